"""Search by gradients: choices relaxed to shares, descended along a smooth cost, rounded, repaired by single moves.

The method `differentiable` (`method`): boundaries, replicas and devices of stages as shares (`stage_arrays`, `relaxed`,
`layouts`), rounded and repaired by moving one boundary or swapping two devices (`stage_repair`); settings, microbatch
sizes, schedules and numbers of stages by a softmax over options. Repair reaches no dynamic program (a contract of the
import linter). Arms for chains alone stand beside their benchmark (`benchmarks/planning/chain_arms`).
"""

from __future__ import annotations

from meshwright.planner.methods.differentiable.method import differentiable

__all__ = ["differentiable"]
