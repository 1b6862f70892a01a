"""Clusters for tests of emulation."""

from meshwright.spec import Cluster, DeviceGroup, Link, Node, load_cluster
from tests.project import ROOT

EXAMPLES = ROOT / "examples" / "emulated"
TWO_LABS, SHARED_NICS, SLOW_NODE = (
    load_cluster(EXAMPLES / f"{name}.toml") for name in ("two-labs", "shared-nics", "slow-node")
)


def cluster_of(*nodes: tuple[int, int], nic: Link | None = None, **fields) -> Cluster:
    """Return a cluster with (devices, NICs) per node."""
    link = Link(latency_s=50e-6, bandwidth_bytes_per_s=1e9)
    return Cluster(
        name="made",
        device_kinds=SHARED_NICS.device_kinds,
        nodes=tuple(
            Node(
                name=f"node{place}",
                devices=(DeviceGroup(kind="cpu", count=devices),),
                host_memory_bytes=2**32,
                num_cores=1,
                device_link=link,
                pcie=link,
                nic=nic or Link(latency_s=1e-4, bandwidth_bytes_per_s=1e7),
                num_nics=num_nics,
            )
            for place, (devices, num_nics) in enumerate(nodes)
        ),
        **fields,
    )
