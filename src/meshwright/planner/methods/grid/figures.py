"""Seconds and bytes of every layer of a model under one sharding (`Figures`); peak memory of backwards (`Moments`).

They are computed on the model's short graph (`short`), which has each distinct layer once. Seconds and bytes of a stage
are the sums over its layers. Further memory of a stage (transfers in flight, the peak within a computation) is left
out, so the sums of bytes are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.autocast import as_computed
from meshwright.cost.host_costs import HostCosts
from meshwright.cost.memory import backend_of, library_workspaces, weigh_tensors
from meshwright.cost.without import without_devices
from meshwright.planner.methods.grid.cover import Exchanges
from meshwright.planner.problem import Problem
from meshwright.planner.short import ShortGraph, is_plain_chain
from meshwright.planner.stage_tables import Structure, as_kept_least, find_structure, sent_to_several, weigh_alone
from meshwright.program import lower_graph, own_workload, parameter_groups
from meshwright.simulator.stage_costs import weights_shares
from meshwright.spec import (
    DeviceKind,
    GradientExchange,
    Graph,
    Sharding,
    StageSlice,
    Workload,
    computed_again,
    read_recompute,
    slice_graph,
)
from meshwright.spec.memory import GRADIENTS, SENT
from meshwright.spec.recompute import is_by_stage, words_of
from meshwright.spec.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from meshwright.cost import CostModel


class Moment(NamedTuple):
    """Bytes that the backward of a stage's last layer needs, without gradients of parameters.

    ``first`` and ``later``: in addition to the memory in use at its start, in the first backward of a step and in later
    ones. ``kept``: activations that the layer keeps per microbatch.
    """

    kept: float
    first: float
    later: float


class Moments:
    """Peak memory that the backward of each layer adds, computed once for each distinct layer on that layer alone.

    ``graph_with`` returns the short graph under a recompute word. ``stands_for`` (L,) has the equal layer in that graph
    for each layer of the model. ``activations_away``: activations are in host memory between forward and backward.
    """

    def __init__(
        self,
        graph_with: Callable[[str], Graph],
        stands_for: NDArray[np.int64],
        workload: Workload,
        cost: CostModel,
        *,
        activations_away: bool,
    ) -> None:
        self._graph_with, self._stands_for = graph_with, stands_for
        self._workload, self._cost, self._away = workload, cost, activations_away
        self._found: dict[tuple[int, str, int], Moment] = {}
        self._alone: dict[str, tuple[Graph, tuple[StageSlice, ...]]] = {}

    def of_layer(self, layer: int, microbatch_size: int, recompute: str) -> Moment:
        """Return the memory needs of a layer's backward; for recompute words by stage, the least of all words."""
        key = microbatch_size, recompute, int(self._stands_for[layer])
        if key not in self._found:
            found = [self._walk(microbatch_size, word, key[-1]) for word in words_of(recompute)]
            self._found[key] = Moment(*map(min, zip(*found, strict=True)))
        return self._found[key]

    def _walk(self, microbatch_size: int, recompute: str, layer: int) -> Moment:
        if recompute not in self._alone:
            graph = as_kept_least(self._graph_with(recompute), self._workload, self._cost.cluster)
            self._alone[recompute] = graph, tuple(slice_graph(graph, [(i, i + 1) for i in range(len(graph.layers))]))
        graph, stages = self._alone[recompute]
        memory = weigh_alone(
            graph,
            stages[layer],
            microbatch_size,
            self._workload,
            self._cost,
            exchanges=True,
            activations_away=self._away,
        )
        # Within a longer stage this layer receives nothing, and does not add up gradients that come back twice.
        width = self._workload.float_bytes
        several = sum(graph.tensors[i].num_bytes(microbatch_size, width) for i in sent_to_several(stages[layer]))
        left_out, phases = memory.received_bytes + several, memory.phases
        first, later = (phase.most_bytes - max(phase.most[GRADIENTS], 0) for phase in (phases.first, phases.later))
        return Moment(
            kept=max(phases.forward.after_bytes - phases.forward.after[SENT], 0),
            first=max(first - left_out, 0),
            later=max(later - left_out, 0),
        )


Floats = NDArray[np.float64]

