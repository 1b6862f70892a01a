"""Lower a plan: replace the graph by the local graph of one device, and the plan by a plan for that graph.

A plan may split ops over teams of devices, recompute parts of the graph, and compile its layers. The lowered graph is
what one device of a team computes, including its collectives, recompute and compilation. The lowered plan assigns this
graph to stages as the plan assigns the whole graph, but neither splits ops nor recomputes. Programs are built,
estimated and simulated from the lowered plan and graph.
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
    """Return the lowered plan and the local graph (see the module's docstring).

    A plan that neither splits ops, recomputes nor compiles is returned unchanged, with ``graph``. Raises PlanError if
    the plan does not match the graph, or if the graph's ops do not support its sharding.
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
    """Return the workload of one device of each team: its global batch is divided by the size of the expert axis.

    The ranks of the expert axis compute different samples; those of other axes compute the same ones. Raises PlanError
    if the size of the expert axis does not divide the global batch.
    """
    share, rest = divmod(workload.global_batch, sharding.expert)
    if rest:
        near = " or ".join(str(count * sharding.expert) for count in (share, share + 1) if count)
        raise PlanError(
            f"A global batch of {workload.global_batch} samples was given for expert = {sharding.expert} ranks, which "
            f"compute different samples; expected a multiple, the nearest is {near}. Choose such a global batch, or "
            "another size of the expert axis."
        )
    return replace(workload, global_batch=share)


def unlower_plan(plan: Plan, whole: Plan) -> Plan:
    """Undo `lower_plan`: return a plan of a local graph as a plan of the whole graph.

    Sharding, recompute, compilation, workload and idle ranks are those of the plan ``whole``.
    """
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

    ``recompute`` are ranges of ops, ``keeps`` ops in these ranges whose results are not recomputed. A range with
    ``keeps`` also keeps the results of its reduce-scatters and all-to-alls, as torchtitan's policy does
    (`spec.recompute`). ``compiled``: into how many parts each layer is cut to be compiled, 0 for eager layers.

    Raises PlanError if the graph's ops do not support the sharding.
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
    """Return the graph as the program runs it: without compilation if the program splits backwards into two parts."""
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
