"""What the devices of teams exchange (`spec.teams`): which groups talk at once, inside of a team and between teams.

    between teams   w groups {r·w + i, s·w + i, ...}, one for each place i in a team, all at once
    inside          the ranks of a mesh axis, of stride 1 (tensor), tensor (context, expert), all its groups of the
                    nodes that the first one touches at once

Rings of attention: with c ranks a rank computes c parts of its attention one after the other, while the keys and
values of the next part come from its neighbour: t/c + (c - 1)·max(t/c, send) (Liu et al., Ring Attention, 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.prediction import Floats
    from meshwright.spec import Cluster
    from meshwright.spec.collective import Axis
    from meshwright.spec.sharding import Sharding

Group = tuple[int, ...]
_FORWARD, _BACKWARD = 0, 1


class OpExchange(NamedTuple):
    """Seconds that op ``at`` of a local graph spends in an exchange of its forward or backward, with their interval.

    ``ring``: among so many ranks, while the op computes; 0 for what comes on top.
    """

    at: int
    in_backward: bool
    seconds: float
    low_s: float
    high_s: float
    ring: int = 0


def add_exchanges(table: Floats, exchanges: Sequence[OpExchange], seconds: Floats) -> None:
    """Add to the seconds of ops, columns forward and backward, what the exchanges take, shape (exchanges,)."""
    for item, taken_s in zip(exchanges, seconds.tolist(), strict=True):
        column = _BACKWARD if item.in_backward else _FORWARD
        own_s = table[item.at, column]
        table[item.at, column] = ring_seconds(own_s, taken_s, item.ring) if item.ring else own_s + taken_s


def spread_teams(teams: Sequence[int], width: int) -> list[Group]:
    """The groups of devices in which so many teams talk: one for each place in a team."""
    return [tuple(team * width + place for team in teams) for place in range(width)]


def axis_groups(cluster: Cluster, sharding: Sharding, axis: Axis) -> list[list[Group]]:
    """The groups of an axis that talk at once, for each kind of node that their first one may lie on.

    Of each list the first group is the one to price.
    """
    size, stride = sharding.size(axis), 1 if axis == "tensor" else sharding.tensor
    block = size * stride
    columns = cluster.columns()
    found: dict[tuple[int, ...], list[Group]] = {}
    for start in range(0, cluster.num_ranks - block + 1, block):
        first = tuple(range(start, start + block, stride))
        kinds = tuple(columns.node_kind[list(first)].tolist())
        if kinds not in found:
            touched = set(columns.node[list(first)].tolist())
            found[kinds] = [first, *(group for group in _others(cluster, block, stride, touched) if group != first)]
    return list(found.values())


def _others(cluster: Cluster, block: int, stride: int, nodes: set[int]) -> list[Group]:
    """All groups of the axis that touch one of these nodes."""
    columns = cluster.columns()
    mine = [rank for rank in range(cluster.num_ranks) if int(columns.node[rank]) in nodes]
    starts = dict.fromkeys((rank // block) * block + rank % stride for rank in mine)
    groups = (tuple(range(start, start + block, stride)) for start in starts)
    return [group for group in groups if group[-1] < cluster.num_ranks]


def ring_seconds(alone_s: float, send_s: float, num_ranks: int) -> float:
    """Seconds of an op whose parts are computed while the next part's operands travel round a ring."""
    part_s = alone_s / num_ranks
    return part_s + (num_ranks - 1) * max(part_s, send_s)
