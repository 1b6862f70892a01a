"""Compare the simulated bubbles and speed of schedules with the figures of the Zero Bubble paper (`score_schedules`).

    Table 5    busy shares of schedules, computed by Qi et al. (ICLR 2024) from profiled times of stages. Our programs
               use the same times, so that only the schedule or the simulator can differ (`busy_share`)
    Table 4    measured throughput of the same models, as the speed-up over 1F1B

ZB-1p and ZB-2p of Table 5 are schedules that the authors searched for these times, with p and 2p microbatches in
memory. ZB-1p is compared with the order that `program.find_orders` finds; in every row it has the rate of ZB-H1, which
replaces it in Table 4. ZB-2p cannot be compared: its orders minimise the longest time of any single rank, ours the time
from the first to the last computation of all ranks.

Interleaved 1F1B is scored in two ways. In the authors' simulation (sail-sg/zero-bubble-pipeline-parallelism at f68d387,
megatron/core/pipeline_parallel/efficiency.py) only the first of each p microbatches waits for the message from the last
rank to the first, or back, so their rates include p messages less than the schedule needs.

In theory a message takes no time from computation. If a message occupies both of its ends, a schedule with v times the
messages gains less: measured interleaved 1F1B lies between these two predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.program import StageTimes, build_program, find_orders
from meshwright.simulator import ProgramCosts, SectionCosts, simulate_program
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
    Timeline,
    Workload,
    to_picoseconds,
    to_seconds,
)
from meshwright.spec.instructions import COMPUTATIONS, SENDS
from meshwright.validation.datasets import load_steps, load_table
from meshwright.validation.scores import Score, score_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshwright.cost.costs import Floats
    from meshwright.templates.shapes import Schedule


# Our names of the schedules of measured steps. ZB-2p is taken to fill its bubble, as ZB-H2 does nearly.
SCHEDULE_NAMES: dict[Schedule, str] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage for one microbatch: forward, input gradients, weight gradients, and a message."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all four times."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s + self.transfer_s


def longest_rank_ps(timeline: Timeline, opcodes: Sequence[Opcode]) -> int:
    """Return the longest time (ps) of any rank from the start of its first to the end of its last such instruction.

    Only instructions with one of the ``opcodes`` count.
    """
    mine = np.isin(timeline.opcode, opcodes)
    rank = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track[mine]]
    begin = np.full(timeline.num_ranks, np.iinfo(np.int64).max)
    end = np.zeros(timeline.num_ranks, np.int64)
    np.minimum.at(begin, rank, timeline.start_ps[mine])
    np.maximum.at(end, rank, timeline.end_ps[mine])
    return int((end - begin).max())


@lru_cache(maxsize=256)
def build_pipeline(num_positions: int, num_microbatches: int, schedule: str, chunks: int) -> Program:
    """Return the program of the plan that `lay_out` returns.

    Raises PlanError for a schedule that does not support this number of microbatches.
    """
    return build_program(*lay_out(num_positions, num_microbatches, schedule, chunks))


def lay_out(num_positions: int, num_microbatches: int, schedule: str, chunks: int = 1) -> tuple[Plan, Graph]:
    """Return a plan and its graph, a chain with one layer per stage: one stage on each position (rank).

    With ``chunks`` above 1, position i has the stages i, i + ``num_positions`` and so on.
    """
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


# For programs of steps of which only the times of stages are known; they are simulated as every plan is. Only the graph
# (a chain, a layer per part of the model) and the costs are made here. A position with v chunks gives each a v-th of
# its times. Every pair of positions has its own link in each direction.
def estimate_pipeline(program: Program, stages: Sequence[StageSeconds], *, blocking: bool) -> ProgramCosts:
    """Return the costs of a program of `build_pipeline`, given the times of the stages of each position.

    A message holds the link between its two positions. ``blocking``: it also takes processor time at both of its ends.
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


# Pipelines described by four numbers, as profiled in a paper:
#
#     F, B, W    seconds of a rank for a microbatch: forward, gradients of inputs, gradients of weights
#     C          seconds of a message between two ranks; every pair of ranks has its own link in each direction
#
# With v chunks on a rank each has a v-th of F, B and W, and its messages take as long. The cost of a schedule is the
# longest time of a rank from the beginning of its first computation to the end of its last one (Qi et al., ICLR 2024,
# section 5.4): a rank that begins later also synchronises later. It has
#
#     busy share     m (F + B + W) / cost, one minus the bubble rate
@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages:
    """A pipeline of equal positions (ranks): p positions, m microbatches, v chunks on each position.

    ``stage``: the seconds of a position for a microbatch.
    """

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
    """Return the share (0..1) of a schedule's time in which ranks compute, one minus the bubble rate.

    ``blocking``: a message also occupies both of its ends. ``rounds_wait_together``: only the first microbatch of a
    round waits for messages between the last and the first position, as in the authors' simulation. Raises PlanError
    for a schedule that does not support this number of microbatches.
    """
    program = _build(pipeline, schedule)
    if rounds_wait_together:
        program = replace(program, body=_wait_by_rounds(program.body, pipeline.num_positions))
    timeline = simulate_program(program, _estimate(program, pipeline, blocking=blocking))
    return pipeline.work_s / to_seconds(longest_rank_ps(timeline, COMPUTATIONS))


