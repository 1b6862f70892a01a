"""Compare a predicted timeline with a measured one, number by number.

    step         median of `Timeline.step_seconds`; spread = (p90 - p10) / median of the measured steps
    rank         Σ spans of the compute stream / number of steps
    instruction  median duration over all instructions of one opcode and stage
    error        (predicted - measured) / measured; None where nothing was measured

The order is that of issue: for each stream and step, (opcode, stage, microbatch, peer) by start. Measured step k is
compared with predicted step k, or with the last one if fewer were predicted (a schedule repeats itself).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwright.report.order import StreamOrder, compare_orders
from meshwright.spec import DocumentError, Opcode, Timeline

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Seconds of a step: predicted, measured (median of ``num_steps``), and the spread of the measured ones."""

    predicted_s: float
    measured_s: float
    measured_spread: float
    num_steps: int
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Busy seconds of one rank's compute stream per step, and its peak memory if known."""

    rank: int
    predicted_busy_s: float
    measured_busy_s: float
    relative_error: float | None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionComparison:
    """Median seconds of one kind of instruction of one stage; None where a timeline has none."""

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
        DocumentError: The arguments are swapped, of different numbers of ranks, or without spans.
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
    """Plain data of a comparison.

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
