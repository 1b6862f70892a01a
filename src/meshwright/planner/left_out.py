"""Which devices of an unequal cluster plans may leave out: few sets, by kind and by node.

    slow kinds    the slowest kind, the two slowest, and so on, until one kind is left
    other kinds   all but one
    slow nodes    where nodes of one device kind differ in their links, the same by kind of node

A kind's speed is its peak in the workload's type. The search decides which set is best; sets with half of a node's
equal devices are not considered.
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
    """Return the sets of devices that plans may leave out, the empty set first; equal devices have only that one."""
    columns = cluster.columns()
    kinds = [_speed(cluster, rank, workload.numbers.compute) for rank in range(cluster.num_ranks)]
    found: dict[tuple[int, ...], None] = {(): None}
    found.update(dict.fromkeys(_by_group(columns.kind.tolist(), kinds)))
    nics = [cluster.nodes[node].num_nics * cluster.nodes[node].nic.bandwidth_bytes_per_s for node in columns.node]
    found.update(dict.fromkeys(_by_group(columns.node_kind.tolist(), list(zip(kinds, nics, strict=True)))))
    return tuple(found)[:MAX_SETS]


def unequal_settings(settings: Sequence[Setting], choices: Choices) -> list[Setting]:
    """Return settings for mapping stages to unequal devices: the given ones and others close to them.

    A uniform plan keeps the same amount on a small device as on a large one and gives a slow one the same microbatches
    as a fast one. So its sharding and recomputation say little about what is best for devices with unequal parts: here
    all devices are used, states are sharded as far as unequal replicas allow (ZeRO 0 and 1), and all recompute choices
    are tried.
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
