"""Arms by gradients on chains: valid answers, gradients that are derivatives, repair that moves one boundary."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.chain import ChainProblem, solve_chain
from planning.chain_arms import CHAIN_ARMS, assignment, boundaries, recursion
from planning.chain_arms.repair import Repaired, descend_moves

from meshwright.planner.methods.differentiable.relaxed import softmax, softmax_gradient
from meshwright.planner.methods.differentiable.stage_repair import round_edges
from tests.marks import examples


def drawn(num_layers, num_stages, seed=0, num_microbatches=3):
    random = np.random.default_rng(seed)
    return ChainProblem(
        layer_costs=random.integers(5, 10, num_layers),
        cut_costs=random.integers(5, 10, (num_layers - 1, num_stages - 1)),
        num_microbatches=num_microbatches,
    )


@pytest.mark.parametrize("name", CHAIN_ARMS)
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (4, 4), (5, 4), (9, 3)])
def test_small_chains(name, size, monkeypatch):
    for module in (assignment, boundaries):
        monkeypatch.setattr(module, "NUM_STEPS", 40)
    problem = drawn(*size)
    found = CHAIN_ARMS[name](problem, np.random.default_rng(0))
    assert found == problem.cut_at(found.edges)
    assert solve_chain(problem).cost <= found.cost <= problem.cut_evenly().cost
    assert found == CHAIN_ARMS[name](problem, np.random.default_rng(0))


@pytest.mark.parametrize("name", CHAIN_ARMS)
def test_arms_come_near_the_optimum(name):
    """Single moves from the uniform split, the start of all arms, do not."""
    problem = drawn(48, 9, seed=4)
    optimum = solve_chain(problem).cost
    alone = Repaired(problem)
    alone.keep(problem.cut_evenly().edges)
    assert alone.best.cost > 1.1 * optimum
    assert CHAIN_ARMS[name](problem, np.random.default_rng(0)).cost <= 1.01 * optimum


def test_the_recursion_finds_what_exactly_solving_does():
    for seed in range(5):
        problem = drawn(24, 6, seed)
        assert CHAIN_ARMS["recursion"](problem, np.random.default_rng(0)).cost == solve_chain(problem).cost


def test_no_time_at_all():
    problem = ChainProblem(layer_costs=np.zeros(4), cut_costs=np.zeros((3, 1)), num_microbatches=1)
    for arm in CHAIN_ARMS.values():
        assert arm(problem, np.random.default_rng(0)).cost == 0.0


# --- gradients ---


@pytest.mark.parametrize(("theta", "smooth", "warm"), [(20.0, 3.0, 2.0), (14.0, 1.0, 0.5)])
def test_the_slope_of_the_recursion(theta, smooth, warm):
    """Against the sum over all cuttings, and its derivative by θ as a difference; marginals by counting."""
    problem = drawn(9, 3)
    before, rounds = problem.before(), float(problem.rounds)
    cuttings = [(0, *inner, 9) for inner in itertools.combinations(range(1, 9), 2)]

    def energy(edges, theta):
        stages = np.diff(before[list(edges)])
        cuts = sum(problem.cut_costs[edge - 1, cut] for cut, edge in enumerate(edges[1:-1]))
        return cuts + rounds * smooth * np.exp((stages - theta) / smooth).sum()

    def value(theta):
        energies = np.array([energy(edges, theta) for edges in cuttings])
        least = energies.min()
        return rounds * (theta - smooth) + least - warm * np.log(np.exp((least - energies) / warm).sum())

    marginals = np.zeros((4, 10))
    slope = recursion._slope(before, problem.cut_costs, rounds, theta, smooth, warm, marginals)
    assert slope == pytest.approx((value(theta + 1e-5) - value(theta - 1e-5)) / 2e-5, rel=1e-4)
    shares = softmax(-np.array([energy(edges, theta) for edges in cuttings]) / warm)
    counted = np.zeros((4, 10))
    for edges, share in zip(cuttings, shares, strict=True):
        counted[range(4), edges] += share
    assert marginals == pytest.approx(counted, abs=1e-4)


def test_the_threshold_form_is_the_smooth_maximum():
    stages, t = np.array([3.0, 5.0, 4.5]), 0.7
    smooth = t * np.log(np.exp(stages / t).sum())
    thetas = np.linspace(0, 10, 100_001)
    form = thetas - t + t * np.exp((stages[:, None] - thetas) / t).sum(axis=0)
    assert form.min() == pytest.approx(smooth, abs=1e-8)


def test_the_gradient_of_softmax():
    random = np.random.default_rng(0)
    logits, weights = random.normal(size=5), random.normal(size=5)
    found = softmax_gradient(softmax(logits), weights)
    for place in range(5):
        moved = np.eye(5)[place] * 1e-6
        slope = ((softmax(logits + moved) - softmax(logits - moved)) * weights).sum() / 2e-6
        assert found[place] == pytest.approx(slope, abs=1e-8)


def test_the_gradient_by_assignments():
    problem, smooth, strict = drawn(6, 3), 2.0, 1.5
    shares = np.random.default_rng(1).uniform(0.1, 1, (1, 6, 3))

    def cost(shares):
        stages = shares[0].T @ problem.layer_costs
        slowest = smooth * np.log(np.exp(stages / smooth).sum())
        moved = (shares[0, :-1, :-1] * shares[0, 1:, 1:] * (problem.cut_costs - strict)).sum()
        return problem.rounds * slowest + moved - strict * (shares[0, :-1] * shares[0, 1:]).sum()

    found = assignment._cost_by_shares(problem, shares, smooth, strict)
    for layer, stage in itertools.product(range(6), range(3)):
        moved = np.zeros_like(shares)
        moved[0, layer, stage] = 1e-6
        assert found[0, layer, stage] == pytest.approx((cost(shares + moved) - cost(shares - moved)) / 2e-6, rel=1e-5)


def test_the_gradient_by_boundaries():
    expected, total, t = np.array([[4.0, 7.5, 11.0]]), 17.0, 0.8

    def slowest(expected):
        stages = np.diff(np.concatenate([[0.0], expected[0], [total]]))
        return t * np.log(np.exp(stages / t).sum())

    found = boundaries._slowest_by_edge(expected, total, t)
    for edge in range(3):
        moved = np.eye(3)[edge][None] * 1e-6
        slope = (slowest(expected + moved) - slowest(expected - moved)) / 2e-6
        assert found[0, edge] == pytest.approx(slope, abs=1e-7)


def test_the_loss_of_a_model_does_not_know_its_plan():
    """All stages compute the same function: by A the loss has the same slope along a row, so none by the logits."""
    random = np.random.default_rng(0)
    weights, shares = random.normal(0, 0.3, 7), softmax(random.normal(size=(7, 3)))

    def loss(weights):
        value = 1.0
        for weight in weights:
            value += weight * math.tanh(value)
        return (value - 2.0) ** 2 / 2

    by_weights, by_shares = assignment.loss_gradients(weights, shares)
    for layer in range(7):
        moved = np.eye(7)[layer] * 1e-6
        assert by_weights[layer] == pytest.approx((loss(weights + moved) - loss(weights - moved)) / 2e-6, rel=1e-5)
    assert np.abs(by_shares).min() > 1e-3
    assert softmax_gradient(shares, by_shares) == pytest.approx(np.zeros((7, 3)), abs=1e-15)


# --- rounding and repair ---


@given(st.lists(st.floats(-5, 40), min_size=2, max_size=9), st.integers(0, 20))
def test_rounded_edges_are_a_cutting(edges, more):
    num_layers = len(edges) - 1 + more
    rounded = round_edges(np.array(edges), num_layers)
    assert rounded[0] == 0
    assert rounded[-1] == num_layers
    assert (np.diff(rounded) > 0).all()


@given(st.integers(2, 20), st.data())
def test_valid_edges_stay(num_layers, data):
    inner = data.draw(st.sets(st.integers(1, num_layers - 1), max_size=6))
    edges = [0, *sorted(inner), num_layers]
    assert round_edges(np.array(edges), num_layers).tolist() == edges


@settings(max_examples=examples(50))
@given(st.integers(0, 1000))
def test_repair_ends_where_no_single_move_gains(seed):
    random = np.random.default_rng(seed)
    num_layers = int(random.integers(3, 14))
    problem = drawn(num_layers, int(random.integers(2, num_layers + 1)), seed)
    inner = 1 + random.choice(num_layers - 1, problem.num_stages - 1, replace=False)
    start = np.array([0, *sorted(inner), num_layers])
    edges = start.copy()
    descend_moves(problem.before(), problem.cut_costs, float(problem.rounds), edges)
    found = problem.cut_at(edges.tolist())
    assert found.cost <= problem.cut_at(start.tolist()).cost
    for cut in range(1, problem.num_stages):
        for place in range(edges[cut - 1] + 1, edges[cut + 1]):
            moved = edges.copy()
            moved[cut] = place
            assert problem.cut_at(moved.tolist()).cost >= found.cost


def test_slowest_stages_shrink_one_after_the_other():
    """4, 4, 1: no single move makes the slowest stage faster, but one makes room for the next."""
    problem = ChainProblem(layer_costs=np.ones(9), cut_costs=np.zeros((8, 2)), num_microbatches=3)
    edges = np.array([0, 4, 8, 9])
    descend_moves(problem.before(), problem.cut_costs, 2.0, edges)
    assert edges.tolist() == [0, 3, 6, 9]


def test_repair_moves_only_one_boundary_at_a_time():
    """Two boundaries that would have to move together stay where they are."""
    cuts = np.array([[9.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    problem = ChainProblem(layer_costs=np.zeros(4), cut_costs=cuts, num_microbatches=1)
    edges = np.array([0, 1, 2, 4])
    descend_moves(problem.before(), problem.cut_costs, 0.0, edges)
    assert edges.tolist() == [0, 1, 2, 4]
    assert solve_chain(problem).edges == (0, 2, 3, 4)
