"""Cache of graphs captured from Hugging Face configurations, in the user's cache folder.

A graph follows from the configuration, the sizes, and the code that captures: torch, transformers and Meshwright.
Files are named by a digest of all of these, so that any change leads to another file. An unreadable file counts as
missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.spec.codec import decode_document, dump_json, encode_document
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.files import read_regular, write_bytes
from meshwright.spec.graph import Graph
from meshwright.spec.parsing import parse_data
from meshwright.spec.shipped import MAX_UNPACKED_BYTES, SUFFIX, pack, unpack

# Files to keep; beyond these, the least recently used ones are deleted.
MAX_FILES = 64
# The code that captures: modules of Meshwright with all that they import, and libraries.
_MODULES = ("meshwright.capture", "meshwright.zoo", "meshwright.zoo.huggingface_classes")
_LIBRARIES = ("torch", "transformers")


def kept_file(config: dict[str, Any], *asked: object) -> Path | None:
    """Path of the cached graph of a configuration, captured as ``asked``; None without a cache folder.

    The folder is MESHWRIGHT_CACHE, else ``meshwright`` in the user's cache folder; an empty MESHWRIGHT_CACHE turns the
    cache off.
    """
    from meshwright.compiled import contents_digest

    folder = os.environ.get("MESHWRIGHT_CACHE")
    if folder == "":
        return None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    versions = [f"{name} {_version(name)}" for name in _LIBRARIES]
    parts = [json.dumps(config, sort_keys=True), repr(asked), *versions, *map(contents_digest, _MODULES)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return (Path(folder) if folder else home / "meshwright") / "graphs" / f"{digest}{SUFFIX}"


def read_kept(path: Path | None) -> Graph | None:
    """Return the graph in a file; None if the file is missing or unreadable."""
    if path is None or not path.is_file():
        return None
    try:
        text = unpack(read_regular(path, MAX_UNPACKED_BYTES), path.name)
        with suppress(OSError):
            path.touch()
        return decode_document(Graph, parse_data(text, Path("graph.json")), path.name)
    except (MeshwrightError, OSError):
        return None


def keep(graph: Graph, path: Path | None) -> None:
    """Write a graph to its file; does nothing if the folder is not writable."""
    if path is None:
        return
    with suppress(MeshwrightError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(pack(dump_json(encode_document(graph))), path)
        files = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
