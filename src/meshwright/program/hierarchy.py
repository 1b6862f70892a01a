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
from meshwright.program.parts import PartRows, append_rows
from meshwright.spec.errors import PlanError
from meshwright.spec.instructions import Opcode

Ids = NDArray[np.int64]


def append_hierarchical(builder: ProgramBuilder, rows: PartRows, buckets: tuple[Bucket, ...], node_size: int) -> Ids:
    """Write the three collectives of each row; for each row the handle at which its rank has the sum.

    Raises PlanError where the ranks of a bucket are not as many on each node.
    """
    inside, across, place, size = _find_groups(builder, rows, buckets, node_size)
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


def _find_groups(
    builder: ProgramBuilder, rows: PartRows, buckets: tuple[Bucket, ...], node_size: int
) -> tuple[Ids, Ids, Ids, Ids]:
    """Of each row the groups inside its node and across nodes, its place in the node, and how many are there."""
    facts: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    known: dict[tuple[int, ...], dict[int, tuple[int, int, int, int]]] = {}
    for bucket in buckets:
        if bucket.ranks not in known:
            known[bucket.ranks] = _group_ranks(builder, bucket.ranks, node_size)
        facts |= {(bucket.index, rank): fact for rank, fact in known[bucket.ranks].items()}
    table = np.array([facts[key] for key in zip(rows.bucket.tolist(), rows.rank.tolist(), strict=True)], np.int64)
    inside, across, place, size = table.reshape(-1, 4).T
    return inside, across, place, size


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
