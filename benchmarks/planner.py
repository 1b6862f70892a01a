"""The planner: every search method against its paper, an oracle, or the others. Sections, described each in its file:

    slicing, differentiable     benchmarks/planning/slicing.py, differentiable.py: pipeDejavu's notebook
    pipedream                   benchmarks/planning/pipedream.py
    alpa                        benchmarks/planning/alpa.py
    flexflow                    benchmarks/planning/flexflow.py
    unequal                     benchmarks/planning/unequal.py
    grid                        benchmarks/planning/uniform_grid.py
    auto                        benchmarks/planning/portfolio.py
    replan                      benchmarks/planning/replanning.py
    picking                     benchmarks/planning/picking.py
    unequal-space               benchmarks/planning/unequal_space.py
    space                       benchmarks/planning/space.py
    recipes                     benchmarks/planning/recipes.py

``--only NAME`` runs one of them and writes a report of its own. Instances and seeds are files in benchmarks/splits.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from harness import parse_options, publish

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SECTIONS = {
    "slicing": "slicing",
    "differentiable": "differentiable",
    "pipedream": "pipedream",
    "alpa": "alpa",
    "flexflow": "flexflow",
    "unequal": "unequal",
    "grid": "uniform_grid",
    "auto": "portfolio",
    "replan": "replanning",
    "picking": "picking",
    "unequal-space": "unequal_space",
    "space": "space",
    "recipes": "recipes",
}


def main():
    options = parse_options(__doc__.splitlines()[0], only=tuple(SECTIONS))
    chosen = options.only or tuple(SECTIONS)
    table = [row for name in chosen for row in import_module(f"planning.{SECTIONS[name]}").rows(options.quick)]
    return publish("planner", table, options, label="-".join(options.only or ()))


if __name__ == "__main__":
    sys.exit(main())
