"""Two independent parts: the options ``--trace`` and ``--trace-ranks``, and tables of many devices on the terminal."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.spec import DocumentError, format_count, write_document

if TYPE_CHECKING:
    from meshwright.records import Records
    from meshwright.simulator import Simulation


# The path of a trace (``--trace FILE``), and the ranks that it shows (``--trace-ranks``).
TraceOption = Annotated[
    Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file (.json, or .json.gz).")
]
TraceRanksOption = Annotated[
    str | None, typer.Option(help="Only these ranks in the trace: numbers and ranges, such as 0,5-7.")
]
# Six digits, so that a range holds at most a million numbers.
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def traced_ranks(trace: Path | None, ranks: str | None) -> tuple[int, ...] | None:
    """Return the ranks that a trace shows, ascending; None for all. Raises BadParameter for an invalid list."""
    if ranks is None:
        return None
    if trace is None:
        raise typer.BadParameter("--trace-ranks chooses the ranks of a trace; give --trace FILE, too.")
    chosen: set[int] = set()
    for part in ranks.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise typer.BadParameter(
                f"--trace-ranks {ranks!r}: {part!r} is not a rank or a range; expected numbers of up to six digits "
                f"and ranges of "
                "them, such as 0,5-7."
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def put_timeline(result: Simulation, out: Path | None, trace: Path | None, ranks: tuple[int, ...] | None) -> None:
    """Write the timeline of a simulation and its trace, if they were asked for."""
    from meshwright.report import write_trace

    if out is not None:
        write_document(result.timeline, out)
    if trace is not None:
        write_trace([result.timeline], trace, ranks=ranks, ops=result.op_spans)


# A trace of a large model has hundreds of ops; ``--json`` lists them all.
_MAX_LISTED = 20


def show_records(path: Path, as_json: bool, other_options: bool) -> None:
    """Show a measurement table (.parquet): its contents by device and op."""
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
    """Return the first rows of `op_rows` as a table, and the number of the others."""
    from meshwright.report import make_table

    rows = op_rows(records)
    more = len(rows) - _MAX_LISTED
    return [make_table(rows[:_MAX_LISTED]), *([f"and {more} ops more"] if more > 0 else [])]
