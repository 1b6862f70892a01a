"""Meshwright: plan how a model is laid out on machines, predict how fast it runs, and run it.

Public names are loaded on first use, so that ``import meshwright`` is quick and never loads torch. The table
`_PUBLIC` maps each public name to the module that defines it. Names whose libraries are not installed are missing from
``dir`` and from ``__all__``, so that help, completion and inspection work with any choice of extras.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    # facts
    "Graph": "meshwright.spec:Graph",
    "Cluster": "meshwright.spec:Cluster",
    "Workload": "meshwright.spec:Workload",
    "Plan": "meshwright.spec:Plan",
    "Placement": "meshwright.spec:Placement",
    "Program": "meshwright.spec:Program",
    "Timeline": "meshwright.spec:Timeline",
    "load_cluster": "meshwright.spec:load_cluster",
    "shipped_graphs": "meshwright.spec:shipped_graphs",
    "load_shipped_graph": "meshwright.spec:load_shipped_graph",
    # a module becomes a graph, and parts of the graph become modules
    "capture_model": "meshwright.capture:capture_model",
    "differentiate": "meshwright.capture:differentiate",
    "part": "meshwright.capture:part",
    # plans
    "plan": "meshwright.api:plan",
    "search_plans": "meshwright.planner:search_plans",
    "Problem": "meshwright.planner:Problem",
    "Choices": "meshwright.planner:Choices",
    "Limits": "meshwright.planner:Limits",
    "place": "meshwright.planner:place",
    "build_program": "meshwright.program:build_program",
    "build_placed_program": "meshwright.program:build_placed_program",
    "with_schedule": "meshwright.program:with_schedule",
    "simulate_plan": "meshwright.simulator:simulate_plan",
    "simulate_plans": "meshwright.simulator:simulate_plans",
    # graphs
    "optimize": "meshwright.rewrite.optimize:optimize",
    # training
    "prepare": "meshwright.training:prepare",
    "Feed": "meshwright.training:Feed",
}

# The extras and libraries that a module needs.
_NEEDS = {
    "meshwright.capture": ("torch", ("torch",)),
    "meshwright.training": ("torch", ("torch",)),
    "meshwright.rewrite.optimize": ("torch,rewrite", ("torch", "z3", "highspy")),
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once (PEP 562).

    Raises ImportError, with the pip line, if a library that it needs is not installed.
    """
    if name == "__all__":
        return ["__version__", *filter(_is_usable, _PUBLIC)]
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name].split(":")
    try:
        value = getattr(import_module(module_name), attribute)
    except ImportError as error:
        from meshwright.extras import explain_missing, missing_of

        if not (missing := missing_of(error)):
            raise
        extras, _ = _NEEDS.get(module_name, ("", ()))
        raise ImportError(explain_missing(f"meshwright.{name}", missing, extras), name=missing) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *filter(_is_usable, _PUBLIC)})


def _is_usable(name: str) -> bool:
    from meshwright.extras import is_installed

    _, libraries = _NEEDS.get(_PUBLIC[name].partition(":")[0], ("", ()))
    return all(map(is_installed, libraries))
