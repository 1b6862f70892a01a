"""Sums in two levels: scattered inside groups of ranks, summed across groups, gathered inside.

With r ranks of a bucket in each group, a part of b bytes is first reduce-scattered among the r; the l-th of them sums
its b / r with the l-th ranks of the other groups, all r at once.

    hierarchical   groups are nodes, and each gathers at once. Each of the three collectives has a lane of the exchange
                   stream of its own, so that one part crosses nodes while others move inside. Where ranks share network
                   cards, their transfers queue there
    hybrid         groups are those that shard states (`GradientExchange.shard_size`), which gather parameters after
                   the update. Sums across groups have a lane of their own, too: each follows its scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.program.parts import PartRows, append_rows
from meshwright.spec.errors import PlanError
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.instructions import Opcode

Ids = NDArray[np.int64]


def append_hierarchical(builder: ProgramBuilder, rows: PartRows, buckets: tuple[Bucket, ...], node_size: int) -> Ids:
    """Append the three collectives of each row; return the handle at which each row's rank has the sum.

    Raises PlanError if a bucket has different numbers of ranks on its nodes.
    """
    inside, across, place, size = _find_groups(builder, rows, buckets, partial(_nodes, node_size=node_size))
    share = rows.num_bytes // size + (place < rows.num_bytes % size)
    order, awaited = np.lexsort((rows.place, rows.rank)), rows.ready
    levels = (
        (Opcode.REDUCE_SCATTER, rows.num_bytes, inside),
        (Opcode.ALL_REDUCE, share, across),
        (Opcode.ALL_GATHER, rows.num_bytes, inside),
    )
    for lane, (opcode, num_bytes, group) in enumerate(levels):
        handles = append_rows(builder, rows, order, opcode, num_bytes, group, lane=lane)
        builder.wait_each(handles, awaited)
        awaited = handles
    return awaited


def append_hybrid(
    builder: ProgramBuilder,
    rows: PartRows,
    buckets: tuple[Bucket, ...],
    exchange: GradientExchange,
    gradient_bytes: int,
) -> tuple[Ids, Ids]:
    """Append the scatters of each row and sums across groups; return, by row, handles of the sums and inner groups."""
    inside, across, _, size = _find_groups(builder, rows, buckets, exchange.shard_groups)
    order = np.lexsort((rows.place, rows.rank))
    scattered = append_rows(builder, rows, order, Opcode.REDUCE_SCATTER, rows.num_bytes, inside)
    builder.wait_each(scattered, rows.ready)
    num_ranks = np.array([len(bucket.ranks) for bucket in buckets], np.int64)[rows.bucket]
    kept = order[num_ranks[order] > size[order]]
    # Parts are padded to equal numbers of elements.
    kept_bytes = -(-rows.num_bytes // (size * gradient_bytes)) * gradient_bytes
    summed = append_rows(builder, rows, kept, Opcode.ALL_REDUCE, kept_bytes, across, lane=1)
    for before in (rows.ready, scattered):
        builder.wait_each(summed[kept], before[kept])
    return np.where(summed < 0, scattered, summed), inside


def _find_groups(
    builder: ProgramBuilder,
    rows: PartRows,
    buckets: tuple[Bucket, ...],
    split: Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]],
) -> tuple[Ids, Ids, Ids, Ids]:
    """Return, for each row, the group inside, the group across, its index in the first, and the first's size.

    ``split`` divides the ranks of a bucket into equal groups.
    """
    facts: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    known: dict[tuple[int, ...], dict[int, tuple[int, int, int, int]]] = {}
    for bucket in buckets:
        if bucket.ranks not in known:
            known[bucket.ranks] = _number_groups(builder, split(bucket.ranks))
        facts |= {(bucket.index, rank): fact for rank, fact in known[bucket.ranks].items()}
    table = np.array([facts[key] for key in zip(rows.bucket.tolist(), rows.rank.tolist(), strict=True)], np.int64)
    inside, across, place, size = table.reshape(-1, 4).T
    return inside, across, place, size


def _number_groups(builder: ProgramBuilder, groups: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, int, int, int]]:
    across = [tuple(column) for column in zip(*groups, strict=True)]
    return {
        rank: (builder.group(members), builder.group(across[place]), place, len(members))
        for members in groups
        for place, rank in enumerate(members)
    }


def _nodes(ranks: tuple[int, ...], node_size: int) -> list[tuple[int, ...]]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // node_size, []).append(rank)
    sizes = {len(members) for members in nodes.values()}
    if len(sizes) > 1:
        raise PlanError(
            f"Gradients of ranks {list(ranks)[:16]} are to be summed hierarchically in nodes of {node_size} ranks, but "
            f"some nodes have {min(sizes)} and some {max(sizes)} of these ranks; expected the same number on each. "
            "Choose another `node_size`, or another algorithm."
        )
    return [tuple(members) for members in nodes.values()]
