"""How many rows has a parquet file, and what do its pages unpack to? Found before anything is unpacked.

A footer can say what it likes: a reader trusts the head of each page, and unpacks into buffers of the sizes that these
name. Hence the sum of these sizes bounds its memory, where values are stored whole. An encoding that stores a text as
a prefix of the previous one (DELTA_BYTE_ARRAY) can expand to any size; it is refused.

    file   =  "PAR1", pages of columns, FileMetaData, its size in 4 bytes, "PAR1"
    pages of a column in a group of rows  =  (PageHeader, packed bytes), one after the other

Source: Apache Parquet, src/main/thrift/parquet.thrift and Encodings.md. The footer is not asked of pyarrow: 26.0 ends
the process where the figures of a column are spoilt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.records.thrift import Struct, read_struct

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_MAGIC = b"PAR1"
# Thousands of columns in groups of rows, at some 200 bytes each.
_MAX_FOOTER_BYTES = 4 * 2**20
# Fields of FileMetaData, SchemaElement, RowGroup, ColumnChunk and ColumnMetaData.
_SCHEMA, _ROWS, _GROUPS = 2, 3, 4
_TYPE, _ELEMENT, _NUM_CHILDREN = 1, 4, 5
_COLUMNS, _GROUP_ROWS = 1, 3
_FIGURES = 3
_NUM_VALUES, _PACKED_TOTAL, _DATA_OFFSET, _DICTIONARY_OFFSET = 5, 7, 9, 11
# Fields of PageHeader: sizes, and the three kinds of page; where a kind's encoding stands, and its number of values.
_UNPACKED, _PACKED = 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8
_ENCODINGS, _VALUES = {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}, 1
# Encodings whose values take no more bytes than their page, or eight each: PLAIN, PLAIN_DICTIONARY, RLE, BIT_PACKED,
# DELTA_BINARY_PACKED, DELTA_LENGTH_BYTE_ARRAY, RLE_DICTIONARY, BYTE_STREAM_SPLIT.
_WHOLE = frozenset((0, 2, 3, 4, 5, 6, 8, 9))


def measure_pages(content: bytes, names: Collection[str]) -> tuple[int, int]:
    """The rows of a file, and the bytes that the pages of the named columns, which are flat, unpack to.

    Raises ValueError for a footer that cannot be read, or that the pages contradict, and for pages of unknown size.
    """
    size = int.from_bytes(content[-8:-4], "little")
    if content[-4:] != _MAGIC or not 0 < size <= min(len(content) - 8, _MAX_FOOTER_BYTES):
        raise ValueError("no footer that can be read")
    footer, _ = read_struct(content[-8 - size : -8], 0)
    leaves = [_get(element, _ELEMENT, bytes).decode() for element in _get(footer, _SCHEMA, list) if _is_leaf(element)]
    num_rows, unpacked = 0, 0
    for group in _get(footer, _GROUPS, list):
        rows = _get(group, _GROUP_ROWS, int)
        # Columns are known by their place; the names beside them are not looked at.
        for name, column in zip(leaves, _get(group, _COLUMNS, list), strict=True):
            if name in names:
                unpacked += _measure_column(content, name, _get(column, _FIGURES, dict), rows)
        num_rows += rows
    if num_rows != _get(footer, _ROWS, int):
        raise ValueError(f"{num_rows} rows, of which the footer has {footer[_ROWS]}")
    return num_rows, unpacked


def _is_leaf(element: Any) -> bool:
    has_type, has_children = isinstance(element, dict) and _TYPE in element, bool(_get(element, _NUM_CHILDREN, int, 0))
    if has_type == has_children:
        raise ValueError("a column that is neither of values nor of columns")
    return has_type


def _measure_column(content: bytes, name: str, figures: Struct, rows: int) -> int:
    told = _get(figures, _NUM_VALUES, int)
    if not rows and not told:
        return 0  # of which nothing is read
    # As readers do, whatever else the offset of a dictionary may be.
    data, dictionary = _get(figures, _DATA_OFFSET, int), _get(figures, _DICTIONARY_OFFSET, int, 0)
    start = dictionary if 0 < dictionary < data else data
    end = start + _get(figures, _PACKED_TOTAL, int)
    if not 0 < start <= end <= len(content):
        raise ValueError(f"column {name!r} from byte {start} to {end} of {len(content)}")
    pages = list(_pages(content, start, end))
    found = sum(values for _, values in pages)
    if not found == told == rows:
        raise ValueError(f"{found} values in column {name!r}, of which the footer has {told} in {rows} rows")
    return sum(unpacked for unpacked, _ in pages)


def _pages(content: bytes, place: int, end: int) -> Iterator[tuple[int, int]]:
    """The unpacked bytes and the values of each page from a place to the end of its column."""
    while place < end:
        head, place = read_struct(content, place)
        unpacked, packed = _get(head, _UNPACKED, int), _get(head, _PACKED, int)
        place += packed
        if min(unpacked, packed) < 0 or place > end:
            raise ValueError(f"a page of {packed} bytes that ends at byte {place}, its column at {end}")
        values = 0
        for kind, encoding in _ENCODINGS.items():
            if kind in head:
                page = _get(head, kind, dict)
                if page.get(encoding) not in _WHOLE:
                    raise ValueError("an encoding by which a page may unpack to any size; write it with dictionaries")
                values += 0 if kind == _DICTIONARY else _get(page, _VALUES, int)
        yield unpacked, values


def _get(struct: Any, field: int, kind: type[Any], otherwise: Any = None) -> Any:
    """A field of a struct. Raises ValueError if it is of another type, or neither there nor optional."""
    value = struct.get(field, otherwise) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise ValueError(f"a header whose field {field} is not of type {kind.__name__}")
    return value
