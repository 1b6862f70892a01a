"""A search in which ops are split over teams of devices, or parts of the graph run again, as one that knows of neither.

Its graphs are the local ones, its ranks teams (`simulator.teams`). A plan that it finds is that of the whole graph but
for what it says of the sharding and of recomputing, which `Lowering.whole` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.cost import CostModel
from meshwright.program import lower_graph, own_workload
from meshwright.spec import Cluster, Graph, Plan, PlanError, Workload, read_recompute
from meshwright.spec.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """``recompute`` in words or layers, as `spec.read_recompute` reads it; ``workload`` is that of the whole plan."""

    whole_graph_for: Callable[[int], Graph]
    sharding: Sharding
    recompute: str
    workload: Workload
    cluster: Cluster
    cost: CostModel

    def graph_for(self, microbatch_size: int) -> Graph:
        """The local graph for a microbatch size."""
        graph = self.whole_graph_for(microbatch_size)
        return lower_graph(graph, self.sharding, read_recompute(graph, self.recompute))

    @property
    def own_workload(self) -> Workload:
        """What the search plans for: the samples of one device of each team."""
        return own_workload(self.workload, self.sharding)

    def whole(self, plan: Plan) -> Plan:
        """A plan that was found for local graphs, of the whole one."""
        graph = self.whole_graph_for(plan.microbatch_size)
        ranges = read_recompute(graph, self.recompute)
        return replace(
            plan,
            graph_hash=graph.content_hash,
            workload=self.workload,
            sharding=self.sharding,
            recompute=ranges,
        )


def lower_search(
    graph_for: Callable[[int], Graph],
    cluster: Cluster,
    workload: Workload,
    cost: CostModel,
    *,
    sharding: Sharding,
    recompute: str = "none",
    num_devices: int | None = None,
) -> tuple[Lowering, int | None]:
    """What a search sees of the problem, and the number of teams in ``num_devices`` devices.

    Raises PlanError for devices that are no whole number of teams and samples that expert ranks do not divide,
    ClusterError for teams that do not fit the nodes.
    """
    own_workload(workload, sharding)
    prices = cost.for_teams(sharding)
    if num_devices is not None and num_devices % sharding.width:
        raise PlanError(
            f"{num_devices} devices were to be used in teams of {sharding.width} (tensor times context times "
            "expert); expected a multiple. Choose another number of devices, or other sizes of the axes."
        )
    seen = prices.cluster if prices.devices else cluster
    lowering = Lowering(
        whole_graph_for=graph_for,
        sharding=sharding,
        recompute=recompute,
        workload=workload,
        cluster=seen,
        cost=prices,
    )
    return lowering, None if num_devices is None else num_devices // sharding.width
