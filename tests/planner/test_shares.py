"""Shares of the gain: each coalition against all of its plans, and the value against all orders of joining."""

from dataclasses import replace
from itertools import combinations, permutations
from statistics import fmean

import numpy as np
import pytest

from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Choices, Problem, evaluate_plan, find_shares, list_shardings
from meshwright.planner.methods.grid import bound_grid
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.planner.plan_shares import NOT_UNIFORM, shapley_values
from meshwright.spec import Offload, PlanError, Workload, load_cluster, load_shipped_graph
from tests.planner.searching import solve
from tests.planner.test_search import cluster_of, weighted_graph

# Each choice: what it may be, and the first value where it is plain.
OPEN = {
    "tensor parallelism": {"shardings": list_shardings(tensor=(1, 2))},
    "ZeRO": {"zero": (0, 3)},
    "recompute": {"recompute": ("none", "full")},
    "pipeline stages": {"num_stages": (1, 4)},
    "microbatch size": {"microbatch_sizes": (1, 8)},
}


def problem_with(graph, cluster, batch, names=(*OPEN,), memory=None):
    """These choices are open, the others plain."""
    choices = {"schedules": ("1f1b",)}
    for name, own in OPEN.items():
        ((field, values),) = own.items()
        choices[field] = values if name in names else values[:1]
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=batch, precision="mixed", kind=graph.mode),
        choices=Choices(**choices),
        memory=MemoryLimit(num_bytes=memory),
    )


def by_orders(players, worth):
    """What each gains when it joins, averaged over all orders."""
    gains = {name: [] for name in players}
    for order in permutations(players):
        for place, name in enumerate(order):
            gains[name].append(worth[frozenset(order[: place + 1])] - worth[frozenset(order[:place])])
    return {name: fmean(values) for name, values in gains.items()}


def differing(configuration):
    """In which choices a configuration is not plain."""
    values = {
        "tensor parallelism": configuration.sharding.tensor > 1,
        "ZeRO": configuration.zero > 0,
        "recompute": configuration.recompute != "none",
        "pipeline stages": configuration.positions > 1,
        "microbatch size": configuration.microbatch_size > 1,
    }
    return {name for name, differs in values.items() if differs}


@pytest.mark.parametrize(
    ("cluster", "batch", "memory", "plain_fits"),
    [("4xL40S", 32, None, True), ("4xL40S", 32, 78 * 2**20, False), ("2x2xcpu", 16, None, True)],
)
def test_shares_are_those_of_the_best_of_every_coalition(cluster, batch, memory, plain_fits):
    """All uniform plans are simulated; of each set of choices the best is taken that makes no other."""
    graph, machine = load_shipped_graph("gpt-tiny"), load_cluster(cluster)
    problem = problem_with(graph, machine, batch, memory=memory)
    found = solve(problem, "grid")
    shares = find_shares(problem, found)
    players = [item.choice for item in shares.choices]
    assert len(players) >= 2
    assert {*players, *shares.left_plain} == {*OPEN}
    simulated = [
        (differing(configuration), evaluate_plan(plan, graph, machine, problem.cost, memory=problem.memory))
        for _, configuration in bound_grid(problem).by_bound()
        for plan in plans_of(problem, configuration)
    ]
    fitting = [(names, item.step_time_s) for names, item in simulated if item.fits]
    steps_s = {
        frozenset(some): min((seconds for names, seconds in fitting if names <= {*some}), default=np.inf)
        for size in range(len(players) + 1)
        for some in combinations(players, size)
    }
    slowest = max(value for value in steps_s.values() if np.isfinite(value))
    gains = by_orders(players, {names: -min(value, slowest) for names, value in steps_s.items()})
    for item in shares.choices:
        without_s = steps_s[frozenset(players) - {item.choice}]
        assert item.gain_s == pytest.approx(gains[item.choice], abs=1e-9)
        assert item.without_s == (pytest.approx(without_s) if np.isfinite(without_s) else None)
    assert shares.plain_s == pytest.approx(min(steps_s[frozenset()], slowest))
    assert shares.plain_fits == np.isfinite(steps_s[frozenset()]) == plain_fits
    assert min(value for _, value in fitting) <= shares.best_s <= found.best.step_time_s
    assert sum(item.gain_s for item in shares.choices) == pytest.approx(shares.gain_s)
    assert sum(item.share for item in shares.choices) == pytest.approx(1)
    assert shares.num_simulated < len(simulated)
    assert find_shares(problem, found) == shares


