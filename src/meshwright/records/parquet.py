"""Read and write measurement tables as parquet files with a versioned schema, within limits of size.

The columns are those of `Records`. A missing column, a further one or one of another type is an error, because a table
in other units would look the same. Strings are stored as dictionaries, so that repeated ones take little space. Pages
have checksums, which are compared if a file has them. The module needs pyarrow (``meshwright[tables]``). No content of
a file is executed. `read_struct` and `measure_pages` find the unpacked size of a file before anything is unpacked.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshwright.records.record_table import COLUMNS, TEXTS, Records, make_records
from meshwright.spec import DocumentError, MeasurementError, read_regular
from meshwright.spec.files import write_bytes
from meshwright.spec.parsing import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray


# A struct by the ids of its fields; numbers, truths, bytes, lists and structs. Doubles are passed over.
Struct = dict[int, Any]

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
# Parquet's deepest value is eight levels down (file, row groups, group, columns, column, its figures, statistics).
_MAX_DEPTH = 12


# Parquet's heads are structs of Apache Thrift's compact protocol:
#
#     field   =  (difference of ids << 4 | type) [id] value         integers: base 128, lowest first, zigzag
#     list    =  (length << 4 | type) [length] values               texts: length and bytes
#
# Source: Apache Thrift, doc/specs/thrift-compact-protocol.md. Nothing is trusted: invalid content is a ValueError, and
# no value takes more memory than a small multiple of the bytes that it is read from.
def read_struct(content: bytes, place: int, depth: int = _MAX_DEPTH) -> tuple[Struct, int]:
    """Return the Thrift struct that starts at byte ``place`` (values by field id), and the place after its end.

    Raises ValueError for invalid content, and for more than ``depth`` nested levels.
    """
    fields: Struct = {}
    number = 0
    while (kind := _byte(content, place)) != _STOP:
        place += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, place = _read_integer(content, place)
        if kind & 15 in (_TRUE, _FALSE):
            fields[number] = kind & 15 == _TRUE
        else:
            fields[number], place = _read_value(content, place, kind & 15, depth)
    return fields, place + 1


def _read_value(content: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return _read_integer(content, place)
    if kind in (_TRUE, _FALSE, _BYTE):  # in a list, truth takes a byte
        return _byte(content, place), place + 1
    if kind == _DOUBLE:
        return None, place + 8
    if kind == _BINARY:
        length, place = _read_size(content, place)
        return content[place : place + length], place + length
    if depth == 0:
        raise ValueError("a header with too many levels")
    if kind == _STRUCT:
        return read_struct(content, place, depth - 1)
    if kind in (_LIST, _SET):
        head = _byte(content, place)
        length, place = (head >> 4, place + 1) if head >> 4 < 15 else _read_size(content, place + 1)
        values = []
        for _ in range(length):  # every value takes a byte at least, so that this ends with the content
            value, place = _read_value(content, place, head & 15, depth - 1)
            values.append(value)
        return values, place
    raise ValueError(f"a header with a field of unknown type {kind}")


def _read_integer(content: bytes, place: int) -> tuple[int, int]:
    size, place = _read_size(content, place)
    return (size >> 1) ^ -(size & 1), place


def _read_size(content: bytes, place: int) -> tuple[int, int]:
    size = 0
    for shift in range(0, 70, 7):
        byte = _byte(content, place)
        place += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, place
    raise ValueError("a header with a number of more than 64 bits")


def _byte(content: bytes, place: int) -> int:
    if place >= len(content):
        raise ValueError("a header that is truncated")
    return content[place]


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


# A footer may contain false sizes: a reader trusts the head of each page, and unpacks into buffers of the sizes that
# these name. Hence the sum of these sizes bounds its memory, where values are stored whole. An encoding that stores a
# text as a prefix of the previous one (DELTA_BYTE_ARRAY) can expand to any size; it is refused.
#
#     file   =  "PAR1", pages of columns, FileMetaData, its size in 4 bytes, "PAR1"
#     pages of a column in a group of rows  =  (PageHeader, packed bytes), one after the other
#
# Source: Apache Parquet, src/main/thrift/parquet.thrift and Encodings.md. pyarrow is not asked for the footer: version
# 26.0 ends the process where the figures of a column are invalid.
def measure_pages(content: bytes, names: Collection[str]) -> tuple[int, int]:
    """Return the number of rows of a file, and the bytes to which the pages of the columns ``names`` unpack.

    The named columns are flat (not nested). Raises ValueError for a footer that cannot be read or that contradicts the
    pages, and for pages of unknown size.
    """
    size = int.from_bytes(content[-8:-4], "little")
    if content[-4:] != _MAGIC or not 0 < size <= min(len(content) - 8, _MAX_FOOTER_BYTES):
        raise ValueError("its footer cannot be read")
    footer, _ = read_struct(content[-8 - size : -8], 0)
    leaves = [_get(element, _ELEMENT, bytes).decode() for element in _get(footer, _SCHEMA, list) if _is_leaf(element)]
    num_rows, unpacked = 0, 0
    for group in _get(footer, _GROUPS, list):
        rows = _get(group, _GROUP_ROWS, int)
        # Columns are known by their place; the names next to them are not looked at.
        for name, column in zip(leaves, _get(group, _COLUMNS, list), strict=True):
            if name in names:
                unpacked += _measure_column(content, name, _get(column, _FIGURES, dict), rows)
        num_rows += rows
    if num_rows != _get(footer, _ROWS, int):
        raise ValueError(f"its row groups have {num_rows} rows, but its footer says {footer[_ROWS]}")
    return num_rows, unpacked


def _is_leaf(element: Any) -> bool:
    has_type, has_children = isinstance(element, dict) and _TYPE in element, bool(_get(element, _NUM_CHILDREN, int, 0))
    if has_type == has_children:
        raise ValueError("a column has neither values nor columns, or both")
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
        raise ValueError(f"column {name!r} goes from byte {start} to {end}, but the file has {len(content)} bytes")
    pages = list(_pages(content, start, end))
    found = sum(values for _, values in pages)
    if not found == told == rows:
        raise ValueError(f"column {name!r} has {found} values, but its footer says {told} values in {rows} rows")
    return sum(unpacked for unpacked, _ in pages)


def _pages(content: bytes, place: int, end: int) -> Iterator[tuple[int, int]]:
    """The unpacked bytes and the values of each page from a place to the end of its column."""
    while place < end:
        head, place = read_struct(content, place)
        unpacked, packed = _get(head, _UNPACKED, int), _get(head, _PACKED, int)
        place += packed
        if min(unpacked, packed) < 0 or place > end:
            raise ValueError(f"a page of {packed} bytes ends at byte {place}, but its column ends at {end}")
        values = 0
        for kind, encoding in _ENCODINGS.items():
            if kind in head:
                page = _get(head, kind, dict)
                if page.get(encoding) not in _WHOLE:
                    raise ValueError(
                        "a page has an encoding that may unpack to any size; write the table with plain or "
                        "dictionary encoding"
                    )
                values += 0 if kind == _DICTIONARY else _get(page, _VALUES, int)
        yield unpacked, values


def _get(struct: Any, field: int, kind: type[Any], otherwise: Any = None) -> Any:
    """A field of a struct. Raises ValueError if it is of another type, or neither there nor optional."""
    value = struct.get(field, otherwise) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise ValueError(f"field {field} of a header is not of type {kind.__name__}")
    return value


SCHEMA_VERSION = 1
_SCHEMA_KEY = b"meshwright"
# Many times the largest public table (aiconfigurator has 7.8 million rows of GEMM in dozens of files).
MAX_FILE_BYTES = MAX_DOCUMENT_BYTES
MAX_ROWS = 5_000_000
# A few kilobytes can stand for gigabytes of equal values: what the columns take once they are unpacked.
MAX_UNPACKED_BYTES = 2**30
# A number, or a reference to a string.
_BYTES_PER_CELL = 8


def write_records(records: Records, path: Path | str) -> Path:
    """Write a table as a parquet file, completely or not at all."""
    path = Path(path)
    columns = {
        name: _as_dictionary(getattr(records, name)) if name in TEXTS else pa.array(getattr(records, name))
        for name in COLUMNS
    }
    table = pa.table(columns).replace_schema_metadata({_SCHEMA_KEY: f"records/{SCHEMA_VERSION}"})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=9, write_page_checksum=True)
    return write_bytes(sink.getvalue(), path)


def read_records(path: Path | str) -> Records:
    """Read a table from a parquet file. Raises DocumentError for a file of another kind or with invalid rows."""
    path = Path(path)
    return parse_records(read_regular(path, MAX_FILE_BYTES + 1), path)


def parse_schema(content: bytes, path: Path) -> pa.Schema:
    """Return the schema (names and types of columns) of any parquet file, without unpacking its columns.

    Raises DocumentError, which names ``path``, if the file cannot be read.
    """
    if len(content) > MAX_FILE_BYTES:
        raise DocumentError(f"{path}: more than {MAX_FILE_BYTES} bytes, the limit of tables. Split the table.")
    with _readable(path):
        schema = pq.read_schema(pa.BufferReader(content))
        if len(set(schema.names)) < len(schema.names):
            raise ValueError("two columns have the same name")
        return schema


def is_records(schema: pa.Schema) -> bool:
    """Return whether a parquet file is marked as a measurement table (of any version)."""
    return _SCHEMA_KEY in (schema.metadata or {})


def parse_records(content: bytes, path: Path) -> Records:
    """Return the rows of a table from the content of its parquet file.

    Raises DocumentError, which names ``path``, for a file of another kind or with invalid rows.
    """
    schema = parse_schema(content, path)
    version = (schema.metadata or {}).get(_SCHEMA_KEY, b"").decode(errors="replace")
    if version != f"records/{SCHEMA_VERSION}":
        raise DocumentError(
            f"{path}: expected a measurement table 'records/{SCHEMA_VERSION}', found {version or 'another table'!r}. "
            "`meshwright measure --from` reads tables of other kinds."
        )
    if odd := sorted(set(schema.names) ^ set(COLUMNS)):
        raise DocumentError(
            f"{path}: the table has unknown or missing columns ({', '.join(odd)}). Write the table again."
        )
    try:
        return make_records(**parse_columns(content, path, COLUMNS))
    except MeasurementError as error:
        raise DocumentError(f"{path}: {error}") from None


def parse_columns(content: bytes, path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the columns ``names`` of any parquet file: strings (dtype object) or numbers, each of shape (n,).

    Raises DocumentError, which names ``path``, for a file that is damaged (checksums of pages are compared), exceeds
    the limits, or has columns of other types.
    """
    schema = parse_schema(content, path)
    with _readable(path):
        wanted = [schema.field(name) for name in names]
        for field in wanted:
            if not (_holds_texts(field.type) or _holds_numbers(field.type)):
                raise ValueError(f"column {field.name!r} holds {field.type}; expected strings or numbers")
        _check_limits(content, names, path)
        # A text that repeats a million times is kept once.
        texts = [field.name for field in wanted if _holds_texts(field.type)]
        # By no threads: with them one of a hundred processes aborts as it ends (apache/arrow#34314).
        file = pq.ParquetFile(
            pa.BufferReader(content), read_dictionary=texts, page_checksum_verification=True, pre_buffer=False
        )
        table = file.read(columns=[field.name for field in wanted], use_threads=False)
        table.validate(full=True)
        return {name: _column(table, name) for name in names}


