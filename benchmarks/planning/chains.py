"""The instances of the slicing problem in `splits/planner_differentiable.json`, and two oracles for them."""

import itertools
import json
from pathlib import Path

import numpy as np
from planning.chain import ChainProblem

SPLITS = json.loads((Path(__file__).parent.parent / "splits" / "planner_differentiable.json").read_text())
SLICING = SPLITS["slicing"]


def homogeneous(num_layers, num_stages):
    return _problem(np.ones(num_layers), np.full((num_layers - 1, num_stages - 1), 2.0))


def heterogeneous(num_layers, num_stages, seed, *, fractional=False):
    random = np.random.default_rng([seed, num_layers, num_stages])
    shape = (num_layers - 1, num_stages - 1)
    if fractional:
        return _problem(random.uniform(5, 9, num_layers), random.uniform(5, 9, shape))
    return _problem(random.integers(5, 10, num_layers), random.integers(5, 10, shape))


def scored():
    """Name and problem of every instance that arms are scored on."""
    for num_layers, num_stages in SLICING["homogeneous"]:
        yield f"homogeneous {num_layers}, {num_stages}", homogeneous(num_layers, num_stages)
    for num_layers, num_stages in SLICING["heterogeneous"]:
        for seed in SLICING["scored_seeds"]:
            name = f"heterogeneous {num_layers}, {num_stages}, seed {seed}"
            yield name, heterogeneous(num_layers, num_stages, seed)


def by_trying_all(problem):
    """The least cost of all ways to cut."""
    inner = itertools.combinations(range(1, problem.num_layers), problem.num_stages - 1)
    inner = np.array(list(inner), np.int64).reshape(-1, problem.num_stages - 1)
    ends = np.ones((len(inner), 1), np.int64)
    edges = np.concatenate([0 * ends, inner, problem.num_layers * ends], axis=1)
    stages = np.diff(np.concatenate([[0.0], np.cumsum(problem.layer_costs)])[edges], axis=1)
    cuts = sum((problem.cut_costs[inner[:, cut] - 1, cut] for cut in range(inner.shape[1])), np.zeros(len(inner)))
    return float(((problem.num_microbatches - 1) * stages.max(axis=1) + cuts).min())


def by_every_threshold(problem):
    """The least cost, by the plain dynamic program for every sum of neighbouring layers as the slowest stage."""
    before = np.concatenate([[0.0], np.cumsum(problem.layer_costs)])
    num_layers, num_stages = problem.num_layers, problem.num_stages
    stages = before[None, :] - before[:, None]
    thetas = np.unique(stages[np.triu_indices(num_layers + 1, 1)])
    sums = np.full((num_layers + 1, len(thetas)), np.inf)
    sums[0] = 0.0
    for stage in range(num_stages):
        moved = sums.copy()
        if stage:
            moved[1:-1] += problem.cut_costs[:, stage - 1, None]
        sums = np.full_like(sums, np.inf)
        for stop in range(stage + 1, num_layers + 1):
            within = stages[:stop, stop, None] <= thetas
            sums[stop] = np.where(within, moved[:stop], np.inf).min(axis=0)
    return float(((problem.num_microbatches - 1) * thetas + sums[-1]).min())


def _problem(layers, cuts):
    return ChainProblem(layer_costs=layers, cut_costs=cuts, num_microbatches=SLICING["num_microbatches"])
