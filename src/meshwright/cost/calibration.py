"""Correct a measurement table by real steps: three factors, no more.

    factor(part) = (measured - overhead) / (predicted - overhead)         seconds of the part in a step over all ranks,
                                                                          the median over steps

for the parts forward, backward and optimizer step; the overhead is the runtime's time to issue them, the difference
between predictions with and without it. `apply_calibration` multiplies the table's ops (gradient accumulation counts as
backward) and optimizer steps, and thereby all costs that depend on them. Transfers, the host's overhead and batches of
whole models, which depend on no op's time, stay unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from meshwright.spec import MeasurementError, Measurements, Opcode, Timeline
from meshwright.spec.measurements import BUCKET_COPY
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Part = Literal["forward", "backward", "optimizer"]
_OPCODES: dict[Part, Opcode] = {
    "forward": Opcode.FORWARD,
    "backward": Opcode.BACKWARD,
    "optimizer": Opcode.OPTIMIZER_STEP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCorrection:
    """Seconds of one part of a step over all ranks, without overhead: predicted from the table, and measured."""

    part: Part
    predicted_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        """The factor for the table's times of this part; 1 if nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0


def fit_calibration(predicted: Timeline, bare: Timeline, measured: Timeline) -> tuple[StepCorrection, ...]:
    """Compare the parts of steps; ``bare`` is the prediction with an overhead of 0.

    Raises MeasurementError if the timelines have different numbers of ranks or contain no step.
    """
    if predicted.num_ranks != measured.num_ranks or not (predicted.num_spans and measured.num_spans):
        raise MeasurementError(
            f"A prediction for {predicted.num_ranks} ranks with {predicted.num_spans} spans was compared with a run on "
            f"{measured.num_ranks} with {measured.num_spans}; compare timelines of one plan, with at least one step."
        )
    corrections = []
    for part, opcode in _OPCODES.items():
        asked, own, found = (_part_seconds(timeline, opcode) for timeline in (predicted, bare, measured))
        corrections.append(StepCorrection(part=part, predicted_s=own, measured_s=max(found - (asked - own), 0.0)))
    return tuple(corrections)


def apply_calibration(table: Measurements, corrections: tuple[StepCorrection, ...], source: str) -> Measurements:
    """Return the table with its ops and optimizer steps corrected; its conditions name the ``source``."""
    factor = {item.part: item.factor for item in corrections}
    note = ", ".join(f"{part} x {value:.3f}" for part, value in factor.items())
    return replace(
        table,
        conditions="; ".join(filter(None, (table.conditions, f"calibration by {source}: {note}"))),
        ops=tuple(
            replace(
                op,
                forward_s=op.forward_s * factor["forward"],
                backward_s=op.backward_s * factor["backward"],
                accumulate_s=op.accumulate_s * factor["backward"],
            )
            for op in table.ops
        ),
        optimizers=tuple(
            row if row.kind == BUCKET_COPY else replace(row, seconds=row.seconds * factor["optimizer"])
            for row in table.optimizers
        ),
    )


def _part_seconds(timeline: Timeline, opcode: Opcode) -> float:
    """Return the median over the steps of the total seconds of all spans of an opcode."""
    chosen = timeline.opcode == opcode
    durations = (timeline.end_ps - timeline.start_ps)[chosen] / PICOSECONDS_PER_SECOND
    return float(np.median(np.bincount(timeline.step[chosen], durations, minlength=int(timeline.step.max()) + 1)))