def _check_limits(content: bytes, names: Sequence[str], path: Path) -> None:
    """Raise DocumentError for more than the limits once unpacked, ValueError for a file that contradicts itself."""
    num_rows, encoded = measure_pages(content, names)
    # Equal numbers are stored once and unpacked into one each.
    unpacked = max(encoded, num_rows * len(names) * _BYTES_PER_CELL)
    if num_rows > MAX_ROWS or unpacked > MAX_UNPACKED_BYTES:
        raise DocumentError(
            f"{path}: {num_rows} rows that take {unpacked} bytes; tables are limited to {MAX_ROWS} rows and "
            f"{MAX_UNPACKED_BYTES} bytes. Split the table."
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        what = str(error).splitlines()[0][:200]
        raise DocumentError(f"{path}: not a parquet file that can be read ({what}). Make it again.") from None


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of strings (dtype object, missing ones empty) or numbers (missing ones NaN)."""
    column = table.column(name).combine_chunks()
    if pa.types.is_dictionary(column.type):
        texts = np.array([text or "" for text in (*column.dictionary.to_pylist(), None)], object)
        places: NDArray[np.int64] = column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)
        return texts[places]
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    numbers: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return numbers


def _holds_numbers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind))


def _holds_texts(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _as_dictionary(texts: NDArray[np.object_]) -> pa.DictionaryArray:
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    indices = pa.array([places[text] for text in texts], pa.int32())
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(places), pa.string()))
