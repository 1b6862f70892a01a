"""What the plans of a search may choose among, and one setting: the choices that decide a device's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.planner.adoption import DEFAULT_CHUNKS
from meshwright.program import name_schedule
from meshwright.spec import GradientExchange, Offload, PlanError, Sharding
from meshwright.spec.exchange import ZeroStage
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.recompute import words_in_layers
from meshwright.spec.schedules import BASIC_SCHEDULES
from meshwright.spec.sharding import UNSHARDED


class Setting(NamedTuple):
    """The choices that decide the graph and the memory of a device.

    ``recompute`` is a word or layers (`spec.read_recompute`).
    """

    num_devices: int
    sharding: Sharding = UNSHARDED
    zero: ZeroStage = 0
    recompute: str = "none"
    offload: Offload = ON_DEVICE
    shard_size: int = 0
    idle: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What plans may choose among; a single value is fixed.

    ``last_resorts`` are ways to offload that are used only if no plan fits without them. ``shard_sizes`` go with ZeRO 1
    to 3 (`GradientExchange.shard_size`). If empty, ``num_devices`` means all devices of the cluster, ``num_stages`` any
    number, and ``microbatch_sizes`` divisors of the batch. ``num_chunks`` are numbers of stages per rank for
    interleaved schedules. ``idle`` are sets of devices to leave out (`Plan.idle`); plans use the first ``num_devices``
    of the others. ``schedules`` are names, references ``path/to/file.py:function`` to your own functions, such
    functions themselves, or order files; after construction they are names and references, and ``schedule_hashes``
    holds the hashes of the files. Raises ScheduleReferenceError for a value that is not a schedule.
    """

    num_devices: tuple[int, ...] = ()
    shardings: tuple[Sharding, ...] = (UNSHARDED,)
    zero: tuple[ZeroStage, ...] = (0,)
    shard_sizes: tuple[int, ...] = (0,)
    recompute: tuple[str, ...] = ("none",)
    offload: tuple[Offload, ...] = (ON_DEVICE,)
    idle: tuple[tuple[int, ...], ...] = ((),)
    last_resorts: tuple[Offload, ...] = ()
    microbatch_sizes: tuple[int, ...] = ()
    schedules: tuple[str, ...] = BASIC_SCHEDULES
    num_stages: tuple[int, ...] = ()
    num_chunks: tuple[int, ...] = (DEFAULT_CHUNKS,)
    schedule_hashes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.schedule_hashes
        named = dict((name, known[name]) if name in known else name_schedule(name) for name in self.schedules)
        object.__setattr__(self, "schedules", tuple(named))
        object.__setattr__(self, "schedule_hashes", named)
        for zero, size in self.sharing():
            GradientExchange(zero=zero, shard_size=size)

    @property
    def ways_to_offload(self) -> tuple[Offload, ...]:
        """Return the ways to offload, followed by those that are used only if no plan fits without them."""
        return tuple(dict.fromkeys((*self.offload, *self.last_resorts)))

    def allows_recompute(self, word: str) -> bool:
        """Return whether a word is allowed: it is a choice, or names layers.

        For layers, all of their words and "none" must be choices.
        """
        words = words_in_layers(word)
        return word in self.recompute or (bool(words) and {*words, "none"} <= {*self.recompute})

    def sharing(self) -> Iterator[tuple[ZeroStage, int]]:
        """Yield ZeRO stages, each with a shard size (0 for ZeRO 0). Raises PlanError for shard sizes without ZeRO."""
        if not any(self.zero) and any(self.shard_sizes):
            raise PlanError(
                f"A shard size of {max(self.shard_sizes)} was given without ZeRO, so replicas shard nothing; "
                "expected ZeRO 1 to 3 with it. Add --zero 3, or leave the shard size out."
            )
        for zero in self.zero:
            for size in self.shard_sizes if zero else (0,):
                yield zero, size
