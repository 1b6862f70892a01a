"""Seconds of copies between a device and its host: offloaded states and activations, and arriving batches.

    seconds = latency + bytes / bandwidth of the node's PCIe link, per direction

Such copies are not measured yet: on a CPU there is no other memory to copy to. The interval is that of a datasheet's
link. No copy is faster; page-locked memory reaches 5.8 to 6.0 of the 8 GB/s of PCIe x16 of generation 2, pageable
memory 2.3 (Harris, How to Optimize Data Transfers in CUDA C/C++, NVIDIA 2012), which is 3.5 times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.costs import Cost, cost_of_seconds
from meshwright.cost.prediction import Interval
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from meshwright.spec import Link

HOST_COPY = Interval(low=1.0, high=3.5)


def estimate_host_copy(pcie: Link, num_bytes: float) -> Cost:
    """Return the cost of one copy in one direction; 0 for 0 bytes. Raises MeasurementError for a negative size."""
    if not num_bytes >= 0:
        raise MeasurementError(
            f"A copy between a device and its host was to move {num_bytes} bytes; expected 0 or more. Check the sizes."
        )
    return cost_of_seconds(pcie.seconds(num_bytes) if num_bytes else 0.0, HOST_COPY, "roofline")
