"""The comparison of the search with every uniform layout: its data, what it keeps, and the plans of recipes."""

import importlib
import json
from pathlib import Path

import pytest

from meshwright.planner.methods.grid import bound_grid

ROOT = Path(__file__).parents[2]
SPLIT = json.loads((ROOT / "benchmarks" / "splits" / "planner_space.json").read_text())
TINY = {
    "name": "tiny",
    "model": "gpt-tiny",
    "cluster": "2xA100",
    "batch": 4,
    "precision": "mixed",
    "microbatch_sizes": [1, 2],
    "zero": [0, 3],
    "schedules": ["1f1b"],
}


@pytest.fixture
def part():
    """A module of the benchmarks by its name."""
    return importlib.import_module


@pytest.fixture
def space(part, tmp_path, monkeypatch):
    module = part("planning.space")
    monkeypatch.setattr(module, "CACHE", tmp_path)
    return module


def test_problems_and_recipes_are_as_many_and_as_different_as_was_asked_for(part):
    problems = part("planning.problems")
    sizes = [problems.cluster_of(spec["cluster"]).num_ranks for spec in SPLIT["problems"]]
    unequal = [len(problems.cluster_of(spec["cluster"]).device_kinds) > 1 for spec in SPLIT["problems"]]
    assert (len(sizes), min(sizes), max(sizes), sum(unequal)) == (16, 4, 64, 5)
    assert len({spec["name"] for spec in SPLIT["problems"]}) == 16
    assert len({recipe["name"] for recipe in SPLIT["recipes"]}) == 12
    assert all(recipe["link"].startswith("https://") and recipe["source"] for recipe in SPLIT["recipes"])


@pytest.mark.parametrize("name", ["gpt2-small on a workstation", "16 experts on 8 A100"])
def test_axes_span_about_three_hundred_layouts(part, name):
    spec = next(spec for spec in SPLIT["problems"] if spec["name"] == name)
    problem = part("planning.problems").problem_of(spec)
    assert 100 < bound_grid(problem).num_configurations <= 310


def test_layouts_are_simulated_once(space, monkeypatch):
    first = space.simulate_layouts(TINY)
    assert len(first) > 4
    assert all(layout.bound_s <= min(layout.steps_s) and layout.fitting_s == layout.steps_s for layout in first)
    best = min(min(layout.fitting_s) for layout in first)
    problems = importlib.import_module("planning.problems")
    # The grid leaves plans out that are within 0.01 % of the best.
    assert problems.solve(problems.problem_of(TINY), "grid").best.step_time_s == pytest.approx(best, rel=2e-4)
    simulated = []
    monkeypatch.setattr(space, "_simulate", lambda *given, real=space._simulate: simulated.append(1) or real(*given))
    assert space.simulate_layouts(TINY) == first
    # The best one alone, to see that it still takes as long.
    assert len(simulated) == 1


def test_layouts_of_another_simulator_are_refused(space):
    space.simulate_layouts(TINY)
    path = space.cache_path(TINY)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    halved = [{**line, "plans": [(step_s / 2, fits) for step_s, fits in line["plans"]]} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in halved))
    with pytest.raises(ValueError, match="another simulator"):
        space.simulate_layouts(TINY)


def test_a_recipe_is_laid_out_as_its_source_says(part):
    recipes = part("planning.recipes")
    recipe = next(recipe for recipe in SPLIT["recipes"] if recipe["name"] == "Megatron-LM 175B")
    problem, own = recipes.evaluate_recipe(recipe)
    plan = own.plan
    assert (plan.sharding.tensor, len(plan.stages), plan.num_microbatches, plan.schedule) == (8, 24, 64, "interleaved")
    assert {len(stage.ranks) for stage in plan.stages} == {1}
    assert len(plan.recompute) == 96
    assert own.fits
    assert recipes.published_seconds(recipe, problem) == 18.13
    said = "\n".join(recipes.describe(recipe, own, own))
    assert "tensor 8, 24 stages on 8 positions" in said
    assert "as fast" in said
