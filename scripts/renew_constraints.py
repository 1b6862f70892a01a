"""Write constraints.txt anew: the newest versions that the ranges in pyproject.toml allow.

    .venv/bin/python scripts/renew_constraints.py

pip resolves core, `torch`, `serve`, `dev` and `docs` from nothing, for the oldest Python that is supported
and for a newer one; nothing is installed. Where the two disagree the lower version is kept, since
it is the one that every Python can have. torch's local label (+cpu, +cu130) is dropped: which build
is taken is up to pip's own settings. Packages that only the CUDA build needs are kept in the list;
a constraint on a package that nothing asks for does nothing.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.13")
EXTRAS = ("torch", "serve", "dev", "docs")
HEADER = """\
# Exact versions of all that `make` installs: core, torch, dev, docs and what they need.
# Made by scripts/renew_constraints.py; which build of torch is taken is up to pip's own settings.
"""


def resolve(requirements: list[str], python: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        target = ["--python-version", python, "--only-binary=:all:", "--target", folder]
        command = [sys.executable, "-m", "pip", "install", *options, *target, *requirements]
        subprocess.run(command, check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {entry["name"].lower().replace("_", "-"): entry["version"].partition("+")[0] for entry in found}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    versions: dict[str, str] = {}
    for python in PYTHONS:
        for name, version in resolve(requirements, python).items():
            versions[name] = min(versions.get(name, version), version, key=Version)
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    (ROOT / "constraints.txt").write_text(HEADER + "".join(lines))
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
