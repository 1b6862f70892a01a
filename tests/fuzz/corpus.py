"""Sound documents to start from: small ones of every kind, made by the commands themselves without torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.main import invoke
from meshwright.spec import encode_document
from tests.docs.blocks import ROOT
from tests.spec.examples import EXAMPLES

# Whoever loads this as a model or a schedule without being asked leaves a mark.
TRAP = """
from pathlib import Path
Path(__file__).with_name("harmed").touch()


def build(*given):
    raise SystemExit("harmed")


order = build
"""
_COMMANDS = (
    "capture gpt-tiny --out graph.json",
    "plan gpt-tiny --cluster 2xcpu --batch 4 --stages 2 --precision float32 --out plan.json",
    "plan graph.json --cluster 2xcpu --batch 4 --precision float32 --method place --fix head=1 --out placement.json",
    "simulate plan.json --graph graph.json --out predicted.json",
    "simulate plan.json --graph graph.json --cluster 2xH100 --out measured.json",
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Document:
    """A sound document: its file name and its data."""

    name: str
    data: Any

    def __repr__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix


def make_corpus(folder: Path) -> dict[str, Document]:
    """Make the documents in a folder and read them back; the examples of the codec's own tests are added."""
    previous = Path.cwd()
    os.chdir(folder)
    try:
        for command in _COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
                assert invoke(command.split()) == 0, f"{command}: {errors.getvalue()}"
    finally:
        os.chdir(previous)
    shutil.copy(ROOT / "examples" / "cluster.toml", folder)
    shutil.copy(ROOT / "src" / "meshwright" / "zoo" / "shapes" / "gpt-tiny.toml", folder / "shape.toml")
    shutil.copy(ROOT / "tests" / "fuzz" / "scenario.toml", folder)
    shutil.copy(ROOT / "tests" / "zoo" / "configs" / "gpt2.json", folder / "config.json")
    made = [_read(path) for path in sorted(folder.iterdir())]
    for document in made:
        if document.name == "measured.json":
            document.data["origin"] = "measured"
    examples = [
        Document(name=f"example-{type(value).__name__.lower()}.json", data=encode_document(value))
        for value in EXAMPLES.values()
    ]
    return {document.name: document for document in (*made, *examples)}


def _read(path: Path) -> Document:
    text = path.read_text()
    return Document(name=path.name, data=tomllib.loads(text) if path.suffix == ".toml" else json.loads(text))
