"""Compare a predicted timeline with a measured one; list ranks' times (`timeline_rows`) and slow ranks.

    step         median of `Timeline.step_seconds`; spread = (p90 - p10) / median of the measured steps
    rank         Σ spans of the compute stream / number of steps
    instruction  median duration over all instructions of one opcode and stage
    error        (predicted - measured) / measured; None if nothing was measured

The order is that of issue: for each stream and step, (opcode, stage, microbatch, peer) by start. Measured step k is
compared with predicted step k, or with the last predicted step if fewer were predicted (a schedule repeats itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.report.issue_order import StreamOrder, compare_orders
from meshwright.spec import DocumentError, Opcode, Timeline, format_seconds, to_seconds
from meshwright.spec.instructions import COMPUTATIONS

Row = dict[str, Any]


# Over all steps of a timeline of length T = `Timeline.duration_s`, per rank and per step (divided by their number):
#
#     busy            Σ spans of the compute stream
#     communication   time with at least one transfer or collective under way
#     exposed         the part of it in which the compute stream is idle
#     idle            T - busy
#
# A measured transfer ends when something has waited for it, so measured communication is an upper bound.
def timeline_rows(timeline: Timeline) -> Row:
    """Return step time, bubble and, under ``ranks``, one row per rank, for `timeline_table` and ``--json``.

    Keys: ``origin``, ``num_ranks``, ``num_steps``, ``num_spans``, ``median_step_s``, ``slowest_step_s``,
    ``bubble_share``, ``ranks``: ``rank``, ``busy_s``, ``communication_s``, ``exposed_s``, ``idle_s`` (per step),
    ``busy_share``, ``communication_share``, ``idle_share``, ``peak_memory_bytes`` (None if not known).
    """
    steps = timeline.step_seconds()
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track]
    order = np.argsort(ranks, kind="stable")
    spans_of_rank = np.split(order, np.searchsorted(ranks[order], np.arange(1, timeline.num_ranks)))
    return {
        "origin": timeline.origin,
        "num_ranks": timeline.num_ranks,
        "num_steps": len(steps),
        "num_spans": timeline.num_spans,
        "median_step_s": float(np.median(steps)) if len(steps) else 0.0,
        "slowest_step_s": float(steps.max(initial=0.0)),
        "bubble_share": timeline.bubble_fraction(),
        "ranks": [_rank_row(timeline, rank, spans, max(len(steps), 1)) for rank, spans in enumerate(spans_of_rank)],
    }


def _rank_row(timeline: Timeline, rank: int, spans: NDArray[np.int64], num_steps: int) -> Row:
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)[timeline.track[spans]]
    busy_ps = int((timeline.end_ps - timeline.start_ps)[spans[computes]].sum())
    communication_ps = _length(merge_spans(timeline, spans[~computes]))
    # |moving and not computing| = |moving or computing| - |computing|
    exposed_ps = _length(merge_spans(timeline, spans)) - _length(merge_spans(timeline, spans[computes]))
    total_ps = int(timeline.end_ps.max(initial=0))
    peaks = timeline.peak_memory_bytes
    return {
        "rank": rank,
        "busy_s": to_seconds(busy_ps) / num_steps,
        "communication_s": to_seconds(communication_ps) / num_steps,
        "exposed_s": to_seconds(exposed_ps) / num_steps,
        "idle_s": to_seconds(total_ps - busy_ps) / num_steps,
        "busy_share": busy_ps / total_ps if total_ps else 0.0,
        "communication_share": communication_ps / total_ps if total_ps else 0.0,
        "idle_share": 1 - busy_ps / total_ps if total_ps else 0.0,
        "peak_memory_bytes": peaks[rank] if peaks else None,
    }


def merge_spans(timeline: Timeline, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time that some spans cover together: disjoint intervals (start, end) in ps, shape (intervals, 2)."""
    order = spans[np.argsort(timeline.start_ps[spans], kind="stable")]
    start, end = timeline.start_ps[order], np.maximum.accumulate(timeline.end_ps[order])
    if not len(order):
        return np.zeros((0, 2), np.int64)
    opens = np.concatenate([[True], start[1:] > end[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([start[opens], end[closes]], axis=1)


def _length(intervals: NDArray[np.int64]) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum())


Floats = NDArray[np.float64]

# Ranks of one machine differ by a few percent from step to step; a quarter is not chance (docs/concepts/running.md).
SLOW = 1.25
# A single slow step may have any cause.
_LEAST_STEPS = 2


class SlowRank(NamedTuple):
    """A rank on which an opcode takes ``ratio`` times as long as on others, since recorded step ``since`` (from 0)."""

    rank: int
    opcode: Opcode
    ratio: float
    since: int


# Where a step differs from its prediction, and which ranks are slow:
#
#     seconds[r, k, s]   of rank r, kind k (opcode and stage) and step s: the sum of its spans
#     difference         mean over steps of measured less predicted; of the slowest rank, the kind that differs most
#     straggler          a rank whose work of an opcode takes SLOW times as long as that of the others, in each of the
#                        last recorded steps; "as long" is in shares of the predicted seconds where there are some, else
#                        of the others' that hold the same stages
def seconds_by_kind(timeline: Timeline, *, per_span: bool = False) -> dict[tuple[int, Opcode, int], Floats]:
    """Return the seconds that spans take in each step, shape (steps,), by (rank, opcode, stage).

    With ``per_span``, the mean seconds of one span in each step.
    """
    num_steps = int(timeline.step.max(initial=0)) + 1
    rank = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track]
    keys = np.stack([rank, timeline.opcode.astype(np.int64), timeline.stage.astype(np.int64)])
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    seconds = np.zeros((kinds.shape[1], num_steps))
    places = which.reshape(-1), timeline.step
    np.add.at(seconds, places, (timeline.end_ps - timeline.start_ps) / 1e12)
    if per_span:
        counts = np.zeros_like(seconds)
        np.add.at(counts, places, 1.0)
        seconds /= np.maximum(counts, 1.0)
    return {
        (int(r), Opcode(int(opcode)), int(stage)): row for (r, opcode, stage), row in zip(kinds.T, seconds, strict=True)
    }


def explain_difference(predicted: Timeline, measured: Timeline) -> str:
    """Return a sentence on the kind of work that explains most of the difference between measured and predicted step.

    If the step was longer, that is the kind of work that exceeds its prediction most, and the reverse. It is a
    computation if computations of one rank explain more than half of the difference, else any instruction. "" without
    spans.
    """
    ours, theirs = (
        {key: float(row.mean()) for key, row in seconds_by_kind(item).items()} for item in (predicted, measured)
    )
    gap = float(np.median(measured.step_seconds()) - np.median(predicted.step_seconds()))
    sign = 1.0 if gap >= 0 else -1.0
    differing = {key: sign * (theirs.get(key, 0.0) - ours.get(key, 0.0)) for key in {*ours, *theirs}}
    computing = {key: value for key, value in differing.items() if key[1] in COMPUTATIONS}
    by_rank: dict[int, float] = {}
    for key, value in computing.items():
        by_rank[key[0]] = by_rank.get(key[0], 0.0) + value
    slowest = max(by_rank, key=lambda rank: by_rank[rank], default=0)
    chosen = computing if by_rank and by_rank[slowest] > abs(gap) / 2 else differing
    own = {key: value for key, value in chosen.items() if chosen is differing or key[0] == slowest}
    if not own:
        return ""
    rank, opcode, stage = max(own, key=lambda key: own[key])
    before, after = ours.get((rank, opcode, stage), 0.0), theirs.get((rank, opcode, stage), 0.0)
    return (
        f"Largest difference: {_words(opcode)} of stage {stage} on rank {rank}, {format_seconds(after)} per step "
        f"instead of {format_seconds(before)}."
    )


def find_stragglers(measured: Timeline, predicted: Timeline | None = None) -> list[SlowRank]:
    """Return ranks that take at least `SLOW` times as long as others for the same work; the slowest first."""
    # Replicas may compute different numbers of microbatches.
    seconds = seconds_by_kind(measured, per_span=True)
    wanted = _expected(seconds, predicted)
    work: dict[tuple[int, Opcode], list[Floats]] = {}
    for (rank, opcode, stage), row in seconds.items():
        if opcode in COMPUTATIONS and wanted.get((rank, opcode, stage), 0.0) > 0.0:
            work.setdefault((rank, opcode), []).append(np.stack([row, np.full(len(row), wanted[rank, opcode, stage])]))
    ratios = {key: (total := np.sum(rows, axis=0))[0] / total[1] for key, rows in work.items()}
    found = []
    for (rank, opcode), ratio in ratios.items():
        others = [other for (r, kind), other in ratios.items() if kind == opcode and r != rank]
        if not others:
            continue
        slower = ratio / np.median(others, axis=0)
        quick = np.flatnonzero(slower < SLOW)
        since = int(quick[-1]) + 1 if len(quick) else 0
        if len(slower) - since >= min(_LEAST_STEPS, len(slower)):
            found.append(SlowRank(rank, opcode, float(np.median(slower[since:])), since))
    return sorted(found, key=lambda item: -item.ratio)


def explain_stragglers(stragglers: list[SlowRank], first_step: int = 0) -> list[str]:
    """Return a sentence for each slow rank. ``first_step``: steps of the run before the first recorded one."""
    return [
        f"Rank {item.rank} is slow: {_words(item.opcode)} takes {item.ratio:.2f} times as long as elsewhere, since "
        f"step {first_step + item.since + 1}."
        for item in stragglers
    ]


def _expected(
    seconds: Mapping[tuple[int, Opcode, int], Floats], predicted: Timeline | None
) -> dict[tuple[int, Opcode, int], float]:
    """Seconds per step that a kind of work is compared with: predicted, or the median of ranks with the same work."""
    if predicted is not None:
        return {key: float(row.mean()) for key, row in seconds_by_kind(predicted, per_span=True).items()}
    alike: dict[tuple[Opcode, int], list[float]] = {}
    for (_, opcode, stage), row in seconds.items():
        alike.setdefault((opcode, stage), []).append(float(np.median(row)))
    return {
        (rank, opcode, stage): float(np.median(alike[opcode, stage]))
        for rank, opcode, stage in seconds
        if len(alike[opcode, stage]) > 1
    }


def _words(opcode: Opcode) -> str:
    return opcode.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Seconds of a step: predicted, measured (median of ``num_steps``), and relative spread of measured steps."""

    predicted_s: float
    measured_s: float
    measured_spread: float
    num_steps: int
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Busy seconds per step of one rank's compute stream, and the rank's peak memory; None if not known."""

    rank: int
    predicted_busy_s: float
    measured_busy_s: float
    relative_error: float | None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionComparison:
    """Median seconds of one kind of instruction of one stage; None if a timeline has no such instruction."""

    opcode: str
    stage: int
    num_measured: int
    predicted_s: float | None
    measured_s: float | None
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prediction compared with the measurement.

    ``same_order``: every stream issued the same instructions in the same order in every step. Raises DocumentError if
    ``same_order`` contradicts ``streams``.
    """

    step: StepComparison
    ranks: tuple[RankComparison, ...]
    instructions: tuple[InstructionComparison, ...]
    same_order: bool
    streams: tuple[StreamOrder, ...]

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.same_order != all(stream.same for stream in self.streams):
            raise DocumentError(
                f"The comparison has same_order = {self.same_order}, but its streams contradict that; compare again."
            )


def compare_timelines(predicted: Timeline, measured: Timeline) -> Comparison:
    """Compare two timelines of one plan; each may hold several steps.

    Raises:
        DocumentError: The arguments are swapped, differ in the number of ranks, or have no spans.
    """
    _check(predicted, measured)
    predicted_steps, measured_steps = predicted.step_seconds(), measured.step_seconds()
    low, high = np.percentile(measured_steps, (10, 90)).tolist()
    predicted_s, measured_s = float(np.median(predicted_steps)), float(np.median(measured_steps))
    streams = compare_orders(predicted, measured)
    busy = zip(
        (predicted.busy_seconds() / len(predicted_steps)).tolist(),
        (measured.busy_seconds() / len(measured_steps)).tolist(),
        strict=True,
    )
    return Comparison(
        step=StepComparison(
            predicted_s=predicted_s,
            measured_s=measured_s,
            measured_spread=(high - low) / measured_s if measured_s else 0.0,
            num_steps=len(measured_steps),
            relative_error=_error(predicted_s, measured_s),
        ),
        ranks=tuple(
            RankComparison(
                rank=rank,
                predicted_busy_s=ours,
                measured_busy_s=theirs,
                relative_error=_error(ours, theirs),
                predicted_peak_bytes=_of_rank(predicted.peak_memory_bytes, rank),
                measured_peak_bytes=_of_rank(measured.peak_memory_bytes, rank),
                measured_reserved_bytes=_of_rank(measured.reserved_memory_bytes, rank),
            )
            for rank, (ours, theirs) in enumerate(busy)
        ),
        instructions=_compare_instructions(predicted, measured),
        same_order=all(stream.same for stream in streams),
        streams=streams,
    )


def comparison_rows(comparison: Comparison) -> Row:
    """Return plain data of a comparison.

    Keys: ``step`` (one row), ``ranks`` and ``instructions`` (rows with the fields of their classes), ``same_order``,
    ``differences`` (one sentence for each stream that differs).
    """
    return {
        "step": _fields(comparison.step),
        "ranks": [_fields(item) for item in comparison.ranks],
        "instructions": [_fields(item) for item in comparison.instructions],
        "same_order": comparison.same_order,
        "differences": [stream.difference for stream in comparison.streams if not stream.same],
    }


def _of_rank(known: tuple[int, ...], rank: int) -> int | None:
    return known[rank] if known else None


def _fields(item: StepComparison | RankComparison | InstructionComparison) -> Row:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def _check(predicted: Timeline, measured: Timeline) -> None:
    if (predicted.origin, measured.origin) != ("predicted", "measured"):
        raise DocumentError(
            f"A {predicted.origin} and a {measured.origin} timeline were given; expected a predicted one first and a "
            "measured one second."
        )
    if predicted.num_ranks != measured.num_ranks:
        raise DocumentError(
            f"The predicted timeline has {predicted.num_ranks} ranks, the measured one {measured.num_ranks}; "
            "compare timelines of the same plan."
        )
    for timeline in (predicted, measured):
        if not timeline.num_spans:
            raise DocumentError(f"The {timeline.origin} timeline has no spans; simulate or run at least one step.")


def _compare_instructions(predicted: Timeline, measured: Timeline) -> tuple[InstructionComparison, ...]:
    ours, theirs = _durations(predicted), _durations(measured)
    rows = []
    for opcode, stage in sorted(ours.keys() | theirs.keys()):
        first, second = (_median(group.get((opcode, stage))) for group in (ours, theirs))
        rows.append(
            InstructionComparison(
                opcode=Opcode(opcode).name.lower(),
                stage=stage,
                num_measured=len(theirs.get((opcode, stage), ())),
                predicted_s=first,
                measured_s=second,
                relative_error=None if first is None or second is None else _error(first, second),
            )
        )
    return tuple(rows)


def _durations(timeline: Timeline) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Picoseconds of all spans by (opcode, stage)."""
    keys = np.stack([timeline.opcode.astype(np.int64), timeline.stage.astype(np.int64)], axis=1)
    known, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    parts = np.split((timeline.end_ps - timeline.start_ps)[order], np.cumsum(np.bincount(group))[:-1])
    return {(int(opcode), int(stage)): part for (opcode, stage), part in zip(known.tolist(), parts, strict=True)}


def _median(picoseconds: NDArray[np.int64] | None) -> float | None:
    return None if picoseconds is None else float(np.median(picoseconds)) / 1e12


def _error(predicted: float, measured: float) -> float | None:
    return (predicted - measured) / measured if measured else None
