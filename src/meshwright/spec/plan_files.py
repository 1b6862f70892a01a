"""Read a file that assigns the parts of a graph to ranks: a plan, or a placement."""

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
    """Read a plan or a placement; DocumentError names file, place and remedy for any other file.

    ``compiled``: overrides whether layers are compiled.
    """
    data = read_data(Path(path))
    found: Plan | Placement
    if document_kind(data) == STRATEGY:
        raise PlanError(
            f"{path} is a strategy that could not be made a placement of the model's parts: its step is an estimate, "
            "and there is nothing to simulate or to run. Plan from the model's own reference, which has code."
        )
    if document_kind(data) == "placement":
        found = decode_document(Placement, data, str(path))
    else:
        found = decode_document(Plan, data, str(path))
    return found if compiled is None else with_compiled(found, compiled)


def with_compiled(plan: Plan | Placement, compiled: bool) -> Plan | Placement:
    """Return the plan with layers compiled or not. Raises PlanError for compiling a placement."""
    if isinstance(plan, Plan):
        return replace(plan, compiled=compiled)
    if compiled:
        raise PlanError(
            "Layers of a placement cannot be compiled, because it assigns every op to a device separately. Compile a "
            "plan by layers, or leave out --compile."
        )
    return plan
