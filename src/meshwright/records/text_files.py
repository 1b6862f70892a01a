"""Read and write measurement tables by their suffix; read CSV files, and files that may be compressed (gzip).

A measurement table of one device ends in ``.json``, a table of many devices in ``.parquet``. Limits of size are checked
while reading.
"""

from __future__ import annotations

import csv
import io
import zlib
from pathlib import Path

from meshwright.records.one_device import from_measurements, to_measurements
from meshwright.records.record_table import Records, merge_records
from meshwright.spec import (
    Cluster,
    DocumentError,
    MeasurementError,
    Measurements,
    read_document,
    read_regular,
    write_document,
)
from meshwright.spec.files import refuse_replacing
from meshwright.spec.parsing import MAX_DOCUMENT_BYTES

_PARQUET, _JSON = ".parquet", ".json"


def load_measurements(path: Path | str, cluster: Cluster) -> Measurements:
    """Read the measurements of a table for the devices of a cluster.

    From a table of many devices, the rows of the first of the cluster's device kinds that has rows are taken. Raises
    DocumentError for a file that cannot be read, MeasurementError if the table has no device of the cluster.
    """
    path = Path(path)
    if _kind(path) == _JSON:
        return read_document(Measurements, path)
    records = read_records_at(path)
    kinds = [kind.name for kind in cluster.device_kinds]
    found = [kind for kind in kinds if len(records.where(device=kind))]
    if not found:
        raise MeasurementError(
            f"{path} has no rows of {', '.join(kinds)}; its devices are {', '.join(sorted(set(records.device)))}. "
            "Give a table with rows of these devices, or plan without a table."
        )
    return to_measurements(records, found[0])


# Of a table of many devices a cluster takes its own kind. Written rows replace those of the same things; all others
# stay.
def save_measurements(table: Measurements, path: Path | str) -> Path:
    """Write the measurements of one device. In a table of many devices, they replace rows of the same measurements."""
    path = Path(path)
    return write_document(table, path) if _kind(path) == _JSON else add_records(from_measurements(table), path)


def check_table_place(path: Path | str, *, of_many: bool = False) -> None:
    """Check, before a long measurement, that its table can be written to ``path``.

    ``of_many``: it is a table of many devices. Raises DocumentError if the suffix is wrong or the file exists and is of
    another kind, ModuleNotFoundError if pyarrow is needed and missing.
    """
    path = Path(path)
    if of_many or _kind(path) == _PARQUET:
        _known_records(path)


def add_records(records: Records, path: Path | str) -> Path:
    """Add rows to a table of many devices, which is created if it does not exist.

    Raises DocumentError if the table cannot be read or written.
    """
    path = Path(path)
    known = _known_records(path)
    from meshwright.records.parquet import write_records  # noqa: PLC0415

    return write_records(records if known is None else merge_records(known, records), path)


def _known_records(path: Path) -> Records | None:
    """The contents of the table that rows are to be added to; None if the file does not exist yet."""
    if _kind(path) != _PARQUET:
        raise DocumentError(
            f"{path}: expected a name that ends in .parquet, for a table of many devices. Choose such a name."
        )
    import meshwright.records.parquet  # noqa: PLC0415, F401 - without pyarrow this is the first to fail

    refuse_replacing(path)
    return read_records_at(path) if path.exists() else None


def read_records_at(path: Path) -> Records:
    """Read a table of many devices (parquet).

    Raises DocumentError if it cannot be read, ModuleNotFoundError without pyarrow.
    """
    from meshwright.records.parquet import read_records  # noqa: PLC0415

    return read_records(path)


def _kind(path: Path) -> str:
    if path.suffix not in (_PARQUET, _JSON):
        raise DocumentError(
            f"{path}: measurements are kept in files that end in .json (one device) or .parquet (many). "
            "Choose a name with one of these endings."
        )
    return path.suffix


Row = dict[str, str]

# A cell takes some 60 bytes as a Python string, a row as much as four cells: about a gigabyte at most.
_MAX_CELLS, _CELLS_PER_ROW = 15_000_000, 4


def read_unpacked(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is gzip data.

    Raises DocumentError if it cannot be read, is damaged, or exceeds `MAX_DOCUMENT_BYTES`.
    """
    content = read_regular(path, MAX_DOCUMENT_BYTES + 1)
    if content.startswith(b"\x1f\x8b"):
        machine = zlib.decompressobj(wbits=31)
        try:
            content = machine.decompress(content, MAX_DOCUMENT_BYTES + 1)
        except zlib.error as error:
            raise DocumentError(f"{path}: cannot be decompressed ({error}). Make it again.") from None
        if not machine.eof and len(content) <= MAX_DOCUMENT_BYTES:
            raise DocumentError(f"{path}: the compressed file is truncated. Make it again.")
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DocumentError(
            f"{path}: more than {MAX_DOCUMENT_BYTES} bytes, the limit of files. Record less, or split the file."
        )
    return content


def parse_csv(content: bytes, path: Path) -> list[Row]:
    """Return the rows of a CSV file, each a dict of texts by the column names in the first line.

    Raises DocumentError for a file that is not CSV, too large, or has rows of different lengths.
    """
    return [row for _, row in number_rows(content, path)]


def number_rows(content: bytes, path: Path) -> list[tuple[int, Row]]:
    """Return the rows as `parse_csv` does, each with the number of the line on which it starts (from 1)."""
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
                raise ValueError(
                    f"line {line} exceeds the limit of {_MAX_CELLS:,} cells, where a row counts {_CELLS_PER_ROW} more; "
                    "split the table"
                )
            if cells:
                rows.append((line, dict(zip(names, cells, strict=True))))
            line = reader.line_num + 1
    except (csv.Error, ValueError) as error:
        raise DocumentError(f"{path}: not a table in CSV ({error}). Check which file was meant.") from None
    return rows
