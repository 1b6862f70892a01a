"""The search over the whole space beside every uniform layout of some axes, each of them simulated.

Problems and axes: `splits/planner_space.json`, "problems", written down before the first scored run. Uniform layouts
are those of the grid: equal replicas, layers cut evenly, ranks stage by stage or pipeline by pipeline. All that the
axes allow are simulated, also those that a search would leave out by their bounds. The fastest that fits is what `auto`
is compared with, which has the whole space, no deadline, and none of these results.

Steps of layouts are kept in benchmarks/cache, as they take minutes and do not depend on the search: one line for each
layout. The best of them is simulated again in every run; where its step has changed, the file is refused.

    bounds of seconds    of a layout, as the grid has them once it knows of exchanges: none may lie above its step
    bounds of bytes      none may say of a layout that fits that it does not
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
from harness import make_row
from planning.problems import BENCHMARKS, layout_words, problem_of, solve

from meshwright.planner import evaluate_plan, explain_difference, whole_space
from meshwright.planner.methods.grid import Configuration, bound_grid
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.spec import MeshwrightError

SPLIT = json.loads((BENCHMARKS / "splits" / "planner_space.json").read_text())
CACHE = BENCHMARKS / "cache" / "space"
# Steps of one simulator, but for the order in which numbers were added.
_ALIKE = 1e-9
# Of 16 problems 14 are to be at most 1 % behind, all at most 3 %.
CLOSE, MOST_BEHIND, MOST_APART = 1.01, 1.03, 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A uniform layout: its bounds in seconds and bytes, and what simulation says of its plans, one for each order.

    ``steps_s`` are those of all its plans, ``fitting_s`` of those that fit; ``took_s`` is how long it took.
    """

    configuration: Configuration
    bound_s: float
    may_fit: bool
    steps_s: tuple[float, ...]
    fitting_s: tuple[float, ...]
    took_s: float


