"""The roofline of an op on a device kind, for ops without measurements.

    seconds = max(FLOPs / peak(dtype), bytes / memory bandwidth) + kernels · launch

Peak and bandwidth come from the device's datasheet, bytes from `traits`. The roofline is mostly too short, because few
ops reach the speeds of a datasheet. It is not a lower bound: data in a cache are not read from memory. Its errors are
`op_estimates.ROOFLINE` and `op_estimates.GPU_ROOFLINE`. Source: Williams, Waterman, Patterson, Roofline (CACM 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.traits import passes_of

if TYPE_CHECKING:
    from meshwright.cost.work import Amount
    from meshwright.spec import DeviceKind, Graph, Op

# Seconds of the smallest kernel: the fastest of 24,000 GEMMs measured on A100, H100, H200 and L40S
# (ai-dynamo/aiconfigurator, gemm_perf tables, Apache-2.0) is 2.0 µs; a 64-element addition through torch's dispatcher
# on one Xeon core is 0.9 to 1.5 µs (own measurement, torch 2.13).
LAUNCH_S = 2.0e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSeconds:
    """Seconds of one op: forward, backward of a step's first microbatch, and accumulating gradients in later ones."""

    forward_s: float
    backward_s: float
    accumulate_s: float

    def scaled(self, forward: float, backward: float, accumulate: float) -> RooflineSeconds:
        """Return the seconds with forward, backward and accumulate each multiplied by its own factor."""
        return RooflineSeconds(
            forward_s=self.forward_s * forward,
            backward_s=self.backward_s * backward,
            accumulate_s=self.accumulate_s * accumulate,
        )

    def times(self, factor: float) -> RooflineSeconds:
        """Return the seconds with forward, backward and accumulate multiplied by one factor."""
        return self.scaled(factor, factor, factor)

    def plus(self, other: RooflineSeconds) -> RooflineSeconds:
        """Return the sum of two ops' seconds, separately for forward, backward and accumulate."""
        return RooflineSeconds(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            accumulate_s=self.accumulate_s + other.accumulate_s,
        )


def peak_flops(kind: DeviceKind, dtype: str) -> float:
    """Return the peak FLOP/s of a device kind in a dtype; the lowest listed rate if the datasheet lacks the dtype."""
    return kind.peak_flops_per_s.get(dtype) or min(kind.peak_flops_per_s.values())


def bound_op(
    graph: Graph, op: Op, batch_size: int, kind: DeviceKind, dtype: str, key: str = "", arithmetic: str = ""
) -> RooflineSeconds:
    """Return the roofline of one op at a batch size; 0 for a view.

    ``dtype``: the type in which the op computes; ``arithmetic``: the type in which it multiplies, if it differs. The
    other arguments are those of `passes_of`.
    """
    passes = passes_of(graph, op, batch_size, dtype, key)
    peak, bandwidth = peak_flops(kind, arithmetic or dtype), kind.memory_bandwidth_bytes_per_s

    def seconds(amount: Amount) -> float:
        return max(amount.flops / peak, amount.num_bytes / bandwidth) + amount.num_kernels * LAUNCH_S

    return RooflineSeconds(
        forward_s=seconds(passes.forward),
        backward_s=seconds(passes.backward),
        accumulate_s=seconds(passes.accumulate),
    )
