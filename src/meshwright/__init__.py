"""Meshwright: how to lay a model out on machines, how fast it will run, and running it.

The public names below are loaded on first use, so that ``import meshwright`` stays quick and never
loads torch. Each entry of the table says in which module the name lives.
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
    "search_plans": "meshwright.planner:search_plans",
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

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  (the table is the one list of names)


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name].split(":")
    value = getattr(import_module(module_name), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
