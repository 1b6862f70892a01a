"""Pipelines of which only the times of stages are known, as Programs: laid out and simulated as every plan is.

Only the graph (a chain, a layer per part of the model) and the prices are made here. A position with v chunks gives
each a v-th of its times. Every pair of positions has a link of its own each way.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.steps import pipeline_seconds
from meshwright.program import build_program
from meshwright.simulator import Prices, SectionPrices, simulate_program
from meshwright.simulator.pricing import SHORTEST_S
from meshwright.spec import (
    Extent,
    Graph,
    Layer,
    Op,
    Opcode,
    Plan,
    PlanError,
    Program,
    Section,
    StagePlan,
    Tensor,
    Workload,
    to_picoseconds,
    to_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.steps import StageSeconds
    from meshwright.cost.transformer import Schedule

SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)
# Our names of the schedules of measured steps. ZB-2p is taken to fill its bubble, as ZB-H2 does nearly.
_NAMES: dict[Schedule, str] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
}
# A larger pipeline takes seconds to simulate; its bubble is small, and the closed form as good.
_MOST_COMPUTATIONS = 400_000


@lru_cache(maxsize=4096)
def simulated_seconds(
    stages: tuple[StageSeconds, ...], num_microbatches: int, schedule: Schedule, chunks: int, *, blocking: bool
) -> float:
    """Seconds from the first computation of a step to the last, or by `pipeline_seconds` where nothing is simulated.

    ``stages`` hold what their messages take for a microbatch, both ways and of all chunks; ``blocking``: while one is
    under way, neither of its ends computes. A schedule that does not take so many microbatches is not simulated.
    """
    if len(stages) * chunks * num_microbatches <= _MOST_COMPUTATIONS:
        try:
            program = build_pipeline(len(stages), num_microbatches, _NAMES[schedule], chunks)
        except PlanError:
            pass
        else:
            message_s = max(stage.transfer_s for stage in stages) / (2 * chunks)
            timeline = simulate_program(program, price_pipeline(program, stages, message_s, blocking=blocking))
            return to_seconds(int(timeline.end_ps.max()) - int(timeline.start_ps.min()))
    return pipeline_seconds(stages, num_microbatches, schedule, chunks)


@lru_cache(maxsize=64)
def build_pipeline(num_positions: int, num_microbatches: int, schedule: str, chunks: int) -> Program:
    """The program of `lay_out`. Raises PlanError for a schedule that does not take so many microbatches."""
    return build_program(*lay_out(num_positions, num_microbatches, schedule, chunks))


def lay_out(num_positions: int, num_microbatches: int, schedule: str, chunks: int = 1) -> tuple[Plan, Graph]:
    """One stage on a position, or as many chunks as are given, dealt out in turn."""
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


def price_pipeline(program: Program, stages: Sequence[StageSeconds], message_s: float, *, blocking: bool) -> Prices:
    """A cost class for every opcode of every part of the model; a message holds the link of its pair of positions.

    ``stages``: one for each position. ``blocking``: a message takes as long of the time of both of its ends, too.
    """
    num_parts = len(np.unique(program.body.stage[program.body.stage >= 0]))
    chunks = num_parts // len(stages)
    seconds = np.array([[_seconds(opcode, stage, chunks, message_s) for stage in stages] for opcode in Opcode])
    duration_ps = np.array([to_picoseconds(each) for each in np.tile(seconds, (1, chunks)).ravel()], np.int64)
    sends = np.repeat(np.isin(list(Opcode), SENDS), num_parts)
    nothing = np.zeros((len(duration_ps), 1), np.int64)
    sections = {name: _price_section(section, num_parts) for name, section in program.sections()}
    return Prices(
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


def _seconds(opcode: Opcode, stage: StageSeconds, chunks: int, message_s: float) -> float:
    if opcode in SENDS:
        return max(message_s, SHORTEST_S)
    whole_s = stage.input_gradient_s + stage.weight_gradient_s
    of_stage = {
        Opcode.FORWARD: stage.forward_s,
        Opcode.BACKWARD: whole_s,
        Opcode.BACKWARD_INPUT: stage.input_gradient_s,
        Opcode.BACKWARD_WEIGHT: stage.weight_gradient_s,
    }
    return of_stage.get(opcode, 0.0) / chunks


def _price_section(section: Section, num_parts: int) -> SectionPrices:
    sends = np.isin(section.opcode, SENDS)
    part = np.maximum(section.stage.astype(np.int64), 0)
    return SectionPrices(
        cost_class=(section.opcode.astype(np.int64) * num_parts + part).astype(np.int32),
        route=np.where(sends, section.group, -1).astype(np.int32),
        mark_offset_ps=np.zeros(len(section.mark_instruction), np.int64),
    )


@cache
def _chain(length: int) -> Graph:
    """A layer per part: one op that reads what the layer before it made. Nothing of it is priced."""
    tensors = [
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
        tensors=tuple(tensors),
        ops=tuple(Op(name=f"layer{i}", kind="stage", inputs=(i,), outputs=(i + 1,)) for i in range(length)),
        layers=tuple(Layer(name=f"layer{i}", start=i, stop=i + 1) for i in range(length)),
        inputs=(0,),
        outputs=(length,),
        has_loss=True,
    )
