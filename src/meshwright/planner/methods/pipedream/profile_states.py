"""The input of PipeDream's planner: a graph of layers with seconds and bytes (`Profile`), and its states.

Values are for one minibatch on one machine. A profile comes from a file of PipeDream's profiler (``graph.txt``) or from
a captured graph and a cost model. Of a file, input layers (whose time is that of loading data) and ``__getitem__``
layers that no layer reads are skipped, as in PipeDream's optimizer (`optimizer_graph_hierarchical.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.records.importing.read_records import read_edges, read_layers
from meshwright.records.text_files import read_unpacked
from meshwright.spec import DeviceKind, DocumentError, Graph, PlanError, slice_graph
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """The layers of a model with their costs for one minibatch; each layer comes after those that it reads.

    Arrays have shape (layers,): ``seconds`` of forward and backward, ``activation_bytes`` of the output that other
    layers read, ``parameter_bytes``. ``reads`` has, for each layer, the indexes of the layers whose output it reads.
    """

    names: tuple[str, ...]
    seconds: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    reads: tuple[tuple[int, ...], ...]

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the indexes of the layers that read its output."""
        found: list[list[int]] = [[] for _ in self.names]
        for layer, sources in enumerate(self.reads):
            for source in sources:
                found[source].append(layer)
        return tuple(map(tuple, found))


def load_profile(path: Path | str) -> Profile:
    """Read a profile from a file of PipeDream's profiler, compressed or not.

    Raises DocumentError if the file has another form, PlanError if layers read each other in a cycle.
    """
    path = Path(path)
    try:
        text = read_unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"{path} is not text; expected a PipeDream profile (graph.txt). Check the file.") from None
    return parse_profile(text, source=path.name)


def parse_profile(text: str, *, source: str) -> Profile:
    """Return the profile described by a text of PipeDream's profiler; ``source`` names it in messages.

    Raises DocumentError if the text has another form, PlanError if layers read each other in a cycle.
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
        raise DocumentError(f"{source} has only input layers; expected at least one other layer. Check the file.")
    order = _sorted(reads)
    kept = [lines[name] for name in order]
    return Profile(
        names=tuple(order),
        seconds=np.array([(layer.forward_ms + layer.backward_ms) / 1e3 for layer in kept]),
        activation_bytes=np.array([layer.activation_bytes for layer in kept]),
        parameter_bytes=np.array([layer.parameter_bytes for layer in kept]),
        reads=_numbered(order, reads),
    )


def make_profile(graph: Graph, batch_size: int, cost: CostModel, kind: DeviceKind) -> Profile:
    """Return the profile of a captured graph for minibatches of ``batch_size`` on one device kind.

    Ops that every stage computes for itself (`Op.replicable`) count for no layer. A tied parameter counts for the first
    layer that reads it. A layer without its own ops is assumed to read the layer before it, and the next layer to read
    it. Raises GraphError for a batch size that the graph does not support.
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
        seconds=np.array([each[ops].sum() for ops in own]),
        activation_bytes=activations,
        parameter_bytes=parameters,
        reads=tuple(reads),
    )


def _op_seconds(graph: Graph, batch_size: int, cost: CostModel, kind: DeviceKind) -> Floats:
    return cost.estimate_ops(graph, batch_size, kind).microbatch_s(trains=graph.mode == "training")


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


Words = NDArray[np.uint64]

# The number of rows of a table of members that are summed at a time.
_ROWS = 4096


# States are where a graph of layers can be cut; PipeDream names them by their antichains. A **state** is a set of
# layers that contains, with each layer, everything that it reads. Its frontier is the set of its layers that no other
# of its layers reads, an antichain; a stage is the difference of two nested states. Starting with the first source
# alone, the next states of D are D with one more layer that reads one of D, and everything that this layer needs. A
# state is inside another one exactly if such steps lead from it to the other.
#
#     T, A, P     seconds, activation and parameter bytes of a state's layers; of a stage, differences of two states
#     a           bytes on the frontier: outputs of the antichain, and of each layer p such that some layer of the
#                 antichain behind p is not behind all readers of p (PipeDream's "augmented" antichain)
#
# A chain of n layers has n states, branches multiply: n parallel layers have 2^n. If there are too many, states are
# taken from orders of the layers instead (`states_along`), and the result is only a good plan.
#
# Source: Narayanan et al., "PipeDream" (SOSP 2019); `graph/graph.py` of its repository (`antichain_dag`).
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileStates:
    """States of a profile: sets of layers that contain, with each layer, all layers that it reads.

    They ascend by ``seconds``, so every state comes after its subsets. ``members`` (states, words): bit l % 64 of word
    l // 64 is 1 if layer l belongs to the state. Shape (states,), summed over the layers of a state: ``seconds`` (T,
    rounded to picoseconds), ``activation_bytes`` (A), ``parameter_bytes`` (P); ``frontier_bytes`` (a) are those sent
    over a cut at the end of the state. ``complete``: all states of the profile are included.
    """

    members: Words
    seconds: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    frontier_bytes: Floats
    complete: bool

    def __len__(self) -> int:
        return len(self.members)

    def layers(self, state: int) -> set[int]:
        """Return the indexes of the layers of a state; an empty set for state -1 (before the first layer)."""
        return set() if state < 0 else set(np.flatnonzero(_bits(self.members[state : state + 1])[0]).tolist())


