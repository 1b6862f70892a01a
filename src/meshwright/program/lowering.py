"""What one rank computes under a plan: its share of the graph, what runs again in it, and the plan of that.

A plan may split ops over teams of devices, let parts of the graph run again, and compile its layers. Lowered, its graph
is the local graph of one device of a team, which says what that exchanges, computes again and compiles; its plan says
of this graph what the plan says of the whole one, and splits nothing further. All that builds, costs and simulates
programs works on these two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.program.sharding import MESH, ShardedGraph, shard_graph
from meshwright.spec.collective import Collective
from meshwright.spec.compiled_units import parts_of_layers
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import Program
from meshwright.spec.recompute import Ranges, Recompute, with_recompute
from meshwright.spec.sharding import UNSHARDED, Sharding
from meshwright.spec.workload import Workload

_KEPT_EXCHANGES = (f"{MESH}reduce_scatter.", f"{MESH}all_to_all.")


def lower_plan(plan: Plan, graph: Graph) -> tuple[Plan, Graph]:
    """The plan of the local graph, and that graph; a plan that changes nothing of it stays itself.

    Raises PlanError for a plan that does not fit the graph, or a sharding that its ops cannot take.
    """
    if not plan.has_local_graph:
        return plan, graph
    check_plan(plan, graph)
    local = lower_graph(graph, plan.sharding, plan.recompute, plan.keeps, compiled=parts_of_layers(plan))
    workload = own_workload(plan.workload, plan.sharding)
    own = replace(
        plan,
        graph_hash=local.content_hash,
        workload=workload,
        sharding=UNSHARDED,
        recompute=(),
        keeps=(),
        compiled=False,
    )
    return own, local


def own_workload(workload: Workload, sharding: Sharding) -> Workload:
    """What one device of each team does of a workload: ranks of the expert axis have samples of their own.

    Raises PlanError for samples that they do not divide.
    """
    share, rest = divmod(workload.global_batch, sharding.expert)
    if rest:
        near = " or ".join(str(count * sharding.expert) for count in (share, share + 1) if count)
        raise PlanError(
            f"A global batch of {workload.global_batch} samples was given for {sharding.expert} expert ranks, which "
            f"have samples of their own; expected a multiple, the nearest is {near}. Choose that, or another size of "
            "the axis."
        )
    return replace(workload, global_batch=share)


def unlower_plan(plan: Plan, whole: Plan) -> Plan:
    """What a plan of a local graph is for the whole one, of which ``whole`` is a plan with the same sharding."""
    return replace(
        plan,
        graph_hash=whole.graph_hash,
        workload=whole.workload,
        sharding=whole.sharding,
        recompute=whole.recompute,
        keeps=whole.keeps,
        compiled=whole.compiled,
        idle=whole.idle,
    )


@lru_cache(maxsize=32)
def lower_graph(
    graph: Graph, sharding: Sharding, recompute: Ranges, keeps: tuple[int, ...] = (), *, compiled: int = 0
) -> Graph:
    """The local graph of one device: its share of every op, what it exchanges, computes again, and compiles.

    Of ranges that are computed again in which results are kept (``keeps``), it also keeps what the devices of a team
    reduce-scatter and exchange all to all, as torchtitan's policy does (`spec.recompute_words`).

    Raises PlanError for a sharding that the ops cannot take.
    """
    again = Recompute(recompute, keeps)
    local = with_recompute(graph, *again) if sharding.is_whole else _split_graph(graph, sharding, again)
    compiled = compiled or graph.compiled
    return local if local.compiled == compiled else replace(local, compiled=compiled)


# Why layers of a plan that compiles them run as they are.
STAYS_EAGER = (
    "The layers run eagerly: the schedule's backwards come in two parts, and a compiled layer has one backward for all "
    "of its gradients."
)


def graph_of_program(graph: Graph, program: Program) -> Graph:
    """The graph of a plan as its program runs it: not compiled where backwards come in two parts."""
    return _eager(graph) if graph.compiled and program.splits_backwards else graph


@lru_cache(maxsize=16)
def _eager(graph: Graph) -> Graph:
    return replace(graph, compiled=0)


def _split_graph(graph: Graph, sharding: Sharding, recompute: Recompute) -> Graph:
    sharded = shard_graph(graph, sharding)
    local = replace(
        sharded.graph,
        collectives=(*sharded.collectives, *_sums_of_gradients(sharded)),
        model_flops=graph.total_flops,
    )
    return with_recompute(local, *_move_recompute(graph, local, recompute))


def _sums_of_gradients(sharded: ShardedGraph) -> Iterator[Collective]:
    """What is summed once per step: gradients of parameters of which each rank of an axis has a part."""
    reader: dict[int, int] = {}
    for index, op in enumerate(sharded.graph.ops):
        for tensor in op.inputs:
            reader.setdefault(tensor, index)
    for axis, parameters in sharded.reduced_parameters.items():
        for tensor in parameters:
            yield Collective(kind="all_reduce", axis=axis, phase="step", at=reader[tensor], tensor=tensor)


def _move_recompute(graph: Graph, local: Graph, again: Recompute) -> Recompute:
    """The same parts of the local graph: layers with the conversions that they got, other ranges from op to op."""
    starts = {old.start: new.start for old, new in zip(graph.layers, local.layers, strict=True)}
    stops = {old.stop: new.stop for old, new in zip(graph.layers, local.layers, strict=True)}
    place = {op.name: index for index, op in enumerate(local.ops)}
    ranges, keeps = [], [place[graph.ops[op].name] for op in again.keeps]
    for start, stop in again.ranges:
        own = (starts.get(start, place[graph.ops[start].name]), stops.get(stop, place[graph.ops[stop - 1].name] + 1))
        ranges.append(own)
        if bisect_left(again.keeps, start) < bisect_left(again.keeps, stop):
            keeps += [op for op in range(*own) if local.ops[op].kind.startswith(_KEPT_EXCHANGES)]
    return Recompute(tuple(ranges), tuple(sorted(keeps)))
