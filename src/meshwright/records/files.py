"""Where measurements are read and written: a table of one device (``.json``), or of many (``.parquet``).

The suffix decides. Of a table of many devices a cluster takes its own kind; what is written renews the rows of the
same things and keeps all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.records.one_device import from_measurements, to_measurements
from meshwright.records.table import Records, merge_records
from meshwright.spec import DocumentError, MeasurementError, Measurements, read_document, write_document
from meshwright.spec.files import refuse_replacing

if TYPE_CHECKING:
    from meshwright.spec import Cluster

_PARQUET, _JSON = ".parquet", ".json"


def load_measurements(path: Path | str, cluster: Cluster) -> Measurements:
    """The measurements of a file for the devices of a cluster: of a table of many, those of its first kind with rows.

    Raises DocumentError for a file that cannot be read, MeasurementError if no device of the cluster is in the table.
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
            "Give a table of these devices, or none."
        )
    return to_measurements(records, found[0])


def save_measurements(table: Measurements, path: Path | str) -> Path:
    """Write a table of one device; in a file of many devices its rows are renewed and all others kept."""
    path = Path(path)
    return write_document(table, path) if _kind(path) == _JSON else add_records(from_measurements(table), path)


def check_table_place(path: Path | str, *, of_many: bool = False) -> None:
    """Check, before a long measurement, that a table can be written.

    ``of_many``: a table of many devices. Raises DocumentError if the name does not fit, or if a file of another kind is
    there; ModuleNotFoundError if pyarrow is needed and missing.
    """
    path = Path(path)
    if of_many or _kind(path) == _PARQUET:
        _known_records(path)


def add_records(records: Records, path: Path | str) -> Path:
    """Write rows into a table of many devices, which is made if it is not there. Raises DocumentError."""
    path = Path(path)
    known = _known_records(path)
    from meshwright.records.parquet import write_records  # noqa: PLC0415

    return write_records(records if known is None else merge_records(known, records), path)


def _known_records(path: Path) -> Records | None:
    """The contents of the table that rows are to be added to; None if the file does not exist yet."""
    if _kind(path) != _PARQUET:
        raise DocumentError(
            f"{path}: rows of many devices are kept in a table that ends in .parquet. Choose such a name."
        )
    import meshwright.records.parquet  # noqa: PLC0415, F401 - without pyarrow this is the first to fail

    refuse_replacing(path)
    return read_records_at(path) if path.exists() else None


def read_records_at(path: Path) -> Records:
    """A table of many devices. Raises DocumentError, ModuleNotFoundError without pyarrow."""
    from meshwright.records.parquet import read_records  # noqa: PLC0415

    return read_records(path)


def _kind(path: Path) -> str:
    if path.suffix not in (_PARQUET, _JSON):
        raise DocumentError(
            f"{path}: measurements are kept in files that end in .json (one device) or .parquet (many). "
            "Choose such a name."
        )
    return path.suffix
