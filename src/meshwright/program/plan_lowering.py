"""Lower a plan to one rank: the local graph with recompute and compilation in it, and the plan for that graph.

A plan may split ops over teams, recompute parts of the graph, and compile its layers. Its lowered graph is the local
graph of one device of a team, including its collectives, recompute and compilation; the lowered
plan assigns this graph as the plan assigns the whole one, and splits nothing further. Building, estimating and
simulating programs all work on these two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from meshwright.program.sharding import MESH, ShardedGraph, shard_graph
from meshwright.spec import Graph, Plan, PlanError, Program, Recompute, Sharding, Workload, check_plan, with_recompute
from meshwright.spec.compiled_units import parts_of_layers
from meshwright.spec.exchange import Collective
from meshwright.spec.recompute import Ranges
from meshwright.spec.sharding import UNSHARDED

_KEPT_EXCHANGES = (f"{MESH}reduce_scatter.", f"{MESH}all_to_all.")


def lower_plan(plan: Plan, graph: Graph) -> tuple[Plan, Graph]:
    """Return the plan of the local graph, and that graph; a plan without a local graph is returned unchanged.

    Raises PlanError for a plan that does not match the graph, or a sharding that its ops do not support.
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
    """Return the workload of one device of each team; ranks of the expert axis have samples of their own.

    Raises PlanError if the expert ranks do not divide the global batch.
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
    """Return a plan of a local graph as a plan of the whole graph, with the sharding of ``whole``."""
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
    """Return the local graph of one device: its shard of every op, its collectives, recompute, and compilation.

    Recomputed ranges that keep some results (``keeps``) also keep the results of the group's reduce-scatters and
    all-to-alls, as torchtitan's policy does (`spec.recompute`).

    Raises PlanError for a sharding that the ops do not support.
    """
    again = Recompute(recompute, keeps)
    local = with_recompute(graph, *again) if sharding.is_whole else _split_graph(graph, sharding, again)
    compiled = compiled or graph.compiled
    return local if local.compiled == compiled else replace(local, compiled=compiled)


# The reason why a plan that compiles its layers runs them eagerly.
STAYS_EAGER = (
    "The layers run eagerly: the schedule's backwards come in two parts, and a compiled layer has one backward for all "
    "of its gradients."
)


def graph_of_program(graph: Graph, program: Program) -> Graph:
    """Return the graph of a plan as its program runs it: not compiled if backwards come in two parts."""
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
    """Yield the sums done once per step: gradients of parameters that each rank of an axis holds a part of."""
    reader: dict[int, int] = {}
    for index, op in enumerate(sharded.graph.ops):
        for tensor in op.inputs:
            reader.setdefault(tensor, index)
    for axis, parameters in sharded.reduced_parameters.items():
        for tensor in parameters:
            yield Collective(kind="all_reduce", axis=axis, phase="step", at=reader[tensor], tensor=tensor)


def _move_recompute(graph: Graph, local: Graph, again: Recompute) -> Recompute:
    """Return the same parts of the local graph: layers with their added conversions, other ranges from op to op."""
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
