"""Dividing ops into layers, on plain data; and which models become which layers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.capture import capture_model
from meshwright.capture.layer_division import OpLine, divide, find_units, unit_of

from .models import Block, DoubleConv, build, mean_square, numbers


def line(module, *, parameters=False, replicable=False, kind="op", work=1):
    return OpLine(module=module, kind=kind, has_parameters=parameters, replicable=replicable, work=work)


def names(ranges):
    return [(item.name, item.start, item.stop) for item in ranges]


def test_blocks_and_what_stands_around_them():
    lines = [
        line("wte", parameters=True, kind="aten.embedding.default"),
        line(""),
        line("h.0.fc", parameters=True),
        line("h.0"),
        line("h.1.fc", parameters=True),
        line("h.1"),
        line(""),
        line("h.2.fc", parameters=True),
        line("norm", parameters=True),
        line("head", parameters=True),
        line("loss"),
    ]
    units = {"wte": False, "h.0": True, "h.1": True, "h.2": True, "norm": False, "head": False}
    even = [1] * 12
    every = frozenset(range(1, 11))
    expected = [("embedding", 0, 2), ("h.0", 2, 4), ("h.1", 4, 7), ("h.2", 7, 8), ("head", 8, 11)]
    assert names(divide(lines, every, even, units)) == expected
    # Glue goes where the fewest bytes cross: here the op at 1 belongs to the block behind it.
    dear = [1, 1, 9, *even[3:]]
    assert names(divide(lines, every, dear, units))[:2] == [("embedding", 0, 1), ("h.0", 1, 4)]
    # A boundary that is no legal cut merges its layers.
    merged = divide(lines, every - {4}, even, units)
    assert ("h.0..h.1", 2, 7) in names(merged)


def test_a_model_without_parameters_and_its_loss_are_one_layer():
    lines = [line("", parameters=False), line("", parameters=False), line("loss", parameters=False)]
    (only,) = divide(lines, frozenset(), [0, 0, 0, 0], {})
    assert (only.start, only.stop) == (0, 3)


@given(st.data())
def test_layers_cover_all_ops_and_start_at_legal_cuts(data):
    count = data.draw(st.integers(1, 40))
    modules = ["", "a", "b.0", "b.1", "b.2.x", "c", "loss"]
    lines = [
        line(
            data.draw(st.sampled_from(modules)),
            parameters=data.draw(st.booleans()),
            replicable=data.draw(st.integers(0, 4)) == 0,
            work=data.draw(st.integers(0, 5)),
        )
        for _ in range(count)
    ]
    cuts = frozenset(data.draw(st.sets(st.integers(1, max(count - 1, 1))))) - {count}
    crossing = [data.draw(st.integers(0, 9)) for _ in range(count + 1)]
    units = {"a": False, "b.0": True, "b.1": True, "b.2": True, "c": False}
    ranges = divide(lines, cuts, crossing, units)
    assert ranges[0].start == 0
    assert ranges[-1].stop == count
    for one, two in itertools.pairwise(ranges):
        assert one.stop == two.start
        assert two.start in cuts
    assert len({item.name for item in ranges}) == len(ranges)
    for item in ranges:
        assert item.stop > item.start
        if len(ranges) > 1:
            assert not all(entry.replicable for entry in lines[item.start : item.stop])


def test_units_of_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3, 4)
            self.body = nn.Module()
            self.body.h = nn.ModuleList(Block(4, 2, 0.0) for _ in range(2))
            self.left = DoubleConv(1, 2)
            self.right = DoubleConv(2, 1)
            self.alone = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    units = find_units(Net())
    assert units == {
        "embed": False,
        "body.h.0": True,
        "body.h.1": True,
        "left": True,
        "right": True,
        "alone.0": True,
        "alone.1": True,
    }
    assert unit_of("body.h.1.mlp.0", units) == "body.h.1"
    assert unit_of("body", units) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("gpt", ["embedding", "h.0", "h.1", "h.2", "head"]),
        ("resnet", ["stem.0", "stem.1..stem.2", "layer1.0", "layer1.1", "layer1.2", "layer1.3", "head"]),
        ("two_outputs", ["stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),
        ("cond", ["stem", "after.0", "after.1", "after.2"]),
    ],
)
@pytest.mark.matrix
def test_layers_of_models(case, expected):
    model, batch, loss = build(case)
    inputs, targets = batch(2)
    graph = capture_model(model, inputs, targets=targets, loss=loss, verify=False).graph
    assert [layer.name for layer in graph.layers] == expected


class Pairs(nn.Module):
    """A loss over all pairs of the batch: its work grows with the square of the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        z = nn.functional.normalize(self.body(x))
        return nn.functional.cross_entropy(z @ z.t(), torch.arange(x.shape[0]))


def test_work_that_is_not_affine_in_the_batch_binds_the_batch_size():
    graph = capture_model(Pairs().double(), numbers(4, 4)).graph
    assert graph.batch_size == 4
    products = [op for op in graph.ops if op.kind == "aten.matmul.default"]
    assert [op.flops.at(4) for op in products] == [2 * 4 * 4 * 4]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x[:, None].expand(-1, 3, -1))[0])


def test_an_lstm_is_captured_and_estimated():
    graph = capture_model(Recurrent().double(), numbers(3, 4), loss=mean_square).graph
    (lstm,) = (op for op in graph.ops if op.kind == "aten.lstm.input")
    assert lstm.flops.at(5) == 2 * 5 * 3 * 2 * (4 * 16 + 4 * 16)
