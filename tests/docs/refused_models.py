"""Models that cannot be captured faithfully, one construct each.

``meshwright capture tests/docs/refused_models.py:NAME`` says why; NAME is the class in lower case.

The table of refusals in docs/concepts/captured.md shows what each is told; the docstring of a model names its row.
"""

import random

import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint


class Body(nn.Module):
    """Four layers; what the refused models add their construct to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.calls = 0

    def body(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Branch(Body):
    """A Python branch on a tensor"""

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.body(x).mean()


class Item(Body):
    """A Python number read off a tensor (`.item()`, `int()`, `.tolist()`)"""

    def forward(self, x):
        scale = x.abs().max().item()
        return self.body(x / scale).mean()


class Mask(Body):
    """A selection by a mask: its size depends on data (`x[mask]`, `nonzero`, `unique`)"""

    def forward(self, x):
        kept = x[x[:, 0] > 0]
        return self.body(kept).mean()


class LayerDrop(Body):
    """Layers left out at random by a Python branch"""

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x.mean()


class WhileLoop(Body):
    """`while_loop` and other operators with subgraphs, except `torch.cond`"""

    def forward(self, x):
        start = torch.zeros((), dtype=torch.int64)
        _, x = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), (start, self.body(x)))
        return x.mean()


class Square(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class CustomFunction(Body):
    """A custom `autograd.Function`"""

    def forward(self, x):
        return Square.apply(self.body(x)).mean()


@torch.library.custom_op("refused::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    """An operator without a fake implementation."""
    return 2 * x


@torch.library.custom_op("refused::forward_only", mutates_args=())
def forward_only(x: torch.Tensor) -> torch.Tensor:
    """An operator without a gradient."""
    return 2 * x


forward_only.register_fake(torch.empty_like)


class PlainOperator(Body):
    """A C++ or custom operator without `register_fake`"""

    def forward(self, x):
        return plain(self.body(x)).mean()


class ForwardOperator(Body):
    """A C++ or custom operator without `register_autograd`"""

    def forward(self, x):
        return forward_only(self.body(x)).mean()


class ReentrantCheckpoint(Body):
    """`checkpoint(..., use_reentrant=True)`"""

    def forward(self, x):
        x = self.layers[0](x)
        return checkpoint(self.body, x, use_reentrant=True).mean()


class TensorHook(Body):
    """A hook on a tensor, registered in forward"""

    def forward(self, x):
        y = self.body(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y.mean()


class BackwardHook(Body):
    """A backward hook of a module"""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_full_backward_hook(lambda *_: None)

    def forward(self, x):
        return self.body(x).mean()


class Autocast(Body):
    """`torch.autocast` entered in forward"""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.body(x)
        return y.float().mean()


class Counter(Body):
    """A Python attribute that forward changes"""

    def forward(self, x):
        self.calls += 1
        return self.calls * self.body(x).mean()


class WrittenParameter(Body):
    """A write to a parameter in place"""

    def forward(self, x):
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
        return self.body(x).mean()


class Numpy(Body):
    """NumPy in forward"""

    def forward(self, x):
        return self.body(torch.from_numpy(x.numpy())).mean()


class Compiled(Body):
    """A module compiled by `torch.compile`"""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = torch.compile(self.layers[0])

    def forward(self, x):
        return self.body(x).mean()


class PythonRandom(Body):
    """Python's own random numbers, or a global that changes (found only with weights: by `run` and `capture_model`)"""

    def forward(self, x):
        return random.random() * self.body(x).mean()


class TensorData(Body):
    """The values of `tensor.data`"""

    def forward(self, x):
        y = self.body(x)
        return (y * y.data).mean()


class SparseEmbedding(Body):
    """`nn.Embedding(..., sparse=True)`"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8, sparse=True)

    def forward(self, x):
        return self.body(self.embedding(x.argmax(1) % 4)).mean()


class Frozen(Body):
    """Training where all parameters are frozen"""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x):
        return self.body(x).mean()


REFUSED = (
    Branch,
    Item,
    Mask,
    LayerDrop,
    WhileLoop,
    CustomFunction,
    PlainOperator,
    ForwardOperator,
    ReentrantCheckpoint,
    TensorHook,
    BackwardHook,
    Autocast,
    Counter,
    WrittenParameter,
    Numpy,
    Compiled,
    PythonRandom,
    TensorData,
    SparseEmbedding,
    Frozen,
)


def _maker(kind):
    return lambda: (kind(), (torch.randn(4, 8),))


# Functions by the models' names in lower case, as references name them.
globals().update({kind.__name__.lower(): _maker(kind) for kind in REFUSED})