def found_share(pipeline: EqualStages, most_kept: int) -> float:
    """Return the busy share of the shortest order found for one stage per rank.

    Ranks hold at most ``most_kept`` microbatches. The time of an order is that from the first computation of all ranks
    to the last.
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


DATASET = "schedules"
FOUND = "found, p microbatches in memory"
OURS, COUNTED, BLOCKING = (
    "simulated",
    "simulated, waits as the authors count them",
    "simulated, messages occupy both of their ranks",
)
PRINTED = "rates of Table 5"

# Columns of the tables, and the schedules that they are.
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
# Measured, and what of Table 5 it is.
MEASURED = {"1F1B-I": "1F1B-I", "ZB-1p": "ZB-H1"}
# In per cent: 0.002 of a rate, and less where less is busy; 3 % of a ratio.
_RATES, _RATIOS = 0.2, 3.0
_BLOCKING_NOTE = "form chosen with these rows in view: how much computing time a message takes from its two ranks"


def score_schedules(*, quick: bool = False) -> tuple[Score, ...]:
    """Score both tables: twelve setups of four models.

    With ``quick``, orders are searched only for the first setup of each model.
    """
    rows = load_table("zero_bubble_rates_table5")
    pipelines = [find_pipeline(row) for row in rows]
    found = {name: _shares(pipelines, name) for name in SCHEDULES}
    scores: list[Score] = []
    for name in SCHEDULES:
        part, printed = f"Table 5: busy share of {name}", _printed(rows, name)
        arms = {OURS: found[name]}
        if name == "1F1B-I":
            arms[COUNTED] = _shares(pipelines, name, rounds_wait_together=True)
        scores += [
            score_rows(DATASET, part, arm, printed, shares, judged="worst", target=_RATES)
            for arm, shares in arms.items()
        ]
    asked = [row for row in rows if not quick or int(row["microbatches"]) == 3 * int(row["stages"])]
    shares = np.array([found_share(pipeline, pipeline.num_positions) for pipeline in map(find_pipeline, asked)])
    part, printed = "Table 5: busy share of ZB-1p", _printed(asked, "ZB-1p")
    scores.append(score_rows(DATASET, part, FOUND, printed, shares, judged="worst", target=_RATES))
    for name, column in MEASURED.items():
        part, measured = f"Table 4: {name} over 1F1B", _speedups(rows, name)
        ours = found[column] / found["1F1B"]
        blocking = _shares(pipelines, column, blocking=True) / _shares(pipelines, "1F1B", blocking=True)
        printed = _printed(rows, name) / _printed(rows, "1F1B")
        scores += [
            score_rows(DATASET, part, OURS, measured, ours, target=_RATIOS),
            score_rows(DATASET, part, BLOCKING, measured, blocking, target=_RATIOS, note=_BLOCKING_NOTE),
            score_rows(DATASET, part, PRINTED, measured, printed),
        ]
    return tuple(scores)


def find_pipeline(row: Mapping[str, str]) -> EqualStages:
    """Return the pipeline of a row of Table 5, with the profiled times of its model."""
    times = next(item for item in load_table("zero_bubble_times") if _setup(item) == _setup(row))
    forward, inputs, weights, transfer = (
        float(times[f"t_{name}_ms"]) / 1e3 for name in ("forward", "backward_input", "backward_weight", "comm")
    )
    return EqualStages(
        num_positions=int(row["stages"]),
        num_microbatches=int(row["microbatches"]),
        num_chunks=int(times["virtual_stages_1f1b_i"]),
        stage=StageSeconds(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights, transfer_s=transfer),
    )


def _setup(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "stages", "microbatches"))


def _shares(pipelines: Iterable[EqualStages], name: str, **counted: bool) -> Floats:
    schedule = SCHEDULES[name]
    return np.array([busy_share(pipeline, schedule, **counted) for pipeline in pipelines])


def _printed(rows: Iterable[Mapping[str, str]], name: str) -> Floats:
    return np.array([1.0 - float(row[name]) for row in rows])


def _speedups(rows: Iterable[Mapping[str, str]], name: str) -> Floats:
    """Measured seconds under 1F1B over those under another schedule, for the setups of Table 5's rows."""
    measured = {row["id"]: float(row["iter_time_s"]) for row in load_steps() if row["id"].startswith("zb-t4-")}

    def seconds(row: Mapping[str, str], schedule: str) -> float:
        return measured[f"zb-t4-{row['model']}-{schedule}-{row['microbatches']}"]

    return np.array([seconds(row, "1F1B") / seconds(row, name) for row in rows])
