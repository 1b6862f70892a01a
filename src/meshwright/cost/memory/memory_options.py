"""Closed forms of a stage's memory on a rank with sharding, recomputation or offload; the memory that a plan may use.

`weigh_rank` returns a rank's memory. In the formulas, N ranks hold the same stage, in groups of e ranks that divide the
experts. P is the number of parameter elements (those of experts are divided by e, and sharded over N / e ranks only), w
the bytes per element, and s the bytes of optimizer states per element:

    parameters    w·P,   ZeRO-3: w·P / N + two layers gathered in full
    gradients     w·P,   ZeRO-2, 3: w·P / N + one layer
    states        s·P,   ZeRO-1, 2, 3: s·P / N                       (Rajbhandari et al., SC 2020, section 5)
    activations   the peak of a step (`fullest`), without gradients; with recomputation
    host          states, per step 2·w·P / N bytes over PCIe         (Ren et al., ZeRO-Offload, ATC 2021, section 4)
    NVMe          states, also read and written once per step        (Rajbhandari et al., ZeRO-Infinity, SC 2021)
                  activations on the host: each saved byte is copied there and back; those of two layers stay on the
                  device

The memory of a `Plan` is simulated instead. `MemoryLimit` is the memory of a device that a rank's allocator may
reserve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshwright.cost.autocast import as_computed
from meshwright.cost.host_costs import estimate_host_copy
from meshwright.cost.memory.kept import Backend, as_kept, library_workspaces
from meshwright.cost.memory.stage_memory import backend_of, weigh_stage
from meshwright.cost.optimizers import state_bytes
from meshwright.spec import DeviceKind, Graph, Link, PlanError, StageSlice, Workload, format_bytes, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterable


CONTEXT_BYTES = 2**29
NCCL_BYTES = 2**30
MEMORY_MARGIN = 0.15


# usable = (memory − context − NCCL) / (1 + margin)
#
# The context and the buffers of NCCL are outside of torch's allocator; a single device does not use NCCL, but the room
# is reserved, so that its plan fits into a larger cluster. The margin covers the error of the memory model: at least
# the 90 % quantile of (reserved - predicted) / predicted over the training steps of ``validation/data/steps_cuda.csv``;
# `meshwright validate memory` shows it.
#
# Sources: CUDA's context takes about 0.5 GiB on an H100 (driver 580, own measurement). NCCL takes about 1 GiB for a
# communicator that uses all channels: each of up to 24 channels has buffers of 4 MiB (Simple), 4.7 MiB (LL128) and 0.5
# MiB (LL) for every peer of its ring and its tree (NVIDIA/nccl, src/include/comm.h; 1.6 GB were reported in
# https://github.com/NVIDIA/nccl/issues/864).
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The memory of each device that a plan may use.

    ``num_bytes``: bytes for the allocator on every device; None for the device's memory minus CUDA's context and NCCL's
    buffers. ``margin``: the share (0.15 is 15 %) by which predictions may be too low; None for `MEMORY_MARGIN` on GPUs,
    and for 0 on CPUs and with ``num_bytes``.
    """

    num_bytes: int | None = None
    margin: float | None = None

    def usable_bytes(self, kind: DeviceKind) -> int:
        """Return the bytes that the allocator of a rank may reserve on a device."""
        whole = kind.memory_bytes - _outside_bytes(kind)
        room = whole if self.num_bytes is None else self.num_bytes
        return max(int(room / (1 + self.margin_on(kind))), 0)

    def margin_on(self, kind: DeviceKind) -> float:
        """Return the margin on a device kind, as a share of the predicted memory."""
        if self.margin is not None:
            return self.margin
        return 0.0 if self.num_bytes is not None or backend_of(kind) == "cpu" else MEMORY_MARGIN

    def explain(self, kind: DeviceKind) -> str:
        """Return a sentence on the parts of a device's memory that plans do not use; "" if they may use all of it."""
        parts = []
        if self.num_bytes is None and backend_of(kind) == "cuda":
            parts.append(f"{format_bytes(_outside_bytes(kind))} for CUDA and NCCL")
        if margin := self.margin_on(kind):
            parts.append(f"a margin of {format_percent(margin, 0)} for the error of this prediction")
        if not parts:
            return ""
        whole = format_bytes(kind.memory_bytes if self.num_bytes is None else self.num_bytes)
        return f"Of a device's {whole}, plans leave {' and '.join(parts)}."


