"""Checks of plans and settings that both adapters use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.spec import Placement, Plan, PlanError, RunError
from meshwright.spec.plan_files import read_plan


class RefusedSetting(NamedTuple):
    """A setting of the other library that the plan decides, or that is not supported.

    ``given``: whether the user has set it. ``what``, ``expected`` and ``advice`` are parts of the error message.
    """

    given: bool
    what: str
    expected: str
    advice: str


def take_plan(plan: Plan | Placement | Path | str) -> Plan | Placement:
    """Return the plan, read from its file if it is a path.

    Raises PlanError for a plan for inference or with an asynchronous schedule.
    """
    found = plan if isinstance(plan, Plan | Placement) else read_plan(plan)
    if found.workload.kind == "inference":
        raise PlanError("The plan is for inference; expected a plan for training. Plan without --inference.")
    if isinstance(found, Plan) and found.is_asynchronous:
        raise PlanError(
            f"The plan's schedule {found.schedule!r} is asynchronous, so that a step's loss is known some steps later; "
            "expected a synchronous schedule. Plan with --schedule 1f1b, or train with meshwright.prepare."
        )
    return found


def refuse_given(where: str, refusals: Iterable[RefusedSetting]) -> None:
    """Raise RunError for the first setting that the user has set; ``where`` names the library's class."""
    for item in refusals:
        if item.given:
            raise RunError(f"{where} was given {item.what}; expected {item.expected}. {item.advice}")


def refuse_overridden(what: str, kind: type, base: type, reasons: Mapping[str, str]) -> None:
    """Raise RunError if a class overrides a method that is never called under a plan.

    ``reasons``: by name of the method, why it is not called. ``what`` says what the class is, for the message.
    """
    for name, reason in reasons.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise RunError(
                f"{what} {kind.__name__} has its own `{name}`, which would never be called: {reason}. Remove it, or "
                "train with your own loop and meshwright.prepare."
            )


def microbatch_size(plan: Plan | Placement) -> int:
    """Return the number of samples in a microbatch."""
    return plan.workload.global_batch // plan.num_microbatches
