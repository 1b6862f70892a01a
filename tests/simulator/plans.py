"""A cost model with round numbers, so that plans have closed forms."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.cost import CostModel, OpCosts, StageMemory
from meshwright.spec import Cluster, DeviceGroup, DeviceKind, Link, Node, load_cluster


def small_cluster(num_nodes: int = 1, devices: int = 8, *, num_nics: int = 1) -> Cluster:
    link = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    kind = DeviceKind(
        name="small",
        memory_bytes=2**30,
        memory_bandwidth_bytes_per_s=1e9,
        peak_flops_per_s={"float32": 1e9},
        source="round numbers",
    )
    node = lambda i: Node(
        name=f"node{i}",
        devices=(DeviceGroup(kind="small", count=devices),),
        host_memory_bytes=2**30,
        num_cores=8,
        device_link=link,
        pcie=link,
        nic=link,
        num_nics=num_nics,
    )
    return Cluster(name="small", device_kinds=(kind,), nodes=tuple(node(i) for i in range(num_nodes)))


def with_fast_hosts(cluster: Cluster) -> Cluster:
    """The cluster with hosts that issue at once."""
    return replace(cluster, nodes=tuple(replace(node, host_call_s=1e-15) for node in cluster.nodes))


def fast_cluster(name: str) -> Cluster:
    """A shipped cluster whose hosts issue at once: devices alone take time, however small a model is."""
    return with_fast_hosts(load_cluster(name))


def exact_costs(forward_s, backward_s, accumulate_s):
    """Costs without any doubt."""
    columns = np.stack([forward_s, backward_s, accumulate_s], axis=1)
    return OpCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        accumulate_s=accumulate_s,
        again_s=np.zeros(len(columns)),
        low_s=columns,
        high_s=columns,
        group=np.arange(len(columns)),
        basis=("measured",) * len(columns),
        exchanged_s=np.zeros((len(columns), 2)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCost(CostModel):
    """Every op takes ``forward`` and ``backward`` seconds, every message ``send`` seconds, and so on."""

    cluster: Cluster = field(default_factory=small_cluster)
    forward: float = 3e-6
    backward: float = 5e-6
    accumulate: float = 0.0
    send: float = 0.0
    all_reduce: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0
    overhead: float = 0.0
    fill: float = 0.0
    memory: StageMemory | None = None

    @property
    def overhead_s(self) -> float:
        return self.overhead

    def estimate_ops(self, graph, batch_size, device_kind):
        ones = np.ones(len(graph.ops))
        return exact_costs(self.forward * ones, self.backward * ones, self.accumulate * ones)

    def collective_seconds(self, op, ranks, num_bytes, concurrent=(), algorithm=None, axes=()):
        return self.send if op == "send" else self.all_reduce

    def collective_host_seconds(self, op, ranks, num_bytes, axes=()):
        return self.host

    def optimizer_seconds(self, graph, parameter_ids, optimizer, device_kind, num_shards=1):
        return self.optimizer

    def bucket_seconds(self, graph, parameter_ids, device_kind):
        return self.fill

    def stage_memory(self, graph, stage_slice, batch_size, workload, **settings):
        return self.memory or CostModel.stage_memory(self, graph, stage_slice, batch_size, workload, **settings)
