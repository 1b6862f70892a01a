"""Models for runs that end in odd ways."""

import torch
from torch import nn


class Partly(nn.Module):
    """A parameter without dims, and one that nothing reads."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale, self.never = nn.Parameter(torch.tensor(0.5)), nn.Linear(3, 3)

    def forward(self, x):
        return self.leave(self.scale * torch.tanh(self.enter(x)))


def partly():
    torch.manual_seed(0)
    return Partly(), (torch.randn(4, 8), torch.tensor([0, 1, 2, 3])), nn.functional.cross_entropy
