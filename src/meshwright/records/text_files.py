"""Tables of texts (CSV), and files that may be compressed (gzip), within limits that are checked while reading."""

from __future__ import annotations

import csv
import io
import zlib
from typing import TYPE_CHECKING

from meshwright.spec import DocumentError
from meshwright.spec.files import read_regular
from meshwright.spec.parsing import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, str]


def read_unpacked(path: Path) -> bytes:
    """The content of a file that may be compressed. Raises DocumentError above the limit of documents."""
    content = read_regular(path, MAX_DOCUMENT_BYTES + 1)
    if content.startswith(b"\x1f\x8b"):
        machine = zlib.decompressobj(wbits=31)
        try:
            content = machine.decompress(content, MAX_DOCUMENT_BYTES + 1)
        except zlib.error as error:
            raise DocumentError(f"{path}: cannot be decompressed ({error}). Make it again.") from None
        if not machine.eof and len(content) <= MAX_DOCUMENT_BYTES:
            raise DocumentError(f"{path}: cut off in the middle. Make it again.")
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DocumentError(
            f"{path}: more than {MAX_DOCUMENT_BYTES} bytes, to which files are limited. Record less, or split the file."
        )
    return content


def parse_csv(content: bytes, path: Path) -> list[Row]:
    """The rows of a table by the names in its first line. Raises DocumentError for rows of other lengths."""
    try:
        names, *rows = csv.reader(io.StringIO(content.decode("utf-8-sig")), strict=True)
        if len(set(names)) < len(names):
            raise ValueError("a column occurs twice")
        return [dict(zip(names, row, strict=True)) for row in rows if row]
    except (csv.Error, ValueError) as error:
        raise DocumentError(f"{path}: not a table in CSV ({error}). Check which file was meant.") from None
