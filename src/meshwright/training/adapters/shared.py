"""What both adapters ask of a plan, and how they refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.spec.errors import PlanError, RunError
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.plan_files import read_plan


class RefusedSetting(NamedTuple):
    """A setting that another loop has and a plan decides, or that nothing here does."""

    given: bool
    what: str
    expected: str
    advice: str


def take_plan(plan: Plan | Placement | Path | str) -> Plan | Placement:
    """The plan, read if it is a file; PlanError unless every step of it is a whole training step."""
    found = plan if isinstance(plan, Plan | Placement) else read_plan(plan)
    if found.workload.kind == "inference":
        raise PlanError("A plan for inference was given; expected one for training. Plan without --inference.")
    if isinstance(found, Plan) and found.is_asynchronous:
        raise PlanError(
            f"The plan's schedule {found.schedule!r} never flushes, so that a step's loss is known some steps later; "
            "expected one that flushes. Plan with --schedule 1f1b, or train with meshwright.prepare."
        )
    return found


def refuse_given(where: str, refusals: Iterable[RefusedSetting]) -> None:
    """Raise RunError for the first setting that was given."""
    for item in refusals:
        if item.given:
            raise RunError(f"{where} was given {item.what}; expected {item.expected}. {item.advice}")


def refuse_overridden(what: str, kind: type, base: type, reasons: Mapping[str, str]) -> None:
    """Raise RunError if a class has a method of its own in place of its base's: by name, why it is never called."""
    for name, reason in reasons.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise RunError(
                f"{what} {kind.__name__} has its own `{name}`, which would never be called: {reason}. Remove it, or "
                "train with your own loop and meshwright.prepare."
            )


def microbatch_size(plan: Plan | Placement) -> int:
    """Samples of a microbatch."""
    return plan.workload.global_batch // plan.num_microbatches
