"""The drives of a node, for states that fit neither the devices nor the host."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """The drives of a node, taken together."""

    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float

    def __post_init__(self) -> None:
        if not min(self.capacity_bytes, self.read_bytes_per_s, self.write_bytes_per_s) > 0:
            raise ClusterError(
                f"Drives of {self.capacity_bytes} bytes that read {self.read_bytes_per_s} B/s and write "
                f"{self.write_bytes_per_s} B/s are impossible; expected positive numbers. Leave `nvme` out if the node "
                "has no drives."
            )
