"""A chain cut exactly: against all ways to cut, against every threshold, and the notebook's recorded optima."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.chain import ChainProblem, solve_chain

from meshwright.spec import PlanError


def cost_of(layers, cuts, num_microbatches, edges):
    stages = [sum(layers[i:j]) for i, j in itertools.pairwise(edges)]
    return (num_microbatches - 1) * max(stages) + sum(cuts[edge - 1][cut] for cut, edge in enumerate(edges[1:-1]))


def by_trying_all(layers, cuts, num_microbatches, num_stages):
    inner = itertools.combinations(range(1, len(layers)), num_stages - 1)
    return min(cost_of(layers, cuts, num_microbatches, (0, *places, len(layers))) for places in inner)


@st.composite
def chains(draw):
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, num_layers))
    costs = st.sampled_from([0, 1, 2, 3, 5, 8, 13]) | st.floats(0, 10)
    layers = draw(st.lists(costs, min_size=num_layers, max_size=num_layers))
    cuts = [draw(st.lists(costs, min_size=num_stages - 1, max_size=num_stages - 1)) for _ in range(num_layers - 1)]
    return layers, cuts, draw(st.integers(1, 6)), num_stages


def problem_of(layers, cuts, num_microbatches, num_stages):
    shaped = np.array(cuts, float).reshape(len(layers) - 1, num_stages - 1)
    return ChainProblem(layer_costs=np.array(layers, float), cut_costs=shaped, num_microbatches=num_microbatches)


@given(chains())
def test_no_way_to_cut_is_cheaper(chain):
    found = solve_chain(problem_of(*chain))
    assert found.cost == pytest.approx(by_trying_all(*chain), rel=1e-9, abs=1e-9)
    assert found.cost == pytest.approx(cost_of(*chain[:3], found.edges), rel=1e-9, abs=1e-9)
    assert len(found.edges) == chain[3] + 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [(40, 8), (64, 24)])
@pytest.mark.matrix
def test_large_chains_against_every_threshold(size, seed):
    (num_layers, num_stages), random = size, np.random.default_rng(seed)
    layers, cuts = random.integers(5, 10, num_layers), random.integers(5, 10, (num_layers - 1, num_stages - 1))
    before, best = np.concatenate([[0], np.cumsum(layers)]), np.inf
    for theta in range(max(layers), 5 * num_layers // num_stages * 9):
        sums = {0: 0}
        for stage in range(num_stages):
            moved = {i: s + (cuts[i - 1, stage - 1] if stage else 0) for i, s in sums.items() if i < num_layers}
            sums = {
                j: min(reached)
                for j in range(stage + 1, num_layers + 1)
                if (reached := [s for i, s in moved.items() if i < j and before[j] - before[i] <= theta])
            }
        best = min(best, 2 * theta + sums.get(num_layers, np.inf))
    assert solve_chain(problem_of(layers, cuts, 3, num_stages)).cost == best


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "optimum", "uniform"),
    [(12, 4, 12, 12), (16, 8, 18, 18), (18, 8, 20, 22), (24, 8, 20, 20), (24, 12, 26, 26), (36, 8, 24, 30)],
)
def test_recorded_optima_of_equal_layers(num_layers, num_stages, optimum, uniform):
    """pipeDejavu's notebook prints these; its uniform split puts the remainder into the last stage."""
    problem = problem_of([1] * num_layers, [[2] * (num_stages - 1)] * (num_layers - 1), 3, num_stages)
    assert solve_chain(problem).cost == optimum
    assert problem.cut_evenly().cost == uniform


def test_the_notebooks_first_example():
    assert solve_chain(problem_of([1, 3, 2, 5], [[2]] * 3, 3, 2)).cost == 14
    assert solve_chain(problem_of([1, 3, 2, 5], [[2]] * 3, 3, 2)).edges == (0, 3, 4)


def test_what_is_no_chain():
    with pytest.raises(PlanError, match=r"shape \(3,\).*expected"):
        ChainProblem(layer_costs=np.ones(3), cut_costs=np.ones((3, 1)), num_microbatches=3)
    with pytest.raises(PlanError, match="3 layers cannot be cut into 4"):
        ChainProblem(layer_costs=np.ones(3), cut_costs=np.ones((2, 3)), num_microbatches=3)
    with pytest.raises(PlanError, match="finite"):
        ChainProblem(layer_costs=np.array([1.0, np.nan]), cut_costs=np.ones((1, 1)), num_microbatches=3)
    with pytest.raises(PlanError, match="finite and not negative"):
        ChainProblem(layer_costs=np.array([1.0, -1.0]), cut_costs=np.ones((1, 1)), num_microbatches=3)
    with pytest.raises(PlanError, match="at least one"):
        ChainProblem(layer_costs=np.ones(2), cut_costs=np.ones((1, 1)), num_microbatches=0)
    problem = ChainProblem(layer_costs=np.ones(3), cut_costs=np.ones((2, 1)), num_microbatches=3)
    for edges in ((0, 3), (0, 1, 2), (1, 2, 3)):
        with pytest.raises(PlanError, match="do not cut 3 layers into 2"):
            problem.cut_at(edges)
    with pytest.raises(PlanError, match="leave a stage empty"):
        problem.cut_at((0, 3, 3))
