"""Every family cut into stages trains as the model itself does: losses and gradients in float64, with dropout on."""

import copy

import pytest
import torch

from meshwright.capture import capture_model
from meshwright.zoo.source import call_forward
from tests.capture.pipeline import Pipeline, even_bounds

from .sources import TINY, rows, small

MICROBATCH_SIZE = 2
NUM_MICROBATCHES = 2


@pytest.fixture(scope="module", params=TINY)
def captured_source(request):
    source = small(request.param, batch_size=MICROBATCH_SIZE * NUM_MICROBATCHES)
    source.model.train()
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=request.param, verify=False
    )
    return source, captured


def microbatches(source):
    for index in range(NUM_MICROBATCHES):
        span = (index * MICROBATCH_SIZE, (index + 1) * MICROBATCH_SIZE)
        yield rows(source.inputs, *span), rows(source.targets, *span)


def train_serially(source):
    """The user's own loop on a copy: losses, gradients by name, buffers by name."""
    model, losses = copy.deepcopy(source.model), []
    for seed, (inputs, targets) in enumerate(microbatches(source)):
        torch.manual_seed(seed)
        loss = source.loss(call_forward(model, inputs), *targets)
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.item())
    return losses, {name: item.grad for name, item in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_train_as_the_model(captured_source, num_stages):
    source, captured = captured_source
    start = {name: item.clone() for name, item in source.model.named_buffers()}
    expected_losses, expected, buffers = train_serially(source)
    pipeline = Pipeline(captured, even_bounds(len(captured.graph.layers), num_stages), MICROBATCH_SIZE)
    losses = []
    try:
        for seed, (inputs, targets) in enumerate(microbatches(source)):
            torch.manual_seed(seed)
            loss, tape = pipeline.forward(inputs, targets)
            (loss / NUM_MICROBATCHES).backward()
            pipeline.backward(tape)
            losses.append(loss.item())
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, parameter in source.model.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None), name
            if parameter.grad is not None:
                assert parameter.grad.norm() > 0, name
                assert (parameter.grad - expected[name]).norm() <= 1e-9 * expected[name].norm(), name
        for name, buffer in source.model.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
    finally:
        source.model.zero_grad()
        for name, buffer in source.model.named_buffers():
            buffer.copy_(start[name])
