"""The devices of a cluster as FlexFlow sees them: messages of latency + bytes / bandwidth, on links that they hold.

Both figures are of the cost model's costs of two sends, a short and a long one; pairs of devices of the same kinds on
the same kinds of nodes cost the same. Links are those of the simulator's routes: one per direction between two devices
of a node, the NICs of both nodes, uplinks of racks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.methods.flexflow.assemble import SoapMachine
from meshwright.simulator.routes import hop_links
from meshwright.spec.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Hashable

    from meshwright.cost import CostModel
    from meshwright.spec import Cluster

_SHORT, _LONG = 1024, 64 * 2**20


def make_machine(cluster: Cluster, cost: CostModel, num_devices: int) -> SoapMachine:
    """The first devices of a cluster."""
    columns = cluster.columns()
    latency = np.zeros((num_devices, num_devices), np.int64)
    per_byte = np.zeros((num_devices, num_devices))
    known: dict[Hashable, tuple[int, float]] = {}
    for here, there in zip(*np.nonzero(~np.eye(num_devices, dtype=bool)), strict=True):
        nodes = int(columns.node[here]), int(columns.node[there])
        key = columns.kind[here], columns.kind[there], nodes
        if key not in known:
            known[key] = _line(cost, int(here), int(there))
        latency[here, there], per_byte[here, there] = known[key]
    everyone = np.arange(num_devices)
    hops = hop_links(cluster, everyone[:, None] + 0 * everyone, everyone + 0 * everyone[:, None])
    numbers, dense = np.unique(hops, return_inverse=True)
    first = int(numbers[0] == -1)
    return SoapMachine(
        kind=columns.kind[:num_devices].astype(np.int64),
        limit_bytes=np.array([cluster.device_kind(rank).memory_bytes for rank in range(num_devices)], np.int64),
        latency_ps=latency,
        byte_ps=per_byte,
        hops=np.moveaxis(dense.reshape(hops.shape) - first, 0, -1).astype(np.int64).copy(),
        num_links=len(numbers) - first,
    )


def _line(cost: CostModel, here: int, there: int) -> tuple[int, float]:
    """Latency in ps and ps per byte of messages from one device to another."""
    short, long = (cost.collective_seconds("send", (here, there), size) for size in (_SHORT, _LONG))
    per_byte = max(long - short, 0.0) / (_LONG - _SHORT)
    latency = max(short - _SHORT * per_byte, 0.0)
    return round(latency * PICOSECONDS_PER_SECOND), per_byte * PICOSECONDS_PER_SECOND
