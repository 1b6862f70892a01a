"""Clusters for tests of emulation."""

from dataclasses import replace

from meshwright.spec import Cluster, DeviceGroup, Link, load_cluster
from tests.project import ROOT

EXAMPLES = ROOT / "examples" / "emulated"
TWO_LABS, SHARED_NICS, SLOW_NODE = (
    load_cluster(EXAMPLES / f"{name}.toml") for name in ("two-labs", "shared-nics", "slow-node")
)


def cluster_of(*nodes: tuple[int, int], nic: Link | None = None, **fields) -> Cluster:
    """Return a cluster with (devices, NICs) per node; a NIC has 10 MB/s by default."""
    like, link = SHARED_NICS.nodes[0], nic or Link(latency_s=1e-4, bandwidth_bytes_per_s=1e7)
    made = tuple(
        replace(
            like,
            name=f"node{place}",
            devices=(DeviceGroup(kind="cpu", count=devices),),
            nic=link,
            num_nics=num_nics,
        )
        for place, (devices, num_nics) in enumerate(nodes)
    )
    return replace(SHARED_NICS, name="made", nodes=made, **fields)