def _outside_bytes(kind: DeviceKind) -> int:
    return 0 if backend_of(kind) == "cpu" else CONTEXT_BYTES + NCCL_BYTES


# Layers whose parameters or activations are on the device at once: the computing one and the next.
LAYERS_AT_HAND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How the memory of a stage is divided between ranks, and what is offloaded.

    ``num_ranks``: ranks that hold the stage. ``num_expert_ranks``: ranks over which the experts are divided.
    ``zero``: ZeRO stage. ``states_on``, ``activations_on``: where optimizer states and activations are between uses.
    Raises PlanError if ``num_expert_ranks`` does not divide ``num_ranks``.
    """

    num_ranks: int = 1
    num_expert_ranks: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    states_on: Literal["device", "host", "nvme"] = "device"
    activations_on: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_expert_ranks < 1 or self.num_ranks % self.num_expert_ranks:
            raise PlanError(
                f"The experts of a stage on {self.num_ranks} ranks cannot be divided over {self.num_expert_ranks} "
                "ranks; expected positive numbers, the second a divisor of the first. Choose another number of ranks "
                "that share the experts."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank, in bytes, on its device, on its host and on NVMe.

    ``absent_bytes``: gradients that do not exist yet at the peak of the device. ``host_moved_bytes``,
    ``nvme_moved_bytes``: bytes moved per step between device and host, and to and from NVMe.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    absent_bytes: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    host_moved_bytes: int = 0
    nvme_moved_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Peak memory on the device, in bytes."""
        parts = (self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes, self.activation_bytes)
        return sum(parts) + self.buffer_bytes - self.absent_bytes

    def moving_seconds(self, pcie: Link, nvme_bandwidth_bytes_per_s: float | None = None) -> float:
        """Return the seconds per step to move the bytes over PCIe and then to and from NVMe; 0 if nothing is moved.

        Raises PlanError if states are on NVMe and its bandwidth is None.
        """
        seconds = estimate_host_copy(pcie, self.host_moved_bytes).seconds
        if not self.nvme_moved_bytes:
            return seconds
        if nvme_bandwidth_bytes_per_s is None:
            raise PlanError(
                "Optimizer states are on NVMe, but nvme_bandwidth_bytes_per_s was not given; expected bytes per "
                "second. Take the rate for alternating reads and writes from the drive's datasheet."
            )
        return seconds + self.nvme_moved_bytes / nvme_bandwidth_bytes_per_s


