"""Read the file of a plan or of a placement (`read_plan`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.spec.codec import decode_document, document_kind
from meshwright.spec.errors import PlanError
from meshwright.spec.parsing import read_data
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan

# The kind of a strategy of single layers (`planner.methods.flexflow.soap_result`), which no program can be made of.
STRATEGY = "soap-strategy"


def read_plan(path: Path | str, *, compiled: bool | None = None) -> Plan | Placement:
    """Read a plan or a placement. ``compiled``, if given, overrides whether layers are compiled.

    Raises DocumentError for a file of another kind, PlanError for a FlexFlow strategy without a placement.
    """
    data = read_data(Path(path))
    found: Plan | Placement
    if document_kind(data) == STRATEGY:
        raise PlanError(
            f"{path} holds a strategy for layers (--method flexflow) without a placement of their parts, so it cannot "
            "be simulated or run; its step time is only an estimate. Plan again from the model's own reference, which "
            "has code."
        )
    if document_kind(data) == "placement":
        found = decode_document(Placement, data, str(path))
    else:
        found = decode_document(Plan, data, str(path))
    return found if compiled is None else with_compiled(found, compiled)


def with_compiled(plan: Plan | Placement, compiled: bool) -> Plan | Placement:
    """Return the plan with its field ``compiled`` set. Raises PlanError if layers of a placement are to be compiled."""
    if isinstance(plan, Plan):
        return replace(plan, compiled=compiled)
    if compiled:
        raise PlanError(
            "Layers of a placement cannot be compiled, because it assigns every op to a device separately. Compile a "
            "plan by layers, or leave out --compile."
        )
    return plan
