"""Graphs that ship with Meshwright: every model of the zoo, captured for training, readable without torch.

``spec/graphs/NAME.json.gz`` is the graph of the zoo model NAME with the sizes of its shape file, symbolic in the batch
size. `scripts/renew_graphs.py` writes the files, and a test captures the models again and compares content hashes.
"""

from __future__ import annotations

import gzip
import zlib
from functools import cache
from importlib import resources
from pathlib import Path

from meshwright.spec.codec import decode_document
from meshwright.spec.errors import DocumentError, ModelReferenceError, suggest
from meshwright.spec.graph import Graph
from meshwright.spec.parsing import parse_data

SUFFIX = ".json.gz"

# A shipped graph unpacks to 10 MB at most (a test checks this); a file that unpacks to more is not one of ours.
MAX_UNPACKED_BYTES = 64 * 2**20


@cache
def shipped_graphs() -> tuple[str, ...]:
    """Return the names of the models whose graphs ship with Meshwright, sorted."""
    folder = resources.files("meshwright.spec") / "graphs"
    return tuple(sorted(item.name.removesuffix(SUFFIX) for item in folder.iterdir() if item.name.endswith(SUFFIX)))


def load_shipped_graph(name: str) -> Graph:
    """Return the training graph of a shipped model. Raises ModelReferenceError for a name that is not shipped."""
    if name not in shipped_graphs():
        raise ModelReferenceError(
            f"No graph of a model {name!r} is shipped{suggest(name, shipped_graphs())}. Give a shipped model's name."
        )
    source = resources.files("meshwright.spec") / "graphs" / f"{name}{SUFFIX}"
    return decode_document(Graph, parse_data(unpack(source.read_bytes(), source.name), Path(source.name)), source.name)


def unpack(packed: bytes, where: str) -> bytes:
    """Return the unpacked content of a gzip file; messages name the file as ``where``.

    Raises DocumentError if it is damaged or unpacks to more than `MAX_UNPACKED_BYTES`.
    """
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16 +: a gzip header
    try:
        content = unpacker.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise DocumentError(f"{where}: not valid gzip ({error}). Install Meshwright again.") from None
    if not unpacker.eof:
        reason = "it is truncated" if not unpacker.unconsumed_tail else f"it unpacks to over {MAX_UNPACKED_BYTES} bytes"
        raise DocumentError(f"{where}: {reason}. Install Meshwright again.")
    return content


def pack(text: str) -> bytes:
    """Return ``text`` as gzip data without a time stamp, so that equal graphs make equal files."""
    return gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)
