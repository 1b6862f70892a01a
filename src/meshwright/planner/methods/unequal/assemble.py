"""Assemble mapping problems: stages of a space at one microbatch size, on the classes of its devices.

Bytes and seconds are those of a slicing problem (`slicing.assemble`); what differs are the devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.layouts import Layout, Places, memory_limit
from meshwright.planner.methods.slicing.assemble import make_problem
from meshwright.planner.methods.unequal.groups import DeviceClass, count_states, find_classes, find_groups
from meshwright.planner.methods.unequal.mapping import Mapping
from meshwright.planner.methods.unequal.shares import optimal_shares
from meshwright.planner.methods.unequal.stage_table import KEEPS_ALL, KEEPS_ONE, KEEPS_SOME, MappingProblem
from meshwright.planner.space import Space
from meshwright.spec import Plan, StagePlan
from meshwright.spec.units import PICOSECONDS_PER_SECOND

# The least time that a layer counts for: the tick of the simulator.
_LEAST_S = 1.0 / PICOSECONDS_PER_SECOND


# States of devices left beyond which nodes that are alike are merged.
MAX_STATES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClasses:
    """The classes of a space's devices, the groups of them, and what these groups mean for links.

    ``set_of`` has the set of classes of each group; ``link_of`` the link between two sets, of which ``links`` has a
    pair of ranks (twice the same for no link). ``latency_s`` and ``bucket_s`` are the seconds in which a group sums a
    byte and a bucket.
    """

    classes: tuple[DeviceClass, ...]
    groups: tuple[tuple[int, ...], ...]
    set_of: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    link_of: tuple[tuple[int, ...], ...]
    latency_s: tuple[float, ...]
    bucket_s: tuple[float, ...]

    def of_sizes(self, num_ranks: int) -> DeviceClasses | None:
        """The same with groups of so many devices alone; None if there are too few of them to use all devices."""
        chosen = [index for index, group in enumerate(self.groups) if sum(group) == num_ranks]
        met = [any(self.groups[index][k] for index in chosen) for k in range(len(self.classes))]
        if not all(met):
            return None
        return replace(
            self,
            groups=tuple(self.groups[index] for index in chosen),
            set_of=tuple(self.set_of[index] for index in chosen),
            latency_s=tuple(self.latency_s[index] for index in chosen),
            bucket_s=tuple(self.bucket_s[index] for index in chosen),
        )

    def ranks(self, groups: Sequence[int]) -> list[tuple[int, ...]]:
        """Ranks for stages on these groups: of each class the next ones."""
        taken = [0] * len(self.classes)
        found = []
        for group in groups:
            own: list[int] = []
            for k, count in enumerate(self.groups[group]):
                own += self.classes[k].ranks[taken[k] : taken[k] + count]
                taken[k] += count
            found.append(tuple(own))
        return found


def find_devices(space: Space, ranks: Sequence[int] | None = None) -> DeviceClasses:
    """The devices of a space, or some of them; nodes that are alike are merged where there are too many states."""
    chosen = range(space.num_ranks) if ranks is None else ranks
    classes = _classes(space, chosen, merged=False)
    if count_states(classes) > MAX_STATES:
        classes = _classes(space, chosen, merged=True)
    groups = find_groups(space.cluster, classes, len(chosen))
    sets = list(dict.fromkeys(map(_support, groups)))
    links: list[tuple[int, int]] = [(0, 0)]
    link_of = [[_number(_slowest_pair(space, classes, a, b), links) for b in sets] for a in sets]
    devices = DeviceClasses(
        classes=classes,
        groups=groups,
        set_of=tuple(sets.index(_support(group)) for group in groups),
        links=tuple(links),
        link_of=tuple(map(tuple, link_of)),
        latency_s=(),
        bucket_s=(),
    )
    rings = [tuple(sorted(devices.ranks([index])[0])) for index in range(len(groups))]

    def sums(num_bytes: int) -> tuple[float, ...]:
        return tuple(
            space.cost.collective_seconds("all_reduce", ring, num_bytes) if len(ring) > 1 else 0.0 for ring in rings
        )

    return replace(devices, latency_s=sums(1), bucket_s=sums(space.exchange.bucket_bytes))


def are_equal(space: Space) -> bool:
    """Whether all devices of a space are alike, and all their links."""
    cluster = space.cluster
    return (
        len(_classes(space, range(space.num_ranks), merged=True)) == 1 and cluster.racks is None and not cluster.paths
    )


def _classes(space: Space, chosen: Collection[int], *, merged: bool) -> tuple[DeviceClass, ...]:
    """The classes of some ranks."""
    found = (
        replace(item, ranks=tuple(rank for rank in item.ranks if rank in chosen))
        for item in find_classes(space.cluster, merged=merged)
    )
    return tuple(item for item in found if item.ranks)


def _support(group: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k for k, count in enumerate(group) if count)


def _number(pair: tuple[int, int], links: list[tuple[int, int]]) -> int:
    if pair not in links:
        links.append(pair)
    return links.index(pair)


def _slowest_pair(
    space: Space, classes: Sequence[DeviceClass], source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, int]:
    """Two ranks that stand for the slowest link from one set of classes to another."""
    pairs = [
        (classes[a].ranks[0], classes[b].ranks[-1])
        for a, b in product(source, target)
        if classes[a].ranks[0] != classes[b].ranks[-1]
    ]
    num_bytes = space.exchange.bucket_bytes
    return max(pairs, key=lambda pair: space.cluster.link_between(*pair).seconds(num_bytes), default=(0, 0))


def make_mapping_problem(
    space: Space, size: int, schedule: str, devices: DeviceClasses, beside: NDArray[np.float64]
) -> MappingProblem:
    """The arrays of one mapping problem; ``beside`` (L, L + 1) are bytes that only a simulation showed."""
    tables = space.tables(size)
    kinds = tuple(dict.fromkeys(item.kind for item in devices.classes))
    nowhere = np.zeros((1, 2), np.int64)
    given = make_problem(
        tables,
        Places(
            layout=Layout(name="stage-major", num_ranks=1),
            kind_sets=tuple((kind,) for kind in kinds),
            links=devices.links,
            kind_of=nowhere,
            link_of=nowhere,
            memory_limit=nowhere.astype(np.float64),
            latency_s=nowhere.astype(np.float64),
            bucket_s=nowhere.astype(np.float64),
            shared_s=nowhere.astype(np.float64),
        ),
        in_flight=nowhere,
        beside=beside,
        exchange=space.exchange,
        workload=space.workload,
        cost=space.cost,
        offload=space.offload,
    )
    keeps = KEEPS_ONE if space.workload.kind == "inference" else KEEPS_ALL if schedule == "gpipe" else KEEPS_SOME
    shared: dict[str, Any] = given._asdict()
    limits = [memory_limit(space.cluster, item.ranks[0], space.memory) for item in devices.classes]
    own: dict[str, Any] = {
        "keeps": keeps,
        # Layers that are only looked at take no time, but shares are by speed.
        "seconds": np.maximum(given.seconds, _LEAST_S),
        "zero": int(given.zero > 0),
        "kind_of": np.array([kinds.index(item.kind) for item in devices.classes], np.int64),
        "memory_limit": np.array(limits, np.float64),
        "sizes": np.array([item.size for item in devices.classes], np.int64),
        "counts": np.array(devices.groups, np.int64),
        "set_of": np.array(devices.set_of, np.int64),
        "latency_s": np.array(devices.latency_s),
        "bucket_s": np.array(devices.bucket_s),
        "link_of": np.array(devices.link_of, np.int64),
    }
    return MappingProblem(**{name: own[name] if name in own else shared[name] for name in MappingProblem._fields})


def plan_mapping(space: Space, size: int, schedule: str, devices: DeviceClasses, mapping: Mapping) -> Plan:
    """The plan of the local graph that a mapping stands for."""
    ranks = devices.ranks(mapping.groups)
    stages = tuple(
        StagePlan(start=start, stop=stop, ranks=own, shares=share_stage(space, size, (start, stop), own))
        for (start, stop), own in zip(mapping.bounds, ranks, strict=True)
    )
    return space.make_plan(stages, size, schedule)


def share_stage(space: Space, size: int, layers: tuple[int, int], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The best shares of a stage's replicas; none where they are as fast as each other, or none does better."""
    tables = space.tables(size)
    seconds = [float(tables.seconds[space.cluster.device_kind(rank).name].total[layers]) for rank in ranks]
    if len(set(seconds)) == 1 or min(seconds) <= 0:
        return ()
    shares = optimal_shares(seconds, tables.num_microbatches)
    in_turn = StagePlan(start=0, stop=1, ranks=ranks).counts(tables.num_microbatches)
    return () if shares == in_turn else shares
