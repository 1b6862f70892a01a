"""The cost model: seconds and bytes of ops, transfers, optimizer steps and stages, for planner and simulator.

One question per method, each answered from the measurement table where it applies (the device kind has the table's
name, ranks share a node) and from datasheet figures elsewhere:

    price_ops           table, ops, prices, roofline    send_seconds, all_reduce_seconds   transfers, collectives
    predict_collective  collectives                     collective_seconds                 collectives
    optimizer_seconds   optimizers                      bucket_seconds                     optimizers
    stage_memory        memory                          peak_memory                        memory

Answers are kept, so that asking again costs a dictionary look-up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from meshwright.cost.classes import classify_ops
from meshwright.cost.collectives.algorithms import check_messages
from meshwright.cost.collectives.datasheet import quote_collective
from meshwright.cost.collectives.errors import datasheet_scale
from meshwright.cost.collectives.fitted import with_interval
from meshwright.cost.collectives.groups import place_group
from meshwright.cost.kernels import is_tiled, price_kernels, shipped_model
from meshwright.cost.memory import StageMemory, weigh_stage
from meshwright.cost.optimizers import copy_seconds, optimizer_curves, step_seconds, trainable_elements
from meshwright.cost.prices import End, OpPrices, gather_prices
from meshwright.cost.table import OpTable, key_in, price_op, roofline_interval
from meshwright.cost.transfers import TransferTable
from meshwright.spec import Cluster, DeviceKind, Graph, Measurements
from meshwright.spec.measurements import BUCKET_COPY

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from meshwright.cost.collectives import CollectiveModel, CollectiveOp
    from meshwright.cost.curves import Curve
    from meshwright.cost.kernels import KernelModel
    from meshwright.cost.prediction import Basis, Floats, Predictions
    from meshwright.spec import Optimizer, StageSlice, Workload
    from meshwright.spec.workload import Precision

T = TypeVar("T")

_ROOFLINE: tuple[Basis, ...] = ("roofline",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel:
    """Prices for one cluster, from one measurement table (or none), for models that run in ``precision``.

    ``collectives``: what was fitted on measured collectives of this kind of cluster (`fit_collectives`).
    ``kernels``: the predictor of products and attention on GPUs, None for the one that ships (`adapt_kernels`).
    ``ops_at``: all ops of a graph as fast or as slow as the 80 % interval of their sum allows; see `at_end`.
    """

    cluster: Cluster
    measurements: Measurements | None = None
    precision: Precision = "float32"
    ops_at: End | None = None
    collectives: CollectiveModel | None = None
    kernels: KernelModel | None = None
    _ops: OpTable | None = field(init=False, repr=False, default=None)
    _transfers: TransferTable | None = field(init=False, repr=False, default=None)
    _optimizers: dict[str, Curve] = field(init=False, repr=False, default_factory=dict)
    _kept: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)
    _graphs: dict[int, Graph] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.measurements is not None:
            object.__setattr__(self, "_ops", OpTable(self.measurements, self.precision))
            object.__setattr__(self, "_transfers", TransferTable(self.measurements))
            object.__setattr__(self, "_optimizers", optimizer_curves(self.measurements, self.precision))

    @property
    def overhead_s(self) -> float:
        """Seconds of the host per instruction of the runtime, as measured; 0 without measurements."""
        return self.measurements.overhead_s if self.measurements is not None else 0.0

    def is_measured(self, device_kind: DeviceKind) -> bool:
        """Whether the measurement table was taken on this kind of device."""
        return self.measurements is not None and self.measurements.device == device_kind.name

    def price_ops(self, graph: Graph, batch_size: int, device_kind: DeviceKind) -> OpPrices:
        """Seconds of every op at a batch size on a device. Raises GraphError for a batch it was not captured for."""
        key = ("ops", self._known(graph), batch_size, device_kind.name)
        return self._keep(key, lambda: self._price_ops(graph, batch_size, device_kind))

    def at_end(self, end: End) -> CostModel:
        """The same prices, but all ops at one end of the 80 % interval of their sum."""
        return replace(self, ops_at=end)

    def explain_basis(self, graph: Graph, batch_size: int) -> str:
        """One sentence: how many ops are priced by measurement, and what the others' figures are worth."""
        kinds = {
            self.cluster.device_kind(rank).name: self.cluster.device_kind(rank)
            for rank in range(self.cluster.num_ranks)
        }
        counts = Counter(basis for kind in kinds.values() for basis in self.price_ops(graph, batch_size, kind).basis)
        total, guessed = counts.total(), counts["roofline"]
        if guessed == total:
            return (
                f"Basis: nothing was measured on {', '.join(kinds)}; all times are rooflines from datasheets, "
                "which real steps mostly exceed. `meshwright measure` replaces them on a machine that you have."
            )
        words = ", ".join(f"{count} {basis}" for basis, count in sorted(counts.items()))
        warning = "; rooflines are mostly too short, measure this model to replace them" if guessed else ""
        return f"Basis of {total} op prices: {words}{warning}."

    def send_seconds(self, source_rank: int, target_rank: int, num_bytes: float) -> float:
        """Seconds until a message has arrived; 0 from a rank to itself."""
        if source_rank == target_rank:
            return 0.0
        key = ("send", source_rank, target_rank, num_bytes)
        return self._keep(key, lambda: self._send((source_rank, target_rank), num_bytes))

    def send_host_seconds(self, source_rank: int, target_rank: int, num_bytes: float) -> float:
        """Seconds of processor time that a message takes from sender and receiver each; 0 where not measured."""
        if (
            self._transfers is None
            or source_rank == target_rank
            or not self._measured_among((source_rank, target_rank))
        ):
            return 0.0
        return self._transfers.send(num_bytes, host=True) or 0.0

    def all_reduce_seconds(self, ranks: Sequence[int], num_bytes: float) -> float:
        """Seconds to sum ``num_bytes`` over the ranks, from the moment all are ready; 0 for a single rank."""
        if len(ranks) < 2:
            return 0.0
        group = tuple(ranks)
        return self._keep(("all_reduce", group, num_bytes), lambda: self._all_reduce(group, num_bytes))

    def collective_seconds(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: float, concurrent: Sequence[Sequence[int]] = ()
    ) -> float:
        """Seconds of a collective among the ranks, in any order, while the ``concurrent`` groups run the same.

        ``num_bytes`` are those of the full tensor: what an all-gather yields, what a reduce-scatter takes in.
        """
        key = ("collective", op, tuple(ranks), num_bytes, tuple(map(tuple, concurrent)))
        sizes = np.array([num_bytes], np.float64)
        return self._keep(key, lambda: float(self.predict_collective(op, ranks, sizes, concurrent).seconds[0]))

    def predict_collective(
        self, op: CollectiveOp, ranks: Sequence[int], num_bytes: Floats, concurrent: Sequence[Sequence[int]] = ()
    ) -> Predictions:
        """Seconds of a collective for many sizes (shape (n,)), with intervals and basis.

        Measured on this kind of device where `collectives` has it or something comparable; else from the datasheet's
        links, with the interval that such prices had on public clusters (`collectives.errors`).
        """
        check_messages(op, num_bytes)
        place = (tuple(ranks), tuple(map(tuple, concurrent)))
        group = self._keep(("place", *place), lambda: place_group(self.cluster, ranks, concurrent))
        kinds = self._keep(("kinds", place[0]), lambda: {self.cluster.device_kind(rank).name for rank in ranks})
        if self.collectives is not None and kinds == {self.collectives.device}:
            found = self.collectives.predict(op, group, num_bytes)
            if found is not None:
                return found
        tariff = self._keep(("tariff", op, *place), lambda: quote_collective(self.cluster, op, ranks, group))
        scale = datasheet_scale(op, by_nccl=tariff.by_nccl)
        latency_s, seconds = float(tariff.latency_s.min()), tariff.price(num_bytes)
        return with_interval(seconds, latency_s, scale, 1.0, _ROOFLINE * len(num_bytes))

    def all_reduce_host_seconds(self, ranks: Sequence[int], num_bytes: float) -> float:
        """Seconds of processor time that an all-reduce takes from each rank; 0 where not measured."""
        group = tuple(ranks)
        if self._transfers is None or len(group) < 2 or not self._measured_among(group):
            return 0.0
        return self._transfers.all_reduce(len(group), num_bytes, host=True) or 0.0

    def optimizer_seconds(
        self, graph: Graph, parameter_ids: Sequence[int], optimizer: Optimizer, device_kind: DeviceKind
    ) -> float:
        """Seconds of one optimizer step over the trainable ones among the parameters."""
        key = ("optimizer", self._known(graph), tuple(parameter_ids), optimizer, device_kind.name)
        return self._keep(key, lambda: self._step(graph, parameter_ids, optimizer, device_kind))

    def bucket_seconds(self, graph: Graph, parameter_ids: Sequence[int], device_kind: DeviceKind) -> float:
        """Seconds to copy the gradients of trainable parameters into the buffers that are summed over ranks."""
        key = ("bucket", self._known(graph), tuple(parameter_ids), device_kind.name)
        return self._keep(key, lambda: self._fill(graph, parameter_ids, device_kind))

    def stage_memory(self, graph: Graph, stage_slice: StageSlice, batch_size: int, workload: Workload) -> StageMemory:
        """Bytes that a stage keeps for microbatches of ``batch_size`` samples."""
        key = ("memory", self._known(graph), stage_slice, batch_size, workload)
        return self._keep(key, lambda: weigh_stage(graph, stage_slice, batch_size, workload))

    def peak_memory(
        self, graph: Graph, stage_slice: StageSlice, batch_size: int, workload: Workload, num_in_flight: int
    ) -> int:
        """Peak bytes of a stage with a number of microbatches in flight."""
        return self.stage_memory(graph, stage_slice, batch_size, workload).peak_bytes(num_in_flight)

    def _price_ops(self, graph: Graph, batch_size: int, kind: DeviceKind) -> OpPrices:
        graph.check_batch_size(batch_size)
        classes = self._keep(("classes", self._known(graph)), lambda: classify_ops(graph))
        table = self._ops if self.is_measured(kind) else None
        ops = [graph.ops[index] for index in classes.representatives]
        bounds = [price_op(graph, op, batch_size, kind, self.precision, table) for op in ops]
        keys = [key_in(self.precision, graph, op, batch_size) for op in ops]
        prices = bounds
        if is_tiled(kind):
            kernels = self.kernels or shipped_model()
            prices = price_kernels(
                kernels, bounds, graph, ops, keys, batch_size, kind, self.precision, roofline_interval(kind)
            )
        backward_ops = np.array([op.phase == "backward" for op in graph.ops], bool)
        # An op of a joint graph's backward half runs once, in the backward.
        gathered = gather_prices(prices, classes.class_of, backward_ops)
        return gathered if self.ops_at is None else gathered.at_end(self.ops_at)

    def _send(self, ranks: tuple[int, int], num_bytes: float) -> float:
        check_messages("send", num_bytes)
        if self._transfers is not None and self._measured_among(ranks):
            measured = self._transfers.send(num_bytes)
            if measured is not None:
                return measured
        return self.cluster.link_between(*ranks).seconds(num_bytes)

    def _all_reduce(self, ranks: tuple[int, ...], num_bytes: float) -> float:
        check_messages("all_reduce", num_bytes)
        if self._transfers is not None and self._measured_among(ranks):
            measured = self._transfers.all_reduce(len(ranks), num_bytes)
            if measured is not None:
                return measured
        return self.collective_seconds("all_reduce", ranks, num_bytes)

    def _measured_among(self, ranks: tuple[int, ...]) -> bool:
        """Whether the transfer table applies: all ranks of the measured kind, on one node."""
        return self._keep(
            ("measured", ranks),
            lambda: (
                all(self.is_measured(self.cluster.device_kind(rank)) for rank in ranks)
                and len({self.cluster.node_index(rank) for rank in ranks}) == 1
            ),
        )

    def _step(self, graph: Graph, parameters: Sequence[int], optimizer: Optimizer, kind: DeviceKind) -> float:
        curve = self._optimizers.get(optimizer.name) if self.is_measured(kind) else None
        return step_seconds(trainable_elements(graph, parameters), optimizer, kind, self.precision, curve)

    def _fill(self, graph: Graph, parameters: Sequence[int], kind: DeviceKind) -> float:
        curve = self._optimizers.get(BUCKET_COPY) if self.is_measured(kind) else None
        return copy_seconds(trainable_elements(graph, parameters), kind, self.precision, curve)

    def _known(self, graph: Graph) -> int:
        # Graphs are kept alive here, so that an id is never given to another graph.
        self._graphs.setdefault(id(graph), graph)
        return id(graph)

    def _keep(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = compute()
        return cast("T", self._kept[key])
