"""The portfolio `auto` beside every single method, each with the same seconds and seed, on problems fixed in a file.

`splits/planner_auto.json`. The best plan of every method is simulated by the same simulator. A ratio is the step time
of `auto` over that of the best single method; a gap is that of `auto` over its lower bound. A method that the problem
does not have, or that finds nothing in its time, counts as none.
"""

import json
import time

import numpy as np
from harness import make_row
from planning.problems import BENCHMARKS, problem_of, solve

from meshwright.planner import METHODS
from meshwright.spec import MeshwrightError

SPLIT = json.loads((BENCHMARKS / "splits" / "planner_auto.json").read_text())


def solve_by(spec, method):
    """The answer of a method in its seconds, or None; and the wall time that it took."""
    begun = time.perf_counter()
    try:
        plans = solve(problem_of(spec), method, deadline_s=SPLIT["seconds"], seed=SPLIT["seed"])
    except MeshwrightError:
        plans = None
    return plans, time.perf_counter() - begun


def rows(quick):
    table, ratios, notes = [], [], []
    for spec in SPLIT["problems"]:
        if quick and spec["name"] not in SPLIT["quick"]:
            continue
        found = {name: solve_by(spec, name) for name in METHODS}
        steps = {name: plans.best.step_time_s for name, (plans, _) in found.items() if plans is not None}
        ours, seconds = found["auto"]
        if ours is None:
            table.append(make_row(f"{spec['name']}: auto", float("nan"), "s", ratio=float("inf"), target=1.03))
            ratios.append(float("inf"))
            continue
        single, best = min(
            ((name, step) for name, step in steps.items() if name != "auto"),
            key=lambda item: item[1],
            default=("none", ours.best.step_time_s),
        )
        ratio = ours.best.step_time_s / best
        ratios.append(ratio)
        table.append(
            make_row(
                f"{spec['name']}: auto over {single}",
                ours.best.step_time_s,
                "s",
                baseline=best,
                ratio=ratio,
                target=1.03,
            )
        )
        table.append(make_row(f"{spec['name']}: gap to the lower bound", ours.gap if ours.gap else float("nan"), ""))
        others = ", ".join(f"{name} {step:.4g}" for name, step in sorted(steps.items(), key=lambda item: item[1]))
        notes.append(f"- {spec['name']} ({seconds:.1f} s): {others}")
    beyond = sum(ratio > 1.01 for ratio in ratios)
    allowed = 0 if quick else len(ratios) - round(len(ratios) * 18 / 20)
    table.append(make_row("problems where auto is more than 1 % behind", beyond, "problems", target=allowed))
    table.append(make_row("auto over the best single method, worst", float(np.max(ratios)), "", target=1.03))
    print("\n".join(notes))
    return table