def weigh_rank(
    graph: Graph,
    stage: StageSlice,
    batch_size: int,
    workload: Workload,
    options: MemoryOptions,
    *,
    num_in_flight: int = 1,
    num_microbatches: int = 1,
    device: Backend = "cpu",
) -> RankMemory:
    """Return the memory of a rank of a stage for microbatches of ``batch_size`` samples, in training.

    At most ``num_in_flight`` of the ``num_microbatches`` of a step are in flight at once. ``device``: "cpu" or "cuda".
    Raises GraphError for a batch size that the graph does not support.
    """
    graph = as_computed(graph, workload.numbers)
    num_microbatches = max(num_microbatches, num_in_flight)
    plain = weigh_stage(graph, stage, batch_size, workload, device=device)
    numbers, states = workload.numbers, state_bytes(workload.optimizer, workload.precision)
    width, gradient_width = numbers.value_bytes, numbers.gradient_bytes
    shards = _Shards(graph, stage, options)
    all_elements, trainable = shards.held(stage.parameters), shards.held(_trainable(graph, stage.parameters))
    layer = shards.largest_layer()
    parameters, gradients, kept_states = width * all_elements, gradient_width * trainable, states * trainable
    activations = plain.activation_bytes(num_in_flight, num_microbatches)
    # At the peak in a first backward, most gradients do not exist yet.
    peak = plain.peak_bytes(num_in_flight, num_microbatches) - plain.static_bytes
    absent = max(activations + plain.gradient_bytes - peak, 0) if options.zero < 2 else 0
    if options.zero >= 1:
        kept_states = states * shards.sharded(_trainable(graph, stage.parameters))
    if options.zero >= 2:
        sharded = shards.sharded(_trainable(graph, stage.parameters))
        # With states on the device, a rank's part of the weights is its part of the master weights (`spec.precision`).
        master = numbers.master_bytes if options.states_on == "device" else 0
        gradients = (master or gradient_width) * sharded + gradient_width * layer
        if options.zero == 3:
            parameters = (master or width) * shards.sharded(stage.parameters) + width * LAYERS_AT_HAND * layer
            kept_states -= master * sharded
    activations_moved, activations_away = 0, 0
    if options.activations_on == "host":
        kept = plain.microbatch_bytes - plain.received_bytes - plain.sent_bytes
        seen = as_kept(graph, numbers, device)
        at_hand = min(
            num_in_flight * kept, LAYERS_AT_HAND * _largest_saved(seen, stage, batch_size, workload.float_bytes)
        )
        activations_away = num_in_flight * kept - at_hand
        activations_moved = 2 * num_microbatches * kept
    away = kept_states if options.states_on != "device" else 0
    exchanged = (width + gradient_width) * shards.sharded(_trainable(graph, stage.parameters)) if away else 0
    return RankMemory(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=kept_states - away,
        activation_bytes=activations - activations_away,
        buffer_bytes=plain.buffer_bytes + sum(library_workspaces(device, trains=True)),
        absent_bytes=min(absent, gradients),
        host_bytes=activations_away + (away if options.states_on == "host" else 0),
        nvme_bytes=away if options.states_on == "nvme" else 0,
        host_moved_bytes=activations_moved + exchanged,
        nvme_moved_bytes=2 * away if options.states_on == "nvme" else 0,
    )


class _Shards:
    """Elements of a stage's parameters that a rank holds, in full or as its shard."""

    def __init__(self, graph: Graph, stage: StageSlice, options: MemoryOptions) -> None:
        self._graph, self._stage, self._options = graph, stage, options

    def held(self, parameters: Iterable[int]) -> int:
        """Return elements without sharding, except of experts."""
        return sum(self._elements(i) // self._expert_ranks(i) for i in parameters)

    def sharded(self, parameters: Iterable[int]) -> int:
        """Return the elements of a rank's shard, rounded up per parameter as sharding by rows does."""
        return sum(-(-self._elements(i) // self._options.num_ranks) for i in parameters)

    def largest_layer(self) -> int:
        """Return the elements of the stage's largest layer."""
        mine, ops = set(self._stage.parameters), set(self._stage.ops)
        layers = (
            {i for op in range(layer.start, layer.stop) if op in ops for i in self._graph.ops[op].inputs if i in mine}
            for layer in self._graph.layers
        )
        return max((self.held(layer) for layer in layers), default=0)

    def _elements(self, parameter: int) -> int:
        return self._graph.tensors[parameter].num_elements(0)

    def _expert_ranks(self, parameter: int) -> int:
        # Experts are stacked along the first dim of parameters of a module with this name.
        is_expert = "experts" in self._graph.tensors[parameter].name.split(".")
        return self._options.num_expert_ranks if is_expert else 1


def _trainable(graph: Graph, parameters: Iterable[int]) -> list[int]:
    return [i for i in parameters if graph.tensors[i].requires_grad]


def _largest_saved(graph: Graph, stage: StageSlice, batch_size: int, width: int | None) -> int:
    mine = set(stage.ops)
    layers = (mine & set(range(layer.start, layer.stop)) for layer in graph.layers)
    return max(sum(_bytes(graph, i, batch_size, width) for i in _saved_storages(graph, ops)) for ops in layers)


def _saved_storages(graph: Graph, ops: set[int]) -> set[int]:
    storages = {graph.tensors[i].storage for op in ops for i in graph.ops[op].saved}
    return {i for i in storages if graph.tensors[i].role in ("activation", "saved")}


def _bytes(graph: Graph, tensor: int, batch_size: int, width: int | None) -> int:
    return graph.tensors[tensor].num_bytes(batch_size, width)
