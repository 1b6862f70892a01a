"""The amount of work of one pass of an op."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """FLOPs, bytes and kernels; ``num_calls`` also counts views, which cost a call of the host but launch no kernel."""

    flops: float = 0.0
    num_bytes: float = 0.0
    num_kernels: int = 0
    num_views: int = 0

    @property
    def num_calls(self) -> int:
        """Calls of the host: kernels and views."""
        return self.num_kernels + self.num_views
