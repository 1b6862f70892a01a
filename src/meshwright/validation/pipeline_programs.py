"""Steps of which only the times of stages are known, as Programs: laid out and simulated as every plan is.

Only the graph (a chain, a layer per part of the model) and the prices are made here. A position with v chunks gives
each a v-th of its times. Every pair of positions has a link of its own each way. Of the replicas of a stage, which do
the same at the same time, one is written down (`program.folding`); their sums of gradients are those of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.steps import StageSeconds, StepSeconds
from meshwright.program import Fold, build_folded_program, build_program
from meshwright.simulator import Prices, SectionPrices, simulate_program
from meshwright.simulator.pricing import SHORTEST_S
from meshwright.spec import (
    Extent,
    GradientExchange,
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
from meshwright.spec.instructions import COLLECTIVES, COMPUTATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.cost.transformer import Schedule
    from meshwright.spec import Timeline

SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)
# Our names of the schedules of measured steps. ZB-2p is taken to fill its bubble, as ZB-H2 does nearly.
_NAMES: dict[Schedule, str] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
}
# Elements by which messages are told apart whose bytes do not matter: of a bucket, of an embedding that stages share.
_BUCKET, _TIED = 2, 3
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What follows the computations of a step (`cost.steps.StepSeconds`): what its Program depends on."""

    num_buckets: int = 0
    overlaps: bool = False
    shards: bool = False
    tied: bool = False
    clips: bool = False
    updates: bool = False


@lru_cache(maxsize=4096)
def simulated_seconds(
    step: StepSeconds, num_microbatches: int, schedule: Schedule, chunks: int, *, blocking: bool
) -> float:
    """Seconds of a step, from its first computation until all parameters are updated.

    Where stages go on by themselves, they begin as much later than the first one as they end, and the step is the
    longest time of one of them (Qi et al., ICLR 2024, section 5.4).
    ``blocking``: while a message is under way, neither of its ends computes. Raises PlanError for a schedule that does
    not take so many microbatches.
    """
    exchange = Exchange(
        num_buckets=step.num_buckets,
        overlaps=step.overlaps and step.num_buckets > 0,
        shards=step.shards and step.num_buckets > 0,
        tied=step.tied_s > 0,
        clips=step.clips,
        updates=True,
    )
    program = build_pipeline(len(step.stages), num_microbatches, _NAMES[schedule], chunks, exchange)
    message_s = max(stage.transfer_s for stage in step.stages) / (2 * chunks)
    prices = price_pipeline(program, step.stages, message_s, blocking=blocking, tied_s=step.tied_s)
    timeline = simulate_program(program, prices)
    if step.rolls:
        return to_seconds(longest_rank_ps(timeline, (*COMPUTATIONS, Opcode.OPTIMIZER_STEP)))
    return to_seconds(int(timeline.end_ps.max()) - int(timeline.start_ps.min()))


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
def build_pipeline(
    num_positions: int, num_microbatches: int, schedule: str, chunks: int, exchange: Exchange = Exchange()
) -> Program:
    """The program of `lay_out`. Raises PlanError for a schedule that does not take so many microbatches."""
    if not exchange.num_buckets:
        return build_program(*lay_out(num_positions, num_microbatches, schedule, chunks, exchange))
    whole, graph = lay_out(num_positions, 2 * num_microbatches, schedule, chunks, exchange)
    return build_folded_program(Fold(whole=whole, classes=(0, 0)), graph)


def lay_out(
    num_positions: int, num_microbatches: int, schedule: str, chunks: int = 1, exchange: Exchange = Exchange()
) -> tuple[Plan, Graph]:
    """One stage on a position, or as many chunks as are given, dealt out in turn; two replicas if any exchange."""
    graph = _chain(num_positions * chunks, exchange)
    replicas = 2 if exchange.num_buckets else 1
    stages = tuple(
        StagePlan(start=i, stop=i + 1, ranks=tuple(replicas * (i % num_positions) + r for r in range(replicas)))
        for i in range(num_positions * chunks)
    )
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=f"{replicas * num_positions} devices",
        workload=Workload(global_batch=num_microbatches),
        stages=stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        exchange=GradientExchange(
            bucket_bytes=_BUCKET * _ELEMENT_BYTES,
            overlap=exchange.overlaps,
            zero=1 if exchange.shards else 0,
            clip_norm=exchange.clips,
        ),
    )
    return plan, graph


