"""Stages cut out of a captured model train as the model itself does."""

import copy
import dataclasses
import itertools

import pytest
import torch

from meshwright.capture import capture_model
from meshwright.spec import Layer
from tests.marks import left_to_ci

from .models import CASES, build
from .pipeline import Pipeline, even_bounds, serial

# The user's own torch.cond, run without capture, makes torch._dynamo look at gradients of values that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def _slices(batch, count, size):
    inputs, targets = batch(count * size)
    for start in range(0, count * size, size):
        piece = slice(start, start + size)
        cut = {k: v[piece] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[piece]
        yield cut, targets[piece]


@pytest.fixture(scope="module", params=list(CASES))
def captured_case(request):
    model, batch, loss = build(request.param)
    inputs, targets = batch(4)
    captured = capture_model(model, inputs, targets=targets, loss=loss)
    return request.param, model, batch, loss, captured


def _train_both(case, bounds, size=3, steps=2):
    _, model, batch, loss, captured = case
    start = {key: value.clone() for key, value in model.state_dict().items()}
    reference = copy.deepcopy(model)
    batches, seeds = list(_slices(batch, 2, size)), [5, 6]
    pipeline = Pipeline(captured, bounds, size)
    for _ in range(steps):
        expected = serial(reference, loss, batches, seeds)
        assert pipeline.step(batches, seeds) == pytest.approx(expected, rel=1e-12)
    try:
        worst = 0.0
        for key, parameter in reference.named_parameters():
            mine = model.get_parameter(key)
            assert (mine.grad is None) == (parameter.grad is None), key
            if parameter.grad is not None:
                worst = max(worst, float((mine.grad - parameter.grad).abs().max()))
        for key, buffer in reference.named_buffers():
            worst = max(worst, float((model.get_buffer(key).double() - buffer.double()).abs().max()))
        return worst
    finally:
        model.zero_grad()
        with torch.no_grad():
            for key, value in model.state_dict(keep_vars=True).items():
                value.copy_(start[key])


@pytest.mark.parametrize("stages", [2, *left_to_ci(1, 4)])
@pytest.mark.matrix
def test_stages_train_as_the_model(captured_case, stages):
    layers = len(captured_case[4].graph.layers)
    assert layers >= 4, "every model must be cuttable into four stages"
    assert _train_both(captured_case, even_bounds(layers, stages)) <= 1e-12


@pytest.mark.matrix
def test_every_legal_cut_is_right(captured_case):
    """Cut in two at each place that is called legal, whatever the layers are."""
    name, model, batch, loss, captured = captured_case
    graph = captured.graph
    edges = [0, *sorted(captured.legality.cuts), len(graph.ops)]
    pieces = [Layer(name=str(a), start=a, stop=b) for a, b in itertools.pairwise(edges)]
    fine = dataclasses.replace(captured, graph=dataclasses.replace(graph, layers=tuple(pieces)))
    bounds = [
        [(0, k), (k, len(pieces))]
        for k in range(1, len(pieces))
        # A stage must hold an op that is not computed again elsewhere.
        if not all(captured.legality.replicable[: edges[k]]) and not all(captured.legality.replicable[edges[k] :])
    ]
    assert len(bounds) >= 10
    case = (name, model, batch, loss, fine)
    assert max(_train_both(case, cut, size=2, steps=1) for cut in bounds) <= 1e-12
