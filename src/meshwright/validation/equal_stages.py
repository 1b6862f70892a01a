"""Pipelines of equal stages described by four numbers, as profiled in a paper, simulated under Meshwright's schedules.

    F, B, W    seconds of a rank for a microbatch: forward, gradients of inputs, gradients of weights
    C          seconds of a message between two ranks; every pair of ranks has its own link in each direction

With v chunks on a rank each has a v-th of F, B and W, and its messages take as long (`pipeline_programs`).

The cost of a schedule is the longest time of a rank from the beginning of its first computation to the end of its last
one (Qi et al., ICLR 2024, section 5.4): a rank that begins later also synchronises later. It has

    busy share     m (F + B + W) / cost, one minus the bubble rate
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.program import StageTimes, find_orders
from meshwright.simulator import simulate_program
from meshwright.spec import Opcode, Program, Section, to_picoseconds, to_seconds
from meshwright.spec.instructions import COMPUTATIONS
from meshwright.validation.pipeline_programs import (
    StageSeconds,
    build_pipeline,
    estimate_pipeline,
    lay_out,
    longest_rank_ps,
)

if TYPE_CHECKING:
    from meshwright.simulator import ProgramCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages:
    """p positions, m microbatches, v chunks on each position, and what a position takes for a microbatch."""

    num_positions: int
    num_microbatches: int
    num_chunks: int
    stage: StageSeconds

    @property
    def work_s(self) -> float:
        """Seconds for which a rank computes: m (F + B + W)."""
        stage = self.stage
        return self.num_microbatches * (stage.forward_s + stage.input_gradient_s + stage.weight_gradient_s)


def busy_share(
    pipeline: EqualStages, schedule: str, *, blocking: bool = False, rounds_wait_together: bool = False
) -> float:
    """The share of a schedule's cost in which ranks compute.

    ``blocking``: a message also occupies both of its ends for C. ``rounds_wait_together``: see `_wait_by_rounds`.
    Raises PlanError for a schedule that does not support this number of microbatches.
    """
    program = _build(pipeline, schedule)
    if rounds_wait_together:
        program = replace(program, body=_wait_by_rounds(program.body, pipeline.num_positions))
    timeline = simulate_program(program, _estimate(program, pipeline, blocking=blocking))
    return pipeline.work_s / to_seconds(longest_rank_ps(timeline, COMPUTATIONS))


def found_share(pipeline: EqualStages, most_kept: int) -> float:
    """The busy share of the shortest order found for one stage per rank with ``most_kept`` microbatches.

    Its cost is the time from the first computation of all ranks to the last one, no less than that of any rank.
    """
    stage, one = pipeline.stage, np.ones(pipeline.num_positions, np.int64)
    message_ps = one[1:] * to_picoseconds(stage.transfer_s)
    times = StageTimes(
        forward_ps=one * to_picoseconds(stage.forward_s),
        inputs_ps=one * to_picoseconds(stage.input_gradient_s),
        weights_ps=one * to_picoseconds(stage.weight_gradient_s),
        sending_ps=message_ps,
        returning_ps=message_ps,
        kept_bytes=one,
        limit_bytes=one * most_kept,
    )
    plan, _ = lay_out(pipeline.num_positions, pipeline.num_microbatches, "1f1b")
    return pipeline.work_s / to_seconds(find_orders(plan, times).length_ps)


def _build(pipeline: EqualStages, schedule: str) -> Program:
    chunks = pipeline.num_chunks if schedule == "interleaved" else 1
    return build_pipeline(pipeline.num_positions, pipeline.num_microbatches, schedule, chunks)


def _estimate(program: Program, pipeline: EqualStages, *, blocking: bool) -> ProgramCosts:
    stages = [pipeline.stage] * pipeline.num_positions
    return estimate_pipeline(program, stages, blocking=blocking)


def _wait_by_rounds(section: Section, size: int) -> Section:
    """Microbatches go through the chunks of a rank in rounds of p: only the first of a round waits at a turn.

    A turn is a message between the last position and the first one, which have neighbouring chunks. The others of a
    round may so begin before their message has arrived, which saves p C of an interleaved pipeline's drain.
    """
    count = section.num_instructions
    waiter = np.repeat(np.arange(count), np.diff(section.wait_offsets))
    turns = np.where(section.opcode == Opcode.FORWARD, section.stage % size == 0, section.stage % size == size - 1)
    freed = np.isin(section.opcode, COMPUTATIONS) & turns & (section.microbatch % size > 0)
    kept = ~freed[waiter]
    offsets = np.append(0, np.cumsum(np.bincount(waiter[kept], minlength=count)))
    return replace(section, wait_offsets=offsets.astype(np.int64), waits=section.waits[kept])
