"""What one op of a training step costs on a device of a node, by three figures of that device.

    products      seconds that the kernel takes alone / e_product, at least bytes / (memory bandwidth · e_memory)
    attention     FLOPs / (peak · the share that its kernels alone are published to reach · e_product), or the same
    passes        bytes / (memory bandwidth · e_memory) + launch; bytes that the cache holds count less
    collectives   inside a node as measured on such nodes (`cost.collectives.shipped`); across nodes, and where nothing
                  was measured, the flat ring of `cost.collectives.datasheet` over links of `NETWORK_SHARE` of their
                  bandwidth, and no less than inside
    kernels       each takes the host `host_s` to start (`pacing`)

The same collective runs in all groups of a kind at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from meshwright.cost.collectives.datasheet import find_ways, quote_ring
from meshwright.cost.collectives.groups import Group, group_in_mesh
from meshwright.cost.collectives.protocols import PLAIN
from meshwright.cost.collectives.shipped import load_shipped
from meshwright.cost.roofline import LAUNCH_S, peak_flops
from meshwright.cost.steps.alone import product_seconds
from meshwright.cost.transformer import HALF, SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.cost.collectives import CollectiveOp
    from meshwright.cost.steps.counted import CountedOp
    from meshwright.cost.transformer import TrainingSetup
    from meshwright.spec import DeviceKind, Node

# An all-reduce of 8 A100 grows by 231 of 300 GB/s between 16 and 64 MiB (ai-dynamo/aiconfigurator, nccl_perf, NCCL
# 2.27); links between nodes are taken to give as large a share.
NETWORK_SHARE = 0.77
# What a kernel finds in the second-level cache, or leaves there, moves so much faster: an A100's reads 5120 bytes per
# clock at 1.41 GHz, 7.2 TB/s beside 2.04 of its memory; a V100's 2048 at 1.53, 3.1 beside 0.9 (NVIDIA A100 Tensor Core
# GPU Architecture white paper, 2020). Up to the cache's size, a tensor that was just written is read from there.
_CACHE_SPEED = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """What training reaches on a kind of device, one set for all models and software.

    ``product``: of the speed of products alone; ``memory``: of the memory bandwidth; ``host_s``: seconds in which the
    host of an eager framework starts a kernel.
    """

    product: float
    memory: float
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrices:
    """Prices of ops and messages of one training setup on nodes of one kind, all devices of a node alike.

    ``by_datasheet``: products run at the peak, whatever kernels were measured to reach.
    """

    kind: DeviceKind
    node: Node
    setup: TrainingSetup
    efficiencies: Efficiencies
    attention_share: float | None = None
    by_datasheet: bool = False
    _places: dict[str, Group] = field(init=False, repr=False, default_factory=dict)
    _messages: dict[tuple[str, str, float], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        setup = self.setup
        # Ranks are numbered tensor group first, then context, then data, then pipeline (Megatron-LM's order).
        next_stage = setup.num_devices // setup.pp
        self._places["tensor"] = self.place(setup.tp, 1)
        self._places["context"] = self.place(setup.cp, setup.tp)
        self._places["expert"] = self.place(setup.ep, setup.tp)
        self._places["data"] = self.place(setup.dp * setup.cp, setup.tp)
        self._places["expert data"] = self.place(setup.dp * setup.cp // setup.ep, setup.tp * setup.ep)
        self._places["pipeline"] = self.place(min(setup.pp, 2), next_stage)
        # The first and the last stage share the embedding.
        self._places["embedding"] = self.place(min(setup.pp, 2), next_stage * max(setup.pp - 1, 1))

    def seconds(self, op: CountedOp) -> float:
        """One run of an op; a collective of a single rank takes no time."""
        if op.group:
            return self.collective_seconds(op.group, cast("CollectiveOp", op.op), op.num_bytes)
        if op.op == "memory":
            return self.pass_seconds(op.num_bytes)
        dtype = self._dtype(op)
        moving = self.pass_seconds(op.num_bytes * (SINGLE // HALF if dtype == "float32" else 1))
        if op.op == "attention":
            share = (self.attention_share or 1.0) * self.efficiencies.product
            return max(op.flops / (peak_flops(self.kind, dtype) * share) + LAUNCH_S, moving)
        if self.by_datasheet:
            return max(op.flops / peak_flops(self.kind, dtype) + LAUNCH_S, moving)
        return max(product_seconds(self.kind, dtype, op) / self.efficiencies.product, moving)

    def total(self, ops: Iterable[CountedOp]) -> float:
        """All ops, one after the other, each as often as it counts."""
        return sum(op.count * self.seconds(op) for op in ops)

    def pass_seconds(self, num_bytes: float) -> float:
        """A kernel that reads and writes so many bytes, as many of them in the cache as that holds."""
        cached = min(num_bytes, self.kind.cache_bytes)
        moved = num_bytes - cached * (1.0 - 1.0 / _CACHE_SPEED)
        return moved / (self.kind.memory_bandwidth_bytes_per_s * self.efficiencies.memory) + LAUNCH_S

    def collective_seconds(self, group: str, op: CollectiveOp, num_bytes: float) -> float:
        """A collective over a full tensor of ``num_bytes``, or a send, in a group that a rank belongs to.

        ``group``: "tensor", "context", "expert", "data", "expert data", "pipeline" or "embedding".
        """
        key = (group, op, num_bytes)
        if key not in self._messages:
            self._messages[key] = self._message_seconds(self._places[group], op, num_bytes)
        return self._messages[key]

    def _message_seconds(self, place: Group, op: CollectiveOp, num_bytes: float) -> float:
        if place.num_ranks == 1:
            return 0.0
        # The last node has what is left.
        full = -(-place.num_ranks // place.num_nodes)
        counts = [min(full, place.num_ranks - full * node) for node in range(place.num_nodes)]
        inside = self._measured_seconds(full, place.stride, op, num_bytes)
        if place.num_nodes == 1 and inside is not None:
            return inside
        ways = find_ways([(self.node, count) for count in counts], place.num_sharing)
        reached = replace(PLAIN, bandwidth_share=NETWORK_SHARE)
        latency_s, s_per_byte = quote_ring(op, place, counts, ways.through(reached))
        return max(latency_s + num_bytes * s_per_byte, inside or 0.0)

    def _measured_seconds(self, num_ranks: int, stride: int, op: CollectiveOp, num_bytes: float) -> float | None:
        """What public measurements say of so many devices of a node, if any do."""
        if num_ranks == 1:
            return None
        model = load_shipped().find_inside(self.kind.name, self.node.device_link)
        group = Group(num_ranks=num_ranks, stride=stride)
        found = model.predict(op, group, np.array([float(num_bytes)])) if model else None
        return None if found is None else float(found.seconds[0])

    def place(self, num_ranks: int, stride: int) -> Group:
        """Where the group of every ``stride``-th rank lies, the step's other groups of the kind running beside it."""
        per_node, num_devices = self.node.num_devices, self.setup.num_devices
        return group_in_mesh(num_ranks, stride, per_node, num_devices // num_ranks, -(-num_devices // per_node))

    def _dtype(self, op: CountedOp) -> str:
        # Only products with parameters run in 8 bits; attention's own stay in 16 (Transformer Engine, torchao). Both
        # 16-bit formats have one rate, where a device has both.
        if self.setup.precision == "fp32":
            return "float32"
        if self.setup.precision == "fp8" and op.weighted:
            return "float8_e4m3fn"
        return "bfloat16" if "bfloat16" in self.kind.peak_flops_per_s else "float16"