def test_a_choice_that_the_best_plan_leaves_plain_gains_nothing():
    """Nothing is recomputed where everything fits: shares are the same whether it may be or not."""
    graph, machine = load_shipped_graph("gpt-tiny"), load_cluster("4xL40S")
    names = ("ZeRO", "microbatch size")
    closed, opened = (problem_with(graph, machine, 32, chosen) for chosen in (names, (*names, "recompute")))
    without, with_it = (find_shares(problem, solve(problem, "grid")) for problem in (closed, opened))
    assert "recompute" in with_it.left_plain
    assert "recompute" not in without.left_plain
    assert with_it.choices == without.choices


def test_offload_is_a_choice_where_the_best_plan_had_to_resort_to_it():
    """Without it nothing fits; it is not among the choices of the search itself, but its last resort."""
    graph, machine, away = load_shipped_graph("gpt-tiny"), load_cluster("4xA100"), Offload(optimizer="host")
    problem = problem_with(graph, machine, 32, ("microbatch size",))
    at_home, on_host = (
        find_least_reserved(problem, Choices(schedules=("1f1b",), num_stages=(1,), offload=(offload,)))
        for offload in (problem.choices.offload[0], away)
    )
    assert on_host < at_home
    problem = replace(problem, memory=MemoryLimit(num_bytes=(at_home + on_host) // 2))
    found = solve(replace(problem, choices=replace(problem.choices, offload=(away,))), "grid")
    shares = find_shares(replace(problem, choices=replace(problem.choices, last_resorts=(away,))), found)
    offload = next(item for item in shares.choices if item.choice == "offload")
    assert (offload.plain, offload.taken, offload.without_s) == ("none", away.describe(), None)
    assert "Without offload, no plan with the other choices fits" in shares.explain()


def find_least_reserved(problem, choices):
    """Bytes that the leanest plan of these choices reserves."""
    found = solve(replace(problem, choices=choices), "grid", max_plans=100)
    return min(max(item.reserved_bytes) for item in found.ranked)


def test_what_plans_that_are_not_uniform_gain_is_told_apart():
    graph = weighted_graph([10**9 * amount for amount in (9, 1, 1, 1)], width=256)
    problem = problem_with(graph, cluster_of(4), 12, ("microbatch size",))
    problem = replace(problem, choices=replace(problem.choices, num_stages=(2,), microbatch_sizes=(1, 2)))
    found = solve(problem, "slicing")
    shares = find_shares(problem, found)
    beyond = next(item for item in shares.choices if item.choice == NOT_UNIFORM)
    assert beyond.without_s == pytest.approx(found.best.step_time_s + beyond.gain_s)
    assert beyond.without_s == pytest.approx(solve(problem, "grid").best.step_time_s, rel=1e-3)
    assert sum(item.gain_s for item in shares.choices) == pytest.approx(shares.plain_s - found.best.step_time_s)


def test_the_value_is_shapleys():
    """A game of gloves: players 0 and 1 have a left one each, player 2 a right one; a pair is worth 1."""
    pairs = [1.0 if number & 4 and number & 3 else 0.0 for number in range(8)]
    assert shapley_values(np.array(pairs)) == pytest.approx([1 / 6, 1 / 6, 4 / 6])
    assert shapley_values(np.array([3.0])) == []


def test_values_add_up_and_treat_alike_what_is_alike():
    worth = np.random.default_rng(0).random(32)
    numbers = np.arange(32)
    swapped = numbers & ~3 | (numbers & 1) << 1 | (numbers & 2) >> 1
    alike = worth + worth[swapped]
    # The last player adds nothing to any coalition.
    alike[16:] = alike[:16]
    values = shapley_values(alike)
    assert sum(values) == pytest.approx(alike[-1] - alike[0])
    assert values[0] == pytest.approx(values[1])
    assert values[4] == pytest.approx(0)
    assert abs(values[2]) > 1e-3


def test_what_has_no_shares_is_refused():
    graph, cluster = weighted_graph([10**9] * 4, mode="inference"), cluster_of(2)
    problem = Problem(graph_for=lambda _: graph, cluster=cluster, workload=Workload(global_batch=4, kind="inference"))
    found = solve(problem)
    with pytest.raises(PlanError, match="--aim throughput"):
        find_shares(replace(problem, aim="latency"), found)
    graph = weighted_graph([10**9] * 4)
    chosen = Choices(schedules=("pipedream",))
    problem = Problem(graph_for=lambda _: graph, cluster=cluster, workload=Workload(global_batch=4), choices=chosen)
    with pytest.raises(PlanError, match="which do not exist for the schedules pipedream"):
        find_shares(problem, solve(problem))
