"""Moving a distribution over layouts by noisy measurements."""

from itertools import pairwise

import numpy as np
import pytest
from planning import measured_search as measured
from planning.measured_search import refine_measured, with_noise

from meshwright.planner.methods.differentiable.differentiable_method import (
    StageLayout,
    descend_logits,
    start_logits,
)
from meshwright.planner.methods.differentiable.relaxed import Logits, Smooth
from meshwright.planner.methods.differentiable.stage_repair import layout_cost
from meshwright.spec import PlanError
from tests.planner.methods.test_differentiable import unequal_stages


def best_by_gradients(stages):
    random = np.random.default_rng(0)
    smooth = Smooth(stages, 3)
    found = [descend_logits(stages, smooth, start_logits(stages, 3, random)) for _ in range(5)]
    return min(found, key=lambda layout: layout.key)


def seconds_by(stages):
    return lambda layout: layout_cost(stages, layout.edges, layout.stage_of)[0]


@pytest.mark.parametrize("guided", [True, False])
def test_what_the_closed_form_does_not_know_is_found(guided):
    """In truth two ranks take three times as long as others of their kind."""
    believed = unequal_stages()
    slow = 3 * believed.seconds[believed.kind_of[0]]
    kinds = believed.kind_of.copy()
    kinds[[0, 1]] = len(believed.seconds)
    backward = np.concatenate([believed.backward_s, believed.backward_s[:1]])
    optimizer = np.concatenate([believed.optimizer_s, believed.optimizer_s[:1]])
    truth = believed._replace(seconds=np.concatenate([believed.seconds, slow[None]]), kind_of=kinds)
    truth = truth._replace(backward_s=backward, optimizer_s=optimizer)
    start, seconds_of = best_by_gradients(believed), seconds_by(truth)
    random = np.random.default_rng(1)
    noisy = with_noise(seconds_of, random, 0.05)
    found = refine_measured(believed, start, noisy, random, num_measurements=200, guided=guided)
    assert seconds_of(found) < 0.95 * seconds_of(start)


def test_measurements_without_noise_never_lead_to_a_worse_layout():
    stages = unequal_stages()
    start, count = best_by_gradients(stages), []

    def measure(layout):
        count.append(layout)
        return seconds_by(stages)(layout)

    for seed in range(3):
        count.clear()
        found = refine_measured(stages, start, measure, np.random.default_rng(seed), num_measurements=60)
        assert seconds_by(stages)(found) <= start.seconds * (1 + 1e-12)
        assert len(count) <= 60


def test_what_exceeds_memory_is_not_measured():
    stages = unequal_stages()
    start = best_by_gradients(stages)
    limit = max(
        stages.held_bytes[np.bincount(start.stage_of)[s], i, j] for s, (i, j) in enumerate(pairwise(start.edges))
    )
    tight = stages._replace(memory_limit=np.full(6, 1.1 * float(limit)), more_bytes=0 * stages.more_bytes)
    seen = []

    def measure(layout):
        seen.append(layout_cost(tight, layout.edges, layout.stage_of)[1])
        return 1.0

    refine_measured(tight, start, measure, np.random.default_rng(0), num_measurements=100)
    assert len(seen) > 20
    assert max(seen) == 0


def test_the_score_is_the_gradient_of_the_log_probability():
    random = np.random.default_rng(0)
    logits = Logits(random.normal(size=(2, 8)), random.normal(size=(6, 3)))
    layout = StageLayout(edges=np.array([0, 3, 5, 9]), stage_of=np.array([0, 0, 1, 2, 2, 1]), seconds=1.0, excess=0.0)

    def log_probability(flat):
        edges, ranks = logits.like(flat)
        edges = edges - np.log(np.exp(edges).sum(axis=1, keepdims=True))
        ranks = ranks - np.log(np.exp(ranks).sum(axis=1, keepdims=True))
        return edges[[0, 1], layout.edges[1:-1] - 1].sum() + ranks[range(6), layout.stage_of].sum()

    found, flat = measured._score(logits, layout).flat(), logits.flat()
    for place in range(len(flat)):
        step = 1e-6 * np.eye(len(flat))[place]
        slope = (log_probability(flat + step) - log_probability(flat - step)) / 2e-6
        assert found[place] == pytest.approx(slope, abs=1e-7)


def test_noise_scatters_as_asked():
    noisy = with_noise(lambda _: 2.0, np.random.default_rng(0), 0.1)
    logs = np.log([noisy(None) / 2 for _ in range(2000)])
    assert abs(logs.mean()) < 0.01
    assert logs.std() == pytest.approx(0.1, rel=0.1)


def test_too_few_measurements():
    stages = unequal_stages()
    with pytest.raises(PlanError, match="10 measurements were given; expected at least 18"):
        refine_measured(stages, best_by_gradients(stages), lambda _: 1.0, np.random.default_rng(0), num_measurements=10)
