"""AccPar: every layer split over unequal halves of a cluster along one of three of its dims.

The model. A chain of layers y_l = x_l W_l; x_(l+1) = y_l has F bytes, its gradient E. A group of devices is halved
again and again; the halves take the shares a and 1 - a. A layer is split by

    I     batch              both hold W; gradients of W are partial sums     exchange  W
    II    input channels     each holds a part of W; y are partial sums       exchange  F behind the layer
    III   output channels    each holds a part of W; E are partial sums       exchange  E before the layer

and between two layers a half with share r receives, for what it has and what it needs (table 5 of the paper)

    from / to       I              II             III
    I               0              r(1-r)(F+E)    (1-r) F
    II              (1-r) E        (1-r) E        0
    III             r(1-r)(F+E)    0              (1-r) F

A half computes its share of every layer at the speed of all its devices. Halves wait for each other at every exchange:

    cost = Σ layers ( max over halves (r · seconds) + exchange / b )  +  Σ neighbours max over halves (received / b)

with b bytes per second between the halves. For one share a the best types are a dynamic program over the chain; a is
the best of a grid, which holds that of the halves' speeds, made finer around the best. Below, each half is split
in the same way, with its share of every layer: batch, input or output channels are r times as large. A group takes what
its halves exchange, and what the slower of them takes.

Source: Song et al., "AccPar" (HPCA 2020), sections 3 to 5; its baselines: data parallelism (all I), one weird trick
(Krizhevsky 2014: I for convolutions, III for products) and HyPar (Song et al., HPCA 2019: I or III by a dynamic
program), all with equal halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import PlanError, format_bytes, format_seconds

Floats = NDArray[np.float64]
PartitionType = Literal["I", "II", "III"]
TYPES: tuple[PartitionType, ...] = ("I", "II", "III")

# Shares in the first grid, and how often it is made finer around its best, each time by this factor.
NUM_SHARES = 255
NUM_REFINEMENTS = 3
_FINER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayer:
    """A layer: bytes of W, F before and behind it, E before and behind it; seconds of it all on each kind of device."""

    name: str
    weight_bytes: float
    input_bytes: float
    output_bytes: float
    input_gradient_bytes: float
    output_gradient_bytes: float
    seconds: tuple[float, ...]
    is_convolution: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A group of devices: a kind for each of one, or two halves with ``bytes_per_s`` between them."""

    kinds: tuple[int, ...]
    halves: tuple[Half, Half] | None = None
    bytes_per_s: float = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvingSplit:
    """How a group is halved: the share of the first half, a type for every layer, and how the halves are split.

    ``exchange_s`` is what the halves exchange, ``seconds`` all that the group takes.
    """

    share: float
    types: tuple[PartitionType, ...]
    exchange_s: float
    seconds: float
    halves: tuple[HalvingSplit | None, HalvingSplit | None]
    group: Half

    def explain(self, layers: Sequence[ChainLayer]) -> str:
        """For people: seconds, and share and types of every level."""
        lines = [f"{format_seconds(self.seconds)} per step, of which {format_seconds(self.exchange_s)} on top."]
        for depth, split in self.levels():
            first, second = (len(half.kinds) for half in split.group.halves or (split.group, split.group))
            counts = ", ".join(f"{split.types.count(kind)} of type {kind}" for kind in TYPES if kind in split.types)
            lines.append(
                f"{'  ' * depth}{first} + {second} devices: {split.share:.1%} to the first, {counts}; exchange "
                f"{format_seconds(split.exchange_s)}"
            )
        largest = max(range(len(layers)), key=lambda index: layers[index].weight_bytes)
        lines.append(
            f"The layer with most weights, {layers[largest].name} ({format_bytes(layers[largest].weight_bytes)}), is "
            f"of type {self.types[largest]}."
        )
        return "\n".join(lines)

    def levels(self, depth: int = 0) -> Iterator[tuple[int, HalvingSplit]]:
        """This split and those below it, with their depth."""
        yield depth, self
        for half in self.halves:
            if half is not None:
                yield from half.levels(depth + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Which types each layer may have, (L, 3) of bool, and which shares: all, or equal halves only."""

    types: NDArray[np.bool_]
    equal: bool = False


def solve_accpar(layers: Sequence[ChainLayer], group: Half, allowed: Allowed | None = None) -> HalvingSplit:
    """Split a chain over a group of at least two devices. Raises PlanError for fewer, or no layers."""
    if group.halves is None or not layers:
        raise PlanError(
            f"{len(layers)} layers were to be split over {len(group.kinds)} devices; expected at least one layer and "
            "two devices in halves."
        )
    table = _Sizes(
        weight=np.array([item.weight_bytes for item in layers]),
        before=np.array([(item.input_bytes, item.input_gradient_bytes) for item in layers]),
        behind=np.array([(item.output_bytes, item.output_gradient_bytes) for item in layers]),
        seconds=np.array([item.seconds for item in layers]),
    )
    return _split(table, group, allowed or Allowed(types=np.ones((len(layers), 3), np.bool_)))


def baselines(layers: Sequence[ChainLayer]) -> dict[str, Allowed]:
    """What the baselines of the paper allow."""

    def only(columns: Sequence[Sequence[int]]) -> Allowed:
        return Allowed(types=np.array(columns, np.bool_), equal=True)

    return {
        "data parallel": only([(1, 0, 0)] * len(layers)),
        "one weird trick": only([(1, 0, 0) if item.is_convolution else (0, 0, 1) for item in layers]),
        "HyPar": only([(1, 0, 1)] * len(layers)),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """Layers as a group sees them: W (L,), (F, E) before and behind (L, 2), seconds on each kind (L, kinds)."""

    weight: Floats
    before: Floats
    behind: Floats
    seconds: Floats

    def part(self, types: Sequence[PartitionType], share: float) -> _Sizes:
        """What a half with this share sees: batch, input or output channels times the share."""
        batch, inputs, outputs = (np.where(np.array(types) == kind, share, 1.0) for kind in TYPES)
        return _Sizes(
            weight=self.weight * inputs * outputs,
            before=self.before * (batch * inputs)[:, None],
            behind=self.behind * (batch * outputs)[:, None],
            seconds=self.seconds * share,
        )


def _split(sizes: _Sizes, group: Half, allowed: Allowed) -> HalvingSplit:
    assert group.halves is not None
    shares = np.arange(1, NUM_SHARES + 1) / (NUM_SHARES + 1)
    if allowed.equal:
        found = _best_types(sizes, group, np.array([0.5]), allowed)
    else:
        found = _best_types(sizes, group, np.append(shares, _share_of_speeds(sizes, group)), allowed)
        step = 1.0 / (NUM_SHARES + 1)
        for _ in range(NUM_REFINEMENTS):
            around = found[1] + step * np.arange(-_FINER, _FINER + 1) / _FINER
            found = min(found, _best_types(sizes, group, around[(around > 0) & (around < 1)], allowed))
            step /= _FINER
    _, share, types = found
    exchange_s = _exchanged(sizes, group, share, types)
    halves: list[HalvingSplit | None] = []
    seconds: list[float] = []
    for half, part in zip(group.halves, (share, 1 - share), strict=True):
        own = sizes.part(types, part)
        below = _split(own, half, allowed) if half.halves else None
        halves.append(below)
        seconds.append(below.seconds if below else float(own.seconds[:, half.kinds[0]].sum()))
    return HalvingSplit(
        share=share,
        types=types,
        exchange_s=exchange_s,
        seconds=exchange_s + max(seconds),
        halves=(halves[0], halves[1]),
        group=group,
    )


def _seconds_of(sizes: _Sizes, half: Half) -> Floats:
    """Seconds of each layer on all devices of a half together, shape (L,)."""
    counts = np.bincount(half.kinds, minlength=sizes.seconds.shape[1])
    with np.errstate(divide="ignore"):
        speeds: Floats = (counts / sizes.seconds).sum(axis=1)
    return np.asarray(1.0 / speeds, np.float64)


def _share_of_speeds(sizes: _Sizes, group: Half) -> float:
    """The share with which both halves compute as long."""
    assert group.halves is not None
    first, second = (float(_seconds_of(sizes, half).sum()) for half in group.halves)
    return second / (first + second) if first + second > 0 else 0.5


def layer_costs(sizes: _Sizes, group: Half, shares: Floats) -> tuple[Floats, Floats]:
    """Seconds of layers by share and type, (L, A, 3), and of neighbours by share and both types, (L - 1, A, 3, 3)."""
    assert group.halves is not None
    first, second = (_seconds_of(sizes, half)[:, None] for half in group.halves)
    computed = np.maximum(shares * first, (1 - shares) * second)
    exchanged = np.stack([sizes.weight, sizes.behind[:, 0], sizes.before[:, 1]], axis=-1) / group.bytes_per_s
    own = computed[:, :, None] + exchanged[:, None, :]
    forward, backward = sizes.before[1:, 0, None], sizes.behind[:-1, 1, None]
    both, other = shares * (1 - shares) * (forward + backward), np.maximum(shares, 1 - shares)
    nothing = np.zeros_like(both)
    rows = (
        (nothing, both, other * forward),
        (other * backward, other * backward, nothing),
        (both, nothing, other * forward),
    )
    between = np.stack([np.stack(row, axis=-1) for row in rows], axis=-2) / group.bytes_per_s
    return own, between


def _best_types(
    sizes: _Sizes, group: Half, shares: Floats, allowed: Allowed
) -> tuple[float, float, tuple[PartitionType, ...]]:
    """The best cost of some shares, its share and its types: a dynamic program over the chain, for all at once."""
    own, between = layer_costs(sizes, group, shares)
    own = np.where(allowed.types[:, None, :], own, np.inf)
    costs, chosen = own[0], []
    for layer in range(1, len(own)):
        through = costs[:, :, None] + between[layer - 1]
        chosen.append(through.argmin(axis=1))
        costs = through.min(axis=1) + own[layer]
    best = int(costs.min(axis=1).argmin())
    last = int(costs[best].argmin())
    cost, types = float(costs[best, last]), [last]
    for before in reversed(chosen):
        types.append(int(before[best, types[-1]]))
    return cost, float(shares[best]), tuple(TYPES[kind] for kind in reversed(types))


def _exchanged(sizes: _Sizes, group: Half, share: float, types: Sequence[PartitionType]) -> float:
    """Seconds of all exchanges between the halves."""
    own, between = layer_costs(sizes, group, np.array([share]))
    alone, _ = layer_costs(sizes, Half(kinds=group.kinds, halves=group.halves), np.array([share]))
    places = [TYPES.index(kind) for kind in types]
    each = sum(float(own[layer, 0, kind] - alone[layer, 0, kind]) for layer, kind in enumerate(places))
    return each + sum(float(between[layer, 0, a, b]) for layer, (a, b) in enumerate(pairwise(places)))
