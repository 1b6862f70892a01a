"""Graphs in and out where torch has its own mind: writes, layouts, dtypes, constants, gradients at corners."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.capture import capture_model, flatten_batch, part
from meshwright.rewrite.fx import read_captured, write_graph
from meshwright.rewrite.optimize import rewrite_model


class Of(nn.Module):
    """A function as a model; ``tensors`` are its buffers."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def both(model, inputs, calls=1):
    """Outputs of what was read and of what was written, called several times with the same batch and random seed."""
    captured = capture_model(
        model, inputs, mode="training" if model.training else "inference", verify=False, needs_loss=False
    )
    source = read_captured(captured, inputs)
    tensors = flatten_batch(captured, inputs)
    graph = captured.graph
    whole = part(captured, graph.inputs, graph.outputs, batch_size=tensors[0].shape[0], ops=range(len(graph.ops)))
    again = write_graph(source.terms, source, effects=source.effects)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    results = []
    for module in (whole, again):
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        given = [tensor.clone() for tensor in tensors]
        torch.manual_seed(0)
        made = [module(*given) for _ in range(calls)][-1]
        results.append((made, given, [buffer.clone() for buffer in model.buffers()]))
    return results


def assert_same(model, inputs, calls=1):
    (wanted, given, buffers), (found, taken, state) = both(model, inputs, calls)
    for one, two in zip((*wanted, *given, *buffers), (*found, *taken, *state), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-6, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(one), torch.signbit(two)) or not one.is_floating_point()


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
WHOLE = torch.arange(20).reshape(4, 5)


def written(change):
    def run(_, x):
        y = x.clone()
        change(y)
        return y, x * 2

    return run


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda _, x: x.clamp(min=0.0), X * 20),
        (lambda _, x: x.clamp(max=0.5), X * 20),
        (lambda _, x: (x * 1.0).clamp_(min=0.0), X * 20),
        (lambda _, x: F.hardtanh(x), X * 20),
        (written(lambda y: y.add_(1)), WHOLE),
        (written(lambda y: y.neg_()), WHOLE),
        (written(lambda y: y.clamp_(max=1)), X),
        (written(lambda y: y.add_(y, alpha=2)), X),
        (written(lambda y: y.mul_(y > 0)), X),
        (lambda _, x: ((x * 2).add_(x, alpha=2), x * 2), X),
        (lambda _, x: (torch.zeros(4, 5).add_(x, alpha=2), torch.zeros(4, 5) + x), X),
        (lambda _, x: x.t().contiguous().as_strided((3,), (1,)), X),
        (lambda _, x: torch.view_as_complex(x[:, :2].transpose(0, 1)[:, :2].contiguous()).abs(), X),
        (lambda _, x: torch.rand_like(x.t().contiguous()) + x.t(), X),
        (lambda _, x: torch.full((5,), 0.1).double() * x, X.double()),
        (lambda _, x: x > torch.full((5,), 0.1).double(), torch.full((4, 5), 0.1, dtype=torch.float64)),
        (lambda _, x: torch.full((5,), 0.3).bfloat16() * x, X.bfloat16()),
        (lambda _, x: x.double() * 1e300, X),
        (lambda _, x: x.half().sum(), torch.tensor([[6e4, 6e4], [-6e4, -6e4]])),
        (lambda _, x: x.sum().sum(dim=0) + x.sum().softmax(dim=0), X),
        (lambda _, x: (x.abs() / 0.0, x.abs() / -0.0), X),
        (lambda _, x: x.mean((0, 1)) + x.sum((0, 1)) + x.amax((0, 1)), X),
        (lambda _, x: x.reshape(4, 5, 1).mean((0, 2), keepdim=True), X),
    ],
)
def test_what_is_special_in_torch_stays(function, x):
    with torch.no_grad():
        assert_same(Of(function).eval(), (x,))


def test_buffers_and_constants_are_not_written_where_a_copy_was():
    def counted(model, x):
        place = model.place.clone()
        place.add_(1)
        constant = torch.tensor([1, 2, 3, 4, 5])
        constant.add_(1)
        return x * place * constant

    with torch.no_grad():
        assert_same(Of(counted, place=torch.arange(5)).eval(), (X,), calls=3)


def test_outputs_that_were_copies_are_copies():
    model = Of(lambda model, x: (x.clone(), model.held.clone(), x.clone().reshape(20), x), held=torch.ones(3)).eval()
    with torch.no_grad():
        _, (found, (x,), _) = both(model, (X,))
    places = [item.data_ptr() for item in found]
    assert places[3] == x.data_ptr()
    assert len(set(places)) == 4
    assert model.held.data_ptr() not in places


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: F.embedding(torch.tensor([0, 2, 1, 0]), x, padding_idx=0) * model.weight,
        lambda model, x: F.relu6((x - x) * model.weight),
        lambda model, x: F.hardtanh((x - x + 1) * model.weight),
        lambda model, x: ((x - x) * model.weight).amax((0, 1)),
        lambda model, x: F.dropout((x * model.weight).t().contiguous(), 0.5),
    ],
)
def test_gradients_at_corners_are_those_of_torch(function):
    model = Of(function).train()
    x = X.clone().requires_grad_()
    (wanted, given, _), (found, taken, _) = both(model, (x,))
    grads = []
    for results, inputs in ((wanted, given), (found, taken)):
        total = sum(result.sum() for result in results)
        grads.append(torch.autograd.grad(total, [model.weight, *inputs], retain_graph=True, allow_unused=True))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(two, one)


def test_whole_numbers_become_numbers_of_the_default_type():
    # As in embeddings of time steps: what is whole times a number is float32, and float64 where the check runs in that.
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, steps):
            angles = steps[:, None] * 0.1 * torch.arange(4)
            return self.linear(torch.sin(angles)).neg().neg()

    model, steps = Steps().eval(), torch.arange(5)
    found = rewrite_model(model, steps, measure=False, least_gain=-1.0)
    assert found.chosen.worst < 1e-12
    torch.testing.assert_close(found.module(steps), model(steps))
    assert torch.get_default_dtype() == torch.float32
