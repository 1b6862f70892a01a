"""Backwards in two parts: the same values, no parameter's gradient in the first, and nothing computed twice."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture import capture_model, part
from meshwright.runtime.stage_module import SplitPart, stage_feeds, stage_fetches
from meshwright.spec import slice_graph
from tests.runtime.models import MODELS, Case


class InPlace(nn.Module):
    """Parameters in ops that write their input, and one that leaves the stage as it is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.rand(4) + 1)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x):
        hidden = self.first(x)
        hidden.add_(self.shift).mul_(self.scale)
        twice = hidden * self.frozen
        return self.second(hidden.relu_() + twice), self.scale


def make_in_place():
    def loss(outputs, targets):
        return ((outputs[0] - targets) ** 2).mean() + outputs[1].sum()

    return Case(InPlace(), loss, lambda count: ((torch.randn(count, 4),), (torch.randn(count, 4),)))


CASES = {**MODELS, "in-place": make_in_place}


@pytest.fixture(params=CASES)
def stages(request):
    """Parts of a model in one stage and in two, with values to feed."""
    torch.manual_seed(5)
    case = CASES[request.param]()
    case.model.double().train()
    inputs, targets = case.make_batch(4)
    inputs, targets = (torch.utils._pytree.tree_map(as_double, item) for item in (inputs, targets))
    captured = capture_model(case.model, inputs, targets=targets, loss=case.loss, verify=False)
    count = len(captured.graph.layers)
    found = []
    for bounds in (((0, count),), ((0, count // 2), (count // 2, count)) if count > 1 else ()):
        for stage in slice_graph(captured.graph, bounds) if bounds else ():
            feeds = part(captured, captured.graph.inputs, stage_feeds(stage), batch_size=4)
            with torch.no_grad():
                values = [value.clone() for value in feeds(*tree_leaves(inputs), *tree_leaves(targets))]
            found.append(
                (part(captured, stage_feeds(stage), stage_fetches(stage), batch_size=4, ops=stage.ops), values)
            )
    return case.model, found


def as_double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def run(function, values, buffers):
    """Leaves, outputs, and those of them that are differentiated with the gradients that arrive."""
    for buffer, value in buffers:
        buffer.copy_(value)
    torch.manual_seed(1)
    leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in values]
    outputs = function(*leaves)
    torch.manual_seed(8)
    wanted = [value for value in outputs if value.requires_grad]
    return leaves, outputs, wanted, [torch.randn_like(value) for value in wanted]


@pytest.mark.matrix
def test_both_parts_are_one_backward(stages):
    model, parts = stages
    for module, values in parts:
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        leaves, outputs, wanted, seeds = run(module, values, buffers)
        with FlopCounterMode(display=False) as whole:
            torch.autograd.backward(wanted, seeds)
        expected = {name: parameter.grad for name, parameter in module.named_parameters()}
        after = [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()

        split = SplitPart(module)
        own_leaves, own_outputs, wanted, seeds = run(split, values, buffers)
        notes = split.notes
        with FlopCounterMode(display=False) as first:
            torch.autograd.backward(wanted, seeds)
        assert all(parameter.grad is None for parameter in module.parameters())
        for leaf, own in zip(leaves, own_leaves, strict=True):
            assert (leaf.grad is None) == (own.grad is None)
            assert leaf.grad is None or torch.equal(leaf.grad, own.grad)
        with FlopCounterMode(display=False) as second:
            split.finish(notes)
        assert first.get_total_flops() + second.get_total_flops() == whole.get_total_flops()
        assert all(torch.equal(one, other) for one, other in zip(outputs, own_outputs, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(after, model.buffers(), strict=True))
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-14)
        model.zero_grad()


@pytest.mark.matrix
def test_microbatches_may_be_finished_in_any_order(stages):
    model, parts = stages
    module, values = parts[0]
    split = SplitPart(module)
    kept = []
    for factor in (1.0, 2.0):
        scaled = [value * factor if value.is_floating_point() else value for value in values]
        *_, wanted, seeds = run(split, scaled, [])
        kept.append((split.notes, wanted, seeds))
    for _, wanted, seeds in kept:
        torch.autograd.backward(wanted, seeds)
    found = []
    for notes, *_ in reversed(kept):
        split.finish(notes)
        found.append({name: parameter.grad for name, parameter in module.named_parameters()})
        model.zero_grad()
    for place, factor in enumerate((2.0, 1.0)):
        scaled = [value * factor if value.is_floating_point() else value for value in values]
        *_, wanted, seeds = run(module, scaled, [])
        torch.autograd.backward(wanted, seeds)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[place][name], parameter.grad, rtol=1e-12, atol=1e-14)
        model.zero_grad()
