"""Convert a SOAP strategy to a placement: every op on the device of its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.planner.methods.flexflow.lowering import PART_NAME
from meshwright.planner.placing.op_tasks import find_tasks
from meshwright.planner.placing.placement_search import cut_stages, order_tasks
from meshwright.spec import Graph, Placement

if TYPE_CHECKING:
    from meshwright.planner.methods.flexflow.soap_result import SoapResult


def place_strategy(result: SoapResult, graph: Graph) -> Placement:
    """Return the placement of a strategy.

    ``graph`` is the model's graph; if the strategy splits ops, the graph of the model in parts. Ops that can only be
    placed together go to the device of the first of them.
    """
    space = result.space
    if result.is_split:
        parts = {at: PART_NAME.search(op.module) for at, op in enumerate(graph.ops) if not op.replicable}
        rank_of = {at: int(result.devices[int(name[1]), int(name[2])]) for at, name in parts.items() if name}
    else:
        rank_of = {op: int(result.devices[at, 0]) for at, layer in enumerate(space.layers) for op in layer.ops}
    tasks = find_tasks(graph)
    ranks = [next((rank_of[op] for op in ops if op in rank_of), 0) for ops in tasks.ops]
    return Placement(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=space.cluster.name,
        workload=space.workload,
        stages=cut_stages(tasks, ranks, order_tasks(tasks, [float(ops[0]) for ops in tasks.ops])),
        degrees=result.degrees if result.is_split else (),
    )
