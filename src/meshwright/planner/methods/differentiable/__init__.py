"""Search by gradients: choices relaxed to shares, descended along a smooth cost, rounded, repaired by single moves.

The method `differentiable` (`differentiable_method`) relaxes boundaries, replicas and devices of stages to shares
(`stage_arrays`, `relaxed`), rounds them and repairs them by moving one boundary or swapping two devices
(`stage_repair`); settings, microbatch sizes, schedules and numbers of stages are chosen by a softmax over options.
Repair uses no dynamic program (a contract of the import linter). Variants for chains only are next to their benchmark
(`benchmarks/planning/chain_arms`).
"""

from __future__ import annotations

from meshwright.planner.methods.differentiable.differentiable_method import differentiable

__all__ = ["differentiable"]
