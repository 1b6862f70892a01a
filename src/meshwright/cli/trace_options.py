"""The options ``--trace`` and ``--trace-ranks``, and what they write (`put_timeline`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.spec import write_document

if TYPE_CHECKING:
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
                "and ranges of such numbers, for example 0,5-7."
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def put_timeline(result: Simulation, out: Path | None, trace: Path | None, ranks: tuple[int, ...] | None) -> None:
    """Write the timeline of a simulation to ``out`` and its trace to ``trace``; None: not written."""
    from meshwright.report import write_trace

    if out is not None:
        write_document(result.timeline, out)
    if trace is not None:
        write_trace([result.timeline], trace, ranks=ranks, ops=result.op_spans)


# A trace of a large model has hundreds of ops; ``--json`` lists them all.
