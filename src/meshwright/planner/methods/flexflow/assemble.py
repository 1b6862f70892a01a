"""From layers, edges and weights, one by one, to the arrays of a SOAP problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.planner.methods.flexflow.arrays import Soap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.planner.methods.flexflow.arrays import Floats, Integers


class LayerTable(NamedTuple):
    """The k candidates of a layer: ``degrees`` (k, M), ``pass_ps`` (k, kinds, 2), ``update_ps`` (k, kinds), bytes."""

    degrees: Integers
    pass_ps: Integers
    update_ps: Integers
    held_bytes: Integers
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor from one layer to another; one entry per dim of it, as `arrays` describes them."""

    source: int
    target: int
    length: tuple[int, ...]
    made_by: tuple[int, ...]
    read_by: tuple[int, ...]
    window: tuple[tuple[int, int, int, int], ...]
    element_bytes: int
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Gradients of a layer that are summed together: bytes of all, and which SOAP dims split them."""

    layer: int
    num_bytes: int
    splits: tuple[bool, ...]


class SoapMachine(NamedTuple):
    """Devices and the links between them; see `arrays.Soap`."""

    kind: Integers
    limit_bytes: Integers
    latency_ps: Integers
    byte_ps: Floats
    hops: Integers
    num_links: int


def assemble(
    layers: Sequence[LayerTable],
    edges: Sequence[Edge],
    weights: Sequence[Weight],
    machine: SoapMachine,
    *,
    barrier: bool = False,
    penalty_ps_per_byte: int = 0,
) -> Soap:
    """The problem of these; edges go from earlier to later layers, weights are in the order of their layers."""
    num_layers, rank = len(layers), max([len(edge.length) for edge in edges], default=1)
    num_dims = layers[0].degrees.shape[1]
    degrees = np.concatenate([layer.degrees for layer in layers])
    parts = degrees.prod(axis=1)
    shift = int(parts.max() - 1).bit_length()
    # Part i of degrees (a, b, c) stands at (i // b // c % a, i // c % b, i % c).
    inner = np.cumprod(degrees[:, ::-1], axis=1)[:, ::-1] // degrees
    place = np.arange(1 << shift)[None, :, None] // inner[:, None] % degrees[:, None]

    def rows(values: Sequence[tuple[int, ...]], fill: int) -> Integers:
        table = np.full((len(values), rank), fill, np.int64)
        for row, items in zip(table, values, strict=True):
            row[: len(items)] = items
        return table

    windows = np.tile(np.array([1, 1, 0, 1], np.int64), (len(edges), rank, 1))
    for row, edge in zip(windows, edges, strict=True):
        row[: len(edge.window)] = edge.window
    source = np.array([edge.source for edge in edges], np.int64)
    target = np.array([edge.target for edge in edges], np.int64)
    in_offsets, in_edges = _by_layer(target, num_layers)
    out_offsets, out_edges = _by_layer(source, num_layers)
    weight_layer = np.array([weight.layer for weight in weights], np.int64)
    return Soap(
        candidates=np.cumsum([0, *(len(layer.degrees) for layer in layers)], dtype=np.int64),
        degrees=degrees,
        parts=parts,
        place=place,
        pass_ps=np.maximum(np.concatenate([layer.pass_ps for layer in layers]), 1),
        update_ps=np.concatenate([layer.update_ps for layer in layers]),
        held_bytes=np.concatenate([layer.held_bytes for layer in layers]),
        trains=np.array([layer.trains for layer in layers]),
        source=source,
        target=target,
        element_bytes=np.array([edge.element_bytes for edge in edges], np.int64),
        has_gradient=np.array([edge.has_gradient for edge in edges], np.bool_),
        made_by=rows([edge.made_by for edge in edges], -1),
        read_by=rows([edge.read_by for edge in edges], -1),
        length=rows([edge.length for edge in edges], 1),
        window=windows,
        in_offsets=in_offsets,
        in_edges=in_edges,
        out_offsets=out_offsets,
        out_edges=out_edges,
        weight_offsets=np.searchsorted(weight_layer, np.arange(num_layers + 1)).astype(np.int64),
        weight_layer=weight_layer,
        weight_bytes=np.array([weight.num_bytes for weight in weights], np.int64),
        splits_weight=np.array([weight.splits for weight in weights], np.bool_).reshape(-1, num_dims),
        kind=machine.kind,
        limit_bytes=machine.limit_bytes,
        latency_ps=machine.latency_ps,
        byte_ps=machine.byte_ps,
        hops=machine.hops,
        num_links=machine.num_links,
        shift=shift,
        barrier=barrier,
        penalty_ps_per_byte=penalty_ps_per_byte,
    )


def _by_layer(ends: Integers, num_layers: int) -> tuple[Integers, Integers]:
    """Offsets by layer, and the edges of each, ascending."""
    edges = np.argsort(ends, kind="stable").astype(np.int64)
    return np.searchsorted(ends[edges], np.arange(num_layers + 1)).astype(np.int64), edges
