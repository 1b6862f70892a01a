"""Tracing each distinct block once gives what tracing all of them gives."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model, differentiate, flatten_batch, part
from meshwright.capture.describe import describe_trace
from meshwright.capture.export import trace_model
from meshwright.capture.layer_division import find_units
from meshwright.capture.repeats import find_repeats

from .models import Gpt, ResNet, build, images, labels, mean_square, numbers, token_loss, tokens


def describe(model, inputs, targets, loss, *, shorten):
    trace = trace_model(model, inputs, targets, loss, training=True, shorten=shorten)
    return trace, describe_trace(trace, "", find_units(model)).graph


class Stack(nn.Module):
    """Blocks with batch norm, called with an index-dependent scale and in an order of its own."""

    def __init__(self, layers=6, width=4, *, kinds=1):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh() if i % kinds == 0 else nn.ReLU())
            for i in range(layers)
        )

    def forward(self, x):
        for i in reversed(range(len(self.blocks))):
            x = x + self.blocks[i](x) * (i / len(self.blocks)) if i != 3 else x * 2 + self.blocks[i](x)
        return x


class Indexed(nn.Module):
    """Blocks that read their number for a cache only, as those of transformers, and compute a size of the batch."""

    class Block(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.linear, self.index = nn.Linear(4, 4), index
            self.act = partial(nn.functional.gelu, approximate="tanh")

        def forward(self, x, cache=None):
            places = torch.arange(2 * len(x), dtype=x.dtype)
            made = self.act(self.linear(x)).to(x.dtype) + places.mean()
            return made if cache is None else cache[self.index]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(i) for i in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


CASES = {
    "gpt": (lambda: Gpt(layers=6), tokens(3), tokens(3, 1), token_loss),
    "resnet": (lambda: ResNet(depth=6), images(3), labels(3, 5), nn.functional.cross_entropy),
    "stack": (Stack, numbers(3, 4), numbers(3, 4, 1), mean_square),
    "numbered": (Indexed, numbers(3, 4), numbers(3, 4, 1), mean_square),
    "two kinds": (lambda: Stack(8, kinds=2), numbers(3, 4), numbers(3, 4, 1), mean_square),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.matrix
def test_short_and_full_traces_are_equal(name):
    make, inputs, targets, loss = CASES[name]
    model = make().double().train()
    groups = find_repeats(model)
    assert groups, "the case must have something to repeat"
    short_trace, short = describe(model, inputs, targets, loss, shorten=True)
    full_trace, full = describe(model, inputs, targets, loss, shorten=False)
    assert short == full
    assert short.content_hash == full.content_hash
    assert str(short_trace.graph) == str(full_trace.graph)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.matrix
def test_each_kind_of_block_is_traced_twice(name, monkeypatch):
    make, inputs, targets, loss = CASES[name]
    model = make().double().train()
    ran = []
    for group in find_repeats(model):
        kind = type(next(iter(group.modules.values())))
        monkeypatch.setattr(kind, "forward", _recorded(kind.forward, group, ran))
    describe(model, inputs, targets, loss, shorten=True)
    groups = find_repeats(model)
    assert len(set(ran)) == len(ran) == 2 * len(groups)


def _recorded(original, group, ran):
    def forward(self, *args):
        if any(self is module for module in group.modules.values()):
            ran.append(id(self))
        return original(self, *args)

    return forward


def test_repeats_are_really_skipped(monkeypatch):
    ran = []
    model = Gpt(layers=6).double()
    original = type(model.h[0]).forward

    def forward(self, x):
        ran.append(1)
        return original(self, x)

    monkeypatch.setattr(type(model.h[0]), "forward", forward)
    describe(model, tokens(2), tokens(2), token_loss, shorten=True)
    assert len(ran) == 2


def test_repeated_blocks_compute_what_the_model_computes():
    make, inputs, targets, loss = CASES["gpt"]
    torch.manual_seed(1)
    model = make().double().train()
    captured = capture_model(model, inputs, targets=targets, loss=loss, verify=False)
    graph = captured.graph
    module = part(captured, graph.inputs, graph.outputs, batch_size=2)
    batch = (tokens(2, 5), tokens(2, 6))
    (found,) = module(*flatten_batch(captured, *batch))
    expected = loss(model(batch[0]), batch[1])
    assert found.item() == expected.item()
    gradients = zip(
        torch.autograd.grad(found, list(model.parameters())),
        torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    )
    assert all(torch.equal(one, two) for one, two in gradients)


class Leaky(nn.Module):
    """Blocks that read a value from outside, not handed to them."""

    class Block(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.shared = shared

        def forward(self, x):
            return torch.tanh(self.linear(x)) * self.shared["scale"]

    def __init__(self):
        super().__init__()
        self.shared = {}
        self.blocks = nn.ModuleList(self.Block(self.shared) for _ in range(5))

    def forward(self, x):
        scale = {"scale": x.mean()}
        self.shared.update(scale)
        for block in self.blocks:
            x = block(x)
        self.shared.clear()
        return x


class Numbered(nn.Module):
    """Blocks that differ by a plain attribute."""

    class Block(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.index = index

        def forward(self, x):
            return torch.tanh(self.linear(x)) * (self.index + 1)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(i) for i in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Shared(nn.Module):
    """One weight in all blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))
        for block in self.blocks:
            block[0].weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Counting(nn.Module):
    """Blocks that re-bind a buffer."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return torch.tanh(self.linear(x)) / self.calls

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(Numbered):
    """Blocks that hand their number to a function of torch."""

    class Block(Numbered.Block):
        def forward(self, x):
            return torch.mul(torch.tanh(self.linear(x)), self.index)


class Typed(Numbered):
    """Blocks that ask what kind of number theirs is."""

    class Block(Numbered.Block):
        def forward(self, x):
            return torch.tanh(self.linear(x)) * (2 if isinstance(self.index, int) else 1)


class Trying(Numbered):
    """Blocks that forgive whatever goes wrong with their number."""

    class Block(Numbered.Block):
        def forward(self, x):
            try:
                scale = {0: 1, 1: 1, 2: 5, 3: 6, 4: 7}[self.index]
            except Exception:
                scale = 9
            return torch.tanh(self.linear(x)) * scale


class Asked(Numbered):
    """A model that reads the numbers of its blocks."""

    class Block(Numbered.Block):
        def forward(self, x):
            return torch.tanh(self.linear(x))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + (3 if type(block.index) is int and block.index == 2 else 0)
        return x


class OneTanh(Numbered):
    """Blocks that have one activation in common, as a module of each."""

    class Block(Numbered.Block):
        def forward(self, x):
            return self.act(self.linear(x))

    def __init__(self):
        super().__init__()
        act = nn.Tanh()
        for block in self.blocks:
            block.act = act


@pytest.mark.parametrize("kind", [Leaky, Numbered, Scaled, Typed, Trying, Asked, OneTanh, Shared, Counting])
def test_what_cannot_be_repeated_is_traced_in_full(kind):
    torch.manual_seed(0)
    model = kind().double()
    # The check against the model itself (two steps) is the oracle.
    captured = capture_model(model, numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)
    _, full = describe(model, numbers(3, 4), numbers(3, 4, 1), mean_square, shorten=False)
    assert captured.graph.content_hash == full.content_hash


def test_a_class_is_as_before_after_its_numbers_were_watched():
    model = Indexed().double()
    before = dict(vars(Indexed.Block))
    describe(model, numbers(3, 4), numbers(3, 4, 1), mean_square, shorten=True)
    assert dict(vars(Indexed.Block)) == before
    assert [block.index for block in model.blocks] == list(range(6))


SCRIPT = """
import sys
from tests.capture.models import build
from meshwright.capture import capture_model
for case in ("two_outputs", "cond", "dropout"):
    model, batch, loss = build(case)
    inputs, targets = batch(3)
    junk = [object() for _ in range(int(sys.argv[1]))]
    print(capture_model(model, inputs, targets=targets, loss=loss, verify=False).graph.content_hash)
"""


@pytest.mark.long
def test_two_processes_capture_the_same_graph():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "77777", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, "1234"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    here = []
    for case in ("two_outputs", "cond", "dropout"):
        model, batch, loss = build(case)
        inputs, targets = batch(3)
        here.append(capture_model(model, inputs, targets=targets, loss=loss, verify=False).graph.content_hash)
    assert done.stdout.split() == here


class Trunk(nn.Module):
    """Blocks of which all but the first two run without gradients."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks[:2]:
            x = block(x)
        with torch.no_grad():
            y = x
            for block in self.blocks[2:]:
                y = block(y)
        return self.head(x + y)


class OneForAll(nn.Module):
    """The same block six times (ALBERT)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())] * 6)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [Trunk, OneForAll])
def test_blocks_under_no_grad_and_blocks_that_are_one(kind):
    torch.manual_seed(0)
    model = kind().double()
    captured = capture_model(model, numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)
    _, full = describe(model, numbers(3, 4), numbers(3, 4, 1), mean_square, shorten=False)
    assert captured.graph.content_hash == full.content_hash
    joint = differentiate(captured)
    assert joint.flops(5) == captured.graph.flops(5)
