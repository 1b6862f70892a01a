"""What a plan was made with, used as default where the command line gives nothing else."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import note
from meshwright.spec.made_with import recall
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan


def recall_software(plan: Plan | Placement, given: str | None) -> str | None:
    """The training software that a plan is estimated for: the given one, or the plan's own, with a remark."""
    if given is None and plan.made_with.predicted_for:
        note(f"Estimated for {plan.made_with.predicted_for}, as the plan was made.")
    return given or plan.made_with.predicted_for or None


def recall_measurements(
    plan: Plan | Placement | None, plan_file: Path | None, given: Path | None, cluster: str | None = None
) -> Path | None:
    """The measurements that a plan is estimated with: those given, or those it was made with. Prints a remark on them.

    On another ``cluster`` than the plan's, and without a plan, only those given.
    """
    if plan is None or plan_file is None or cluster not in (None, plan.cluster):
        return given
    recalled = recall(plan.made_with, plan_file, given)
    if recalled.remark:
        note(recalled.remark)
    return recalled.measurements
