"""Checks of plans and settings that both adapters share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.spec import Placement, Plan, PlanError, RunError
from meshwright.spec.plan_files import read_plan


class RefusedSetting(NamedTuple):
    """A setting of another loop that a plan decides, or that is not supported."""

    given: bool
    what: str
    expected: str
    advice: str


def take_plan(plan: Plan | Placement | Path | str) -> Plan | Placement:
    """Return the plan, read if it is a file. Raises PlanError unless each of its steps is a whole training step."""
    found = plan if isinstance(plan, Plan | Placement) else read_plan(plan)
    if found.workload.kind == "inference":
        raise PlanError("A plan for inference was given; expected one for training. Plan without --inference.")
    if isinstance(found, Plan) and found.is_asynchronous:
        raise PlanError(
            f"The plan's schedule {found.schedule!r} is asynchronous, so that a step's loss is known some steps later; "
            "expected a synchronous one. Plan with --schedule 1f1b, or train with meshwright.prepare."
        )
    return found


def refuse_given(where: str, refusals: Iterable[RefusedSetting]) -> None:
    """Raise RunError for the first setting that was given."""
    for item in refusals:
        if item.given:
            raise RunError(f"{where} was given {item.what}; expected {item.expected}. {item.advice}")


def refuse_overridden(what: str, kind: type, base: type, reasons: Mapping[str, str]) -> None:
    """Raise RunError if a class overrides a method of its base that is never called; ``reasons``: by name, why."""
    for name, reason in reasons.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise RunError(
                f"{what} {kind.__name__} has its own `{name}`, which would never be called: {reason}. Remove it, or "
                "train with your own loop and meshwright.prepare."
            )


def microbatch_size(plan: Plan | Placement) -> int:
    """Return samples of a microbatch."""
    return plan.workload.global_batch // plan.num_microbatches
