"""What one op of a training step costs on a device of a node, by three efficiencies of that device.

    products      max(FLOPs / (peak · e_product · scale), bytes / (memory bandwidth · e_memory)) + launch
    attention     the same, with the share of the peak that its kernels are published to reach, where one is given
    passes        bytes / (memory bandwidth · e_memory) + launch
    collectives   ring: steps · latency + share · bytes / (bandwidth of the slowest place on the ring · e_network)

The share is 2(r-1)/r for an all-reduce of r ranks and (r-1)/r for the other collectives (Patarasu and Yuan, JPDC 2009).
A group with d ranks on each node has that share of the node's NICs: other groups of the same step use the rest at the
same time. The scale of a dtype is what large products reach on this device over what they reach on the one whose
efficiencies are used, both measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.cost.roofline import LAUNCH_S, peak_flops

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwright.cost.steps.ops import CountedOp
    from meshwright.cost.transformer import TrainingSetup
    from meshwright.spec import DeviceKind, Node

_SHARES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a device's datasheet figures that training reaches, one set for all models on it."""

    product: float
    memory: float
    network: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The slowest place on a ring of ranks: bytes per second of one rank, and seconds of one round of all steps."""

    num_ranks: int
    bandwidth_bytes_per_s: float
    latency_s: float

    def seconds(self, op: str, num_bytes: float) -> float:
        """One collective over a full tensor of ``num_bytes`` (of an all-to-all: what one rank holds)."""
        if self.num_ranks < 2:
            return 0.0
        share = _SHARES[op]
        moved = share * (self.num_ranks - 1) / self.num_ranks * num_bytes
        return share * self.latency_s + moved / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrices:
    """Prices of ops and messages of one training setup on nodes of one kind, all devices of a node alike."""

    kind: DeviceKind
    node: Node
    setup: TrainingSetup
    efficiencies: Efficiencies
    product_scales: Mapping[str, float] = field(default_factory=dict)
    attention_share: float | None = None
    _rings: dict[str, Ring] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        setup = self.setup
        # Ranks are numbered tensor group first, then context, then data, then pipeline (Megatron-LM's order).
        self._rings["tensor"] = self.ring(setup.tp, 1)
        self._rings["context"] = self.ring(setup.cp, setup.tp)
        self._rings["expert"] = self.ring(setup.ep, setup.tp)
        self._rings["data"] = self.ring(setup.dp * setup.cp, setup.tp)
        self._rings["embedding"] = self.ring(min(setup.pp, 2), setup.num_devices // setup.pp)

    def seconds(self, op: CountedOp) -> float:
        """One run of an op; a collective of a single rank takes no time."""
        if op.group:
            return self.collective_seconds(op.group, op.op, op.num_bytes)
        moving = self.pass_seconds(op.num_bytes)
        if op.op == "memory":
            return moving
        dtype = self._dtype(op)
        share = self.efficiencies.product * self.product_scales.get(dtype, 1.0)
        if op.op == "attention" and self.attention_share is not None:
            share = self.attention_share
        return max(op.flops / (peak_flops(self.kind, dtype) * share) + LAUNCH_S, moving)

    def total(self, ops: Iterable[CountedOp]) -> float:
        """All ops, one after the other, each as often as it counts."""
        return sum(op.count * self.seconds(op) for op in ops)

    def pass_seconds(self, num_bytes: float) -> float:
        """A kernel that reads and writes so many bytes."""
        return num_bytes / (self.kind.memory_bandwidth_bytes_per_s * self.efficiencies.memory) + LAUNCH_S

    def collective_seconds(self, group: str, op: str, num_bytes: float) -> float:
        """A collective of the tensor, context, expert, data or embedding group that a rank belongs to."""
        return self._rings[group].seconds(op, num_bytes)

    def send_seconds(self, num_bytes: float) -> float:
        """A message to the next pipeline stage."""
        ranks_between = self.setup.num_devices // self.setup.pp
        return self.ring(2, ranks_between).latency_s + num_bytes / self.ring(2, ranks_between).bandwidth_bytes_per_s

    def ring(self, num_ranks: int, stride: int) -> Ring:
        """The ring through every ``stride``-th rank."""
        node, per_node = self.node, self.node.num_devices
        members = min(max(per_node // stride, 1), num_ranks)
        if members == num_ranks:
            bandwidth, latency = node.device_link.bandwidth_bytes_per_s, num_ranks * node.device_link.latency_s
        else:
            nics = node.nic.bandwidth_bytes_per_s * node.num_nics * members / per_node
            bandwidth = min(node.device_link.bandwidth_bytes_per_s, nics) if members > 1 else nics
            num_nodes = -(-num_ranks // members)
            latency = num_nodes * node.nic.latency_s + (num_ranks - num_nodes) * node.device_link.latency_s
        return Ring(num_ranks=num_ranks, bandwidth_bytes_per_s=bandwidth * self.efficiencies.network, latency_s=latency)

    def _dtype(self, op: CountedOp) -> str:
        # Only products with parameters run in 8 bits; attention's own stay in 16 (Transformer Engine, torchao). Both
        # 16-bit formats have one rate.
        return "float8_e4m3fn" if self.setup.precision == "fp8" and op.weighted else "bfloat16"
