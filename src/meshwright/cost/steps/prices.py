"""What one op of a training step costs on a device of a node, by three efficiencies of that device.

    products      max(FLOPs / (peak · e_product · scale), bytes / (memory bandwidth · e_memory)) + launch
    attention     the same, with the share of the peak that its kernels are published to reach, where one is given
    passes        bytes / (memory bandwidth · e_memory) + launch
    collectives   the flat ring of `cost.collectives.datasheet`, over links of e_network of their bandwidth

The same collective runs in all groups of a kind at once. The scale of a dtype is what large products reach on this
device over what they reach on the one whose efficiencies are used, both measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from meshwright.cost.collectives.datasheet import find_ways, quote_ring
from meshwright.cost.collectives.groups import Group, group_in_mesh
from meshwright.cost.collectives.protocols import PLAIN
from meshwright.cost.roofline import LAUNCH_S, peak_flops

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwright.cost.collectives import CollectiveOp
    from meshwright.cost.steps.ops import CountedOp
    from meshwright.cost.transformer import TrainingSetup
    from meshwright.spec import DeviceKind, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a device's datasheet figures that training reaches, one set for all models on it."""

    product: float
    memory: float
    network: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrices:
    """Prices of ops and messages of one training setup on nodes of one kind, all devices of a node alike."""

    kind: DeviceKind
    node: Node
    setup: TrainingSetup
    efficiencies: Efficiencies
    product_scales: Mapping[str, float] = field(default_factory=dict)
    attention_share: float | None = None
    _places: dict[str, Group] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        setup = self.setup
        # Ranks are numbered tensor group first, then context, then data, then pipeline (Megatron-LM's order).
        next_stage = setup.num_devices // setup.pp
        self._places["tensor"] = self.place(setup.tp, 1)
        self._places["context"] = self.place(setup.cp, setup.tp)
        self._places["expert"] = self.place(setup.ep, setup.tp)
        self._places["data"] = self.place(setup.dp * setup.cp, setup.tp)
        self._places["pipeline"] = self.place(min(setup.pp, 2), next_stage)
        # The first and the last stage share the embedding.
        self._places["embedding"] = self.place(min(setup.pp, 2), next_stage * max(setup.pp - 1, 1))

    def seconds(self, op: CountedOp) -> float:
        """One run of an op; a collective of a single rank takes no time."""
        if op.group:
            return self.collective_seconds(op.group, cast("CollectiveOp", op.op), op.num_bytes)
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

    def collective_seconds(self, group: str, op: CollectiveOp, num_bytes: float) -> float:
        """A collective over a full tensor of ``num_bytes``, or a send, in a group that a rank belongs to.

        ``group``: "tensor", "context", "expert", "data", "pipeline" or "embedding".
        """
        place = self._places[group]
        if place.num_ranks == 1:
            return 0.0
        # The last node has what is left.
        full = -(-place.num_ranks // place.num_nodes)
        counts = [min(full, place.num_ranks - full * node) for node in range(place.num_nodes)]
        ways = find_ways([(self.node, count) for count in counts], place.num_sharing)
        reached = replace(PLAIN, bandwidth_share=self.efficiencies.network)
        latency_s, s_per_byte = quote_ring(op, place, counts, ways.through(reached))
        return latency_s + num_bytes * s_per_byte

    def place(self, num_ranks: int, stride: int) -> Group:
        """Where the group of every ``stride``-th rank lies, the step's other groups of the kind running beside it."""
        per_node, num_devices = self.node.num_devices, self.setup.num_devices
        return group_in_mesh(num_ranks, stride, per_node, num_devices // num_ranks, -(-num_devices // per_node))

    def _dtype(self, op: CountedOp) -> str:
        # Only products with parameters run in 8 bits; attention's own stay in 16 (Transformer Engine, torchao). Both
        # 16-bit formats have one rate.
        return "float8_e4m3fn" if self.setup.precision == "fp8" and op.weighted else "bfloat16"
