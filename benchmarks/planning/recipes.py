"""Public recipes of training runs beside what the search over the whole space finds for the same job.

Recipes: `splits/planner_space.json`, "recipes": sizes of the model, machines, batch and layout as their sources state
them. All are known to run on their machines, so that none may be refused as not fitting. Both plans, the recipe's own
and the best one found, are predicted in the same way; what was published stands beside the first. A ratio of at most 1
says that the recipe was found or beaten under our prediction; what is printed before the table says by which terms.
"""

import sys
import time
from dataclasses import replace

import numpy as np
from harness import make_row
from planning.problems import layout_words, problem_of, solve
from planning.space import SPLIT

from meshwright.planner import Choices, evaluate_plan, explain_difference, list_shardings, whole_space
from meshwright.planner.methods.grid import bound_grid
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.spec import MeshwrightError, format_bytes, format_seconds


def rows(quick):
    table, notes, ratios, refused = [], [], [], []
    for recipe in SPLIT["recipes"]:
        if quick and recipe["name"] not in SPLIT["quick"]["recipes"]:
            continue
        problem, own = evaluate_recipe(recipe)
        begun = time.perf_counter()
        best = search(recipe, problem)
        seconds = time.perf_counter() - begun
        found_s = np.inf if best is None else best.step_time_s
        ratios.append(found_s / own.step_time_s)
        refused += [] if own.fits else [recipe["name"]]
        name = recipe["name"]
        table += [
            make_row(
                f"{name}: found over the recipe", found_s, "s", baseline=own.step_time_s, ratio=ratios[-1], target=1.0
            ),
            make_row(f"{name}: seconds of the search", seconds, "s"),
        ]
        if published_s := published_seconds(recipe, problem):
            facts = {"baseline": published_s, "ratio": own.step_time_s / published_s}
            table.append(make_row(f"{name}: predicted over published", own.step_time_s, "s", **facts))
        notes += describe(recipe, own, best)
        print(f"{name}: {found_s:.6g} s over {own.step_time_s:.6g} s", file=sys.stderr, flush=True)
    table.append(make_row("recipes neither found nor beaten", sum(ratio > 1 for ratio in ratios), "recipes", target=0))
    table.append(make_row("recipes refused as not fitting", len(refused), "recipes", target=0))
    print("\n".join(notes))
    return table


def evaluate_recipe(recipe):
    """The recipe's problem with nothing left to choose, and its own plan, predicted.

    Stages lie one after the other, each with its replicas, each replica with its axes; layers are cut evenly.
    """
    layout = recipe["layout"]
    choices = Choices(
        shardings=list_shardings(
            **{axis: (layout.get(axis, 1),) for axis in ("tensor", "context", "expert")},
            sequence_parallel=layout.get("sequence_parallel", False),
        ),
        zero=(layout.get("zero", 0),),
        shard_sizes=(layout.get("shard_size", 0),),
        recompute=(layout["recompute"],),
        microbatch_sizes=(layout["microbatch_size"],),
        schedules=(layout.get("schedule", "1f1b"),),
        num_chunks=(layout.get("num_chunks", 1),),
        num_stages=(layout.get("stages", 1),),
    )
    problem = problem_of(recipe, choices)
    (sheet,) = bound_grid(problem).sheets
    plan = next(plans_of(problem, sheet.configuration(0)))
    graph = problem.graph_for(plan.microbatch_size)
    return problem, evaluate_plan(plan, graph, problem.cluster, problem.cost, memory=problem.memory)


def search(recipe, problem):
    """The best plan of the whole space, or None where none is found."""
    choices = whole_space(problem.graph_for(1), problem.cluster, problem.workload)
    limits = {"seed": SPLIT["seed"], "deadline_s": SPLIT["seconds"]}
    try:
        return solve(replace(problem, choices=choices), **limits).best
    except MeshwrightError as error:
        print(f"{recipe['name']}: {error}", file=sys.stderr, flush=True)
        return None


def published_seconds(recipe, problem):
    """The published step, s; None where a figure counts FLOPs as no one else does."""
    if recipe["unit"] == "s":
        return recipe["published"]
    if recipe["unit"] == "tokens/s/GPU":
        return recipe["batch"] * recipe["sequence_length"] / problem.cluster.num_ranks / recipe["published"]
    return None


def describe(recipe, own, best):
    """Both plans in words, what decides between them, and the memory of a recipe that is refused."""
    rank = own.fullest_rank
    held, limit = format_bytes(own.reserved_bytes[rank]), format_bytes(own.memory_limit_bytes[rank])
    yield f"- {recipe['name']} ({recipe['source']})"
    yield f"  - recipe: {layout_words(own.plan)}: {format_seconds(own.step_time_s)}, {held} of {limit}"
    if not own.fits:
        parts = sorted(own.memory[rank].parts.items(), key=lambda part: -part[1])
        peak = format_bytes(own.memory[rank].total_bytes)
        words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size > 2**27)
        yield f"  - refused, though it ran: peak {peak} ({words}); the allocator holds {held}"
    if best is not None:
        held = format_bytes(best.reserved_bytes[best.fullest_rank])
        yield f"  - found: {layout_words(best.plan)}: {format_seconds(best.step_time_s)}, {held}"
        yield f"  - the recipe against it: {explain_difference(own, best)}"
