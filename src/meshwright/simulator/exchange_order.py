"""Find the order in which a plan's gradient parts are sent, on the virtual clock of the estimated program.

All forwards of a step come before its backwards, so the times at which parts are ready follow from the backwards alone.
One simulated step gives them, and the sequence found for it holds for every step. The policy (`program.priorities`, or
a user's function) receives these times; its answer becomes data of the plan (``exchange.sequence``), and simulator and
runtime both read the program made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.program import build_program, gradient_buckets
from meshwright.program.parts import cut_parts
from meshwright.program.priorities import ReadyPart, order_parts
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.simulate import SimulatedRun, run_program
from meshwright.spec import Cluster, Graph, Plan, PlanError, Program
from meshwright.spec.instructions import SUMS

# A user's function: parts of one group → their indices in the order in which they are to be sent.
OwnOrder = Callable[[Sequence[ReadyPart]], Iterable[int]]


def schedule_exchange(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    *,
    credit_bytes: int = 0,
    cost: CostModel | None = None,
    own_order: OwnOrder | None = None,
) -> Plan:
    """Return the plan with the sequence of its exchange: nearest to the input first, or by ``own_order``.

    At most ``credit_bytes`` are in flight at once; 0 sends one part after the other. With servers, parts are assumed to
    take as long as all-reduces of them. Raises PlanError as `build_program`, and if ``own_order`` does not return every
    part once.
    """
    parts = ready_parts(plan, graph, cluster, cost=cost)
    groups: dict[tuple[int, ...], list[ReadyPart]] = {}
    buckets = gradient_buckets(graph, plan)
    of_part = cut_parts(buckets, replace(plan.exchange, sequence=())).bucket
    for part in parts:
        groups.setdefault(buckets[of_part[part.index]].ranks, []).append(part)
    admitted = sorted(
        (moment, place, index)
        for group in groups.values()
        for place, (moment, index) in enumerate(
            order_parts(group, credit_bytes) if own_order is None else _follow(own_order, group)
        )
    )
    sequence = tuple(index for _, _, index in admitted)
    return replace(plan, exchange=replace(plan.exchange, sequence=sequence))


def _follow(own_order: OwnOrder, parts: list[ReadyPart]) -> list[tuple[int, int]]:
    """Return (moment, index) of each part in a user's order, sent one after the other as they become ready."""
    known = {part.index: part for part in parts}
    answer: Any = own_order(tuple(parts))
    order = list(answer) if isinstance(answer, Iterable) else None
    if order is None or sorted(map(str, order)) != sorted(map(str, known)):
        given = type(answer).__name__ if order is None else str(order)[:80]
        raise PlanError(
            f"The own order of an exchange returned {given}; expected the `index` of each of its {len(parts)} parts "
            "once. Return `[part.index for part in ...]`."
        )
    free_ps, moments = 0, []
    for index in order:
        moments.append((max(free_ps, known[index].ready_ps), index))
        free_ps = moments[-1][0] + known[index].duration_ps
    return moments


def ready_parts(plan: Plan, graph: Graph, cluster: Cluster, *, cost: CostModel | None = None) -> list[ReadyPart]:
    """Return when each part of the plan's exchange is ready on all of its ranks, and its duration."""
    first = replace(plan, exchange=replace(plan.exchange, sequence=(), across_steps=False, servers=()))
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    program = build_program(first, graph)
    costs = estimate_program(program, first, graph, cost)
    run = run_program(program, costs, 1)
    body = program.body
    sums = np.flatnonzero(np.isin(body.opcode, SUMS))
    ready = _ready_ps(program, run, sums)
    buckets = gradient_buckets(graph, first)
    parts = cut_parts(buckets, first.exchange)
    ready_ps, duration_ps = np.zeros(len(parts.bucket), np.int64), np.zeros(len(parts.bucket), np.int64)
    np.maximum.at(ready_ps, body.peer[sums], ready)
    duration_ps[body.peer[sums]] = costs.duration_ps[costs.body.cost_class[sums]]
    # The first buckets of a stage to be ready are those of its last layers.
    order = sorted(range(len(buckets)), key=lambda index: (min(buckets[index].stages), -index))
    urgency = np.empty(len(buckets), np.int64)
    urgency[order] = np.arange(len(buckets))
    return [
        ReadyPart(
            index=index,
            stage=min(buckets[bucket].stages),
            num_bytes=int(parts.num_bytes[index]),
            ready_ps=int(ready_ps[index]),
            duration_ps=int(duration_ps[index]),
            urgency=int(urgency[bucket]),
        )
        for index, bucket in enumerate(parts.bucket.tolist())
    ]


def _ready_ps(program: Program, run: SimulatedRun, sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when all waits of each given instruction have happened; ids are those of the body, the only section."""
    body, network = program.body, run.network
    marks = run.end_ps[network.mark_instruction] + network.mark_shift_ps
    moments = np.concatenate([run.end_ps, marks])
    return np.array([moments[body.waits_of(i)].max(initial=0) for i in sums.tolist()], np.int64)
