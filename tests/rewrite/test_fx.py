"""Graphs in and out: what is read and written again computes what the model computes, whatever is in it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.capture import capture_model, flatten_batch, part
from meshwright.rewrite.fx import read_captured, write_graph
from meshwright.rewrite.terms import OPAQUE
from meshwright.zoo import load_model


def round_trip(model, inputs, *, training=False, loss=None, seed=0):
    """(terms, outputs of the graph that was read, outputs of the one that was written, both modules)."""
    mode = "training" if training else "inference"
    captured = capture_model(model, inputs, loss=loss, mode=mode, verify=False)
    source = read_captured(captured, inputs)
    tensors = flatten_batch(captured, inputs)
    graph = captured.graph
    size = tensors[0].shape[0]
    whole = part(captured, graph.inputs, graph.outputs, batch_size=size, ops=range(len(graph.ops)))
    again = write_graph(source.terms, source, effects=source.effects)
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(seed)
    wanted = whole(*tensors)
    changed = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    torch.manual_seed(seed)
    found = again(*tensors)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, changed[name], rtol=0, atol=0)
    for one, two in zip(wanted, found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    return source.terms, wanted, found


def opaque(terms):
    return [node.attribute("key") for node in terms.nodes if node.operator == OPAQUE]


OTHERS = ("ddpm-tiny", "dlrm-tiny", "gnmt-tiny", "llama-lora-tiny", "llama-tiny", "mixtral-tiny", "t5-tiny")


@pytest.mark.parametrize(
    "name",
    [
        *("bert-tiny", "gpt-tiny", "resnet-tiny", "unet-tiny", "vgg-tiny"),
        *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS),
    ],
)
def test_models_of_the_zoo_are_read_and_written(name):
    source = load_model(name)
    with torch.no_grad():
        round_trip(source.model.eval(), source.inputs)


class Whole(nn.Module):
    """Operators of all kinds, with other shapes and constants than usual."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.deep, self.line = nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2), nn.Conv1d(8, 6, 3)
        self.group, self.layer = nn.GroupNorm(2, 8), nn.LayerNorm(6)
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 5, bias=False)

    def forward(self, x, ids):
        x = F.relu6(self.norm(self.conv(x)))
        x = self.group(F.silu(self.deep(x)))
        y = self.line(x.flatten(2)).transpose(1, 2)
        y = self.layer(F.gelu(y, approximate="tanh") * 0.5 - 1).clamp(-1, 2)
        parts = y.split([3, y.shape[1] - 3], dim=1)
        z = torch.cat([parts[0], F.pad(parts[1], (0, 0, 1, 0))], dim=1) + self.embed(ids)[:, None]
        weights = torch.softmax(z @ z.transpose(-1, -2) / 3.0, -1).masked_fill(z[:, :, :1] > 2, 0.5)
        z = (weights @ z).mean(1) + z.amax(1) - (z**2).sum(1, keepdim=True).squeeze(1)
        return self.head(z.unflatten(1, (2, 3)).flip(2).flatten(1)), torch.where(z > 0, z, z.exp()).unbind(0)[1]


def test_operators_of_all_kinds_are_terms():
    terms, *_ = round_trip(Whole().eval(), (torch.randn(2, 3, 8, 8), torch.randint(11, (2,))))
    found = {node.operator for node in terms.nodes}
    assert {"conv1d", "conv2d", "batch_norm", "group_norm", "layer_norm", "gelu_tanh", "clamp", "softmax"} <= found
    assert {"concat", "slice", "pad", "embedding", "reverse", "where", "square", "amax", "mean", "sum"} <= found


class InPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        y.relu_()
        y += x
        z = y[:, 1:]
        z.mul_(3)  # changes y, too
        return y.sum(1) + z.mean(1)


def test_writes_that_nobody_else_sees_are_values_and_all_others_keep_their_order():
    terms, *_ = round_trip(InPlace(), (torch.randn(4, 5),))
    # The view is written, and what it is a view of is read again.
    assert any(key.startswith("mul") for key in opaque(terms))
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.SiLU(inplace=True))
    assert not opaque(round_trip(model, (torch.randn(4, 5),))[0])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        self.seen += 1
        return self.norm(x) * self.seen


def test_buffers_are_written_in_training_as_before():
    model = Counting().train()
    terms, *_ = round_trip(model, (torch.randn(6, 5),), training=True, loss=lambda y: y.square().mean())
    assert opaque(terms)


def test_random_numbers_are_drawn_in_the_same_order():
    class Noisy(nn.Module):
        def forward(self, x):
            first = F.dropout(x, 0.5, self.training)
            return first + torch.rand_like(x) + F.dropout(x.tanh(), 0.2, self.training)

    terms, wanted, found = round_trip(
        Noisy().train(), (torch.randn(6, 5),), training=True, loss=lambda y: y.square().mean()
    )
    assert len(opaque(terms)) == 3
    assert torch.equal(wanted[0], found[0])
    assert not opaque(round_trip(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)).eval(), (torch.randn(6, 5),))[0])


def test_branches_are_carried_through():
    class Choosing(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y.relu() + 1, lambda y: y.tanh() - 1, (x,)) * 2

    for inputs in (torch.ones(3, 4), -torch.ones(3, 4)):
        terms, *_ = round_trip(Choosing(), (inputs,))
        assert opaque(terms)


def test_gradients_are_those_of_the_model():
    model = Whole().train()
    inputs = (torch.randn(2, 3, 8, 8), torch.randint(11, (2,)))
    captured = capture_model(
        model, inputs, loss=lambda y: y[0].square().sum() + y[1].sum(), mode="training", verify=False
    )
    source = read_captured(captured, inputs)
    again = write_graph(source.terms, source, effects=source.effects)
    model.zero_grad()
    outputs = model(*inputs)
    (outputs[0].square().sum() + outputs[1].sum()).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    again(*flatten_batch(captured, inputs))[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-6)


def test_keys_are_turned_by_themselves():
    # One transpose for both breaks a pattern of torch's compiler.
    class Scores(nn.Module):
        def forward(self, q, k):
            return q @ k.permute(0, 2, 3, 1)

    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 3, 5)
    model = Scores()
    source = read_captured(capture_model(model, (q, k), mode="inference", verify=False), (q, k))
    graph = write_graph(source.terms, source)
    torch.testing.assert_close(graph(q, k)[0], model(q, k))
    orders = [node.args[1] for node in graph.graph.nodes if node.target is torch.ops.aten.permute.default]
    assert orders == [[0, 2, 1, 3], [0, 1, 3, 2]]
