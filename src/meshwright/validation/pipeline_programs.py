"""Programs of steps of which only the times of stages are known, simulated as every plan is.

Only the graph (a chain, a layer per part of the model) and the costs are made here. A position with v chunks gives
each a v-th of its times. Every pair of positions has its own link in each direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.program import build_program
from meshwright.simulator import ProgramCosts, SectionCosts
from meshwright.simulator.program_estimate import SHORTEST_S
from meshwright.spec import (
    Extent,
    Graph,
    Layer,
    Op,
    Opcode,
    Plan,
    Program,
    Section,
    StagePlan,
    Tensor,
    Workload,
    to_picoseconds,
)
from meshwright.spec.instructions import SENDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec import Timeline
    from meshwright.spec.plan import ScheduleName
    from meshwright.templates.shapes import Schedule

# Our names of the schedules of measured steps. ZB-2p is taken to fill its bubble, as ZB-H2 does nearly.
SCHEDULE_NAMES: dict[Schedule, ScheduleName] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights, a message."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of a microbatch."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s + self.transfer_s


def longest_rank_ps(timeline: Timeline, opcodes: Sequence[Opcode]) -> int:
    """The longest time of a rank from the beginning of its first instruction of these kinds to the end of its last."""
    mine = np.isin(timeline.opcode, opcodes)
    rank = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track[mine]]
    begin = np.full(timeline.num_ranks, np.iinfo(np.int64).max)
    end = np.zeros(timeline.num_ranks, np.int64)
    np.minimum.at(begin, rank, timeline.start_ps[mine])
    np.maximum.at(end, rank, timeline.end_ps[mine])
    return int((end - begin).max())


@lru_cache(maxsize=256)
def build_pipeline(num_positions: int, num_microbatches: int, schedule: str, chunks: int) -> Program:
    """The program of `lay_out`. Raises PlanError for a schedule that does not support this number of microbatches."""
    return build_program(*lay_out(num_positions, num_microbatches, schedule, chunks))


def lay_out(num_positions: int, num_microbatches: int, schedule: str, chunks: int = 1) -> tuple[Plan, Graph]:
    """A plan with a stage on each position; with ``chunks`` above 1 position i has stages i, i + positions, ..."""
    graph = _chain(num_positions * chunks)
    stages = tuple(StagePlan(start=i, stop=i + 1, ranks=(i % num_positions,)) for i in range(num_positions * chunks))
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=f"{num_positions} devices",
        workload=Workload(global_batch=num_microbatches),
        stages=stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    return plan, graph


def estimate_pipeline(program: Program, stages: Sequence[StageSeconds], *, blocking: bool) -> ProgramCosts:
    """A cost class for every opcode of every part of the model; a message holds the link of its pair of positions.

    ``stages``: one for each position. ``blocking``: a message also occupies both of its ends.
    """
    num_parts = len(np.unique(program.body.stage[program.body.stage >= 0]))
    chunks = num_parts // len(stages)
    seconds = np.array([[_seconds(opcode, stage, chunks) for stage in stages] for opcode in Opcode])
    duration_ps = np.array([to_picoseconds(each) for each in np.tile(seconds, (1, chunks)).ravel()], np.int64)
    sends = np.repeat(np.isin(list(Opcode), SENDS), num_parts)
    nothing = np.zeros((len(duration_ps), 1), np.int64)
    sections = {name: _estimate_section(section, num_parts) for name, section in program.sections()}
    return ProgramCosts(
        duration_ps=duration_ps,
        host_ps=np.where(sends, duration_ps, 0) * blocking,
        allocate_bytes=nothing,
        free_bytes=nothing,
        memory_parts=("all",),
        resident_bytes=np.zeros((program.num_ranks, 1), np.int64),
        route_offsets=np.arange(len(program.groups) + 1, dtype=np.int64),
        route_links=np.arange(len(program.groups), dtype=np.int32),
        num_links=len(program.groups),
        prologue=sections["prologue"],
        body=sections["body"],
        epilogue=sections["epilogue"],
    )


def _seconds(opcode: Opcode, stage: StageSeconds, chunks: int) -> float:
    if opcode in SENDS:
        return max(stage.transfer_s, SHORTEST_S)
    of_stage = {
        Opcode.FORWARD: stage.forward_s,
        Opcode.BACKWARD: stage.input_gradient_s + stage.weight_gradient_s,
        Opcode.BACKWARD_INPUT: stage.input_gradient_s,
        Opcode.BACKWARD_WEIGHT: stage.weight_gradient_s,
    }
    return of_stage.get(opcode, 0.0) / chunks


def _estimate_section(section: Section, num_parts: int) -> SectionCosts:
    part = np.maximum(section.stage.astype(np.int64), 0)
    return SectionCosts(
        cost_class=(section.opcode.astype(np.int64) * num_parts + part).astype(np.int32),
        route=np.where(np.isin(section.opcode, SENDS), section.group, -1).astype(np.int32),
        mark_offset_ps=np.zeros(len(section.mark_instruction), np.int64),
    )


@cache
def _chain(length: int) -> Graph:
    """A layer per part: an op that reads what the layer before it made. Nothing of it is estimated."""
    passed = [
        Tensor(
            name=f"y{i}",
            shape=(Extent(0, 1),),
            dtype="float32",
            role="activation" if i else "input",
            storage=i,
            requires_grad=i > 0,
        )
        for i in range(length + 1)
    ]
    return Graph(
        name="chain",
        tensors=tuple(passed),
        ops=tuple(Op(name=f"layer{i}", kind="stage", inputs=(i,), outputs=(i + 1,)) for i in range(length)),
        layers=tuple(Layer(name=f"layer{i}", start=i, stop=i + 1) for i in range(length)),
        inputs=(0,),
        outputs=(length,),
        has_loss=True,
    )
