#!/usr/bin/env bash
# Make .venv and install Meshwright into it: setup.sh run|dev|docs
#   run   what the commands need        dev   and what tests and lint need        docs   the site
#
# PYTHON=...   the Python to build on; without it the first one found that is new enough.
# A torch that this Python can already import is used and never replaced; TORCH=own installs one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?run, dev or docs}
venv=.venv

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'meshwright setup: %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program."
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1), but Meshwright" \
            "needs Python 3.11 or newer. Pass another one: make PYTHON=/path/to/python3.11"
        return
    fi
    for candidate in python3 python python3.13 python3.12 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            PYTHON=$candidate
            return
        fi
    done
    fail "found $(python3 --version 2>&1 || echo 'no Python'), but Meshwright needs Python 3.11 or" \
        "newer. Install one, or name it: make PYTHON=/path/to/python3.11"
}

# The folder that holds the torch which a Python imports; empty if it has none.
torch_folder() {
    "$1" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null || true
}

make_venv() {
    find_python
    local outside="" options=()
    [ "${TORCH:-}" = own ] || outside=$(torch_folder "$PYTHON")
    [ -z "$outside" ] || options=(--system-site-packages)
    say "making $venv with $("$PYTHON" --version) ${outside:+and the torch that it has}"
    "$PYTHON" -m venv --clear "${options[@]}" "$venv" ||
        fail "could not make $venv. On Debian and Ubuntu: apt-get install python3-venv"
    # A venv made from inside a venv sees the outermost Python's packages only.
    if [ -n "$outside" ] && [ -z "$(torch_folder "$venv/bin/python")" ]; then
        "$venv/bin/python" - "$outside" <<'END'
import pathlib, sys, sysconfig
line = f"import site; site.addsitedir({sys.argv[1]!r})\n"
(pathlib.Path(sysconfig.get_path("purelib")) / "zz_torch_outside.pth").write_text(line)
END
    fi
}

# Is torch found outside the venv? Then it is not ours to install.
torch_is_outside() {
    "$venv/bin/python" - <<'END'
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("torch")
here = pathlib.Path(sys.prefix).resolve()
sys.exit(spec is None or here in pathlib.Path(spec.origin).resolve().parents)
END
}

warn_untested_torch() {
    "$venv/bin/python" - <<'END'
import importlib.metadata
import tomllib
from pip._vendor.packaging.requirements import Requirement
with open("pyproject.toml", "rb") as file:
    (torch,) = map(Requirement, tomllib.load(file)["project"]["optional-dependencies"]["torch"])
version = importlib.metadata.version("torch")
if not torch.specifier.contains(version, prereleases=True):
    print(f"note: keeping torch {version}; Meshwright is tested with torch{torch.specifier}. "
          "`make distclean`, then `make TORCH=own ...` installs one of these.")
END
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || ! new_enough "$venv/bin/python"; then
    make_venv
fi
options=()
extras=()
[ "$kind" = docs ] || extras+=(torch)
[ "$kind" = run ] || extras+=("$kind")
[ "$kind" != dev ] || extras+=(serve)
if torch_is_outside; then
    warn_untested_torch
    extras=("${extras[@]/torch/}")
    # What else is found outside counts for nothing: exact versions and their commands go into .venv.
    options=(--ignore-installed)
fi
names=$(IFS=,; printf '%s' "${extras[*]}")
names=${names#,}
say "installing meshwright${names:+[$names]} (the first time may take some minutes)"
# pip compiles on one core; all cores do so below.
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt)
# The build backend comes from constraints.txt too, so the project is built without isolation.
"${pip[@]}" "${options[@]}" --quiet hatchling
"${pip[@]}" "${options[@]}" --no-build-isolation --editable ".${names:+[$names]}"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Some packages have files for newer versions of Python; those cannot be compiled, and nothing imports them.
"$venv/bin/python" -m compileall -qq -j 0 "$packages" src || true
touch "$venv/.stamp-$kind"
