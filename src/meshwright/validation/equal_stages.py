"""Pipelines of equal stages that are known by four numbers: what a paper profiled, simulated under our schedules.

    F, B, W    seconds of a rank for a microbatch: forward, gradients of inputs, gradients of weights
    C          seconds of a message between two ranks; every pair of ranks has a link of its own each way

With v chunks on a rank each has a v-th of F, B and W, and its messages take as long. Program and simulator are those
of every plan; only the graph (a chain) and the prices are made here.

The cost of a schedule is the longest time of a rank from the beginning of its first computation to the end of its last
one (Qi et al., ICLR 2024, section 5.4): a rank that begins later also synchronises later. It has

    busy share     m (F + B + W) / cost, one minus the bubble rate
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from meshwright.cost.steps import StageSeconds
from meshwright.program import StageTimes, build_program, find_orders
from meshwright.simulator import Prices, SectionPrices, simulate_program
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
    to_seconds,
)
from meshwright.spec.instructions import COMPUTATIONS

_SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)


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

    ``blocking``: a message takes C of the time of both of its ends, too. ``rounds_wait_together``: see
    `_wait_by_rounds`. Raises PlanError for a schedule that does not take so many microbatches.
    """
    program = _build(pipeline, schedule)
    if rounds_wait_together:
        program = replace(program, body=_wait_by_rounds(program.body, pipeline.num_positions))
    timeline = simulate_program(program, _price(program, pipeline, blocking=blocking))
    computes = np.isin(timeline.opcode, COMPUTATIONS)
    rank = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track[computes]]
    begin = np.full(timeline.num_ranks, np.iinfo(np.int64).max)
    end = np.zeros(timeline.num_ranks, np.int64)
    np.minimum.at(begin, rank, timeline.start_ps[computes])
    np.maximum.at(end, rank, timeline.end_ps[computes])
    return pipeline.work_s / to_seconds(int((end - begin).max()))


def found_share(pipeline: EqualStages, most_kept: int) -> float:
    """The same of the shortest order that is found for one stage on a rank, which keeps so many microbatches at most.

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
    plan, _ = _lay_out(pipeline, "1f1b")
    return pipeline.work_s / to_seconds(find_orders(plan, times).length_ps)


def _build(pipeline: EqualStages, schedule: str) -> Program:
    return build_program(*_lay_out(pipeline, schedule))


def _lay_out(pipeline: EqualStages, schedule: str) -> tuple[Plan, Graph]:
    """One stage on a rank, or v, dealt out in turn."""
    size, chunks = pipeline.num_positions, pipeline.num_chunks if schedule == "interleaved" else 1
    graph = _chain(size * chunks)
    stages = tuple(StagePlan(start=i, stop=i + 1, ranks=(i % size,)) for i in range(size * chunks))
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=f"{size} equal devices",
        workload=Workload(global_batch=pipeline.num_microbatches),
        stages=stages,
        num_microbatches=pipeline.num_microbatches,
        schedule=schedule,
    )
    return plan, graph


@cache
def _chain(length: int) -> Graph:
    """A layer per stage: one op that reads what the layer before it made. Nothing of it is priced."""
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


def _price(program: Program, pipeline: EqualStages, *, blocking: bool) -> Prices:
    """Every opcode is a cost class; a message holds the link of its pair of ranks."""
    stage, chunks = pipeline.stage, len(np.unique(program.body.stage)) // pipeline.num_positions
    whole_s = stage.input_gradient_s + stage.weight_gradient_s
    seconds = {
        Opcode.FORWARD: stage.forward_s / chunks,
        Opcode.BACKWARD: whole_s / chunks,
        Opcode.BACKWARD_INPUT: stage.input_gradient_s / chunks,
        Opcode.BACKWARD_WEIGHT: stage.weight_gradient_s / chunks,
        **dict.fromkeys(_SENDS, stage.transfer_s),
    }
    duration_ps = np.array([to_picoseconds(seconds.get(opcode, 0.0)) for opcode in Opcode], np.int64)
    nothing = np.zeros((len(Opcode), 1), np.int64)
    sections = {name: _price_section(section) for name, section in program.sections()}
    return Prices(
        duration_ps=duration_ps,
        host_ps=np.where(np.isin(list(Opcode), _SENDS), duration_ps, 0) * blocking,
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


def _price_section(section: Section) -> SectionPrices:
    sends = np.isin(section.opcode, _SENDS)
    return SectionPrices(
        cost_class=section.opcode.astype(np.int32),
        route=np.where(sends, section.group, -1).astype(np.int32),
        mark_offset_ps=np.zeros(len(section.mark_instruction), np.int64),
    )


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
