"""Measurement tables as parquet files: one schema with a version, whole or not at all, within limits.

The columns are those of `Records`; a column more, less or of another type is an error, since a table in other units
would look the same. Texts are stored as dictionaries, which makes repeated ones cheap. Pages carry checksums, which are
compared where a file has them. Needs pyarrow (``meshwright[tables]``). Nothing of a file is executed.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshwright.records.parquet_pages import measure_pages
from meshwright.records.table import COLUMNS, TEXTS, Records, make_records
from meshwright.spec import DocumentError, MeasurementError
from meshwright.spec.files import read_regular, write_bytes
from meshwright.spec.parsing import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

SCHEMA_VERSION = 1
_SCHEMA_KEY = b"meshwright"
# Many times the largest public table (aiconfigurator has 7.8 million rows of GEMM in dozens of files).
MAX_FILE_BYTES = MAX_DOCUMENT_BYTES
MAX_ROWS = 5_000_000
# A few kilobytes can stand for gigabytes of equal values: what the columns take once they are unpacked.
MAX_UNPACKED_BYTES = 2**30
# A number, or a reference to a text.
_BYTES_PER_CELL = 8


def write_records(records: Records, path: Path | str) -> Path:
    """Write a table; the file appears whole or not at all."""
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
    """Read a table. Raises DocumentError for a file that is not a table, and for invalid rows, which it names."""
    path = Path(path)
    return parse_records(read_regular(path, MAX_FILE_BYTES + 1), path)


def parse_schema(content: bytes, path: Path) -> pa.Schema:
    """The columns of any parquet file, of which nothing is unpacked. Raises DocumentError."""
    if len(content) > MAX_FILE_BYTES:
        raise DocumentError(f"{path}: more than {MAX_FILE_BYTES} bytes, to which tables are limited. Split the table.")
    with _readable(path):
        schema = pq.read_schema(pa.BufferReader(content))
        if len(set(schema.names)) < len(schema.names):
            raise ValueError("a column twice")
        return schema


def is_records(schema: pa.Schema) -> bool:
    """Whether a parquet file says that it is a measurement table (of any version)."""
    return _SCHEMA_KEY in (schema.metadata or {})


def parse_records(content: bytes, path: Path) -> Records:
    """The rows of a table; messages name ``path``. Raises DocumentError."""
    schema = parse_schema(content, path)
    version = (schema.metadata or {}).get(_SCHEMA_KEY, b"").decode(errors="replace")
    if version != f"records/{SCHEMA_VERSION}":
        raise DocumentError(
            f"{path}: expected a measurement table 'records/{SCHEMA_VERSION}', found {version or 'another table'!r}. "
            "`meshwright measure --from` reads tables of other kinds."
        )
    if odd := sorted(set(schema.names) ^ set(COLUMNS)):
        raise DocumentError(f"{path}: unknown or missing columns ({', '.join(odd)}). Write the table again.")
    try:
        return make_records(**parse_columns(content, path, COLUMNS))
    except MeasurementError as error:
        raise DocumentError(f"{path}: {error}") from None


def parse_columns(content: bytes, path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The named columns of any parquet file within the limits. Raises DocumentError; pages must match their sums."""
    schema = parse_schema(content, path)
    with _readable(path):
        wanted = [schema.field(name) for name in names]
        for field in wanted:
            if not (_holds_texts(field.type) or _holds_numbers(field.type)):
                raise ValueError(f"column {field.name!r} holds {field.type}; expected texts or numbers")
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
    """A column of texts (dtype object, missing ones empty) or numbers (missing ones NaN)."""
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
