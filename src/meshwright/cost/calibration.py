"""Correct a measurement table by measured steps, with three factors.

    factor(part) = (measured - overhead) / (predicted - overhead)         seconds of the part in a step over all ranks,
                                                                          the median over steps

The parts are forward, backward and optimizer step. The overhead is the runtime's time to issue them: the difference
between predictions with and without overhead. `apply_calibration` multiplies the table's times of ops (gradient
accumulation counts as backward) and of optimizer steps. Costs computed from these times change with them. Transfers,
the host's overhead and measured batches of whole models stay unchanged.
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
    """Predicted and measured seconds of one part of a step, summed over all ranks, without the runtime's overhead."""

    part: Part
    predicted_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        """Factor that multiplies the table's times of this part: measured / predicted; 1 if the prediction is 0 s."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0


def fit_calibration(predicted: Timeline, bare: Timeline, measured: Timeline) -> tuple[StepCorrection, ...]:
    """Return the corrections of forward, backward and optimizer step from a prediction and a measured run of one plan.

    ``bare`` is the prediction with a runtime overhead of 0; ``predicted`` includes the overhead.
    Raises MeasurementError if the timelines have different numbers of ranks or contain no step.
    """
    if predicted.num_ranks != measured.num_ranks or not (predicted.num_spans and measured.num_spans):
        raise MeasurementError(
            f"The prediction has {predicted.num_ranks} ranks and {predicted.num_spans} spans, the measured run has "
            f"{measured.num_ranks} ranks and {measured.num_spans} spans; compare two timelines of the same plan, with "
            "at least one step each."
        )
    corrections = []
    for part, opcode in _OPCODES.items():
        asked, own, found = (_part_seconds(timeline, opcode) for timeline in (predicted, bare, measured))
        corrections.append(StepCorrection(part=part, predicted_s=own, measured_s=max(found - (asked - own), 0.0)))
    return tuple(corrections)


def apply_calibration(table: Measurements, corrections: tuple[StepCorrection, ...], source: str) -> Measurements:
    """Return the table with corrected times of ops and optimizer steps.

    The factors and their ``source`` (such as the name of the measured timeline) are added to the table's conditions.
    """
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
