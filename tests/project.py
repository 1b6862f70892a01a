"""What the project declares of itself, for tests that hold it to that."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Names of packages that are imported under another one.
IMPORTED_AS = {"grpcio": "grpc", "protobuf": "google", "scikit_learn": "sklearn", "z3_solver": "z3"}


def declared(lines: Iterable[str]) -> set[str]:
    """What requirements are imported as."""
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    return {IMPORTED_AS.get(name, name) for name in names}


CORE = declared(PROJECT["project"]["dependencies"])
EXTRAS = {name: declared(lines) for name, lines in PROJECT["project"]["optional-dependencies"].items()}
