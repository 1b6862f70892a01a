"""Change the schedule of a plan: its ranks keep their order; its layers are cut again if the schedule needs it.

A pipeline has p positions, each with the R ranks that are replicas of each other. The layers are cut into S stages such
that the slowest stage is as fast as possible. A stage's time is that of a microbatch's forward and backward on the
device kind of rank 0. By the layout of the schedule:

    single        S = p     stage i on position i
    in turn       S = v·p   stage i on position i mod p
    v             S = 2p    stage i on position i, and stage 2p - 1 - i
    bidirectional S = p     stage i on position i and once more on position p - 1 - i (p even, R = 1)
    order file    the stages of line i on position i (or on rank i, if the file has a line for each rank)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from meshwright.planner.rank_layouts import slice_evenly
from meshwright.program import OrderFile, OwnSchedule, find_schedule, with_schedule
from meshwright.spec import Graph, Plan, PlanError, StagePlan
from meshwright.spec.schedules import layout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel

DEFAULT_CHUNKS = 2


def adopt_schedule(
    plan: Plan, schedule: str | OwnSchedule, graph: Graph, cost: CostModel, *, num_chunks: int = DEFAULT_CHUNKS
) -> Plan:
    """Return the plan under another schedule.

    ``num_chunks``: the number of stages on each rank if the schedule interleaves stages. Raises PlanError if the stages
    cannot be laid out: unequal numbers of replicas, fewer layers than stages, or an odd number of stages in a
    bidirectional pipeline. Also raises the errors of `with_schedule`.
    """
    changed = with_schedule(plan, schedule)
    own = find_schedule(changed)
    if isinstance(own, OrderFile):
        return _follow_file(plan, changed, own, graph, cost)
    layout = layout_of(changed.schedule)
    if layout == "single" and not plan.has_virtual_stages:
        return changed
    positions = _positions(plan)
    if len({len(ranks) for ranks in positions}) > 1:
        raise _impossible(changed.schedule, "its stages have different numbers of replicas", "the same number")
    size = len(positions)
    match layout:
        case "single":
            ranks = positions
        case "in turn":
            ranks = positions * num_chunks
        case "v":
            ranks = [*positions, *positions[::-1]]
        case _:
            if size % 2 or len(positions[0]) > 1:
                raise _impossible(
                    changed.schedule,
                    f"it has {size} stages of {len(positions[0])} replicas",
                    "an even number of stages without replicas",
                )
            ranks = [(own[0], other[0]) for own, other in zip(positions, positions[::-1], strict=True)]
    return _deal_out(plan, changed, ranks, graph, cost)


def _follow_file(plan: Plan, changed: Plan, file: OrderFile, graph: Graph, cost: CostModel) -> Plan:
    """Return the plan with the stages of an order file on the ranks of its lines; unchanged if they already match."""
    lines, positions = file.lines_of_stages(), _positions(plan)
    if len(file.lines) == plan.num_ranks:
        ranks = list(lines)
    elif len(file.lines) == len(positions) and all(len(own) == 1 for own in lines):
        ranks = [positions[line] for (line,) in lines]
    else:
        raise _impossible(
            changed.schedule, f"it has {plan.num_ranks} ranks", f"one rank per line of the file ({len(file.lines)})"
        )
    if ranks == [stage.ranks for stage in plan.stages]:
        return changed
    return _deal_out(plan, changed, ranks, graph, cost)


def _deal_out(plan: Plan, changed: Plan, ranks: Sequence[tuple[int, ...]], graph: Graph, cost: CostModel) -> Plan:
    """Return ``changed`` with the layers cut into stages as even as possible, on these ranks."""
    if len(ranks) > len(graph.layers):
        raise _impossible(changed.schedule, f"the graph has {len(graph.layers)} layers", f"at least {len(ranks)}")
    costs = cost.estimate_ops(graph, plan.microbatch_size, cost.cluster.device_kind(0))
    # Differences of one running sum: layers that are equal differ by rounding, which spreads them over the stages.
    # Exact ties would crowd them into the last ones.
    ends = [0.0, *accumulate(costs.microbatch_s().tolist())]
    bounds = slice_evenly([ends[layer.stop] - ends[layer.start] for layer in graph.layers], len(ranks))
    stages = (StagePlan(start=start, stop=stop, ranks=own) for (start, stop), own in zip(bounds, ranks, strict=True))
    return replace(changed, stages=tuple(stages))


def _positions(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of every position in line; of a bidirectional pipeline, those of one direction."""
    is_bidirectional = layout_of(plan.schedule) == "bidirectional"
    ranks = [stage.ranks[:1] if is_bidirectional else stage.ranks for stage in plan.stages]
    return list(dict.fromkeys(ranks))


def _impossible(schedule: str, found: str, expected: str) -> PlanError:
    return PlanError(
        f"The plan cannot follow the schedule {schedule}: {found}; expected {expected}. Choose another schedule, or "
        "plan again."
    )
