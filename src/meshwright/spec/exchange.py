"""How replicas reduce gradients, synchronise parameters (`GradientExchange`); collectives of an axis (`Collective`).

An exchange is a part of a plan. `program.gradient_exchange`, `program.buckets` and `program.build` turn it into
instructions; the sequence of parts comes from `simulator.schedule_exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from meshwright.spec.errors import PlanError, suggest
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.spec.graph import Graph


Axis = Literal["tensor", "context", "expert"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Phase = Literal["forward", "backward"]
_LOSS = "aten.cross_entropy_loss.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective among the ranks of ``axis`` at op ``at`` of their local graph.

    In the forward pass it is (part of) what that op does, and ends before the op's output is available; in the backward
    pass likewise for the gradients of the op's inputs. The backward runs ops in descending order. Collectives of one
    op and phase run in the order of the list. In phase "step" the gradient of parameter ``tensor``, which op ``at``
    reads first, is summed once before the optimizer.

    Its size is that of the **full** tensor in the group (the output of an all-gather, the input of a reduce-scatter,
    what all ranks together pass to an all-to-all): ``copies`` times tensor ``tensor`` of the local graph. A "send" goes
    to the next rank of the axis while another comes from the rank before, ``count`` times one after the other.
    """

    kind: CollectiveKind
    axis: Axis
    phase: Literal["forward", "backward", "step"]
    at: int
    tensor: int
    copies: int = 1
    count: int = 1

    def num_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Return the bytes of the full tensor, for one of ``count`` (``float_bytes``: see `Tensor.num_bytes`)."""
        tensor = graph.tensors[self.tensor]
        if graph.ops[self.at].kind == _LOSS and tensor.dtype in FLOAT_DTYPES:
            # Sums of exponentials are never in half precision.
            float_bytes = max(float_bytes or DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["float32"])
        return self.copies * tensor.num_bytes(batch_size, float_bytes)


@lru_cache(maxsize=16)
def summing_axes(graph: Graph) -> Mapping[int, tuple[Axis, ...]]:
    """Return, by parameter, the axes over which its gradient is summed besides replicas.

    The ranks of these axes hold copies of the parameter and have gradients of other samples or tokens. The tensor axis
    is not among them if its ranks have parts of the gradients of the same tokens.
    """
    found: dict[int, tuple[Axis, ...]] = {}
    for item in graph.collectives:
        if item.phase == "step" and item.axis != "tensor":
            found[item.tensor] = tuple(sorted({*found.get(item.tensor, ()), item.axis}))
    return found


# The schedule whose replicas sum their updates wave by wave, and the largest staleness: each further wave costs each
# rank another copy of its gradients.
WAVES: Literal["hetpipe"] = "hetpipe"
MAX_STALENESS = 64
# DDP's default bucket (torch.nn.parallel.DistributedDataParallel): large enough for bandwidth, small enough to start
# early.
DEFAULT_BUCKET_BYTES = 25 * 2**20


ZeroStage = Literal[0, 1, 2, 3]
AllReduceAlgorithm = Literal["auto", "ring", "tree", "hierarchical"]
ALGORITHMS: tuple[AllReduceAlgorithm, ...] = get_args(AllReduceAlgorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """How replicas sum their gradients: all-reduce in buckets, during the last backward (``overlap``) or after it.

    ``zero``: what replicas shard instead of keeping copies (Rajbhandari et al., SC 2020). 1: optimizer states, so that
    sums are scattered, and parameters gathered before the next step's forward; 2: also gradients; 3: also parameters.
    With 2 and 3 this happens inside the passes, layer by layer, instead of in buckets.
    ``shard_size``: replicas shard in groups of this number of neighbours, and groups sum the shards of each member
    (hybrid sharding: torch's HSDP, Zhao et al., PyTorch FSDP, VLDB 2023); 0: all replicas of a stage are one group.
    ``staleness``: by how many waves of minibatches replicas may run ahead of each other, under ``hetpipe``.

    ``partition_bytes``: buckets are cut into parts of at most this size (0: not cut). ``sequence``: the order in which
    the parts are sent, by number; by default the order of readiness. ``across_steps``: the exchange continues in the
    next step, where each stage's forward waits for the update of that stage alone.

    ``servers``: ranks that sum the parts instead; each rank pushes to them and pulls from them. Ranks beyond those that
    train are separate machines. ``credit_bytes``: what a rank may have pushed and not yet pulled (0: all).

    ``algorithm`` of all-reduces: ``auto`` is the fastest known for each size; ``hierarchical`` reduce-scatters in each
    node of ``node_size`` ranks, all-reduces each rank's part across nodes, and all-gathers in the node.

    ``every_steps``: replicas update by themselves and average their parameters after this number of steps (local SGD).
    ``clip_norm`` and ``loss_scale``: before every update all ranks agree on one number, the norm of all gradients, or
    whether one of them is not finite.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    overlap: bool = True
    zero: ZeroStage = 0
    shard_size: int = 0
    staleness: int = 0
    partition_bytes: int = 0
    sequence: tuple[int, ...] = ()
    across_steps: bool = False
    servers: tuple[int, ...] = ()
    credit_bytes: int = 0
    algorithm: AllReduceAlgorithm = "auto"
    node_size: int = 0
    every_steps: int = 1
    clip_norm: bool = False
    loss_scale: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_ways(self)

    @property
    def is_plain(self) -> bool:
        """Return whether the exchange consists of all-reduces of buckets alone."""
        return self == GradientExchange(bucket_bytes=self.bucket_bytes, overlap=self.overlap, staleness=self.staleness)

    @property
    def is_runnable(self) -> bool:
        """Return whether the runtime executes it: sums of buckets or parts, sharded states, a norm for clipping."""
        done = {"zero": 0, "shard_size": 0} if self.zero else {"partition_bytes": 0, "sequence": ()}
        return replace(self, **done, clip_norm=False).is_plain

    def describe_changes(self) -> str:
        """Return the settings that differ from the defaults, for messages: ``zero = 3, clip_norm = True``."""
        values = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        return ", ".join(f"{name} = {value}" for name, value, default in values if value != default)

    @property
    def shard_optimizer(self) -> bool:
        """Return whether sums of buckets are scattered, and parameters gathered, once per step."""
        return self.zero == 1

    def shard_groups(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return groups of neighbours that shard states.

        Raises PlanError unless the shard size divides their number.
        """
        size = self.shard_size or len(ranks)
        if len(ranks) == 1:
            return (ranks,)
        if len(ranks) % size:
            raise PlanError(
                f"A shard size of {size} was given for {len(ranks)} replicas; expected a divisor of their number. "
                "Choose another shard size, or leave it out to shard among all of them."
            )
        return tuple(ranks[start : start + size] for start in range(0, len(ranks), size))

    def shard_group_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the group of `shard_groups` that contains a rank."""
        return next(group for group in self.shard_groups(ranks) if rank in group)

    def num_parts(self, num_replicas: int) -> int:
        """Return the number of parts into which replicas cut their shared states; 1 without sharding."""
        return (min(self.shard_size, num_replicas) or num_replicas) if self.zero else 1

    def replicating_groups(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the replicas at the same place of each group of `shard_groups`: they have the same shard."""
        return tuple(zip(*self.shard_groups(ranks), strict=True))

    def suited_to(self, schedule: str) -> GradientExchange:
        """Return the same exchange for another schedule: without staleness, unless the schedule has waves."""
        return self if schedule == WAVES else replace(self, staleness=0)


def _check_numbers(exchange: GradientExchange) -> None:
    if exchange.bucket_bytes < 1:
        raise PlanError(f"Buckets of {exchange.bucket_bytes} bytes were given; expected at least 1 byte.")
    if exchange.shard_size and (exchange.shard_size < 2 or not exchange.zero):
        raise PlanError(
            f"A shard size of {exchange.shard_size} was given with ZeRO {exchange.zero}; expected at least 2 replicas "
            "that shard states, with ZeRO 1 to 3. Give both, or leave the shard size out."
        )
    if not 0 <= exchange.staleness <= MAX_STALENESS:
        raise PlanError(f"A staleness of {exchange.staleness} waves was given; expected 0 to {MAX_STALENESS}.")
    if exchange.partition_bytes < 0:
        raise PlanError(
            f"Parts of {exchange.partition_bytes} bytes were given; expected 0, for whole buckets, or more."
        )
    if exchange.credit_bytes < 0:
        raise PlanError(f"A credit of {exchange.credit_bytes} bytes was given; expected 0, for no bound, or more.")
    if len(set(exchange.servers)) < len(exchange.servers) or min(exchange.servers, default=0) < 0:
        raise PlanError(f"The servers are ranks {list(exchange.servers)}; expected ranks from 0 on, none twice.")
    if exchange.every_steps < 1:
        raise PlanError(f"An exchange every {exchange.every_steps} steps was given; expected 1 or more.")
    if exchange.algorithm not in ALGORITHMS:
        raise PlanError(
            f"The algorithm {exchange.algorithm!r} was given{suggest(exchange.algorithm, ALGORITHMS)}; expected "
            f"{', '.join(ALGORITHMS)}."
        )
    if (exchange.node_size > 0) != (exchange.algorithm == "hierarchical") or exchange.node_size < 0:
        raise PlanError(
            f"Nodes of {exchange.node_size} ranks were given for the algorithm {exchange.algorithm}; expected 1 or "
            "more for hierarchical, and 0 for others. Give `node_size` only with hierarchical."
        )


def _check_ways(exchange: GradientExchange) -> None:
    """Raise PlanError for ways of exchanging that exclude each other."""
    chosen = {
        "zero": exchange.zero > 0,
        "servers": bool(exchange.servers),
        "every_steps": exchange.every_steps > 1,
    }
    ways = [name for name, is_chosen in chosen.items() if is_chosen]
    if len(ways) > 1:
        raise PlanError(
            f"An exchange was given with {' and '.join(ways)}, which exclude each other. Choose one, and leave "
            "the others out."
        )
    if exchange.algorithm != "auto" and (exchange.servers or exchange.zero):
        raise PlanError(
            f"The algorithm {exchange.algorithm} of all-reduces was given for an exchange without them. Leave it out, "
            "or leave out `servers` and `zero`."
        )
    if exchange.every_steps > 1 and exchange.algorithm == "hierarchical":
        raise PlanError("Parameters are averaged by plain all-reduces. Leave out `algorithm`, or `every_steps`.")
    if exchange.across_steps and (exchange.zero or exchange.every_steps > 1):
        raise PlanError(
            f"{ways[0]} was given together with `across_steps`; parameters come back across steps anyway. Leave "
            "`across_steps` out."
        )


# All-reduces of buckets during the last backward.
DEFAULT_EXCHANGE = GradientExchange()
