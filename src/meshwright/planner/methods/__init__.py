"""Search methods, each a module that reads like its paper: from a problem to plans, one after the other (`method`)."""

from meshwright.planner.method import Method, own_method
from meshwright.planner.methods.alpa.method import alpa
from meshwright.planner.methods.auto import auto
from meshwright.planner.methods.differentiable import differentiable
from meshwright.planner.methods.flexflow import flexflow
from meshwright.planner.methods.grid import grid
from meshwright.planner.methods.latency import latency
from meshwright.planner.methods.pipedream import pipedream
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.methods.unequal import unequal
from meshwright.spec import PlanError, suggest

METHODS: dict[str, Method] = {
    "auto": auto,
    "slicing": slicing,
    "pipedream": pipedream,
    "alpa": alpa,
    "flexflow": flexflow,
    "differentiable": differentiable,
    "unequal": unequal,
    "grid": grid,
    "latency": latency,
}

__all__ = ["METHODS", "find_method"]


def find_method(reference: str) -> Method:
    """A method by its name, or one of a user's own by ``path/to/file.py:function``. Raises PlanError for others."""
    if reference in METHODS:
        return METHODS[reference]
    if ".py" in reference:
        return own_method(reference)
    raise PlanError(
        f"There is no search method {reference!r}{suggest(reference, METHODS)}. Give {', '.join(METHODS)}, or your own "
        "as path/to/file.py:function."
    )
