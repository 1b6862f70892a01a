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

# A cell takes some 60 bytes as a Python string, a row as much as four cells: about a gigabyte at most.
_MAX_CELLS, _CELLS_PER_ROW = 15_000_000, 4


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
    return [row for _, row in number_rows(content, path)]


def number_rows(content: bytes, path: Path) -> list[tuple[int, Row]]:
    """As `parse_csv`, each row with the line on which it starts; the first line is 1."""
    rows: list[tuple[int, Row]] = []
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        names = next(reader, [])
        if not names or len(set(names)) < len(names):
            raise ValueError("line 1 names a column twice" if names else "line 1 names no columns")
        room, line = _MAX_CELLS, reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                raise ValueError(f"line {line} has {len(cells)} cells; expected {len(names)}, as line 1 has")
            room -= len(cells) + _CELLS_PER_ROW
            if room < 0:
                raise ValueError(f"more cells than tables are limited to, from line {line} on; split the table")
            if cells:
                rows.append((line, dict(zip(names, cells, strict=True))))
            line = reader.line_num + 1
    except (csv.Error, ValueError) as error:
        raise DocumentError(f"{path}: not a table in CSV ({error}). Check which file was meant.") from None
    return rows
