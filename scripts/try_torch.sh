#!/usr/bin/env bash
# Does Meshwright work with another version of torch? Tests and the demo, in a clone and an environment that are thrown
# away; nothing here is changed. What is committed is tried. KEEP=folder makes both there and keeps them for another time.
#
#     scripts/try_torch.sh 2.14.1                     capture runtime training rewrite serving demo
#     scripts/try_torch.sh 2.14.1 capture runtime     some of them
#
# A build for CUDA, which is what PyPI has, runs on processors, too: 5 GB. Ends with what each part gave, all of them as a
# row for docs/torch-versions.md. Exit code 1: a part failed; 2: the arguments are wrong.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
all=(capture runtime training rewrite serving demo)
fail() { echo "try_torch: $*" >&2; exit 2; }

[ "$#" -gt 0 ] || fail "no version was given; give one, as 2.14.1"
version=$1
shift
parts=("$@")
[ "$#" -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $part "* ]] || fail "$part is no part; give some of ${all[*]}, or none for all"
done

folder=$(realpath -m "${KEEP:-$(mktemp -d)}")
[ -n "${KEEP:-}" ] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"
if [ -e "$folder/installed" ]; then
    [ "$(cat "$folder/installed")" = "$version" ] ||
        fail "$folder has torch $(cat "$folder/installed"), and $version was asked for; give another KEEP"
    git -C "$folder/checkout" pull -q
else
    rm -rf "$folder/checkout"
    git clone -q . "$folder/checkout"
    "${PYTHON:-python3}" -m venv --clear "$folder/venv"
    # Versions of what comes with torch are its own to say.
    grep -vE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|sympy|networkx|fsspec|filelock|setuptools)==' \
        constraints.txt >"$folder/constraints.txt"
    "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check -c "$folder/constraints.txt" \
        "torch==$version" -e "$folder/checkout[serve,metrics,tensorboard,rewrite,search,hf,tables,validate,dev]"
    echo "$version" >"$folder/installed"
fi

cd "$folder/checkout"
row="| $("$folder/venv/bin/python" -c 'import torch; print(torch.__version__)') |" code=0
for part in "${parts[@]}"; do
    log="$folder/$part.log"
    # As `make test P=...` selects them; make would build an environment of its own.
    command=("$folder/venv/bin/python" -m pytest -q -n logical --maxprocesses 4 --hypothesis-profile=quick
        -m "not slow and not long and not lint" "tests/$part")
    [ "$part" != demo ] || command=("$folder/venv/bin/python" examples/demo.py --out "$folder/demo")
    echo "== $part: ${command[*]}"
    if timeout 1800 "${command[@]}" >"$log" 2>&1; then
        found=runs
    else
        found=fails code=1
        tail -n 15 "$log"
    fi
    # pytest's last line: 2 failed, 51 passed, 1 skipped in 40.03s
    [ "$part" = demo ] || found=$(tail -n 1 "$log" | grep -oE '[0-9]+ (failed|passed|errors?)' | paste -sd, - |
        sed 's/,/, /g') || found=fails
    row+=" ${found:-fails} |"
done
echo "$row"
exit "$code"