class _Sets:
    """Layers as bits of integers: each with everything that it needs, and its readers."""

    def __init__(self, profile: Profile) -> None:
        self.count = len(profile.names)
        self.readers = [sum(1 << reader for reader in readers) for readers in profile.readers]
        self.behind: list[int] = []
        branching = [layer for layer, readers in enumerate(profile.readers) if len(readers) > 1]
        self.beside: list[int] = []
        for layer, sources in enumerate(profile.reads):
            within = 1 << layer
            for source in sources:
                within |= self.behind[source]
            self.behind.append(within)
            self.beside.append(sum(1 << p for p in branching if within >> p & 1 and self.readers[p] & ~within))

    def grow(self, members: int, antichain: int, layer: int) -> tuple[int, int]:
        """Return a state extended by a layer and everything that this layer needs, and its antichain."""
        within = self.behind[layer]
        return members | within, antichain & ~within | 1 << layer

    def frontier(self, antichain: int) -> int:
        """Return the antichain, and the other layers whose outputs leave the state."""
        found = antichain
        for layer in _layers(antichain):
            found |= self.beside[layer]
        return found


def find_states(profile: Profile, max_states: int) -> ProfileStates | None:
    """Return all states of a profile; None if there are more than ``max_states``.

    Raises PlanError if some layers are not connected to the first one.
    """
    _check_connected(profile)
    sets = _Sets(profile)
    start, antichain = sets.grow(0, 0, 0)
    found = {start: antichain}
    todo = [(start, sets.readers[0])]
    for members, readers in todo:
        for layer in _layers(readers & ~members):
            grown, front = sets.grow(members, found[members], layer)
            if grown not in found:
                if len(found) == max_states:
                    return None
                found[grown] = front
                more = readers
                for fresh in _layers(grown & ~members):
                    more |= sets.readers[fresh]
                todo.append((grown, more))
    return _weigh(profile, sets, found, complete=True)


def states_along(profile: Profile, orders: Iterable[Sequence[int]]) -> ProfileStates:
    """Return the states along some orders of the layers: the first n layers of an order, for every n.

    In each order, every layer must come after those that it reads.
    """
    sets = _Sets(profile)
    found: dict[int, int] = {}
    for order in orders:
        members = antichain = 0
        for layer in order:
            members, antichain = sets.grow(members, antichain, layer)
            found[members] = antichain
    return _weigh(profile, sets, found, complete=False)


def _check_connected(profile: Profile) -> None:
    """Raise PlanError unless every layer is connected to the first one."""
    names = profile.names
    root = list(range(len(names)))

    def find(layer: int) -> int:
        while root[layer] != layer:
            root[layer] = layer = root[root[layer]]
        return layer

    for layer, writers in enumerate(profile.reads):
        for writer in writers:
            root[find(layer)] = find(writer)
    apart = [name for layer, name in enumerate(names) if find(layer) != find(0)]
    if apart:
        raise PlanError(
            f"{len(apart)} of {len(names)} layers of the profile, such as {apart[0]!r}, are not connected to the "
            "other layers; expected one connected graph. Leave these layers out, or plan them separately."
        )


def _layers(members: int) -> Iterator[int]:
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def _weigh(profile: Profile, sets: _Sets, found: dict[int, int], *, complete: bool) -> ProfileStates:
    words = -(-sets.count // 64)
    members = _words(found, words)
    frontier = _words(map(sets.frontier, found.values()), words)
    picoseconds = np.rint(profile.seconds * PICOSECONDS_PER_SECOND)
    # Whole numbers make sums independent of their order, so that a state never weighs more than one that contains it.
    weights = np.stack([picoseconds, np.rint(profile.activation_bytes), np.rint(profile.parameter_bytes)], axis=1)
    sums = _sums(members, weights)
    leaving = _sums(frontier, weights[:, 1:2])[:, 0]
    order = np.lexsort((_sums(members, np.ones((sets.count, 1)))[:, 0], sums[:, 0]))
    return ProfileStates(
        members=members[order],
        seconds=sums[order, 0] / PICOSECONDS_PER_SECOND,
        activation_bytes=sums[order, 1],
        parameter_bytes=sums[order, 2],
        frontier_bytes=leaving[order],
        complete=complete,
    )


def _words(members: Iterable[int], words: int) -> Words:
    content = b"".join(item.to_bytes(8 * words, "little") for item in members)
    return np.frombuffer(content, "<u8").astype(np.uint64).reshape(-1, words)


def _sums(members: Words, weights: Floats) -> Floats:
    """Return sums of the members' weights, shape (states, kinds of weight)."""
    parts = [_bits(members[i : i + _ROWS])[:, : len(weights)] @ weights for i in range(0, len(members), _ROWS)]
    return np.concatenate(parts)


def _bits(members: Words) -> Floats:
    each = np.unpackbits(members.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    return each.astype(np.float64)
