"""Models whose parts can run side by side: a branched CNN, torch.cond in a branch, two inputs to one encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.models import MODELS, Case


class Branch(nn.Module):
    """Convolution, batch norm and an activation in place, twice; then dropout."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, kernel, padding=kernel // 2) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.relu(norm(convolution(x)))
        return self.dropout(x)


class BranchedCNN(nn.Module):
    """A stem, three branches of other kernels that all read it, and a head; the first branch is added once more."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.branches = nn.ModuleList(Branch(width, kernel) for kernel in (1, 3, 5))
        self.head = nn.Linear(4 * width, 5)

    def forward(self, x):
        x = self.stem(x)
        made = [branch(x) for branch in self.branches]
        return self.head(torch.cat([*made, made[0] + x], dim=1).mean((2, 3)))


class CondBranch(nn.Module):
    """Two branches; one of them chooses by the data, with parameters in one of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.enter, self.inside = nn.Linear(5, width), nn.Linear(width, width)
        self.other = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width))
        self.leave = nn.Linear(width, 3)

    def forward(self, x):
        y = self.enter(x)
        y = torch.cond(y.sum() > 0, lambda v: self.inside(v).sin(), lambda v: v * 2.0, (y,))
        return self.leave(y * self.other(x))


class Twins(nn.Module):
    """Two inputs through one encoder, and outputs of two kinds."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, width))
        self.gate = nn.Linear(width, width)

    def forward(self, a, b):
        left, right = self.encoder(a), self.encoder(b)
        return left * self.gate(right).sigmoid(), (left - right).abs()


def _images(n):
    return (torch.randn(n, 3, 6, 6),), (torch.randint(5, (n,)),)


def _rows(n):
    return (torch.randn(n, 5),), (torch.randn(n, 3),)


def _pairs(n):
    return (torch.randn(n, 4), torch.randn(n, 4)), (torch.randn(n, 6),)


PLACED_MODELS = {
    "branched": lambda: Case(BranchedCNN(), F.cross_entropy, _images),
    "cond": lambda: Case(CondBranch(), F.mse_loss, _rows),
    "twins": lambda: Case(Twins(), lambda o, y: F.mse_loss(o[0], y) + o[1].mean(), _pairs),
    **{name: MODELS[name] for name in ("gpt-tied", "u-net", "resnet", "two-outputs")},
}
