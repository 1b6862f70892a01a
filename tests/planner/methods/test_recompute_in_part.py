"""Some blocks of each stage recomputed: as few as fit, faster than all of them, and allowed where their words are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Choices, Problem, SearchState, evaluate_plan
from meshwright.planner.methods.auto import recompute_in_part
from meshwright.spec import Recompute, Workload, load_cluster, load_shipped_graph, read_recompute, recompute_layers
from tests.graphs import even_bounds, make_plan
from tests.planner.searching import solve

GPT = load_shipped_graph("gpt2-small")
BLOCKS = range(1, 13)
CLUSTER = load_cluster("2xA100")
COST = CostModel(cluster=CLUSTER, precision="bfloat16")
WORK = Workload(global_batch=8, precision="bfloat16")
TWO = replace(
    make_plan(GPT, even_bounds(len(GPT.layers), 2), [1, 1], 4),
    model="gpt2-small",
    cluster=CLUSTER.name,
    workload=WORK,
)


def again(plan, word):
    found = read_recompute(GPT, word)
    return replace(plan, recompute=found.ranges, keeps=found.keeps)


def evaluated(plan, num_bytes=None, word=""):
    return replace(evaluate_plan(plan, GPT, CLUSTER, COST, memory=MemoryLimit(num_bytes=num_bytes)), recompute=word)


def problem_with(num_bytes, *recompute, **choices):
    return Problem(
        graph_for=lambda _: GPT,
        cluster=CLUSTER,
        workload=WORK,
        cost=COST,
        memory=MemoryLimit(num_bytes=num_bytes),
        choices=Choices(recompute=recompute, **choices),
    )


def limit_between(share, light="none", heavy="full"):
    """A share of the way from what the heavier way needs on the fullest rank to what the lighter one does."""
    least, most = (max(evaluated(again(TWO, word)).reserved_bytes) for word in (heavy, light))
    assert least < most
    return int(least + share * (most - least))


def proposals_of(problem, *items):
    """What is proposed after these plans, all of them evaluated."""
    state = SearchState(rejected=[item for item in items if not item.fits])
    fitting = [item for item in items if item.fits]
    state.best = min(fitting, key=lambda item: item.step_time_s) if fitting else None
    steps, found = recompute_in_part(problem, state), []
    item = None
    while True:
        try:
            proposal = steps.send(item)
        except StopIteration:
            return found
        item = evaluated(proposal.plan, problem.memory.num_bytes)
        found.append(item)


def first_blocks(plan, counts, word):
    """The plan with the first blocks of each stage recomputed as a word says."""
    layers: list[int] = []
    for stage, count in zip(plan.stages, counts, strict=True):
        layers += [layer for layer in range(stage.start, stage.stop) if layer in BLOCKS][:count]
    mine = recompute_layers(GPT, layers)
    kept = [op for op in read_recompute(GPT, word).keeps if any(start <= op < stop for start, stop in mine)]
    return replace(plan, recompute=mine, keeps=tuple(kept))


def least_counts(num_bytes, word):
    """Of each stage the least number of blocks with which its rank fits, by trying all numbers of it."""
    counts = [len([layer for layer in range(stage.start, stage.stop) if layer in BLOCKS]) for stage in TWO.stages]
    fitting: list[list[int]] = [[], []]
    for number in range(max(counts) + 1):
        item = evaluated(first_blocks(TWO, (number, number), word), num_bytes)
        for rank in range(2):
            if number <= counts[rank] and item.reserved_bytes[rank] <= num_bytes:
                fitting[rank].append(number)
    return tuple(map(min, fitting))


@pytest.mark.parametrize(("share", "word"), [(0.7, "full"), (0.3, "full"), (0.5, "op")])
def test_the_fewest_blocks_that_fit_are_found(share, word):
    num_bytes = limit_between(share, heavy=word)
    lighter, heavier = evaluated(TWO, num_bytes, "none"), evaluated(again(TWO, word), num_bytes, word)
    assert not lighter.fits
    assert heavier.fits
    found = proposals_of(problem_with(num_bytes, "none", word), lighter, heavier)
    best = min((item for item in found if item.fits), key=lambda item: item.step_time_s)
    assert lighter.step_time_s < best.step_time_s < heavier.step_time_s
    counts = least_counts(num_bytes, word)
    assert 0 < sum(counts) < len(BLOCKS)
    assert best.plan == first_blocks(TWO, counts, word)
    # One block less, of either stage, is too little.
    for fewer in ((counts[0] - 1, counts[1]), (counts[0], counts[1] - 1)):
        assert min(fewer) < 0 or not evaluated(first_blocks(TWO, fewer, word), num_bytes).fits


def test_the_first_heavier_way_that_fits_is_mixed():
    num_bytes = limit_between(0.5, light="op")
    items = [evaluated(again(TWO, word), num_bytes, word) for word in ("none", "op", "full")]
    assert [item.fits for item in items] == [False, False, True]
    found = proposals_of(problem_with(num_bytes, "none", "op", "full"), *items)
    best = min((item for item in found if item.fits), key=lambda item: item.step_time_s)
    assert best.step_time_s < items[2].step_time_s
    # Both ends of either mixture were allowed.
    problem = problem_with(num_bytes, "none", "op", "full", schedules=(TWO.schedule,))
    assert problem.objection(best.plan) == ""


@pytest.mark.parametrize("words", [("full",), ("none",), ("op", "full")])
def test_without_a_choice_nothing_is_proposed(words):
    num_bytes = limit_between(0.5)
    items = evaluated(TWO, num_bytes, "none"), evaluated(again(TWO, "full"), num_bytes, "full")
    assert proposals_of(problem_with(num_bytes, *words), *items) == []


def test_what_would_be_no_faster_is_not_looked_at():
    num_bytes = limit_between(0.5)
    lighter = evaluated(TWO, num_bytes, "none")
    heavier = replace(evaluated(again(TWO, "full"), num_bytes, "full"), step_time_s=lighter.step_time_s)
    problem = problem_with(num_bytes, "none", "full")
    assert proposals_of(problem, lighter, heavier) == []
    # Before anything fits there is nothing to be faster than.
    assert proposals_of(problem, lighter) == []


def test_a_search_finds_a_mixture():
    num_bytes = limit_between(0.6)
    fixed = {"num_stages": (2,), "microbatch_sizes": (2,), "schedules": ("1f1b",)}
    problem = problem_with(num_bytes, "none", "op", "full", **fixed)
    best = solve(problem).best
    assert best.fits
    for word in ("op", "full"):
        assert best.step_time_s < solve(problem_with(num_bytes, word, **fixed)).best.step_time_s
    mixed = read_recompute(GPT, best.recompute)
    assert (best.plan.recompute, best.plan.keeps) == mixed
    assert best.recompute.startswith("full[")
    assert ",op[" in best.recompute
    assert problem.setting_of(best.plan).recompute == best.recompute
    assert 0 < solve(problem).bound_s <= best.step_time_s


def test_a_plan_in_part_has_a_setting_where_its_words_are_choices():
    mixed = read_recompute(GPT, "op[1:5],full[5:7]")
    plan = replace(TWO, recompute=mixed.ranges, keeps=mixed.keeps)
    problem = problem_with(None, "none", "op", "full", schedules=(TWO.schedule,))
    assert problem.setting_of(plan).recompute == "op[1:5],full[5:7]"
    assert problem.objection(plan) == ""
    for words in (("none", "full"), ("op", "full"), ("full",)):
        other = problem_with(None, *words, schedules=(TWO.schedule,))
        assert other.setting_of(plan) is None
        assert other.objection(plan) == "recompute"
    # Where the layers are named, those alone are allowed.
    named = problem_with(None, "op[1:5],full[5:7]", schedules=(TWO.schedule,))
    assert named.objection(plan) == ""
    assert named.objection(replace(TWO, recompute=Recompute(mixed.ranges[:-1]).ranges)) == "recompute"


def test_words_for_layers_are_allowed_where_each_of_them_is():
    choices = Choices(recompute=("none", "full"))
    assert choices.allows_recompute("full")
    assert choices.allows_recompute("3:5,7")
    assert choices.allows_recompute("every-2")
    assert choices.allows_recompute("full[3:5]")
    assert not choices.allows_recompute("op[3:5]")
    assert not choices.allows_recompute("op")
    assert not choices.allows_recompute("op[1:3],full[3:5]")
    # Blocks that are not named are not recomputed.
    assert not Choices(recompute=("full",)).allows_recompute("3:5")
    assert Choices(recompute=("full", "3:5")).allows_recompute("3:5")
