"""The choices that a search may combine (`Choices`), and one combination that fixes a device's graph (`Setting`)."""

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
    """One combination of the choices that decide the graph and the memory of a device.

    ``num_devices`` is the number of devices that the plan uses, ``idle`` those that it leaves out, ``zero`` the ZeRO
    stage. ``shard_size`` is the number of replicas that shard states among each other, 0 for all. ``recompute`` is a
    word such as "full", or words for single layers (`spec.read_recompute`).
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
    """The values that a search may use for each choice; a single value is fixed.

    An empty ``num_devices`` means all devices of the cluster, an empty ``num_stages`` any number, and empty
    ``microbatch_sizes`` all divisors of the batch. ``last_resorts`` are kinds of offload that are used only if no plan
    fits without them. ``shard_sizes`` apply to ZeRO 1 to 3 (`GradientExchange.shard_size`). ``num_chunks`` are numbers
    of stages per rank for interleaved schedules. ``idle`` are sets of devices to leave out (`Plan.idle`); of the
    remaining devices, plans use the first ``num_devices``. ``schedules`` are names, order files, your own functions, or
    references ``path/to/file.py:function``; after construction they are names and references, and ``schedule_hashes``
    holds the hash of each file. Raises ScheduleReferenceError for a value that is not a schedule.
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
        """All kinds of offload: ``offload``, then ``last_resorts``, without duplicates."""
        return tuple(dict.fromkeys((*self.offload, *self.last_resorts)))

    def allows_recompute(self, word: str) -> bool:
        """Return whether the recompute setting ``word`` is allowed.

        A setting is allowed if it is one of the choices. A setting for single layers, such as "op[1:5]", is also
        allowed if "none" and all words that it uses are among the choices.
        """
        words = words_in_layers(word)
        return word in self.recompute or (bool(words) and {*words, "none"} <= {*self.recompute})

    def sharing(self) -> Iterator[tuple[ZeroStage, int]]:
        """Yield every pair of a ZeRO stage and a shard size (0 for ZeRO 0).

        Raises PlanError if shard sizes are given, but no ZeRO stage above 0.
        """
        if not any(self.zero) and any(self.shard_sizes):
            raise PlanError(
                f"A shard size of {max(self.shard_sizes)} was given without ZeRO, so replicas shard nothing; "
                "expected ZeRO 1 to 3 with it. Add --zero 3, or leave --shard out."
            )
        for zero in self.zero:
            for size in self.shard_sizes if zero else (0,):
                yield zero, size
