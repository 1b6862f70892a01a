"""GradientExchange: how replicas make one gradient of theirs, and parameters of it. A part of a plan.

What is said here becomes instructions in `program.exchange`, `program.parts`, `program.servers` and
`program.across_steps`; the sequence of parts comes from `simulator.schedule_exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from meshwright.spec.errors import PlanError, suggest

# The schedule whose replicas sum up their updates wave by wave, and how far they may run ahead: a wave more costs each
# rank another copy of its gradients.
WAVES: Literal["hetpipe"] = "hetpipe"
MAX_STALENESS = 64
# DDP's default bucket (torch.nn.parallel.DistributedDataParallel): large enough for bandwidth, small enough to start
# early.
DEFAULT_BUCKET_BYTES = 25 * 2**20


AllReduceAlgorithm = Literal["auto", "ring", "tree", "hierarchical"]
ALGORITHMS: tuple[AllReduceAlgorithm, ...] = get_args(AllReduceAlgorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """How replicas sum their gradients: all-reduce in buckets, ``overlap`` with the last backward or after it.

    ``shard_optimizer``: each replica keeps the optimizer states of its part of every bucket and updates that (ZeRO-1):
    sums are scattered, parameters gathered before the next step's forward. ``staleness``: by how many waves of
    minibatches replicas may run ahead of each other, under ``hetpipe``.

    ``partition_bytes``: buckets are cut into parts of at most so many bytes (0: left whole). ``sequence``: the order in
    which the parts leave, by number; that of readiness if not given. ``across_steps``: the exchange goes on in the next
    step, where each stage's forward waits for the update of that stage alone.

    ``servers``: ranks that sum the parts instead, each rank pushing to them and pulling from them; ranks beyond those
    that train are machines of their own. ``credit_bytes``: what a rank may have pushed and not yet pulled (0: all).

    ``algorithm`` of all-reduces: ``auto`` is the fastest known for each size, ``hierarchical`` scatters sums in each
    node of ``node_size`` ranks, sums across nodes what each rank has then, and gathers in the node.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    overlap: bool = True
    shard_optimizer: bool = False
    staleness: int = 0
    partition_bytes: int = 0
    sequence: tuple[int, ...] = ()
    across_steps: bool = False
    servers: tuple[int, ...] = ()
    credit_bytes: int = 0
    algorithm: AllReduceAlgorithm = "auto"
    node_size: int = 0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise PlanError(f"Buckets of {self.bucket_bytes} bytes were given; expected at least 1 byte.")
        if not 0 <= self.staleness <= MAX_STALENESS:
            raise PlanError(f"A staleness of {self.staleness} waves was given; expected 0 to {MAX_STALENESS}.")
        if self.partition_bytes < 0:
            raise PlanError(
                f"Parts of {self.partition_bytes} bytes were given; expected 0, for whole buckets, or more."
            )
        if self.credit_bytes < 0:
            raise PlanError(f"A credit of {self.credit_bytes} bytes was given; expected 0, for no bound, or more.")
        if len(set(self.servers)) < len(self.servers) or min(self.servers, default=0) < 0:
            raise PlanError(f"The servers are ranks {list(self.servers)}; expected ranks from 0 on, none twice.")
        if self.algorithm not in ALGORITHMS:
            raise PlanError(
                f"The algorithm {self.algorithm!r} was given{suggest(self.algorithm, ALGORITHMS)}; expected "
                f"{', '.join(ALGORITHMS)}."
            )
        if (self.node_size > 0) != (self.algorithm == "hierarchical") or self.node_size < 0:
            raise PlanError(
                f"Nodes of {self.node_size} ranks were given for the algorithm {self.algorithm}; expected 1 or more "
                "for hierarchical, and none for others. Give `node_size` with hierarchical, and leave it out else."
            )
        if self.algorithm != "auto" and (self.servers or self.shard_optimizer):
            raise PlanError(
                f"The algorithm {self.algorithm} of all-reduces was given for an exchange without them. Leave it out, "
                "or leave out `servers` and `shard_optimizer`."
            )
        if self.shard_optimizer and self.servers:
            raise PlanError(
                "A sharded optimizer was asked for together with servers, which give whole sums back. Leave one of the "
                "two out."
            )
        if self.shard_optimizer and self.across_steps:
            raise PlanError(
                "A sharded optimizer was asked for together with `across_steps`; its parameters are gathered across "
                "steps anyway. Leave one of the two out."
            )

    @property
    def is_plain(self) -> bool:
        """Whether all-reduces of buckets are all there is, which is what the runtime executes."""
        return self == GradientExchange(bucket_bytes=self.bucket_bytes, overlap=self.overlap, staleness=self.staleness)

    def suited_to(self, schedule: str) -> GradientExchange:
        """The same for another schedule: without staleness, unless it knows waves."""
        return self if schedule == WAVES else replace(self, staleness=0)


# All-reduces of buckets within the last backward.
DEFAULT_EXCHANGE = GradientExchange()
