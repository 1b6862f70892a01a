"""What kind of measurements a file holds, told by its content, and its rows.

    parquet    our own table, or a public one (aiconfigurator)        {...}      a trace, or a table of one device
    pickle     Alpa's profiling database, read by `pickled` alone     a -- b     PipeDream's profile
    a,b,c      a public table (aiconfigurator, vTrain)                tabs       Alpa's results

Any of them may be compressed (gzip). Sizes are limited before anything is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwright.records.importing.alpa import read_database, read_results
from meshwright.records.importing.imported import Imported
from meshwright.records.importing.pipedream import read_profile
from meshwright.records.importing.public import NUMBERS, public_columns, read_public
from meshwright.records.importing.trace import is_trace, read_trace, without_bare_numbers
from meshwright.records.one_device import from_measurements
from meshwright.records.text_files import parse_csv, read_unpacked
from meshwright.spec import DocumentError, Measurements, decode_document
from meshwright.spec.codec import document_kind
from meshwright.spec.parsing import parse_data

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

_KNOWN = (
    "our own tables (.parquet, .json), traces of torch's profiler, Alpa's database and results, PipeDream's profiles, "
    "tables of aiconfigurator and vTrain"
)

# The share of rows that may be odd by themselves; the tables that are known have none.
_MAX_REFUSED = 0.01


def import_file(path: Path | str, *, device: str | None = None) -> Imported:
    """The rows of a file. ``device``: the name of the device kind, for files that do not say it.

    Raises DocumentError for a file of another kind, too large, damaged, or without a device.
    """
    path = Path(path)
    content = read_unpacked(path)
    if content.startswith(b"PAR1"):
        return _parquet(path, content)
    if content.startswith(b"\x80"):
        return read_database(content, device=_named(device, path), source=path.name)
    if content.lstrip()[:1] in (b"{", b"["):
        return _json(parse_data(without_bare_numbers(content), path.with_suffix(".json")), path, device)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _unknown(path) from None
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if " -- " in first:
        return read_profile(text, device=_named(device, path), source=path.name)
    if "\t" in first:
        return read_results(text, device=_named(device, path), source=path.name)
    rows = parse_csv(content, path) if "," in first else []
    columns = {name: np.array([row[name] for row in rows], object) for name in (rows[0] if rows else ())}
    return _public(columns, path)


def _parquet(path: Path, content: bytes) -> Imported:
    from meshwright.records.parquet import is_records, parse_columns, parse_records, parse_schema  # noqa: PLC0415

    schema = parse_schema(content, path)
    if is_records(schema):
        return Imported(kind="a measurement table", records=parse_records(content, path))
    columns = parse_columns(content, path, public_columns(schema.names))
    if texts := [name for name, column in columns.items() if name in NUMBERS and column.dtype == object]:
        raise DocumentError(f"{path}: column {texts[0]!r} holds texts; expected numbers. Write the table again.")
    return _public(columns, path)


def _public(columns: dict[str, NDArray[Any]], path: Path) -> Imported:
    """Public tables carry no checksums: where many figures cannot be, those that can be are spoilt as likely."""
    imported = read_public(columns, source=path.name)
    if imported is None:
        raise _unknown(path)
    num_refused = sum(imported.left_out.values())
    num_rows = len(imported.records) + num_refused
    if num_refused > _MAX_REFUSED * num_rows:
        what = ", ".join(f"{count} with {reason}" for reason, count in imported.left_out.items())
        raise DocumentError(
            f"{path}: {num_refused} of {num_rows} rows cannot be ({what}); the file is spoilt, or in other units. "
            "Fetch it again, or leave those rows out."
        )
    return imported


def _json(data: Any, path: Path, device: str | None) -> Imported:
    if document_kind(data) == "measurements":
        records = from_measurements(decode_document(Measurements, data, str(path)))
        return Imported(kind="a table of one device", records=records)
    if is_trace(data):
        return read_trace(data, device=device, source=path.name)
    raise _unknown(path)


def _named(device: str | None, path: Path) -> str:
    if device is None:
        raise DocumentError(f"{path}: the file does not say on which device it was measured. Name it with --device.")
    return device


def _unknown(path: Path) -> DocumentError:
    return DocumentError(f"{path}: no measurements that are known. Read are {_KNOWN}.")