def rows(quick):
    table, ratios, notes, wrong, hidden = [], [], [], 0, 0
    for spec in SPLIT["problems"]:
        if quick and spec["name"] not in SPLIT["quick"]["problems"]:
            continue
        layouts = simulate_layouts(spec)
        wrong += sum(layout.bound_s > min(layout.steps_s, default=np.inf) for layout in layouts)
        hidden += sum(bool(layout.fitting_s) and not layout.may_fit for layout in layouts)
        uniform_s, uniform = min(
            ((min(layout.fitting_s, default=np.inf), layout.configuration) for layout in layouts),
            key=lambda pair: pair[0],
        )
        best, seconds = search(spec)
        found_s = np.inf if best is None else best.step_time_s
        ratios.append(found_s / uniform_s)
        name = spec["name"]
        notes += describe(spec, uniform, best)
        table += [
            make_row(
                f"{name}: auto over the best uniform layout",
                found_s,
                "s",
                baseline=uniform_s,
                ratio=ratios[-1],
                target=MOST_BEHIND,
            ),
            make_row(f"{name}: seconds of the search", seconds, "s"),
            make_row(f"{name}: uniform layouts", len(layouts), "layouts"),
            make_row(f"{name}: seconds of their simulation", sum(layout.took_s for layout in layouts), "s"),
        ]
        print(f"{name}: {found_s:.6g} s over {uniform_s:.6g} s in {seconds:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(notes))
    apart = sum(ratio > CLOSE for ratio in ratios)
    table.append(make_row("problems more than 1 % behind", apart, "problems", target=0 if quick else MOST_APART))
    table.append(make_row("worst of all problems", max(ratios), "", target=MOST_BEHIND))
    table.append(make_row("layouts with a bound above their simulated step", wrong, "layouts", target=0))
    table.append(make_row("layouts that fit though their bound says not", hidden, "layouts", target=0))
    return table


def search(spec):
    """What `auto` finds in the whole space (None if nothing), and the seconds that it took."""
    problem, best = problem_of(spec), None
    begun = time.perf_counter()
    choices = whole_space(problem.graph_for(1), problem.cluster, problem.workload)
    try:
        best = solve(replace(problem, choices=choices), seed=SPLIT["seed"]).best
    except MeshwrightError as error:
        print(f"{spec['name']}: {error}", file=sys.stderr, flush=True)
    return best, time.perf_counter() - begun


def describe(spec, uniform, best):
    """The best uniform layout and the plan that was found, in words, and what decides between them."""
    problem = problem_of(spec)
    items = (
        evaluate_plan(plan, problem.graph_for(1), problem.cluster, problem.cost, memory=problem.memory)
        for plan in plans_of(problem, uniform)
    )
    item = min((item for item in items if item.fits), key=lambda item: item.step_time_s)
    yield f"- {spec['name']}\n  - uniform: {layout_words(item.plan)}: {item.step_time_s:.6g} s"
    if best is not None:
        yield f"  - found: {layout_words(best.plan)}: {best.step_time_s:.6g} s"
        yield f"  - the uniform one against it: {explain_difference(item, best)}"


def simulate_layouts(spec):
    """Every uniform layout of a problem's axes; what was simulated before is read.

    Raises ValueError where what was kept is of another simulator.
    """
    problem, path = problem_of(spec), cache_path(spec)
    known = {line["layout"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    CACHE.mkdir(parents=True, exist_ok=True)
    described = list(_configurations(problem))
    _check_known(problem, path, [(configuration, known.get(name)) for name, configuration, *_ in described])
    found = []
    with path.open("a") as kept:
        for name, configuration, bound_s, may_fit in described:
            line = known.get(name)
            if line is None:
                begun = time.perf_counter()
                line = {"layout": name, **_simulate(problem, configuration)}
                line["took_s"] = time.perf_counter() - begun
                kept.write(json.dumps(line) + "\n")
                kept.flush()
            steps = {fits: tuple(s for s, it_fits in line["plans"] if it_fits >= fits) for fits in (False, True)}
            found.append(
                Layout(
                    configuration=configuration,
                    bound_s=bound_s,
                    may_fit=may_fit,
                    steps_s=steps[False],
                    fitting_s=steps[True],
                    took_s=line["took_s"],
                )
            )
    return found


def cache_path(spec):
    """Where the steps of a problem's layouts are kept: problems that differ have other files."""
    text = json.dumps(spec, sort_keys=True)
    return CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"


def _configurations(problem):
    """Of each layout: its name, the configuration, its bound in seconds, and whether its bounds in bytes may fit."""
    grid = bound_grid(problem)
    for sheet in grid.sheets:
        sheet.refine()
        for row in range(len(sheet.seconds)):
            configuration = sheet.configuration(row)
            may_fit = sheet.bytes[row] <= sheet.limit_bytes and grid.share_needed(configuration) <= 1
            yield repr(configuration), configuration, float(sheet.seconds[row]), may_fit


def _simulate(problem, configuration):
    """Steps of the plans of a layout, each with whether it fits; and why others cannot be."""
    plans, refused = [], []
    try:
        for plan in plans_of(problem, configuration):
            graph = problem.graph_for(plan.microbatch_size)
            item = evaluate_plan(plan, graph, problem.cluster, problem.cost, memory=problem.memory)
            plans.append((item.step_time_s, item.fits))
    except MeshwrightError as error:
        refused.append(str(error))
    return {"plans": plans, "refused": refused}


def _check_known(problem, path, pairs):
    """Raise ValueError where the best of the known layouts takes another step today."""
    known = [(configuration, line) for configuration, line in pairs if line and line["plans"]]
    if not known:
        return
    configuration, line = min(known, key=lambda pair: min(step_s for step_s, _ in pair[1]["plans"]))
    today = _simulate(problem, configuration)["plans"]
    if len(today) != len(line["plans"]) or not np.allclose(today, line["plans"], rtol=_ALIKE, atol=0.0):
        raise ValueError(
            f"{path} was made by another simulator: {line['layout']} took {line['plans']}, and takes {today}. "
            "Delete the file."
        )
