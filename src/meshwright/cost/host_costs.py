"""Seconds of a host and its drives: copies (`estimate_host_copy`), and optimizers on the host (`HostCosts`).

    host step         elements · bytes per element / (bandwidth of the host's memory / devices of the node in use)
    reads, writes     bytes / (rate of the node's drives / devices of the node in use)

The devices of a node step at the same time, so each has an equal part. Bytes per element are those of one fused pass
with the gradient widened before and the parameter narrowed after it (`optimizers`), as in torch's fused AdamW and
Megatron-LM's `HybridDeviceOptimizer`; a pass that does everything at once, as DeepSpeed's CPUAdam, moves 28 instead of
40 for AdamW in mixed precision, which is the lower end of the interval. Its upper end is that of measured steps on a
CPU. Drives have the interval of a copy to the host.
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
    """Return the cost of one copy in one direction; 0 for 0 bytes. Raises MeasurementError for a negative size."""
    if not num_bytes >= 0:
        raise MeasurementError(
            f"A copy between a device and its host was to move {num_bytes} bytes; expected 0 or more. Check the sizes."
        )
    return cost_of_seconds(pcie.seconds(num_bytes) if num_bytes else 0.0, HOST_COPY, "roofline")


_HOST_STEP = Interval(low=28 / 40, high=MEASURED_STEP.high)


class HostCosts:
    """Costs of the host's work for the first ``num_ranks`` ranks of a cost model's cluster."""

    def __init__(self, cost: CostModel, num_ranks: int) -> None:
        self._cost = cost
        self._in_use = Counter(cost.cluster.node_index(rank) for rank in range(num_ranks))

    def estimate_step(self, rank: int, gradient_bytes: int, optimizer: Optimizer) -> Cost:
        """Return the cost of a step over parameters with this number of gradient bytes on the device."""
        node, parts = self._node(rank)
        if not node.host_memory_bandwidth_bytes_per_s:
            raise ClusterError(
                f"Node {node.name!r} has no memory bandwidth, but an optimizer was to step there. Write "
                "host_memory_bandwidth_bytes_per_s into the cluster file."
            )
        elements = gradient_bytes / self._cost.numbers.gradient_bytes
        moved = elements * bytes_per_element(optimizer, self._cost.precision, "fused")
        seconds = moved * parts / node.host_memory_bandwidth_bytes_per_s
        return cost_of_seconds(seconds, _HOST_STEP, "roofline")

    def estimate_read(self, rank: int, num_bytes: int) -> Cost:
        """Return the cost of reading from the drives of the rank's node."""
        drives, parts = self._drives(rank)
        return cost_of_seconds(num_bytes * parts / drives.read_bytes_per_s, HOST_COPY, "roofline")

    def estimate_write(self, rank: int, num_bytes: int) -> Cost:
        """Return the cost of writing to the drives of the rank's node."""
        drives, parts = self._drives(rank)
        return cost_of_seconds(num_bytes * parts / drives.write_bytes_per_s, HOST_COPY, "roofline")

    def bound_step_seconds(self, rank: int, gradient_bytes: int, optimizer: Optimizer, place: Place) -> float:
        """Return a lower bound of an update's seconds, for these gradient bytes: its slowest overlapping part."""
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
                f"Node {node.name!r} has no drives, so states cannot be kept there. Write nvme into the cluster file."
            )
        return node.nvme, parts
