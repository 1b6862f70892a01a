"""Gradient synchronisation among replicas (`GradientExchange`), and collectives inside a split stage (`Collective`).

The exchange is a field of the plan. `program.gradient_exchange`, `program.buckets` and `program.build` turn it into
instructions. `simulator.schedule_exchange` finds the order of the parts of buckets (``sequence``). Under a ``policy``
(`ExchangePolicy`) a controller decides in the run which gradients an update takes (`program.controllers`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshwright.spec.errors import PlanError, suggest
from meshwright.spec.own_code import HASH, split_reference
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
    """A collective among the ranks of a mesh ``axis`` at op ``at`` of their local graph.

    In phase "forward" it is part of op ``at`` and ends before the op's output is available. In phase "backward" it ends
    before the gradients of the op's inputs are available. In phase "step" it sums the gradient of parameter ``tensor``
    once before the optimizer step; op ``at`` is the first that reads the parameter. The backward runs ops in descending
    order. Collectives of one op and phase run in the order of `Graph.collectives`.

    Its size is that of the **full** tensor in the group: the output of an all-gather, the input of a reduce-scatter,
    the input of all ranks together for an all-to-all. It is ``copies`` times the size of tensor ``tensor`` of the local
    graph. In a "send", each rank sends to the next rank of the axis and receives from the previous one, ``count`` times
    in a row.
    """

    kind: CollectiveKind
    axis: Axis
    phase: Literal["forward", "backward", "step"]
    at: int
    tensor: int
    copies: int = 1
    count: int = 1

    def num_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Return the bytes of the full tensor for one of the ``count`` repetitions.

        ``float_bytes`` is as in `Tensor.num_bytes`.
        """
        tensor = graph.tensors[self.tensor]
        if graph.ops[self.at].kind == _LOSS and tensor.dtype in FLOAT_DTYPES:
            # Sums of exponentials are never in half precision.
            float_bytes = max(float_bytes or DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["float32"])
        return self.copies * tensor.num_bytes(batch_size, float_bytes)


