"""The models whose training must not depend on the plan, with a function that makes global batches for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.zoo import load_model


@dataclass(frozen=True)
class Case:
    model: nn.Module
    loss: Callable[..., torch.Tensor]
    make_batch: Callable[[int], tuple[tuple[Any, ...], tuple[Any, ...]]]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(d, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        y = self.up(self.norm2(x))
        if self.dropout:
            x, y = F.dropout(x, self.dropout), F.dropout(y, self.dropout)
        return x + self.down(F.gelu(y))


class GPT(nn.Module):
    """A small GPT; ``tied``: its head is its embedding."""

    def __init__(
        self,
        depth: int = 4,
        width: int = 16,
        vocabulary: int = 23,
        length: int = 10,
        *,
        tied: bool = True,
        heads: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Three skips, each over the whole of what lies deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([ConvBlock(3, 4), ConvBlock(4, 6), ConvBlock(6, 8)])
        self.middle = ConvBlock(8, 8)
        self.ups = nn.ModuleList([ConvBlock(16, 6), ConvBlock(12, 4), ConvBlock(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([x, skips.pop()], dim=1))
        return self.out(x)


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.short = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if stride != 1 or i != o else None
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        short = x if self.short is None else self.short(x)
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += short
        return self.relu(y)


class ResNet(nn.Module):
    """Batch norm in every block, in-place additions and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1), Residual(8, 12, 2)])
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class TwoOutputs(nn.Module):
    """A trunk with a classifier and an early reconstruction, returned as a dict."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.enter = nn.Linear(7, width)
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.rebuild, self.classify = nn.Linear(width, 7), nn.Linear(width, 3)

    def forward(self, x):
        x = self.enter(x)
        for depth, layer in enumerate(self.trunk):
            x = layer(x)
            if depth == 0:
                rebuilt = self.rebuild(x)
        return {"classes": self.classify(x), "rebuilt": rebuilt}


class TwoTowers(nn.Module):
    """Two branches of convolutions that do not need each other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 4)
        self.left = nn.ModuleList([ConvBlock(4, 6), ConvBlock(6, 6)])
        self.right = nn.ModuleList([ConvBlock(4, 8), ConvBlock(8, 4)])
        self.head = nn.Linear(10, 5)

    def forward(self, x):
        x = self.stem(x)
        left = right = x
        for one in self.left:
            left = one(left)
        for one in self.right:
            right = one(right)
        return self.head(torch.cat([left, right], dim=1).mean((2, 3)))


def two_losses(outputs, labels, original):
    return F.cross_entropy(outputs["classes"], labels) + 0.5 * F.mse_loss(outputs["rebuilt"], original)


def _token_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _tokens(n):
    ids = torch.randint(23, (n, 11))
    return (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),)


def _vectors(n):
    x = torch.randn(n, 7)
    return (x,), (torch.randint(3, (n,)), x)


def _stranger():
    source = load_model(f"{Path(__file__).parent / 'stranger.py'}:build")
    return Case(source.model, source.loss, lambda n: ((torch.randn(n, 6),), (torch.randint(3, (n,)),)))


MODELS: dict[str, Callable[[], Case]] = {
    "gpt-tied": lambda: Case(GPT(), _token_loss, _tokens),
    "gpt": lambda: Case(GPT(tied=False), _token_loss, _tokens),
    "u-net": lambda: Case(
        UNet(),
        F.mse_loss,
        lambda n: ((torch.randn(n, 3, 8, 8),), (torch.randn(n, 2, 8, 8),)),
    ),
    "resnet": lambda: Case(
        ResNet(), F.cross_entropy, lambda n: ((torch.randn(n, 3, 8, 8),), (torch.randint(5, (n,)),))
    ),
    "two-towers": lambda: Case(
        TwoTowers(), F.cross_entropy, lambda n: ((torch.randn(n, 3, 8, 8),), (torch.randint(5, (n,)),))
    ),
    "two-outputs": lambda: Case(TwoOutputs(), two_losses, _vectors),
    "stranger-dropout": _stranger,
}
