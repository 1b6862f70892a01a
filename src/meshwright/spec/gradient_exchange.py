"""How the replicas of a stage sum their gradients, and what they share out among each other. A part of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.spec.errors import PlanError

# The schedule whose replicas sum up their updates wave by wave, and how far they may run ahead: a wave more costs each
# rank another copy of its gradients.
WAVES: Literal["hetpipe"] = "hetpipe"
ZeroStage = Literal[0, 1, 2, 3]
MAX_STALENESS = 64

# DDP's default bucket (torch.nn.parallel.DistributedDataParallel): large enough for bandwidth, small enough to start
# early.
DEFAULT_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientExchange:
    """How replicas sum their gradients: all-reduce in buckets, ``overlap`` with the last backward or after it.

    ``zero``: what replicas share out among each other instead of keeping it alike (Rajbhandari et al., SC 2020). 1:
    optimizer states, so that sums are scattered, and parameters gathered before the next step's forward; 2: gradients,
    too; 3: parameters, too. With 2 and 3 this happens inside of passes, layer by layer, instead of in buckets.
    ``staleness``: by how many waves of minibatches replicas may run ahead of each other, under ``hetpipe``.

    ``partition_bytes``: buckets are cut into parts of at most so many bytes (0: left whole). ``sequence``: the order in
    which the parts leave, by number; that of readiness if not given. ``across_steps``: the exchange goes on in the next
    step, where each stage's forward waits for the update of that stage alone.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    overlap: bool = True
    zero: ZeroStage = 0
    staleness: int = 0
    partition_bytes: int = 0
    sequence: tuple[int, ...] = ()
    across_steps: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise PlanError(f"Buckets of {self.bucket_bytes} bytes were given; expected at least 1 byte.")
        if not 0 <= self.staleness <= MAX_STALENESS:
            raise PlanError(f"A staleness of {self.staleness} waves was given; expected 0 to {MAX_STALENESS}.")
        if self.partition_bytes < 0:
            raise PlanError(
                f"Parts of {self.partition_bytes} bytes were given; expected 0, for whole buckets, or more."
            )
        if self.zero and self.across_steps:
            raise PlanError(
                "A sharded optimizer was asked for together with `across_steps`; its parameters are gathered across "
                "steps anyway. Leave one of the two out."
            )

    @property
    def is_plain(self) -> bool:
        """Whether all-reduces of buckets are all there is, which is what the runtime executes."""
        return not (self.zero or self.partition_bytes or self.sequence or self.across_steps)

    @property
    def shard_optimizer(self) -> bool:
        """Whether sums of buckets are scattered, and parameters gathered, once per step."""
        return self.zero == 1

    def suited_to(self, schedule: str) -> GradientExchange:
        """The same for another schedule: without staleness, unless it knows waves."""
        return self if schedule == WAVES else replace(self, staleness=0)


PLAIN_EXCHANGE = GradientExchange()
