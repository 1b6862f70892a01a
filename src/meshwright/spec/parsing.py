"""Parse JSON and TOML files from untrusted sources, within limits that are checked before anything is parsed.

The suffix of the path decides the format. Repeated keys, numbers that JSON does not define (NaN, Infinity), truncated
files and texts that would exhaust memory are refused with a DocumentError. Nothing in a file is executed.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from meshwright.spec.errors import DocumentError
from meshwright.spec.files import read_regular
from meshwright.spec.units import format_bytes

# Larger files are refused before they are read: untrusted input must not exhaust memory. Ten times the timeline of a
# program of 195,000 instructions (15.9 MiB), the largest document that we write.
MAX_DOCUMENT_BYTES = 192 * 2**20
# The memory that a document may take while it is parsed, and the most that each of its characters may stand for, by
# sys.getsizeof of CPython 3.11 on 64 bits (collector's head and a list's spare places included): a container, a key
# with its entry, an item, half a string. Ten times that timeline comes to 1.4e9.
MAX_PARSED_BYTES = 1_600_000_000
_PARSED_BYTES = {"{": 100, "[": 100, ":": 300, ",": 48, '"': 40}
# TOML is for files that people write. The parser keeps a record of every table and of every part of a dotted key.
MAX_TOML_BYTES = 8 * 2**20
# (In Python 3.11 a key of n parts takes n^2 / 2 places; so do keys of one line.)
MAX_TOML_PARTS = 300_000
MAX_TOML_LINE_DOTS = 400

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

# A TOML file that was cut off between two lines still parses; the files that we write end with a marker.
TOML_HEAD = '# A complete file ends with the line "# end".\n'
TOML_TAIL = "# end\n"


def read_data(path: Path | str) -> Any:
    """Parse a JSON or TOML file (by suffix) into plain data. Raises DocumentError if it cannot be read or parsed."""
    path = Path(path)
    return parse_data(read_regular(path, MAX_DOCUMENT_BYTES + 1), path)


def parse_data(content: bytes, path: Path) -> Any:
    """Parse the content of a JSON or TOML file into plain data; the suffix of ``path`` decides which.

    Raises DocumentError, which names ``path``, if the content is not valid or exceeds the limits.
    """
    most = min(MAX_TOML_BYTES, MAX_DOCUMENT_BYTES) if path.suffix == ".toml" else MAX_DOCUMENT_BYTES
    if len(content) > most:
        raise DocumentError(f"{path}: more than {most} bytes, the limit of such documents. Check which file was meant.")
    try:
        text = content.decode("utf-8")
        del content
        _refuse_costly(text, path)
        if path.suffix == ".toml":
            if text.startswith(TOML_HEAD) and not text.endswith(TOML_TAIL):
                raise ValueError('the last line, "# end", is missing')
            return tomllib.loads(text)
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
        if _SURROGATE.search(text):
            # A surrogate pair is one character; a lone surrogate is not, and can be neither printed nor written.
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except (RecursionError, ValueError) as error:
        raise DocumentError(
            f"{path}: not valid {'TOML' if path.suffix == '.toml' else 'JSON'} ({error}). {_parse_remedy(error)}"
        ) from None


def _refuse_costly(text: str, path: Path) -> None:
    """Refuse, before parsing, texts that would exhaust memory: ``[{},{},...]`` takes thirty times its length."""
    if path.suffix == ".toml":
        if (found := text.count("[") + text.count(".")) > MAX_TOML_PARTS:
            raise DocumentError(
                f"{path}: it has {found:,} brackets and dots, but TOML files are limited to {MAX_TOML_PARTS:,}. Check "
                "which file was meant."
            )
        if any(line.count(".") > MAX_TOML_LINE_DOTS for line in text.split("\n")):
            raise DocumentError(
                f"{path}: a line has more dots than the limit for TOML ({MAX_TOML_LINE_DOTS}). Shorten the line."
            )
        return
    cost = 2 * sys.getsizeof(text) + sum(text.count(mark) * size for mark, size in _PARSED_BYTES.items())
    if cost > MAX_PARSED_BYTES:
        raise DocumentError(
            f"{path}: parsing it may take {format_bytes(cost)} of memory, but documents are limited to "
            f"{format_bytes(MAX_PARSED_BYTES)}. Check which file was meant."
        )


def _parse_remedy(error: Exception) -> str:
    """What to do about a text that does not parse; truncated files are distinguished from files of another kind."""
    if isinstance(error, UnicodeDecodeError):
        return "The file holds no text; check which file was meant."
    if isinstance(error, RecursionError):
        return "It is nested more deeply than any document; check which file was meant."
    ends_early = isinstance(error, json.JSONDecodeError) and (
        not error.doc[error.pos :].strip() or "Unterminated string" in error.msg
    )
    if ends_early or "end of document" in str(error) or '"# end"' in str(error):
        return "The file may be truncated; write it again with the command that made it."
    return "Correct it there, or check which file was meant."


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
