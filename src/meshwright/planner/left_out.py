"""Which devices of an unequal cluster plans may leave out: few sets, by kind and by node.

    slow kinds    the slowest kind, the two slowest, and so on, until one kind is left
    other kinds   all but one
    slow nodes    where nodes of one kind of device differ in their links, the same by kind of node

A kind's speed is its peak in the workload's type. What is best of the rest the search finds out; sets that hold half
of a node's equal devices are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshwright.planner.choices import Setting
from meshwright.spec import Cluster, Workload

# No more sets than this, in the order of the list above.
MAX_SETS = 8


def idle_sets(cluster: Cluster, workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Sets of devices that plans may leave out, the empty one first; it is the only one of equal devices."""
    columns = cluster.columns()
    kinds = [_speed(cluster, rank, workload.numbers.compute) for rank in range(cluster.num_ranks)]
    found: dict[tuple[int, ...], None] = {(): None}
    found.update(dict.fromkeys(_by_group(columns.kind.tolist(), kinds)))
    nics = [cluster.nodes[node].num_nics * cluster.nodes[node].nic.bandwidth_bytes_per_s for node in columns.node]
    found.update(dict.fromkeys(_by_group(columns.node_kind.tolist(), list(zip(kinds, nics, strict=True)))))
    return tuple(found)[:MAX_SETS]


def with_all_devices(settings: Iterable[Setting]) -> list[Setting]:
    """The settings, and each that leaves devices out also with all of them.

    Equal shares of unequal devices are what uniform plans lose by; of all devices there may be better ones.
    """
    both = [(item, replace_devices(item)) for item in settings]
    return list(dict.fromkeys(setting for pair in both for setting in pair))


def replace_devices(setting: Setting) -> Setting:
    """The setting with the devices that it leaves out."""
    return setting._replace(num_devices=setting.num_devices + len(setting.idle), idle=())


def _speed(cluster: Cluster, rank: int, dtype: str) -> float:
    kind = cluster.device_kind(rank)
    peaks = kind.peak_flops_per_s
    return peaks.get(dtype, min(peaks.values())) / kind.slowdown


def _by_group(group_of: Sequence[int], speeds: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """All but the fastest groups, more and more of them left out; then all but each."""
    speed_of = {group: speeds[rank] for rank, group in reversed(list(enumerate(group_of)))}
    slowest_first = sorted(speed_of, key=lambda group: (speed_of[group], group))  # type: ignore[arg-type, return-value]
    for count in range(1, len(slowest_first)):
        yield _members(group_of, slowest_first[:count])
    for kept in reversed(slowest_first[:-1]):
        yield _members(group_of, [group for group in slowest_first if group != kept])


def _members(group_of: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, group in enumerate(group_of) if group in groups)
