"""The input of PipeDream's planner: a graph of layers with seconds and bytes, of one minibatch on one machine.

A profile comes from a file of PipeDream's profiler (``graph.txt``) or from a captured graph and a cost model. In a
file, inputs, whose time is that of loading data, and unread results of ``__getitem__`` are skipped, as in PipeDream's
optimizer (`optimizer_graph_hierarchical.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.records.importing.pipedream import read_edges, read_layers
from meshwright.records.text_files import read_unpacked
from meshwright.spec import DeviceKind, DocumentError, Graph, PlanError, slice_graph

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Layers in an order in which each follows what it reads; all arrays have shape (layers,).

    ``seconds`` are forward and backward of one minibatch, ``activation_bytes`` the output of a layer for others.
    ``reads`` has, for each layer, the layers whose output it reads.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    seconds: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    reads: tuple[tuple[int, ...], ...]

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the layers that read its output."""
        found: list[list[int]] = [[] for _ in self.names]
        for layer, sources in enumerate(self.reads):
            for source in sources:
                found[source].append(layer)
        return tuple(map(tuple, found))


def load_profile(path: Path | str) -> Profile:
    """Read a file of PipeDream's profiler, compressed or not. Raises DocumentError for any other file."""
    path = Path(path)
    try:
        text = read_unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: not a PipeDream profile, which is text. Check the file.") from None
    return parse_profile(text, source=path.name)


def parse_profile(text: str, *, source: str) -> Profile:
    """Return the profile that a text of PipeDream's profiler describes.

    Raises DocumentError for any other text, PlanError if layers read each other in a cycle.
    """
    lines = {layer.name: layer for layer in read_layers(text, source=source)}
    reads: dict[str, list[str]] = {name: [] for name in lines}
    for writer, reader in read_edges(text, source=source):
        if unknown := {writer, reader} - lines.keys():
            raise DocumentError(
                f"{source}: an edge names {min(unknown)!r}, which is not one of its layers. Check the file."
            )
        reads[reader].append(writer)
    for name in [name for name, layer in lines.items() if layer.is_input and not reads[name]]:
        _remove(name, reads)
    read = {writer for writers in reads.values() for writer in writers}
    for name in [name for name in reads if name not in read and lines[name].what.startswith("__getitem__")]:
        _remove(name, reads)
    if not reads:
        raise DocumentError(f"{source}: it has only input layers; expected at least one other layer. Check the file.")
    order = _sorted(reads)
    kept = [lines[name] for name in order]
    return Profile(
        names=tuple(order),
        descriptions=tuple(layer.what for layer in kept),
        seconds=np.array([(layer.forward_ms + layer.backward_ms) / 1e3 for layer in kept]),
        activation_bytes=np.array([layer.activation_bytes for layer in kept]),
        parameter_bytes=np.array([layer.parameter_bytes for layer in kept]),
        reads=_numbered(order, reads),
    )


def make_profile(graph: Graph, batch_size: int, cost: CostModel, kind: DeviceKind) -> Profile:
    """Return the profile of a captured graph for minibatches of ``batch_size`` on one device kind.

    Ops that every stage computes itself (`Op.replicable`) belong to no layer, a tied parameter to the first layer that
    reads it; a layer without its own ops is chained between its neighbours. Raises GraphError for a batch size that the
    graph excludes.
    """
    graph.check_batch_size(batch_size)
    each = _op_seconds(graph, batch_size, cost, kind)
    slices = slice_graph(graph, [(layer, layer + 1) for layer in range(len(graph.layers))])
    own = [[op for op in layer.ops if not graph.ops[op].replicable] for layer in slices]
    width = cost.numbers.value_bytes
    reads: list[tuple[int, ...]] = []
    activations, parameters = np.zeros((2, len(slices)))
    seen: set[int] = set()
    for index, layer in enumerate(slices):
        writers = {channel.source for channel in layer.incoming if channel.tensors}
        if index and not (own[index] and own[index - 1]):
            writers.add(index - 1)
        reads.append(tuple(sorted(writers)))
        leaving = {tensor for channel in layer.outgoing for tensor in channel.tensors}
        activations[index] = sum(graph.tensors[i].num_bytes(batch_size, width) for i in leaving)
        fresh = {i for i in layer.parameters if graph.tensors[i].requires_grad} - seen
        parameters[index] = sum(graph.tensors[i].num_bytes(0, width) for i in fresh)
        seen |= fresh
    names = tuple(layer.name for layer in graph.layers)
    return Profile(
        names=names,
        descriptions=names,
        seconds=np.array([each[ops].sum() for ops in own]),
        activation_bytes=activations,
        parameter_bytes=parameters,
        reads=tuple(reads),
    )


def _op_seconds(graph: Graph, batch_size: int, cost: CostModel, kind: DeviceKind) -> Floats:
    costs = cost.estimate_ops(graph, batch_size, kind)
    if graph.mode == "inference":
        return costs.forward_s
    return costs.forward_s + costs.backward_s + costs.accumulate_s


def _remove(name: str, reads: dict[str, list[str]]) -> None:
    del reads[name]
    for writers in reads.values():
        while name in writers:
            writers.remove(name)


def _sorted(reads: Mapping[str, Sequence[str]]) -> list[str]:
    # All are added first, so that of several sources the first of the file stays the first.
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(reads, ()))
    for name, writers in reads.items():
        sorter.add(name, *writers)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        raise PlanError(
            f"Layers of the profile read each other in a cycle ({' -> '.join(error.args[1][:8])}); expected a graph "
            "without cycles. Profile the model again."
        ) from None


def _numbered(order: Sequence[str], reads: Mapping[str, Iterable[str]]) -> tuple[tuple[int, ...], ...]:
    place = {name: index for index, name in enumerate(order)}
    return tuple(tuple(sorted({place[writer] for writer in reads[name]})) for name in order)
