"""Rows and tables of a critical path, and of levers: kinds of work that would shorten the step if they took less time.

The path is a Timeline whose spans follow each other without a gap. In the terminal, runs of similar instructions are
one line: the shortest period of instructions that occurs three times in a row or more, with stage, microbatch and rank
moving by the same amount each time, `F0.0 … F0.6` ×7. Instructions that take no time are left out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.report.report_tables import make_table
from meshwright.spec import Timeline, format_count, format_percent, format_seconds, to_seconds
from meshwright.spec.instructions import COLLECTIVES

Row = dict[str, Any]

# The longest period searched for: a forward and a backward through four stages and back, with their transfers.
MAX_PERIOD = 16
LEAST_REPEATS = 3
# Lines that fit a terminal; the middle of a longer path is left out.
MAX_LINES = 24

_WAITED_FOR = {"link": "link", "mark": "bucket", "host": "host"}


def path_rows(path: Timeline, bounds: Sequence[str]) -> list[Row]:
    """Return one row per span of the path.

    Keys: ``name``, ``rank``, ``stream``, ``start_s``, ``end_s``, ``bound``. ``bounds`` names what each span waited for
    last: ``begin`` (of the step), ``stream`` (its predecessor there), ``wait`` (another instruction), ``mark`` (a
    gradient bucket became ready), ``link`` (held by another transfer) or ``host`` (issued late).
    """
    return [
        {
            "name": path.name(k),
            "rank": path.tracks[track].rank,
            "stream": path.tracks[track].name,
            "start_s": to_seconds(int(path.start_ps[k])),
            "end_s": to_seconds(int(path.end_ps[k])),
            "bound": bounds[k],
        }
        for k, track in enumerate(path.track.tolist())
    ]


def fold_path(path: Timeline, bounds: Sequence[str]) -> list[Row]:
    """Return the path with one row per run of similar instructions; instructions that take no time are left out.

    Keys: ``ranks``, ``instructions`` (names of the first and the last), ``times`` (number of repeats), ``on_path_s``,
    ``waited_for`` (link, bucket, host; None for other waits).
    """
    kept = np.flatnonzero(path.end_ps > path.start_ps).tolist()
    ranks = np.array([stream.rank for stream in path.tracks], np.int64)[path.track]
    kinds = [(int(path.opcode[k]), _WAITED_FOR.get(bounds[k])) for k in kept]
    # The peer of a transfer changes with its stage; the bucket of a reduction counts up by itself.
    peer = path.peer - np.where((np.isin(path.opcode, COLLECTIVES)) | (path.peer < 0), 0, path.stage)
    places = np.stack([path.stage, path.microbatch, peer, ranks], axis=1)[kept].tolist()
    rows: list[Row] = []
    at = 0
    while at < len(kept):
        period, repeats = _longest_run(kinds, places, at)
        run = kept[at : at + period * repeats]
        waits = sorted({_WAITED_FOR[bounds[k]] for k in run if bounds[k] in _WAITED_FOR})
        rows.append(
            {
                "ranks": sorted({int(ranks[k]) for k in run}),
                "instructions": _name_run(path, run, period),
                "times": repeats,
                "on_path_s": to_seconds(int((path.end_ps[run] - path.start_ps[run]).sum())),
                "waited_for": ", ".join(waits) or None,
            }
        )
        at += period * repeats
    return rows


def explanation_rows(path: Timeline, bounds: Sequence[str], levers: Sequence[Row]) -> Row:
    """Return the explanation of a step for ``--json``.

    Keys: ``step_time_s``, ``queued_s`` (seconds on the path in which a transfer held a link that the next one needed),
    ``path`` (rows of `path_rows`) and ``levers``.

    A lever has ``kind``, ``name``, ``path_s``, ``path_share`` (of the step), ``step_if_shorter_s``, ``step_if_free_s``.
    """
    step_s = path.duration_s
    return {
        "step_time_s": step_s,
        "queued_s": _queued_seconds(path, bounds),
        "path": path_rows(path, bounds),
        "levers": [{**item, "path_share": item["path_s"] / step_s if step_s else 0.0} for item in levers],
    }


def explanation_table(path: Timeline, bounds: Sequence[str], levers: Sequence[Row], shorter: float) -> RenderableType:
    """Return tables of the path, condensed, and of levers. ``shorter``: the share of its time that a lever removes."""
    rows = explanation_rows(path, bounds, levers)
    lines = fold_path(path, bounds)
    queued = f", {format_seconds(rows['queued_s'])} of them held a link that the next one needed"
    heading = (
        f"Critical path of a steady step: {format_seconds(rows['step_time_s'])} in "
        f"{format_count(path.num_spans, 'instruction')}{queued if rows['queued_s'] else ''}."
    )
    helps = [
        {
            "by": item["kind"],
            "part": item["name"],
            "on_path_s": item["path_s"],
            "path_share": item["path_share"],
            "step_if_shorter_s": item["step_if_shorter_s"],
            "step_if_free_s": item["step_if_free_s"],
        }
        for item in rows["levers"]
        if item["step_if_free_s"] is not None
    ]
    unseen = len(rows["levers"]) - len(helps)
    more = [Text(f"{unseen} more with less on the path: --json.")] if unseen else []
    title = f"What would help: the step if a part took {format_percent(shorter, 0)} less time, and if it took none."
    return Group(Text(heading), make_table(_shorten(lines)), Text(title), make_table(helps, collapse="part"), *more)


def _shorten(lines: list[Row]) -> list[Row]:
    """All lines, or the first and last of them with one line for those between."""
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    left_out = lines[half:-half]
    row = {
        "ranks": sorted({rank for line in left_out for rank in line["ranks"]}),
        "instructions": f"({format_count(len(left_out), 'line')} more: --json)",
        "times": None,
        "on_path_s": sum(line["on_path_s"] for line in left_out),
        "waited_for": None,
    }
    return [*lines[:half], row, *lines[-half:]]


def _queued_seconds(path: Timeline, bounds: Sequence[str]) -> float:
    """Seconds of transfers that held a link while the next one on the path waited for it."""
    holders = np.flatnonzero(np.array(bounds[1:], dtype=object) == "link")
    return to_seconds(int((path.end_ps - path.start_ps)[holders].sum()))


def _longest_run(kinds: Sequence[tuple[Any, ...]], places: Sequence[Sequence[int]], at: int) -> tuple[int, int]:
    """Period and repeats of the run that begins at ``at`` and covers most; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, (len(kinds) - at) // LEAST_REPEATS) + 1):
        step = [b - a for a, b in zip(places[at], places[at + period], strict=True)]
        k = at + period
        while k < len(kinds) and kinds[k] == kinds[k - period] and _moved(places[k - period], places[k], step):
            k += 1
        repeats = (k - at) // period
        if repeats >= LEAST_REPEATS and repeats * period > best[0] * best[1]:
            best = period, repeats
    return best


def _moved(before: Sequence[int], after: Sequence[int], step: Sequence[int]) -> bool:
    return all(b - a == change for a, b, change in zip(before, after, step, strict=True))


def _name_run(path: Timeline, run: Sequence[int], period: int) -> str:
    """The first period and the last one: ``F3.0 B3.0 … F3.7 B3.7``."""
    ends = [run[:period]] if len(run) == period else [run[:period], run[-period:]]
    return " … ".join(" ".join(path.name(k) for k in part) for part in ends)
