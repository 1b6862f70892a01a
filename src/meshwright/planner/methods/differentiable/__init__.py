"""Search by gradient descent: relax choices to probabilities, descend along a smooth cost, round, and repair.

The method `differentiable` (`differentiable_method`) relaxes the boundaries, replicas and devices of stages to
probabilities (`stage_arrays`, `relaxed`). It rounds them and repairs the result by moving one boundary or swapping two
devices (`stage_repair`). Settings, microbatch sizes, schedules and numbers of stages are drawn from a softmax over
their combinations. Repair uses no dynamic program (a contract of the import linter). Variants for chains only are next
to their benchmark (`benchmarks/planning/chain_arms`).
"""

from __future__ import annotations

from meshwright.planner.methods.differentiable.differentiable_method import differentiable

__all__ = ["differentiable"]
