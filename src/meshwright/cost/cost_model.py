"""The cost model: seconds and bytes of ops, transfers, optimizer steps and stages, for planner and simulator.

Each method answers one question from the measurement table where it applies (the device kind has the table's name,
ranks share a node) and from datasheet figures elsewhere; the module that computes it:

    estimate_ops           table, ops, costs, roofline    collective_seconds                 collectives.costs
    predict_collective  collectives.costs              collective_host_seconds            collectives.costs
    optimizer_seconds   optimizers                      bucket_seconds                     optimizers
    stage_memory        memory                          host_transfer_seconds              host_copies
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import numpy as np

from meshwright.cost.autocast import as_computed
from meshwright.cost.collectives.collective_costs import CollectiveCosts
from meshwright.cost.collectives.fitting import fit_measured
from meshwright.cost.costs import End, OpCosts, explain_bases
from meshwright.cost.host_costs import estimate_host_copy
from meshwright.cost.host_issue import host_factor, issue_step, load_host_calls
from meshwright.cost.memory import StageMemory, backend_of, likeness, weigh_stage
from meshwright.cost.op_classes import classify_ops
from meshwright.cost.op_costs import OpSources, estimate_sizes
from meshwright.cost.op_estimates import OpTable, roofline_interval
from meshwright.cost.optimizers import (
    OptimizerLoop,
    default_loop,
    estimate_copy,
    estimate_step,
    measured_as,
    optimizer_curves,
    trainable_elements,
)
from meshwright.cost.software import PYTORCH, Software
from meshwright.cost.team_costs import REPLICATING, Axes, TeamCosts
from meshwright.records import from_measurements
from meshwright.spec import Cluster, ClusterError, DeviceKind, Graph, MeasurementError, Measurements, Sharding
from meshwright.spec.measurements import BUCKET_COPY
from meshwright.spec.precision import numbers_of
from meshwright.spec.sharding import UNSHARDED
from meshwright.spec.teams import team_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence, Set

    from meshwright.cost.collectives import CollectiveModel, CollectiveOp
    from meshwright.cost.collectives.algorithms import Algorithm
    from meshwright.cost.costs import Basis, Cost, Floats, Predictions
    from meshwright.cost.kernels import KernelModel
    from meshwright.cost.memory import Backend, SharedUnits
    from meshwright.cost.op_estimates import Curve, TracedOps
    from meshwright.spec import Optimizer, StageSlice, Workload
    from meshwright.spec.precision import Numbers, Precision

T = TypeVar("T")

# Cached results that depend on device kinds only, whatever the cluster.
_OF_BYTES = ("classes", "memory")
_OF_KINDS = (*_OF_BYTES, "ops", "optimizer", "bucket")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel:
    """Costs for one cluster, from one measurement table (or none), for models that run in ``precision``.

    ``collectives``, ``collective_hosts``: models fitted on measured collectives of this kind of cluster, for seconds
    and for the CPU seconds of a rank (`fit_measured`); by default fitted on the transfers among the measurements.
    ``kernels``: the predictor of products and attention on GPUs, None for the shipped one (`adapt_kernels`).
    ``traced``: ops of traces of this device kind (`collect_traced`); used only with ``measurements``. ``software``: the
    training software, if not our runtime on current PyTorch (`find_software`). ``end``: all costs as low or as high as
    their 80 % intervals allow; see `at_end`. ``sharding`` with ``devices``: ranks are teams of those devices, over
    which every op is split; see `for_teams`. ``teams``: costs of communication within and between teams.
    ``usual_links``: the cluster with the links as they were measured, if a scenario changes them; costs of collectives
    there are scaled by the ratio of datasheet costs. A slowed device takes its multiple of the usual time.
    """

    cluster: Cluster
    measurements: Measurements | None = None
    precision: Precision = "float32"
    software: Software = PYTORCH
    end: End | None = None
    sharding: Sharding = UNSHARDED
    devices: Cluster | None = None
    collectives: CollectiveModel | None = None
    collective_hosts: CollectiveModel | None = None
    kernels: KernelModel | None = None
    traced: TracedOps | None = None
    usual_links: Cluster | None = None
    _ops: OpTable | None = field(init=False, repr=False, default=None)
    _collectives: CollectiveCosts = field(init=False, repr=False)
    teams: TeamCosts = field(init=False, repr=False)
    _optimizers: dict[str, Curve] = field(init=False, repr=False, default_factory=dict)
    _kept: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)
    _graphs: dict[int, Graph] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        dtype = self.numbers.compute
        if self.measurements is not None:
            object.__setattr__(self, "_ops", OpTable(self.measurements, dtype))
            object.__setattr__(self, "_optimizers", optimizer_curves(self.measurements, self.numbers))
            if self.collectives is None and self.measurements.transfers:
                transfers = replace(self.measurements, ops=(), optimizers=(), overhead_s=0.0, batches=())
                own, host = fit_measured(from_measurements(transfers))
                object.__setattr__(self, "collectives", own)
                object.__setattr__(self, "collective_hosts", host)
        costs = CollectiveCosts(
            cluster=self.usual_links or self.devices or self.cluster,
            dtype=dtype,
            own=self.collectives,
            host=self.collective_hosts,
            changed=self.devices or self.cluster if self.usual_links is not None else None,
        )
        object.__setattr__(self, "_collectives", costs)
        width = None if self.numbers.autocast else self.numbers.value_bytes
        teams = TeamCosts(costs=costs, sharding=self.sharding, float_bytes=width, end=self.end)
        object.__setattr__(self, "teams", teams)

    @property
    def numbers(self) -> Numbers:
        """The types that the precision stands for."""
        return numbers_of(self.precision)

    @property
    def overhead_s(self) -> float:
        """Measured seconds of the host per instruction of the runtime; 0 without measurements."""
        return self.measurements.overhead_s if self.measurements is not None else 0.0

    def serial_overhead_s(self, device_kind: DeviceKind) -> float:
        """Return the part of `overhead_s` in which a device kind is idle: all of it if it is its own host."""
        return self.overhead_s if backend_of(device_kind) == "cpu" else 0.0

    def is_measured(self, device_kind: DeviceKind) -> bool:
        """Return whether the measurement table was measured on this device kind."""
        return self.measurements is not None and self.measurements.device == device_kind.usual_name

    def host_factor(self, rank: int) -> float:
        """Return how many times as long as the host of `host_issue` a rank's host takes to issue ops.

        At an ``end`` of the model, it is that end of the interval.
        """
        node = self.cluster.nodes[self.cluster.node_index(rank)]
        return host_factor(node, self.end, self._measured_host_s(self.cluster.device_kind(rank)))

    def optimizer_issue_s(self, num_tensors: int, optimizer: Optimizer) -> float:
        """Return the seconds of the host of `host_issue` for one step over a number of tensors.

        The loop over the tensors is that of our runtime.
        """
        key = ("optimizer issue", num_tensors, optimizer)
        return self._keep(key, lambda: issue_step(num_tensors, optimizer, self.measurements))

    def _measured_host_s(self, kind: DeviceKind) -> float:
        return self.measurements.host_call_s if self.measurements is not None and self.is_measured(kind) else 0.0

    def estimate_ops(self, graph: Graph, batch_size: int, device_kind: DeviceKind) -> OpCosts:
        """Return the seconds of every op at a batch size on a device. Raises GraphError for an invalid batch size."""
        graph = as_computed(graph, self.numbers)
        key = ("ops", self._known(graph), batch_size, device_kind.name)
        return self._keep(key, lambda: self._estimate_ops(graph, batch_size, device_kind))

    def at_end(self, end: End) -> CostModel:
        """Return the same costs at one end of their 80 % intervals: ops at that of their sum, all others at their own.

        Raises MeasurementError for an invalid end.
        """
        if end not in get_args(End):
            raise MeasurementError(f"An end {end!r} of intervals was given; expected {' or '.join(get_args(End))}.")
        other = self._keep(("end", end), lambda: replace(self, end=end))
        return self._share(other, _OF_BYTES)

    def _share(self, other: CostModel, kinds: tuple[str, ...]) -> CostModel:
        """Pass cached results of some kinds to another model and return it."""
        other._graphs.update(self._graphs)
        other._kept.update((key, kept) for key, kept in self._kept.items() if cast("Any", key)[0] in kinds)
        return other

    def for_teams(self, sharding: Sharding) -> CostModel:
        """Return costs for the local graphs of a sharding: ranks are teams of its devices (`spec.teams`).

        Raises ClusterError if teams do not fit the cluster's nodes.
        """
        if sharding.is_whole:
            return self
        return self._keep(
            ("teams", sharding),
            lambda: replace(self, cluster=self._team_cluster(sharding.width), devices=self.cluster, sharding=sharding),
        )

    def _team_cluster(self, width: int) -> Cluster:
        return self._keep(("team cluster", width), lambda: team_cluster(self.cluster, width))

    def on_machines(self, cluster: Cluster, usual_links: Cluster | None = None) -> CostModel:
        """Return the same costs on other machines; ``usual_links``: these with the measured links, if they differ."""
        # Costs by device kind are valid there, too.
        return self._share(replace(self, cluster=cluster, usual_links=usual_links), _OF_KINDS)

    def explain_basis(self, graph: Graph, batch_size: int) -> str:
        """Return a sentence: how many ops have measured estimates, and how reliable the others are."""
        return explain_bases(self.count_bases(graph, batch_size), self._kinds())

    def count_bases(self, graph: Graph, batch_size: int) -> Counter[Basis]:
        """Return the numbers of op costs by basis, over all device kinds. Raises GraphError as `estimate_ops`."""
        kinds = self._kinds().values()
        return Counter(basis for kind in kinds for basis in self.estimate_ops(graph, batch_size, kind).basis)

    def _kinds(self) -> dict[str, DeviceKind]:
        used = (self.cluster.device_kind(rank) for rank in range(self.cluster.num_ranks))
        return {kind.usual_name: kind.at_usual_speed() for kind in used}

    def collective_seconds(
        self,
        op: CollectiveOp,
        ranks: Sequence[int],
        num_bytes: float,
        concurrent: Sequence[Sequence[int]] = (),
        algorithm: Algorithm | None = None,
        axes: Axes = REPLICATING,
    ) -> float:
        """Return the seconds of a collective or a send, after all ranks are ready; `predict_collective` for one size.

        With an ``algorithm`` it is the datasheet's estimate for it, else the best known estimate; for teams, over these
        axes.
        """

        def predict() -> float:
            devices, beside = self.teams.groups(op, ranks, concurrent, axes)
            return self._chosen(self._collectives.predict(op, devices, _alone(num_bytes), beside, algorithm))

        key = ("collective", op, tuple(ranks), num_bytes, tuple(map(tuple, concurrent)), algorithm, axes)
        return self._keep(key, predict)

    def predict_collective(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: Floats, concurrent: Sequence[Sequence[int]] = ()
    ) -> Predictions:
        """Return the seconds of a collective for many sizes (shape (n,)), with intervals and basis.

        A single rank takes no time. ``num_bytes`` are those of the full tensor: the output of an all-gather, the input
        of a reduce-scatter. The ranks may have any order; the ``concurrent`` groups run the same collective at the same
        time.
        """
        ranks, beside = self.teams.groups(op, ranks, concurrent)
        return self._collectives.predict(op, ranks, num_bytes, beside)

    def collective_host_seconds(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float, axes: Axes = REPLICATING
    ) -> float:
        """Return the CPU seconds that a collective takes from each rank meanwhile; 0 if not measured."""
        ranks, beside = self.teams.groups(op, ranks, (), axes)
        key = ("host", op, ranks, num_bytes, beside)
        found = self._keep(key, lambda: self._collectives.predict_host(op, ranks, _alone(num_bytes), beside))
        return 0.0 if found is None else self._chosen(found)

    def optimizer_seconds(
        self,
        graph: Graph,
        parameter_ids: Sequence[int],
        optimizer: Optimizer,
        device_kind: DeviceKind,
        num_shards: int = 1,
    ) -> float:
        """Return the seconds of one optimizer step over the trainable parameters, or over one of their equal shards."""
        return self.estimate_optimizer(graph, parameter_ids, optimizer, device_kind, num_shards=num_shards).at(self.end)

    def estimate_optimizer(
        self,
        graph: Graph,
        parameter_ids: Sequence[int],
        optimizer: Optimizer,
        device_kind: DeviceKind,
        loop: OptimizerLoop | None = None,
        num_shards: int = 1,
    ) -> Cost:
        """Return the cost of the step with interval and basis.

        ``loop``: over the parameters, by default our runtime's.
        """
        if loop is not None and loop not in get_args(OptimizerLoop):
            raise MeasurementError(
                f"A loop {loop!r} over the parameters was given; expected {', '.join(get_args(OptimizerLoop))}."
            )
        loop = loop or default_loop(optimizer, on_gpu=backend_of(device_kind) == "cuda")
        key = ("optimizer", self._known(graph), tuple(parameter_ids), optimizer, device_kind.name, loop, num_shards)
        return self._keep(key, lambda: self._step(graph, parameter_ids, optimizer, device_kind, loop, num_shards))

    def bucket_seconds(self, graph: Graph, parameter_ids: Sequence[int], device_kind: DeviceKind) -> float:
        """Return the seconds to copy the gradients of trainable parameters into the buffers of a gradient reduction."""
        return self.estimate_bucket(graph, parameter_ids, device_kind).at(self.end)

    def estimate_bucket(self, graph: Graph, parameter_ids: Sequence[int], device_kind: DeviceKind) -> Cost:
        """Return the cost of the copy with interval and basis."""
        key = ("bucket", self._known(graph), tuple(parameter_ids), device_kind.name)
        return self._keep(key, lambda: self._fill(graph, parameter_ids, device_kind))

    def host_transfer_seconds(self, rank: int, num_bytes: float) -> float:
        """Return the seconds to copy bytes between a rank's device and its host, in one direction."""
        return self.estimate_host_transfer(rank, num_bytes).at(self.end)

    def estimate_host_transfer(self, rank: int, num_bytes: float) -> Cost:
        """Return the cost of the copy with its interval and basis.

        Raises MeasurementError for bytes that are negative or not a number, ClusterError for an unknown rank.
        """
        if not 0 <= rank < self.cluster.num_ranks:
            raise ClusterError(f"Rank {rank} was given; the cluster has ranks 0 to {self.cluster.num_ranks - 1}.")
        return estimate_host_copy(self.cluster.nodes[self.cluster.node_index(rank)].pcie, num_bytes)

    def stage_memory(
        self,
        graph: Graph,
        stage_slice: StageSlice,
        batch_size: int,
        workload: Workload,
        *,
        device: Backend = "cpu",
        bucketed: Set[int] = frozenset(),
        shared: SharedUnits | None = None,
        activations_away: bool = False,
    ) -> StageMemory:
        """Return the bytes that a stage holds for microbatches of ``batch_size`` samples.

        Arguments are those of `weigh_stage`.
        """
        graph = as_computed(graph, workload.numbers)
        exchanged = [i in bucketed for i in stage_slice.parameters if graph.tensors[i].requires_grad]
        # If only some gradients are reduced, it matters which ones.
        which = any(exchanged) if len(set(exchanged)) < 2 else stage_slice
        alike = self._known(graph), likeness(graph, stage_slice), which, shared and shared.likeness
        weigh = partial(weigh_stage, graph, stage_slice, batch_size, workload, device=device, bucketed=bucketed)
        key = ("memory", *alike, batch_size, workload, device, activations_away)
        return self._keep(key, partial(weigh, shared=shared, activations_away=activations_away))

    def prepare_costs(self, graph: Graph, batch_sizes: Sequence[int], device_kind: DeviceKind) -> None:
        """Estimate all ops for several batch sizes at once, which is faster than one after the other."""
        graph = as_computed(graph, self.numbers)
        kind = device_kind.at_usual_speed() if not graph.collectives else device_kind
        keys = {size: ("ops", self._known(graph), size, kind.name) for size in batch_sizes}
        missing = [size for size, key in keys.items() if key not in self._kept]
        self.teams.prepare(graph, missing)
        for size, costs in zip(missing, self._estimate_sizes(graph, missing, kind), strict=True):
            self._kept[keys[size]] = costs

    def _estimate_ops(self, graph: Graph, batch_size: int, kind: DeviceKind) -> OpCosts:
        if kind.slowdown != 1 and not graph.collectives:
            return self.estimate_ops(graph, batch_size, kind.at_usual_speed()).slowed(kind.slowdown)
        return self._estimate_sizes(graph, [batch_size], kind)[0]

    def _estimate_sizes(self, graph: Graph, batch_sizes: Sequence[int], kind: DeviceKind) -> list[OpCosts]:
        classes = self._keep(("classes", self._known(graph)), lambda: classify_ops(graph))
        table = self._ops if self.is_measured(kind) else None
        sources = OpSources(
            table=table,
            traced=self.traced,
            kernels=self.kernels,
            teams=self.teams,
            software=self.software,
            host_factor=self._measured_host_s(kind) / load_host_calls().call_s or 1.0,
        )
        found = estimate_sizes(graph, batch_sizes, classes, kind, self.numbers, sources)
        return found if self.end is None else [costs.at_end(self.end) for costs in found]

    def _chosen(self, found: Predictions) -> float:
        """Return the seconds of a single prediction, or the chosen end."""
        seconds = {None: found.seconds, "low": found.low_s, "high": found.high_s}[self.end]
        return float(seconds[0])

    def _step(
        self,
        graph: Graph,
        parameters: Sequence[int],
        optimizer: Optimizer,
        kind: DeviceKind,
        loop: OptimizerLoop,
        num_shards: int,
    ) -> Cost:
        if kind.slowdown != 1:
            usual = self._step(graph, parameters, optimizer, kind.at_usual_speed(), loop, num_shards)
            return usual.slowed(kind.slowdown)
        curve = self._optimizers.get(measured_as(optimizer, loop)) if self.is_measured(kind) else None
        elements, unsure = -(-trainable_elements(graph, parameters) // num_shards), roofline_interval(kind)
        return estimate_step(elements, optimizer, kind, self.precision, curve, loop, unsure)

    def _fill(self, graph: Graph, parameters: Sequence[int], kind: DeviceKind) -> Cost:
        if kind.slowdown != 1:
            return self._fill(graph, parameters, kind.at_usual_speed()).slowed(kind.slowdown)
        curve = self._optimizers.get(BUCKET_COPY) if self.is_measured(kind) else None
        return estimate_copy(
            trainable_elements(graph, parameters), kind, self.precision, curve, roofline_interval(kind)
        )

    def remember(self, what: str, graph: Graph, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of ``compute`` for a graph, cached by key."""
        return self._keep((what, self._known(graph), key), compute)

    def _known(self, graph: Graph) -> int:
        # Graphs are kept alive here, so that an id is never reused for another graph.
        self._graphs.setdefault(id(graph), graph)
        return id(graph)

    def _keep(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = compute()
        return cast("T", self._kept[key])


def _alone(num_bytes: float) -> Floats:
    return np.array([num_bytes], np.float64)
