"""Sums in two levels: scattered inside each node, summed across nodes, gathered inside.

With r ranks of a bucket on each node, a part of b bytes is first reduce-scattered among the r; the l-th of them sums
its b / r with the l-th ranks of the other nodes, all r at once; then the node gathers. The three kinds have a lane of
the exchange stream each, so that one part crosses nodes while others move inside. Whose cards are shared, queues there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.program.parts import PartRows, Parts
from meshwright.spec.errors import PlanError
from meshwright.spec.instructions import Opcode

Ids = NDArray[np.int64]


def append_hierarchical(
    builder: ProgramBuilder, rows: PartRows, parts: Parts, buckets: tuple[Bucket, ...], node_size: int
) -> Ids:
    """Write the three collectives of each row; for each row the handle at which its rank has the sum.

    Raises PlanError where the ranks of a bucket are not as many on each node.
    """
    ranks = np.arange(int(rows.rank.max(initial=0)) + 2)
    order = np.lexsort((parts.place[rows.part], rows.rank))
    inside, across, place, size = _find_groups(builder, rows, parts, buckets, node_size)
    whole = parts.num_bytes[rows.part]
    share = whole // size + (place < whole % size)

    def extend(lane: int, opcode: Opcode, group: Ids, num_bytes: Ids, awaited: Ids) -> Ids:
        handles = np.empty(len(order), np.int64)
        handles[order] = builder.extend(
            np.searchsorted(rows.rank[order], ranks),
            "exchange",
            lane=lane,
            opcode=opcode,
            stage=rows.stage[order],
            version=-1,
            peer=rows.part[order],
            num_bytes=num_bytes[order],
            group=group[order],
        )
        builder.wait_each(handles, awaited)
        return handles

    scattered = extend(0, Opcode.REDUCE_SCATTER, inside, whole, rows.ready)
    summed = extend(1, Opcode.ALL_REDUCE, across, share, scattered)
    return extend(2, Opcode.ALL_GATHER, inside, whole, summed)


def _find_groups(
    builder: ProgramBuilder, rows: PartRows, parts: Parts, buckets: tuple[Bucket, ...], node_size: int
) -> tuple[Ids, Ids, Ids, Ids]:
    """Of each row the groups inside its node and across nodes, its place in the node, and how many are there."""
    facts: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    known: dict[tuple[int, ...], dict[int, tuple[int, int, int, int]]] = {}
    for bucket in buckets:
        if bucket.ranks not in known:
            known[bucket.ranks] = _group_ranks(builder, bucket.ranks, node_size)
        facts |= {(bucket.index, rank): fact for rank, fact in known[bucket.ranks].items()}
    keys = zip(parts.bucket[rows.part].tolist(), rows.rank.tolist(), strict=True)
    table = np.array([facts[key] for key in keys], np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _group_ranks(
    builder: ProgramBuilder, ranks: tuple[int, ...], node_size: int
) -> dict[int, tuple[int, int, int, int]]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // node_size, []).append(rank)
    sizes = {len(members) for members in nodes.values()}
    if len(sizes) > 1:
        raise PlanError(
            f"Gradients of ranks {list(ranks)[:16]} are to be summed hierarchically in nodes of {node_size} ranks, of "
            f"which some have {min(sizes)} and some {max(sizes)} of them; expected as many on each. Choose another "
            "`node_size`, or another algorithm."
        )
    across = [tuple(column) for column in zip(*nodes.values(), strict=True)]
    return {
        rank: (builder.group(tuple(members)), builder.group(across[place]), place, len(members))
        for members in nodes.values()
        for place, rank in enumerate(members)
    }
