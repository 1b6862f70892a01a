"""What a plan that is read was made with, where the command line says nothing else."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import note
from meshwright.spec.made_with import recall
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan


def recall_measurements(
    plan: Plan | Placement | None, plan_file: Path | None, given: Path | None, cluster: str | None = None
) -> Path | None:
    """The measurements to price a plan with: those given, or those it was made with, of which a remark is printed.

    On another ``cluster`` than the plan's, and without a plan, only those given.
    """
    if given is not None or not isinstance(plan, Plan) or plan_file is None or cluster not in (None, plan.cluster):
        return given
    recalled = recall(plan.made_with, plan_file)
    if recalled.remark:
        note(recalled.remark)
    return recalled.measurements