@lru_cache(maxsize=16)
def summing_axes(graph: Graph) -> Mapping[int, tuple[Axis, ...]]:
    """Return the mesh axes over which gradients are summed in addition to the sum over replicas, by parameter id.

    The ranks of these axes hold copies of the parameter and compute gradients of different samples or tokens. The
    tensor axis is left out: its ranks compute parts of the gradients of the same tokens.
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


PolicyKind = Literal["backup", "stopped-backup", "delay", "partial"]
POLICY_KINDS: tuple[PolicyKind, ...] = get_args(PolicyKind)
_POLICY_FORMS = "backup:B, stopped-backup:B, delay:S, partial:P or partial:P:T"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePolicy:
    """Which gradients an update takes, decided in the run.

    ``backup``: the mean of the first n - ``number`` of n; late gradients are dropped. ``stopped-backup``: the same, but
    late replicas are stopped. ``delay``: each as it arrives; a replica is at most ``number`` steps ahead of the
    slowest. ``partial``: the mean of those of the first ``number`` ready replicas, for these replicas;
    ``bridge_after`` groups have to connect all replicas (0: never).
    """

    kind: PolicyKind
    number: int
    bridge_after: int = 0

    @property
    def num_servers(self) -> int:
        """Number of ranks that only update and send parameters."""
        return 0 if self.kind == "partial" else 1

    def updates_per_step(self, num_replicas: int) -> int:
        """Return the number of updates in a step, of all ranks that update."""
        return 1 if self.kind in ("backup", "stopped-backup") else num_replicas

    def num_used(self, num_replicas: int) -> int:
        """Return the number of gradients of a step that are used."""
        return num_replicas - self.number if self.kind in ("backup", "stopped-backup") else num_replicas


def read_policy(text: str) -> ExchangePolicy | None:
    """Read a policy from text such as ``backup:1``; return None for the user's own, ``path/to/file.py:Class``.

    Raises PlanError for other text.
    """
    if split_reference(text) is not None:
        return None
    kind, *numbers = text.split(":")
    if kind not in POLICY_KINDS:
        raise PlanError(
            f"Unknown exchange policy {text!r}{suggest(kind, POLICY_KINDS)}; expected {_POLICY_FORMS}, or your own as "
            "path/to/file.py:Class."
        )
    least = 2 if kind == "partial" else 0
    is_number = len(numbers) in ((1, 2) if kind == "partial" else (1,)) and all(map(_is_count, numbers))
    if not is_number or int(numbers[0]) < least or "0" in numbers[1:]:
        raise PlanError(
            f"The exchange policy {text!r} was given; expected {_POLICY_FORMS}, with whole numbers: B and S of 0 or "
            "more, P of 2 or more, T of 1 or more."
        )
    number, bridge_after = map(int, (*numbers, "0")[:2])
    return ExchangePolicy(kind=kind, number=number, bridge_after=bridge_after)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


ZeroStage = Literal[0, 1, 2, 3]
AllReduceAlgorithm = Literal["auto", "ring", "tree", "hierarchical"]
ALGORITHMS: tuple[AllReduceAlgorithm, ...] = get_args(AllReduceAlgorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """How the replicas of a stage synchronise their gradients.

    By default they all-reduce gradients in buckets of ``bucket_bytes``, during the last backward (``overlap``) or after
    it.

    ``zero`` is the ZeRO stage (Rajbhandari et al., SC 2020). 1: replicas shard optimizer states; gradient buckets are
    reduce-scattered, and parameters all-gathered before the next step's forward. 2: they also shard gradients. 3: they
    also shard parameters. Under 2 and 3 the collectives run inside the passes, layer by layer, instead of in buckets.
    ``shard_size``: states are sharded within groups of this number of neighbouring replicas, and the groups sum the
    gradients of their shards (hybrid sharding: torch's HSDP, Zhao et al., PyTorch FSDP, VLDB 2023). 0: all replicas of
    a stage are one group. ``staleness``: under the schedule ``hetpipe``, the number of waves of minibatches by which
    replicas may run ahead of each other.

    ``partition_bytes``: buckets are cut into parts of at most this size (0: not cut). ``sequence``: the numbers of the
    parts in the order in which they are sent; empty: the order in which they become ready. ``across_steps``: the
    exchange continues in the next step, where each stage's forward waits for the update of that stage only.

    ``servers``: ranks that sum the parts instead of an all-reduce. Each rank pushes gradients to them and pulls the
    sums. Server ranks beyond those that train are separate machines. ``credit_bytes``: the bytes that a rank may have
    pushed and not yet pulled (0: no bound).

    ``algorithm`` of all-reduces: ``auto`` is the fastest known for each size; ``hierarchical`` reduce-scatters in each
    node of ``node_size`` ranks, all-reduces each rank's shard across nodes, and all-gathers in the node.

    ``every_steps``: replicas update by themselves and average their parameters after this number of steps (local SGD).
    Before every update, all ranks agree on the norm of all gradients (``clip_norm``) or on whether all gradients are
    finite (``loss_scale``).

    ``policy``: text of `read_policy`, or a reference ``path/to/file.py:Class`` of the user's own controller, with the
    hash of that file as ``policy_hash``. Such a plan has one stage, and each replica computes one microbatch per step;
    ``servers`` has the rank that holds the parameters, if the policy needs one.
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
    policy: str = ""
    policy_hash: str = ""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_ways(self)
        _check_policy(self)

    @property
    def is_plain(self) -> bool:
        """Return whether the exchange consists only of all-reduces of whole buckets in every step."""
        return self == GradientExchange(bucket_bytes=self.bucket_bytes, overlap=self.overlap, staleness=self.staleness)

    @property
    def is_runnable(self) -> bool:
        """Return whether the runtime can execute the exchange.

        It executes all-reduces of buckets or of their parts in any sequence, ZeRO, ``clip_norm``, and policies.
        """
        done: dict[str, Any] = {"partition_bytes": 0, "sequence": ()}
        if self.zero:
            done = {"zero": 0, "shard_size": 0}
        elif self.policy:
            done = {"policy": "", "policy_hash": "", "servers": ()}
        return replace(self, **done, clip_norm=False).is_plain

    def describe_changes(self) -> str:
        """Return the settings that differ from the defaults, for messages: ``zero = 3, clip_norm = True``."""
        values = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        return ", ".join(f"{name} = {value}" for name, value, default in values if value != default)

    @property
    def shard_optimizer(self) -> bool:
        """Return whether this is ZeRO 1: reduce-scatters of buckets and all-gathers of parameters, once per step."""
        return self.zero == 1

    def shard_groups(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of neighbouring replicas that shard states; ``ranks`` are the ranks of a stage.

        Raises PlanError unless ``shard_size`` divides the number of ranks.
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
        """Return the number of shards into which ``num_replicas`` replicas divide their states; 1 without ZeRO."""
        return (min(self.shard_size, num_replicas) or num_replicas) if self.zero else 1

    def replicating_groups(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of replicas that hold the same shard: the i-th ranks of all groups of `shard_groups`."""
        return tuple(zip(*self.shard_groups(ranks), strict=True))

    def suited_to(self, schedule: str) -> GradientExchange:
        """Return the exchange for another schedule: ``staleness`` is 0 unless the schedule has waves (hetpipe)."""
        return self if schedule == WAVES else replace(self, staleness=0)


def _check_numbers(exchange: GradientExchange) -> None:
    if exchange.bucket_bytes < 1:
        raise PlanError(f"Buckets of {exchange.bucket_bytes} bytes were given; expected at least 1 byte.")
    if exchange.shard_size and (exchange.shard_size < 2 or not exchange.zero):
        raise PlanError(
            f"A shard size of {exchange.shard_size} was given with ZeRO {exchange.zero}; expected a shard size of at "
            "least 2, with ZeRO 1 to 3. Give both, or leave the shard size out."
        )
    if not 0 <= exchange.staleness <= MAX_STALENESS:
        raise PlanError(f"A staleness of {exchange.staleness} waves was given; expected 0 to {MAX_STALENESS}.")
    if exchange.partition_bytes < 0:
        raise PlanError(f"partition_bytes is {exchange.partition_bytes}; expected 0, for whole buckets, or more.")
    if exchange.credit_bytes < 0:
        raise PlanError(f"credit_bytes is {exchange.credit_bytes}; expected 0, for no bound, or more.")
    if len(set(exchange.servers)) < len(exchange.servers) or min(exchange.servers, default=0) < 0:
        raise PlanError(f"The servers are ranks {list(exchange.servers)}; expected different ranks of at least 0.")
    if exchange.every_steps < 1:
        raise PlanError(f"An exchange every {exchange.every_steps} steps was given; expected 1 or more.")
    if exchange.algorithm not in ALGORITHMS:
        raise PlanError(
            f"The algorithm {exchange.algorithm!r} was given{suggest(exchange.algorithm, ALGORITHMS)}; expected "
            f"{', '.join(ALGORITHMS)}."
        )
    if (exchange.node_size > 0) != (exchange.algorithm == "hierarchical") or exchange.node_size < 0:
        raise PlanError(
            f"node_size is {exchange.node_size} with the algorithm {exchange.algorithm}; expected 1 or more ranks with "
            "hierarchical, and 0 with other algorithms. Give `node_size` only with hierarchical."
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
            f"The all-reduce algorithm {exchange.algorithm} was given, but an exchange with `servers` or `zero` has no "
            "all-reduces. Leave `algorithm` out, or leave out `servers` and `zero`."
        )
    if exchange.every_steps > 1 and exchange.algorithm == "hierarchical":
        raise PlanError(
            "The algorithm hierarchical was given with `every_steps`, which averages parameters by plain all-reduces. "
            "Leave out `algorithm`, or `every_steps`."
        )
    if exchange.across_steps and (exchange.zero or exchange.every_steps > 1):
        raise PlanError(
            f"`{ways[0]}` was given together with `across_steps`, but it exchanges parameters across steps already. "
            "Leave `across_steps` out."
        )


def _check_policy(exchange: GradientExchange) -> None:
    """Raise PlanError for a policy that is unknown, lacks its hash or server, or comes with other settings."""
    if not exchange.policy:
        if exchange.policy_hash:
            raise PlanError(f"policy_hash {exchange.policy_hash!r} was given without a policy. Leave it out.")
        return
    policy = read_policy(exchange.policy)
    own = replace(exchange, policy="", policy_hash="", servers=())
    if not own.is_plain or own.staleness:
        raise PlanError(
            f"The exchange policy {exchange.policy} was given with {own.describe_changes()}; a policy exchanges all "
            "gradients of a replica at once. Leave out the other settings."
        )
    if policy is not None and len(exchange.servers) != policy.num_servers:
        raise PlanError(
            f"The exchange policy {exchange.policy} was given with {len(exchange.servers)} servers; expected "
            f"{policy.num_servers}."
        )
    if (policy is None) != bool(exchange.policy_hash) or (policy is None and not HASH.fullmatch(exchange.policy_hash)):
        raise PlanError(
            f"The exchange policy {exchange.policy} has policy_hash {exchange.policy_hash!r}; expected the 16 "
            "hexadecimal digits of its file's hash, and none for a named policy. Let `meshwright plan --exchange` "
            "write it."
        )


# All-reduces of buckets during the last backward.
DEFAULT_EXCHANGE = GradientExchange()