def price_pipeline(
    program: Program, stages: Sequence[StageSeconds], message_s: float, *, blocking: bool, tied_s: float = 0.0
) -> Prices:
    """A cost class for every opcode of every part of the model; a message holds the link of its pair of positions.

    ``stages``: one for each position. ``blocking``: a message takes as long of the time of both of its ends, too.
    ``tied_s``: what the sum of a tied embedding's gradients takes. That ranks agree on a number takes no time.
    """
    num_parts = len(np.unique(program.body.stage[program.body.stage >= 0]))
    chunks = num_parts // len(stages)
    seconds = np.array([[_seconds(opcode, stage, chunks, message_s) for stage in stages] for opcode in Opcode])
    everything = [*np.tile(seconds, (1, chunks)).ravel(), tied_s, 0.0]
    duration_ps = np.array([to_picoseconds(each) for each in everything], np.int64)
    sends = np.append(np.repeat(np.isin(list(Opcode), SENDS), num_parts), [False, False])
    nothing = np.zeros((len(duration_ps), 1), np.int64)
    sections = {name: _price_section(section, num_parts, duration_ps) for name, section in program.sections()}
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
        Opcode.ALL_REDUCE: stage.sum_s,
        Opcode.REDUCE_SCATTER: stage.sum_s,
        Opcode.ALL_GATHER: stage.gather_s,
        Opcode.OPTIMIZER_STEP: stage.optimizer_s,
    }
    return of_stage.get(opcode, 0.0) / chunks


def _price_section(section: Section, num_parts: int, duration_ps: NDArray[np.int64]) -> SectionPrices:
    sends = np.isin(section.opcode, SENDS)
    part = np.maximum(section.stage.astype(np.int64), 0)
    cost_class = section.opcode.astype(np.int64) * num_parts + part
    collective = np.isin(section.opcode, COLLECTIVES)
    tied, agreed = len(duration_ps) - 2, len(duration_ps) - 1
    of_tied = collective & (section.num_bytes == _TIED * _ELEMENT_BYTES)
    cost_class[of_tied] = np.where(section.opcode[of_tied] == Opcode.ALL_GATHER, agreed, tied)
    cost_class[collective & (section.num_bytes < _BUCKET * _ELEMENT_BYTES)] = agreed
    raising = section.mark_instruction
    spans = duration_ps[cost_class[raising]]
    # The buckets of a part are ready at even distances, the last one at the end.
    place = section.mark_index % max((section.mark_index.max(initial=0) + 1) // num_parts, 1)
    count = place.max(initial=0) + 1
    return SectionPrices(
        cost_class=cost_class.astype(np.int32),
        route=np.where(sends, section.group, -1).astype(np.int32),
        mark_offset_ps=spans * (place + 1) // count,
    )


@cache
def _chain(length: int, exchange: Exchange) -> Graph:
    """A layer per part: an op that reads what the layer before it made, and parameters. Nothing of it is priced."""
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
    each = max(exchange.num_buckets, 1) if exchange.updates else 0
    names = [f"w{i}.{k}" for i in range(length) for k in range(each)] + ["tied"] * exchange.tied
    parameters = [
        Tensor(
            name=name,
            shape=(Extent(_TIED if name == "tied" else _BUCKET),),
            dtype="float32",
            role="parameter",
            storage=length + 1 + index,
            requires_grad=True,
        )
        for index, name in enumerate(names)
    ]
    read = [tuple(range(length + 1 + i * each, length + 1 + (i + 1) * each)) for i in range(length)]
    if exchange.tied:
        for end in (0, length - 1):
            read[end] += (length + len(parameters),)
    ops = [Op(name=f"layer{i}", kind="stage", inputs=(i, *mine), outputs=(i + 1,)) for i, mine in enumerate(read)]
    return Graph(
        name="chain",
        tensors=(*passed, *parameters),
        ops=tuple(ops),
        layers=tuple(Layer(name=f"layer{i}", start=i, stop=i + 1) for i in range(length)),
        inputs=(0,),
        outputs=(length,),
        has_loss=True,
    )
