"""The cost model: seconds and bytes of ops, transfers, optimizer steps and stages, for planner and simulator.

Each method returns a cost from the measurement table if the table applies, else from datasheet figures. The table
applies to devices of its kind, and its transfers to ranks of this kind. Methods, and the modules that compute their
results:

    estimate_ops        here, of one op in op_estimates    collective_seconds        collectives.collective_costs
    predict_collective  collectives.collective_costs       collective_host_seconds   collectives.collective_costs
    optimizer_seconds   optimizers                         bucket_seconds            optimizers
    stage_memory        memory                             host_transfer_seconds     host_costs
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args

import numpy as np

from meshwright.cost.autocast import Widths, as_computed
from meshwright.cost.collectives.collective_costs import CollectiveCosts
from meshwright.cost.collectives.uneven_links import LinkModels, fit_links
from meshwright.cost.conversion_costs import (
    is_tf32_by_default,
    op_type,
    product_type,
    widened_gradients,
    with_conversions,
)
from meshwright.cost.costs import Basis, Cost, End, Floats, OpCost, OpCosts, Predictions, explain_bases, gather_costs
from meshwright.cost.fusion.unit_costs import ClassCosts, UnitEstimator
from meshwright.cost.gpu.gpu_products import is_modelled, shipped_gpu
from meshwright.cost.gpu.launches import estimate_launches
from meshwright.cost.gpu.padding import estimate_padded, without_odd_sizes
from meshwright.cost.host_costs import estimate_host_copy
from meshwright.cost.host_issue import host_factor, issue_seconds, issue_step, load_host_calls
from meshwright.cost.kernels import KernelModel, KernelQueries, estimate_kernels, shipped_model
from meshwright.cost.memory import Backend, SharedUnits, StageMemory, backend_of, likeness, weigh_stage
from meshwright.cost.op_classes import OpClasses, classify_ops
from meshwright.cost.op_estimates import Curve, OpTable, TracedOps, estimate_op, roofline_interval
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
from meshwright.cost.traits import family_of
from meshwright.cost.work import key_in
from meshwright.records import from_measurements
from meshwright.spec import (
    Cluster,
    ClusterError,
    DeviceKind,
    Graph,
    MeasurementError,
    Measurements,
    Op,
    Optimizer,
    Sharding,
    StageSlice,
    Workload,
)
from meshwright.spec.measurements import BUCKET_COPY
from meshwright.spec.precision import Numbers, Precision, numbers_of
from meshwright.spec.sharding import UNSHARDED
from meshwright.spec.teams import team_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence, Set

    from meshwright.cost.collectives import CollectiveModel, CollectiveOp
    from meshwright.cost.collectives.algorithms import Algorithm
    from meshwright.cost.roofline import RooflineSeconds


# Ops of these families have additional kernels, which inductor fuses.
_WITH_OTHERS = ("product", "convolution")


class OpSources(NamedTuple):
    """The sources from which `estimate_sizes` computes the costs of ops on one device kind.

    ``table``: measured ops; ``traced``: ops of traces; ``kernels``: predictor of products and attention (None: the
    shipped one); ``teams``: communication inside ops; ``software``: the training software. ``host_factor``: seconds
    that the host of the measurements takes to issue ops, divided by those of the host of `host_issue`.
    """

    table: OpTable | None
    traced: TracedOps | None
    kernels: KernelModel | None
    teams: TeamCosts
    software: Software
    host_factor: float = 1.0


# Each class of equal ops is estimated once, by measurement or roofline (`table`). On GPUs rooflines are replaced by the
# predictor of products (`kernels`) and by the kernels that torch launches (`gpu`). Casts and sums of gradients are
# added (`conversion_costs`), and collectives inside ops (`teams`). Products of all sizes are predicted together.
def estimate_sizes(
    graph: Graph, batch_sizes: Sequence[int], classes: OpClasses, kind: DeviceKind, numbers: Numbers, sources: OpSources
) -> list[OpCosts]:
    """Return the costs of all ops of a graph on a device kind, one `OpCosts` per batch size, from the given sources.

    ``classes``: groups of equal ops, each estimated once. Raises GraphError for a batch size that the graph does not
    support.
    """
    slowdown, usual = kind.slowdown, kind.at_usual_speed()
    ops = [graph.ops[index] for index in classes.representatives]
    asked = []
    # If the largest size is valid, all are.
    for size in sorted(batch_sizes, reverse=True):
        graph.check_batch_size(size)
    types = [op_type(graph, op, numbers) for op in ops]
    products = [product_type(graph, op, numbers, usual) for op in ops]
    arithmetic = [product or numbers.compute for product in products]
    # Measured ops were multiplied in torch's default type.
    tables = [
        sources.table if not product or is_tf32_by_default(op) else None
        for op, product in zip(ops, products, strict=True)
    ]
    for size in batch_sizes:
        keys = [key_in(dtype, graph, op, size) for op, dtype in zip(ops, types, strict=True)]
        bounds = [
            estimate_op(graph, op, size, usual, dtype, table, sources.traced, key, product)
            for op, key, dtype, table, product in zip(ops, keys, types, tables, products, strict=True)
        ]
        asked.append(KernelQueries(costs=bounds, graph=graph, ops=ops, keys=keys, types=arithmetic, batch_size=size))
    costs: list[list[OpCost]] = [list(some.costs) for some in asked]
    dense = costs
    widths = Widths(graph=graph, values=None if numbers.autocast else numbers.value_bytes, single=classes.single)
    gpu = shipped_gpu() if is_modelled(usual) else None
    if gpu is not None:
        predicted = estimate_kernels(sources.kernels or shipped_model(), gpu.products, asked, usual)
        costs = [
            estimate_launches(gpu, some, each, types, widths, usual, sources.software)
            for some, each in zip(asked, predicted, strict=True)
        ]
        if graph.compiled:
            even = estimate_kernels(sources.kernels or shipped_model(), without_odd_sizes(gpu).products, asked, usual)
            dense = [
                [
                    estimate_padded(odd, aligned, key, dtype, gpu, usual)
                    if family_of(op) in _WITH_OTHERS and bound.basis == "roofline"
                    else estimated
                    for op, bound, odd, aligned, estimated, key, dtype in zip(
                        ops, some.costs, *parts, some.keys, arithmetic, strict=True
                    )
                ]
                for some, *parts in zip(asked, predicted, even, costs, strict=True)
            ]
    costs = [
        [
            with_conversions(cost, graph, op, size, usual, numbers, gpu, widths, added, sources.table)
            for cost, op, added in zip(each, ops, classes.added, strict=True)
        ]
        for size, each in zip(batch_sizes, costs, strict=True)
    ]
    issued = []
    if asked and backend_of(usual) == "cuda":
        issued = [
            _issued(graph, op, asked[0].batch_size, dtype, key, numbers, sources).times(sources.software.host_factor)
            for op, dtype, key in zip(ops, types, asked[0].keys, strict=True)
        ]
    gathered = []
    for size, each, kept, some in zip(batch_sizes, costs, dense, asked, strict=True):
        exchanges = sources.teams.op_exchanges(graph, size)
        if not graph.compiled:
            gathered.append(gather_costs(each, classes.class_of, graph, exchanges, slowdown, issued))
            continue
        measured = [bound.basis != "roofline" for bound in some.costs]
        widened = [widened_gradients(graph, op, usual, numbers, gpu) for op in ops]
        known = ClassCosts(
            alone=each, dense=kept if gpu is not None else each, widened=widened, issued=issued, measured=measured
        )
        found = UnitEstimator(
            graph, size, classes, known, types, usual, numbers, widths, gpu, sources.software.host_factor
        ).estimate_all()
        own = np.arange(len(graph.ops))
        gathered.append(gather_costs(found.costs, own, graph, exchanges, slowdown, found.issued, classes.class_of))
    return gathered


def _issued(
    graph: Graph, op: Op, size: int, dtype: str, key: str, numbers: Numbers, sources: OpSources
) -> RooflineSeconds:
    """Return the seconds to issue an op on the host of `host_issue`: measured if possible, else predicted."""
    predicted = issue_seconds(graph, op, size, dtype, key, numbers)
    measured = sources.table.issued(graph, op, key) if sources.table is not None else None
    if measured is None:
        return predicted
    return replace(measured.times(1 / sources.host_factor), accumulate_s=predicted.accumulate_s)


T = TypeVar("T")

# Cached results that depend on device kinds only, whatever the cluster.
_OF_BYTES = ("classes", "memory")
_OF_KINDS = (*_OF_BYTES, "ops", "optimizer", "bucket")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel:
    """Costs of ops, collectives, optimizer steps and copies on one cluster, for models that run in ``precision``.

    ``measurements``: the measurement table, or None. ``collectives``, ``collective_hosts``: models fitted to measured
    collectives of this kind of cluster, for seconds by slowness of links, and for the CPU seconds of a rank
    (`fit_links`); by default fitted to the transfers in ``measurements``. ``kernels``: the predictor of products and
    attention on GPUs (`adapt_kernels`); None for the shipped one. ``traced``: ops of traces of this device kind
    (`collect_traced`); used only with ``measurements``. ``software``: the training software (`find_software`); by
    default our runtime on current PyTorch. ``end``: "low" or "high" for costs at that end of their 80 % intervals; see
    `at_end`. ``sharding`` with ``devices``: each rank is a team of these devices, over which every op is split; see
    `for_teams`. ``teams``: costs of communication within and between teams. ``usual_links``: the cluster with the
    measured links, if a scenario changes them; the costs of its collectives are then scaled by the ratio of datasheet
    costs. On a slowed device, costs are multiplied by its slowdown.
    """

    cluster: Cluster
    measurements: Measurements | None = None
    precision: Precision = "float32"
    software: Software = PYTORCH
    end: End | None = None
    sharding: Sharding = UNSHARDED
    devices: Cluster | None = None
    collectives: LinkModels = field(default_factory=dict)
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
            if not self.collectives and self.measurements.transfers:
                transfers = replace(self.measurements, ops=(), optimizers=(), overhead_s=0.0, batches=())
                own, host = fit_links(from_measurements(transfers), self.usual_links or self.devices or self.cluster)
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
        """The data types of the precision, for example of values, gradients and optimizer states."""
        return numbers_of(self.precision)

    @property
    def overhead_s(self) -> float:
        """Measured seconds of host time per instruction of the runtime; 0 without measurements."""
        return self.measurements.overhead_s if self.measurements is not None else 0.0

    def serial_overhead_s(self, device_kind: DeviceKind) -> float:
        """Return the part of `overhead_s` in which a device is idle: all of it for a CPU, 0 for a GPU."""
        return self.overhead_s if backend_of(device_kind) == "cpu" else 0.0

    def is_measured(self, device_kind: DeviceKind) -> bool:
        """Return whether the measurement table was measured on this device kind."""
        return self.measurements is not None and self.measurements.device == device_kind.usual_name

    def host_factor(self, rank: int) -> float:
        """Return the time of a rank's host to issue ops, divided by that of the measured host of `host_issue`.

        If the cost model has an ``end``, the result is that end of the factor's interval.
        """
        node = self.cluster.nodes[self.cluster.node_index(rank)]
        return host_factor(node, self.end, self._measured_host_s(self.cluster.device_kind(rank)))

    def optimizer_issue_s(self, num_tensors: int, optimizer: Optimizer) -> float:
        """Return the seconds in which the measured host of `host_issue` issues one optimizer step of ``num_tensors``.

        The loop over the tensors is that of our runtime.
        """
        key = ("optimizer issue", num_tensors, optimizer)
        return self._keep(key, lambda: issue_step(num_tensors, optimizer, self.measurements))

    def _measured_host_s(self, kind: DeviceKind) -> float:
        return self.measurements.host_call_s if self.measurements is not None and self.is_measured(kind) else 0.0

    def estimate_ops(self, graph: Graph, batch_size: int, device_kind: DeviceKind) -> OpCosts:
        """Return the costs of every op at a batch size on a device kind.

        Raises GraphError for an invalid batch size.
        """
        graph = as_computed(graph, self.numbers)
        key = ("ops", self._known(graph), batch_size, device_kind.name)
        return self._keep(key, lambda: self._estimate_ops(graph, batch_size, device_kind))

    def at_end(self, end: End) -> CostModel:
        """Return a cost model whose costs are at one end, "low" or "high", of their 80 % intervals.

        The costs of ops are multiplied by one factor, so that their sum is at the end of its interval; every other cost
        is at the end of its own interval. Raises MeasurementError for an invalid end.
        """
        if end not in get_args(End):
            raise MeasurementError(f"The end {end!r} of intervals is unknown; expected {' or '.join(get_args(End))}.")
        other = self._keep(("end", end), lambda: replace(self, end=end))
        return self._share(other, _OF_BYTES)

    def _share(self, other: CostModel, kinds: tuple[str, ...]) -> CostModel:
        """Pass cached results of some kinds to another model and return it."""
        other._graphs.update(self._graphs)
        other._kept.update((key, kept) for key, kept in self._kept.items() if cast("Any", key)[0] in kinds)
        return other

    def for_teams(self, sharding: Sharding) -> CostModel:
        """Return a cost model for the local graphs of a sharding; each rank is a team of devices (`spec.teams`).

        Raises ClusterError if the teams do not fit the cluster's nodes.
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
        """Return a cost model with the same sources for another cluster.

        ``usual_links``: that cluster with the measured links, if a scenario changes its links; else None.
        """
        # Costs by device kind are valid there, too.
        return self._share(replace(self, cluster=cluster, usual_links=usual_links), _OF_KINDS)

    def explain_basis(self, graph: Graph, batch_size: int) -> str:
        """Return a sentence with the numbers of op costs by basis (such as measured) and how reliable they are."""
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
        """Return the seconds of a collective or a send of one size, from the time when all ranks are ready.

        ``num_bytes`` and ``concurrent``: as in `predict_collective`. With an ``algorithm``, the result is the
        datasheet's estimate for it; else the best known estimate. ``axes``: the mesh axes of the communication, if
        ranks are teams.
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

        A single rank takes no time. ``num_bytes``: bytes of the full tensor, which is the output of an all-gather and
        the input of a reduce-scatter. The ranks may have any order. The ``concurrent`` groups run the same collective
        at the same time.
        """
        ranks, beside = self.teams.groups(op, ranks, concurrent)
        return self._collectives.predict(op, ranks, num_bytes, beside)

    def collective_host_seconds(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float, axes: Axes = REPLICATING
    ) -> float:
        """Return the CPU seconds that each rank spends during a collective; 0 if not measured."""
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
        """Return the seconds of one optimizer step over the trainable parameters, or over one of their shards.

        ``num_shards``: the number of equal shards; 1 for all elements.
        """
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
        """Return the cost of one optimizer step over trainable parameters, or over one of their ``num_shards`` shards.

        ``loop``: the implementation of the loop over the parameters; by default that of our runtime. Raises
        MeasurementError for an unknown loop.
        """
        if loop is not None and loop not in get_args(OptimizerLoop):
            raise MeasurementError(
                f"The optimizer's loop over the parameters is {loop!r}; expected one of "
                f"{', '.join(get_args(OptimizerLoop))}."
            )
        loop = loop or default_loop(optimizer, on_gpu=backend_of(device_kind) == "cuda")
        key = ("optimizer", self._known(graph), tuple(parameter_ids), optimizer, device_kind.name, loop, num_shards)
        return self._keep(key, lambda: self._step(graph, parameter_ids, optimizer, device_kind, loop, num_shards))

    def bucket_seconds(self, graph: Graph, parameter_ids: Sequence[int], device_kind: DeviceKind) -> float:
        """Return the seconds to copy the gradients of trainable parameters into the buckets of a gradient reduction.

        `estimate_bucket` returns the interval and the basis, too.
        """
        return self.estimate_bucket(graph, parameter_ids, device_kind).at(self.end)

    def estimate_bucket(self, graph: Graph, parameter_ids: Sequence[int], device_kind: DeviceKind) -> Cost:
        """Return the cost to copy gradients into the buckets of a gradient reduction, with interval and basis.

        ``parameter_ids``: the parameters; only trainable ones have gradients.
        """
        key = ("bucket", self._known(graph), tuple(parameter_ids), device_kind.name)
        return self._keep(key, lambda: self._fill(graph, parameter_ids, device_kind))

    def host_transfer_seconds(self, rank: int, num_bytes: float) -> float:
        """Return the seconds to copy bytes between a rank's device and its host, in one direction.

        Raises as `estimate_host_transfer`.
        """
        return self.estimate_host_transfer(rank, num_bytes).at(self.end)

    def estimate_host_transfer(self, rank: int, num_bytes: float) -> Cost:
        """Return the cost to copy bytes between a rank's device and its host in one direction, with interval and basis.

        Raises MeasurementError for bytes that are negative or not a number, ClusterError for an unknown rank.
        """
        if not 0 <= rank < self.cluster.num_ranks:
            raise ClusterError(f"There is no rank {rank}; the cluster has ranks 0 to {self.cluster.num_ranks - 1}.")
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
        """Return the bytes of memory that a stage needs for microbatches of ``batch_size`` samples.

        The arguments are those of `weigh_stage`. Results are cached.
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
        """Compute and cache the costs of all ops for several batch sizes at once, which is faster than one by one."""
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
        """Return the result of ``compute()``, cached under the graph, the name ``what`` of the result, and ``key``."""
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