# Gathers and scatters move layers, or parts of them.
_SHARES_OF_LAYERS = (0.25, 1.0, 4.0, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """Seconds of each layer by device kind of the teams, shape (kinds, L).

    ``forward``, ``backward`` (with recomputation and accumulation) and ``accumulate`` (adding up gradients) are for one
    microbatch, ``optimizer`` for one step.
    """

    forward: Floats
    backward: Floats
    accumulate: Floats
    optimizer: Floats

    @property
    def work(self) -> Floats:
        """Seconds of a microbatch in each layer on the first device kind, by which layers are cut into stages, (L,)."""
        work: Floats = self.forward[0] + self.backward[0]
        return work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Bytes of each layer, shape (L,): parameters, optimizer states, gradients and kept activations.

    Kept activations of a microbatch of b samples are ``kept_fixed + b · kept_per_sample``.
    """

    parameters: Floats
    states: Floats
    gradients: Floats
    kept_fixed: Floats
    kept_per_sample: Floats


class Figures:
    """Seconds and bytes of a model's layers under one sharding; results are cached.

    ``short``: the model's short graph. ``idle``: devices that plans leave out.
    """

    def __init__(self, problem: Problem, short: ShortGraph, sharding: Sharding, idle: tuple[int, ...] = ()) -> None:
        self._short, self.sharding, self.idle = short, sharding, idle
        self.workload = own_workload(problem.workload, sharding)
        self.cost = without_devices(problem.cost, idle).for_teams(sharding)
        self.cluster = self.cost.cluster
        # If something may be offloaded, it does not count in the bound.
        chosen = self._offload = problem.choices.offload
        self._counts = problem.choices.num_devices or (problem.cluster.num_ranks,)
        self._steps_on_device = all(away.optimizer == "device" for away in chosen)
        self._on_device = all(away.parameters == "device" for away in chosen)
        self.keeps_on_device = all(away.activations == "device" for away in chosen)
        self._local = as_computed(lower_graph(short.graph, sharding, ()), self.workload.numbers)
        self._structure = find_structure(self._local)
        self._bytes: dict[str, LayerBytes] = {}
        self._seconds: dict[tuple[int, str], LayerSeconds] = {}
        self._optimizer: dict[str, Floats] = {}
        self._waiting: dict[int, Floats] = {}
        self._exchanges: dict[tuple[int, tuple[int, ...], int, int], Exchanges] = {}

    @cached_property
    def goes_through_all(self) -> bool:
        """True if every step must wait for a microbatch to pass through all layers, forward and backward.

        This holds for training a plain chain whose first layer has trained parameters.
        """
        trained = any(
            self._local.tensors[i].requires_grad
            for op in self._local.ops[self._local.layers[0].start : self._local.layers[0].stop]
            for i in op.inputs
            if self._local.tensors[i].role == "parameter"
        )
        return self.workload.kind == "training" and trained and is_plain_chain(self._short.graph)

    @property
    def num_layers(self) -> int:
        """The number of layers of the whole graph."""
        return len(self._short.stands_for)

    @property
    def first_of_kinds(self) -> list[int]:
        """The first rank of each device kind."""
        found: list[int] = np.unique(self.cluster.columns().kind, return_index=True)[1].tolist()
        return found

    @cached_property
    def library_bytes(self) -> int:
        """Bytes of library workspaces on a device, of the device kind with the fewest."""
        devices = {backend_of(kind) for kind in self.cluster.device_kinds}
        trains = self.workload.kind == "training"
        return min(sum(library_workspaces(device, trains=trains)) for device in devices)

    @cached_property
    def has_masters(self) -> bool:
        """True if ranks hold master weights, whose shards replace the parameters under ZeRO 3."""
        return self._steps_on_device and self.workload.numbers.master_bytes > 0

    @cached_property
    def moments(self) -> Moments:
        """The peak memory of the backward of each layer."""
        away = not self.keeps_on_device
        return Moments(self._with, self._short.stands_for, self.workload, self.cost, activations_away=away)

    @cached_property
    def is_in_root(self) -> NDArray[np.bool_]:
        """True for layers whose parameters ZeRO 3 gathers with those of the root module, shape (L,)."""
        starts = {group.start for group in parameter_groups(self._local) if not group.is_root}
        alone = np.array([layer.start not in starts for layer in self._local.layers])
        found: NDArray[np.bool_] = alone[self._short.stands_for]
        return found

    @property
    def tied_bytes(self) -> float:
        """Bytes of parameters that several layers read."""
        return self._tied[0]

    def prepare(self, microbatch_sizes: Sequence[int]) -> None:
        """Estimate op costs for several microbatch sizes at once, which is faster than one by one."""
        for kind in self.cluster.device_kinds:
            self.cost.prepare_costs(self._local, microbatch_sizes, kind)

    def seconds(self, microbatch_size: int, recompute: str) -> LayerSeconds:
        """Return the seconds of all layers at a microbatch size under a recompute word."""
        if (microbatch_size, recompute) not in self._seconds:
            self._seconds[microbatch_size, recompute] = self._estimate(microbatch_size, recompute)
        return self._seconds[microbatch_size, recompute]

    def _estimate(self, microbatch_size: int, recompute: str) -> LayerSeconds:
        if is_by_stage(recompute):
            # No word takes less time than recomputing nothing.
            return self.seconds(microbatch_size, "none")
        graph, training = self._with(recompute), self.workload.kind == "training"
        columns: list[list[Floats]] = [[], [], [], []]
        for kind in self.cluster.device_kinds:
            costs = self.cost.estimate_ops(self._local, microbatch_size, kind)
            again = np.zeros(len(graph.ops))
            for start, stop in graph.recompute:
                ops = computed_again(graph, start, stop)
                again[start] = costs.forward_s[np.array(ops, np.int64)].sum()
            # Where gradients go to the host, the device does not accumulate them.
            added = costs.accumulate_s * (training and self._steps_on_device)
            backward = (costs.backward_s + again) * training + added
            for column, values in zip(columns, (costs.forward_s, backward, added), strict=False):
                # Ops that no stage needs are not in the structure.
                picoseconds = _added(self._structure, self._structure.op_picoseconds(values))
                column.append(picoseconds / PICOSECONDS_PER_SECOND)
            if kind.name not in self._optimizer:
                self._optimizer[kind.name] = self._step_seconds(kind)
            columns[3].append(self._optimizer[kind.name] * training)
        forward, backward, accumulate, optimizer = (self._short.spread(np.stack(column)) for column in columns)
        return LayerSeconds(forward=forward, backward=backward, accumulate=accumulate, optimizer=optimizer)

    def exchanges(
        self, num_ranks: int, counts: tuple[int, ...], exchange: GradientExchange, shard_size: int = 0
    ) -> Exchanges:
        """Return the costs of communication among replicas for each of these lengths of the pipeline (``counts``).

        Each is the minimum over all layouts of the ranks. ``shard_size``: replicas that shard states, 0 for all.
        """
        key = num_ranks, counts, exchange.bucket_bytes, shard_size
        if key not in self._exchanges:
            rows = [self._exchange(num_ranks // count, count, exchange.bucket_bytes, shard_size) for count in counts]
            columns = np.array(rows).reshape(-1, 4).T.copy()  # numba compiles for each layout in memory
            wait = all(backend_of(kind) == "cpu" for kind in self.cluster.device_kinds)
            self._exchanges[key] = Exchanges(
                latency_s=columns[0],
                bucket_s=columns[1],
                gather_s=columns[2],
                scatter_s=columns[3],
                tied_parameters=self._tied[0],
                tied_gradients=self._tied[1],
                copy_s=self._copy_seconds,
                bucket_bytes=float(exchange.bucket_bytes),
                overlap=exchange.overlap,
                wait=wait,
            )
        return self._exchanges[key]

    @cached_property
    def _copy_seconds(self) -> float:
        """Seconds per byte to copy parameters to a bucket, or from it, all at once."""
        graph = self._local
        num_bytes = sum(graph.tensors[i].num_bytes(0, self.workload.float_bytes) for i in graph.parameters)
        kinds = self.cluster.device_kinds
        return min(self.cost.bucket_seconds(graph, graph.parameters, kind) for kind in kinds) / max(num_bytes, 1)

    def _exchange(self, replicas: int, positions: int, bucket_bytes: int, shard_size: int) -> tuple[float, ...]:
        """Return the costs of communication among replicas, the minimum over all groups.

        The entries are: seconds to reduce one byte; seconds to reduce a bucket at the best rate; seconds per byte of a
        layer's gathers, and of its scatters. Gathers and scatters are among groups of ``shard_size`` replicas, if that
        is not 0.
        """
        if replicas == 1:
            return 0.0, 0.0, 0.0, 0.0
        groups = self._groups(replicas, positions)
        structure, tensors = self._structure, self._local.tensors
        sizes = np.array([tensor.num_bytes(1, self.workload.float_bytes) for tensor in tensors], np.int64)
        largest = max(float(_added(structure, structure.parameters.table(sizes)).max()), 1.0)
        # A gradient larger than a bucket is reduced alone, at the rate of its size.
        gradient = float(self.bytes("none").gradients.max())
        large = [gradient / share for share in _SHARES_OF_LAYERS if gradient / share > bucket_bytes]
        sums_of = np.array([1.0, float(bucket_bytes), *large])
        found = []
        for ranks in groups:
            seconds = self.cost.predict_collective("all_reduce", ranks, sums_of).seconds
            sums = np.array([seconds[0], (seconds[1:] / sums_of[1:]).min() * bucket_bytes])
            # The best rate over all sizes. Parameters are sharded over replicas only.
            some = [largest / share for share in _SHARES_OF_LAYERS]
            own = ranks[:shard_size] if shard_size else ranks
            gather_s = min(self.cost.collective_seconds("all_gather", own, size, axes=()) / size for size in some)
            scatter_s = min(self.cost.collective_seconds("reduce_scatter", own, size) / size for size in some)
            found.append((*sums.tolist(), gather_s, scatter_s))
        return tuple(min(values) for values in zip(*found, strict=True))

    def _groups(self, replicas: int, positions: int) -> list[tuple[int, ...]]:
        """Return groups of a position's replicas: one for each arrangement on nodes, and one across nodes."""
        groups: dict[object, tuple[int, ...]] = {}
        nodes = self.cluster.columns().node
        for position in range(positions):
            ranks = tuple(range(position * replicas, (position + 1) * replicas))
            shape = (nodes[list(ranks)] - nodes[ranks[0]]).tolist()
            groups.setdefault((tuple(self._sorts_of_ranks[rank] for rank in ranks), *shape), ranks)
        if positions > 1 and len(self.cluster.nodes) > 1:
            groups["across"] = tuple(range(0, replicas * positions, positions))
        return list(groups.values())

    @cached_property
    def _sorts_of_ranks(self) -> list[object]:
        """Keys of ranks that are equal in collectives: device kind and node links; all distinct if paths differ."""
        cluster = self.cluster
        if cluster.racks is not None or cluster.paths:
            return list(range(cluster.num_ranks))
        links = [(node.device_link, node.nic, node.num_nics) for node in cluster.nodes]
        return [(cluster.device_kind(rank).name, links[cluster.node_index(rank)]) for rank in range(cluster.num_ranks)]

    @cached_property
    def _tied(self) -> tuple[float, float]:
        """Bytes of parameters that several layers read, and of their gradients.

        If these layers are in several stages, replicas keep them whole and reduce their gradients once.
        """
        graph, owners = self._local, dict[int, set[int]]()
        for index, layer in enumerate(graph.layers):
            for tensor in {i for op in graph.ops[layer.start : layer.stop] for i in op.inputs}:
                owners.setdefault(tensor, set()).add(index)
        tied = [graph.tensors[i] for i in graph.parameters if len(owners.get(i, ())) > 1]
        gradient = self.workload.numbers.gradient_bytes
        return (
            float(sum(tensor.num_bytes(1, self.workload.float_bytes) for tensor in tied)),
            float(sum(tensor.num_elements(0) * gradient for tensor in tied)),
        )

    def waiting(self, microbatch_size: int) -> Floats:
        """Return the bytes that each layer holds per microbatch for the second part of a split backward, shape (L,)."""
        if microbatch_size not in self._waiting:
            graph, width = self._local, self.workload.float_bytes
            found = np.zeros(len(graph.layers))
            if self.workload.kind == "training" and self.keeps_on_device:
                for index, made in enumerate(self._made_for_weights):
                    found[index] = sum(graph.tensors[i].num_bytes(microbatch_size, width) for i in made)
            self._waiting[microbatch_size] = self._short.spread(found)
        return self._waiting[microbatch_size]

    @cached_property
    def _made_for_weights(self) -> list[set[int]]:
        """For each layer, its values that the second part of a split backward reads, or whose gradients it reads."""
        graph, shares = self._local, weights_shares(self._local)
        found = []
        for layer in graph.layers:
            ops = range(layer.start, layer.stop)
            later = [graph.ops[op] for op in ops if shares[op] > 0]
            made = {graph.tensors[i].storage for op in ops for i in graph.ops[op].outputs}
            read = {graph.tensors[i].storage for op in later for i in op.saved} & made
            found.append(read | {i for op in later for i in op.outputs if graph.tensors[i].requires_grad})
        return found

    def bytes(self, recompute: str) -> LayerBytes:
        """Return the bytes of all layers under a recompute word."""
        if recompute not in self._bytes:
            self._bytes[recompute] = self._weigh(recompute)
        return self._bytes[recompute]

    def _weigh(self, recompute: str) -> LayerBytes:
        if is_by_stage(recompute):
            found = [self.bytes(word) for word in words_of(recompute)]
            names = [item.name for item in fields(LayerBytes)]
            return LayerBytes(**{name: np.minimum.reduce([getattr(item, name) for item in found]) for name in names})
        graph = as_kept_least(self._with(recompute), self.workload, self.cluster)
        structure = self._structure if graph is self._local else find_structure(graph)
        weighed = [weigh_tensors(graph, graph.batch_size or size, self.workload) for size in (1, 2)]
        is_kept = self.workload.kind == "training" and self.keeps_on_device
        kept = [_added(structure, structure.saved.table(each.values)) * is_kept for each in weighed]
        spread = self._short.spread
        parameters, gradients, states = (_added(structure, structure.parameters.table(each)) for each in weighed[0])
        return LayerBytes(
            parameters=spread(parameters) * self._on_device,
            states=spread(states) * self._steps_on_device,
            gradients=spread(gradients) * self._on_device,
            kept_fixed=spread(np.maximum(2 * kept[0] - kept[1], 0.0)),
            kept_per_sample=spread(np.maximum(kept[1] - kept[0], 0.0)),
        )

    def _with(self, recompute: str) -> Graph:
        if recompute == "none":
            return self._local
        local = lower_graph(self._short.graph, self.sharding, *read_recompute(self._short.graph, recompute))
        return as_computed(local, self.workload.numbers)

    def _step_seconds(self, kind: DeviceKind) -> Floats:
        """Return the seconds that each layer adds to the optimizer step.

        The step starts when a rank's last computation has ended.
        """
        if self._steps_on_device:
            return self._optimizer_seconds(kind)
        if any(away.optimizer != "host" for away in self._offload):
            return np.zeros(len(self._local.layers))
        first = next(rank for rank in self.first_of_kinds if self.cluster.device_kind(rank).name == kind.name)
        host = HostCosts(self.cost, self._fewest_ranks(first + 1))
        elements = self._trained_elements()
        each = host.estimate_step(first, self.workload.numbers.gradient_bytes, self.workload.optimizer).at(
            self.cost.end
        )
        return _added(self._structure, self._structure.parameters.table(elements)) * each

    def _fewest_ranks(self, least: int) -> int:
        """Return the fewest ranks of any plan; fewer ranks have a larger share of the host each."""
        return max(min(*self._counts, self.cluster.num_ranks * self.sharding.width) // self.sharding.width, least)

    def _trained_elements(self) -> NDArray[np.int64]:
        trained = self.workload.kind == "training"
        counts = [tensor.num_elements(0) * tensor.requires_grad * trained for tensor in self._local.tensors]
        return np.array(counts, np.int64)

    def _optimizer_seconds(self, kind: DeviceKind) -> Floats:
        """Return the seconds that each layer adds to an optimizer step over all of them."""
        graph, optimizer = self._local, self.workload.optimizer
        owners = np.full(len(graph.tensors), -1)
        for index, layer in enumerate(graph.layers):
            for op in graph.ops[layer.start : layer.stop]:
                for tensor in op.inputs:
                    owners[tensor] = index if owners[tensor] < 0 else owners[tensor]
        everything = self.cost.optimizer_seconds(graph, graph.parameters, optimizer, kind)
        others = (tuple(i for i in graph.parameters if owners[i] != index) for index in range(len(graph.layers)))
        without = [self.cost.optimizer_seconds(graph, some, optimizer, kind) if some else 0.0 for some in others]
        added = np.maximum(everything - np.array(without), 0.0)
        # Kernel start costs come in steps, so that the last layer may seem to add more than its share.
        elements = _added(self._structure, self._structure.parameters.table(self._trained_elements()))
        found: Floats = np.minimum(added, everything * elements / max(elements.sum(), 1.0))
        return found


def _added(structure: Structure, table: NDArray[np.int64]) -> Floats:
    """Return what each layer adds to the layers before it, shape (L,), from a table over all stages i:j."""
    found: Floats = np.diff(table[0, : structure.num_layers + 1].astype(np.float64))
    return found
