"""Tables of measurements of many devices on the terminal (`show_records`, `op_tables`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.spec import DocumentError, format_count

if TYPE_CHECKING:
    from meshwright.records import Records


_MAX_LISTED = 20


def show_records(path: Path, as_json: bool, other_options: bool) -> None:
    """Print the rows of a measurement table (.parquet) by device and op.

    Raises DocumentError if ``other_options`` than --json were given.
    """
    from meshwright.records import read_records_at

    if other_options:
        raise DocumentError(f"{path}: a table of many devices is only listed; leave all options but --json out.")
    records = read_records_at(path)
    if as_json:
        print_json("records", {"file": str(path), "rows": len(records), "ops": op_rows(records)})
    else:
        print_tables(Text(f"{path}: {format_count(len(records), 'row')}"), *op_tables(records))


def op_rows(records: Records) -> list[dict[str, Any]]:
    """Return one row per device and op, those with the most rows first: number of rows, and range of times in s."""
    counts = Counter(zip(records.device, records.op, strict=True))
    rows = []
    for (device, op), count in counts.most_common():
        seconds = records.where(device=device, op=op).seconds
        times = {"fastest_s": float(seconds.min()), "slowest_s": float(seconds.max())}
        rows.append({"device": device, "op": op, "rows": count, **times})
    return rows


def op_tables(records: Records) -> list[Any]:
    """Return a table of the first rows of `op_rows`, and a line with the number of the remaining rows."""
    from meshwright.report import make_table

    rows = op_rows(records)
    more = len(rows) - _MAX_LISTED
    return [make_table(rows[:_MAX_LISTED]), *([f"and {more} ops more"] if more > 0 else [])]
