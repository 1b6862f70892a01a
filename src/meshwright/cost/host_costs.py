"""Costs of offload: copies to the host (`estimate_host_copy`), optimizer steps on the host and drives (`HostCosts`).

    host step         elements · bytes per element / (bandwidth of the host's memory / devices of the node in use)
    reads, writes     bytes / (rate of the node's drives / devices of the node in use)

The optimizer steps of a node's devices run at the same time, so each gets an equal part of the bandwidth. The bytes per
element are those of a fused step: the gradient is widened before it, and the parameter is narrowed after it
(`optimizers`), as in torch's fused AdamW and Megatron-LM's `HybridDeviceOptimizer`. A step that does everything in one
pass, as DeepSpeed's CPUAdam, moves 28 instead of 40 bytes for AdamW in mixed precision. This is the lower end of the
interval; the upper end comes from measured steps on a CPU. Drives have the interval of a copy to the host.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meshwright.cost.costs import Cost, Interval, cost_of_seconds
from meshwright.cost.optimizers import MEASURED_STEP, bytes_per_element, state_bytes
from meshwright.spec import ClusterError, Link, MeasurementError, Node, Nvme, Optimizer

if TYPE_CHECKING:
    from meshwright.cost.cost_model import CostModel
    from meshwright.spec.offload import Place


HOST_COPY = Interval(low=1.0, high=3.5)


# Copies of offloaded states and activations, and of arriving batches: seconds = latency + bytes / bandwidth of the
# node's PCIe link, per direction. They are not measured yet: on a CPU there is no other memory to copy to. The interval
# is that of a datasheet's link. No copy is faster than the link; page-locked memory reaches 5.8 to 6.0 of the 8 GB/s of
# PCIe x16 of generation 2, pageable memory 2.3 (Harris, How to Optimize Data Transfers in CUDA C/C++, NVIDIA 2012),
# which is 3.5 times as long.
def estimate_host_copy(pcie: Link, num_bytes: float) -> Cost:
    """Return the cost of one copy of ``num_bytes`` over a node's PCIe link in one direction; 0 for 0 bytes.

    Raises MeasurementError for a size that is negative or not a number.
    """
    if not num_bytes >= 0:
        raise MeasurementError(
            f"The size of a copy between a device and its host is {num_bytes} bytes; expected 0 or more bytes."
        )
    return cost_of_seconds(pcie.seconds(num_bytes) if num_bytes else 0.0, HOST_COPY, "roofline")


_HOST_STEP = Interval(low=28 / 40, high=MEASURED_STEP.high)


class HostCosts:
    """Costs of optimizer steps on the hosts, and of their drives, if the first ``num_ranks`` ranks of a cluster run."""

    def __init__(self, cost: CostModel, num_ranks: int) -> None:
        self._cost = cost
        self._in_use = Counter(cost.cluster.node_index(rank) for rank in range(num_ranks))

    def estimate_step(self, rank: int, gradient_bytes: int, optimizer: Optimizer) -> Cost:
        """Return the cost of a rank's optimizer step on its host, over parameters with ``gradient_bytes`` of gradients.

        Raises ClusterError if the node has no host memory bandwidth.
        """
        node, parts = self._node(rank)
        if not node.host_memory_bandwidth_bytes_per_s:
            raise ClusterError(
                f"Node {node.name!r} has no memory bandwidth, which the cost of an optimizer step on its host depends "
                "on. Write host_memory_bandwidth_bytes_per_s into the cluster file."
            )
        elements = gradient_bytes / self._cost.numbers.gradient_bytes
        moved = elements * bytes_per_element(optimizer, self._cost.precision, "fused")
        seconds = moved * parts / node.host_memory_bandwidth_bytes_per_s
        return cost_of_seconds(seconds, _HOST_STEP, "roofline")

    def estimate_read(self, rank: int, num_bytes: int) -> Cost:
        """Return the cost of reading ``num_bytes`` for a rank from the drives of its node.

        Raises ClusterError if the node has no drives.
        """
        drives, parts = self._drives(rank)
        return cost_of_seconds(num_bytes * parts / drives.read_bytes_per_s, HOST_COPY, "roofline")

    def estimate_write(self, rank: int, num_bytes: int) -> Cost:
        """Return the cost of writing ``num_bytes`` for a rank to the drives of its node.

        Raises ClusterError if the node has no drives.
        """
        drives, parts = self._drives(rank)
        return cost_of_seconds(num_bytes * parts / drives.write_bytes_per_s, HOST_COPY, "roofline")

    def bound_step_seconds(self, rank: int, gradient_bytes: int, optimizer: Optimizer, place: Place) -> float:
        """Return a lower bound, in seconds, for an update with optimizer states in host memory or, "nvme", on drives.

        The transfer of the gradients, the step and the reads and writes of the drives overlap; the bound is the longest
        of them.
        """
        seconds = [self._cost.host_transfer_seconds(rank, gradient_bytes)]
        seconds.append(self.estimate_step(rank, gradient_bytes, optimizer).at(self._cost.end))
        if place == "nvme":
            elements = gradient_bytes // self._cost.numbers.gradient_bytes
            moved = elements * state_bytes(optimizer, self._cost.precision)
            seconds += [
                estimate(rank, moved).at(self._cost.end) for estimate in (self.estimate_read, self.estimate_write)
            ]
        return max(seconds)

    def _node(self, rank: int) -> tuple[Node, int]:
        """Return the node of a rank, and the number of its devices in use."""
        index = self._cost.cluster.node_index(rank)
        return self._cost.cluster.nodes[index], self._in_use[index]

    def _drives(self, rank: int) -> tuple[Nvme, int]:
        node, parts = self._node(rank)
        if node.nvme is None:
            raise ClusterError(
                f"Node {node.name!r} has no drives, so optimizer states cannot be offloaded to them. Write nvme into "
                "the cluster file."
            )
        return node.nvme, parts
