"""Search methods, by name in `METHODS`: each proposes plans for a problem, and most follow a paper."""

from collections.abc import Sequence

from meshwright.planner.methods.alpa.alpa_method import alpa
from meshwright.planner.methods.auto import auto
from meshwright.planner.methods.differentiable import differentiable
from meshwright.planner.methods.flexflow import flexflow
from meshwright.planner.methods.grid import grid
from meshwright.planner.methods.latency_search import latency
from meshwright.planner.methods.pipedream import pipedream
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.methods.unequal import unequal
from meshwright.planner.search_method import Method, own_method
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

# Methods that search the whole space for choices that are not given (`whole_space`); others have their own space.
OPEN_METHODS = ("auto", "grid")

# Methods that choose numbers of replicas which a shard size may not divide.
_WITHOUT_SHARD_SIZES = ("pipedream", "flexflow", "differentiable", "unequal")

__all__ = ["METHODS", "OPEN_METHODS", "check_shard_sizes", "find_method"]


def check_shard_sizes(name: str, shard_sizes: Sequence[int]) -> None:
    """Raise PlanError if a shard size is given and the method ``name`` can shard states over all replicas only."""
    if any(shard_sizes) and name in _WITHOUT_SHARD_SIZES:
        raise PlanError(
            f"A shard size of {max(shard_sizes)} was given for the method {name}, which shards states over all "
            "replicas of a stage. Give --method auto, slicing, grid or alpa, or leave --shard out."
        )


def find_method(reference: str) -> Method:
    """Return a method of `METHODS` by its name, or your own from ``path/to/file.py:function``.

    Raises PlanError for an unknown name.
    """
    if reference in METHODS:
        return METHODS[reference]
    if ".py" in reference:
        return own_method(reference)
    raise PlanError(
        f"Unknown search method {reference!r}{suggest(reference, METHODS)}. Give {', '.join(METHODS)}, or your own "
        "as path/to/file.py:function."
    )
