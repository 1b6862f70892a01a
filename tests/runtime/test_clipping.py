"""Clipping by the norm of all gradients: what is refused, and that torch agrees (runs are in `test_teams`)."""

from types import SimpleNamespace

import pytest
import torch

from meshwright.runtime import with_clipping
from meshwright.runtime.optimizer_steps import NormClip
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.spec import GradientExchange, PlanError
from tests.graphs import chain_graph, even_bounds, make_plan

GRAPH = chain_graph(2)


def plan_of(**options):
    return make_plan(GRAPH, even_bounds(2, 2), [1, 1], 4, **options)


def test_a_norm_makes_ranks_agree_on_it():
    plan = with_clipping(plan_of(), 1.0)
    assert plan.exchange.clip_norm
    assert plan.is_runnable
    assert with_clipping(plan_of(), None) == plan_of()


@pytest.mark.parametrize(
    ("options", "norm", "words"),
    [
        ({}, 0.0, r"The norm for gradient clipping \(--clip-norm\) is 0.0; expected more than 0"),
        ({}, float("nan"), r"The norm for gradient clipping \(--clip-norm\) is nan"),
        ({"exchange": GradientExchange(clip_norm=True)}, None, "but no norm was given"),
        ({"schedule": "pipedream"}, 1.0, "asynchronous schedule"),
    ],
)
def test_what_cannot_be_clipped_is_refused(options, norm, words):
    with pytest.raises(PlanError, match=words):
        with_clipping(plan_of(**options), norm)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_the_coefficient_is_that_of_torch(max_norm):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5, dtype=torch.float64)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(5, dtype=torch.float64)
    unused, frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    held = dict(enumerate([*parameters, unused, frozen]))
    clip = NormClip(
        0,
        max_norm,
        held,
        dict.fromkeys(held, 1),
        lambda: None,
        TeamPosition(process=0, width=1),
        SimpleNamespace(sum_over=lambda tensor, ranks: []),
        torch.device("cpu"),
    )
    assert clip.begin((0,)) == []
    found = [parameter.grad * clip.coefficient() for parameter in parameters]
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for ours, parameter in zip(found, parameters, strict=True):
        assert torch.allclose(ours, parameter.grad, rtol=1e-12)
