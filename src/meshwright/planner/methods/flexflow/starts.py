"""Strategies that chains begin with: data parallelism, Krizhevsky's split, layers one after the other, and any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.planner.methods.flexflow.arrays import Integers
    from meshwright.planner.methods.flexflow.space import SoapSpace

# Candidates (n,) and devices (n, P).
StrategyArrays = tuple["Integers", "Integers"]


def data_parallel(space: SoapSpace, random: np.random.Generator | None = None) -> StrategyArrays:  # noqa: ARG001
    """Every layer in as many parts of the samples as it can be, on all devices."""
    return _by(space, lambda layer: _most(space, layer, "sample"))


def experts(space: SoapSpace, random: np.random.Generator | None = None) -> StrategyArrays:  # noqa: ARG001
    """Layers with more parameters than activations are split along those, others along samples (Krizhevsky 2014)."""

    def choose(layer: int) -> int:
        alone = space.soap.candidates[layer]
        own = slice(space.soap.weight_offsets[layer], space.soap.weight_offsets[layer + 1])
        is_heavy = 2 * space.soap.weight_bytes[own].sum() > space.soap.held_bytes[alone] / 2
        return _most(space, layer, "parameter" if is_heavy else "sample")

    return _by(space, choose)


def one_after_another(space: SoapSpace, random: np.random.Generator | None = None) -> StrategyArrays:  # noqa: ARG001
    """Whole layers on one device each, runs of about the same time on every device."""
    soap = space.soap
    alone = soap.candidates[:-1]
    spent = np.cumsum(soap.pass_ps[alone, soap.kind[0]].sum(axis=1))
    devices = np.zeros((len(alone), 1 << soap.shift), np.int64)
    devices[:, 0] = np.minimum(spent * len(soap.kind) // max(int(spent[-1]), 1), len(soap.kind) - 1)
    return alone.copy(), devices


def anything(space: SoapSpace, random: np.random.Generator) -> StrategyArrays:
    """A random candidate of every layer, on distinct random devices."""
    soap = space.soap
    candidates = random.integers(soap.candidates[:-1], soap.candidates[1:])
    devices = np.zeros((len(candidates), 1 << soap.shift), np.int64)
    for row in devices:
        drawn = random.permutation(len(soap.kind))[: len(row)]
        row[: len(drawn)] = drawn
    return candidates, devices


STARTS: dict[str, Callable[[SoapSpace, np.random.Generator], StrategyArrays]] = {
    "data parallel": data_parallel,
    "experts": experts,
    "one after another": one_after_another,
    "random": anything,
}


def _by(space: SoapSpace, choose: Callable[[int], int]) -> StrategyArrays:
    num_layers, num_devices = len(space.layers), len(space.soap.kind)
    devices = np.tile(np.arange(1 << space.soap.shift) % num_devices, (num_layers, 1)).astype(np.int64)
    return np.array([choose(layer) for layer in range(num_layers)], np.int64), devices


def _most(space: SoapSpace, layer: int, kind: str) -> int:
    """The candidate of a layer with the most parts along one kind of dim alone; the whole layer if it has none such."""
    soap = space.soap
    rows = range(soap.candidates[layer], soap.candidates[layer + 1])
    dims = [at for at, dim in enumerate(space.layers[layer].dims) if dim.kind == kind]
    along = [int(soap.degrees[row, dims].prod()) if dims else 1 for row in rows]
    best = max(count for row, count in zip(rows, along, strict=True) if count == soap.parts[row])
    return next(row for row, count in zip(rows, along, strict=True) if count == best == soap.parts[row])
