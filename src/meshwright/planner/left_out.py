"""Sets of devices that plans may leave idle on a cluster of unequal devices.

    slow kinds    the slowest device kind, the two slowest, and so on, until one kind is left
    other kinds   all kinds but one
    slow nodes    the same sets by kind of node, if nodes of one device kind differ in their links

The speed of a kind is its peak FLOP/s in the workload's data type. The search decides which set is best. No set leaves
out only some of a node's equal devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from meshwright.planner.choices import Choices, Setting
from meshwright.spec import Cluster, Workload
from meshwright.spec.sharding import UNSHARDED

# No more sets than this, in the order of the list above.
MAX_SETS = 8


def idle_sets(cluster: Cluster, workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Return at most `MAX_SETS` sets of devices that plans may leave idle, the empty set first.

    If all devices are equal, the empty set is the only one.
    """
    columns = cluster.columns()
    kinds = [_speed(cluster, rank, workload.numbers.compute) for rank in range(cluster.num_ranks)]
    found: dict[tuple[int, ...], None] = {(): None}
    found.update(dict.fromkeys(_by_group(columns.kind.tolist(), kinds)))
    nics = [cluster.nodes[node].num_nics * cluster.nodes[node].nic.bandwidth_bytes_per_s for node in columns.node]
    found.update(dict.fromkeys(_by_group(columns.node_kind.tolist(), list(zip(kinds, nics, strict=True)))))
    return tuple(found)[:MAX_SETS]


def unequal_settings(settings: Sequence[Setting], choices: Choices) -> list[Setting]:
    """Return settings for plans that give unequal devices unequal work: those of ``settings`` that allow it, and more.

    The best setting of a uniform plan need not be the best one here, because a uniform plan gives all devices the same
    work and memory. So the added settings use all devices and try all allowed shardings of ``settings``, ZeRO 0 and 1
    (as far as unequal replicas can shard states), and all recompute choices.
    """
    found = [item for item in settings if item.zero <= 1 and not item.shard_size]
    shardings = dict.fromkeys([*(item.sharding for item in settings), UNSHARDED])
    zero = [stage for stage in choices.zero if stage <= 1]
    for item, sharding in product(settings[:1], shardings):
        if sharding not in choices.shardings:
            continue
        every = item._replace(num_devices=item.num_devices + len(item.idle), idle=(), sharding=sharding, shard_size=0)
        for stage, recompute in product(zero, choices.recompute):
            found.append(every._replace(zero=stage, recompute=recompute))
    return list(dict.fromkeys(found))


def _speed(cluster: Cluster, rank: int, dtype: str) -> float:
    kind = cluster.device_kind(rank)
    peaks = kind.peak_flops_per_s
    return peaks.get(dtype, min(peaks.values())) / kind.slowdown


def _by_group(group_of: Sequence[int], speeds: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Yield sets that leave out more and more of the slowest groups, then all groups but one."""
    speed_of = {group: speeds[rank] for rank, group in reversed(list(enumerate(group_of)))}
    slowest_first = sorted(speed_of, key=lambda group: (speed_of[group], group))
    for count in range(1, len(slowest_first)):
        yield _members(group_of, slowest_first[:count])
    for kept in reversed(slowest_first[:-1]):
        yield _members(group_of, [group for group in slowest_first if group != kept])


def _members(group_of: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, group in enumerate(group_of) if group in groups)
