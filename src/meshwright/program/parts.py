"""The parts of a gradient exchange and their order: whole buckets or pieces, as they become ready or in a sequence.

A bucket of n elements is cut into ⌈n / s⌉ parts of nearly equal size, where s elements (at least one) fit into the
plan's ``partition_bytes``. Parts are numbered in the order of the buckets. They are sent in the plan's
``sequence``, by default in the order of their numbers; every rank skips those that it does not hold, so that all ranks
reach the collectives in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket
from meshwright.program.builder import ProgramBuilder
from meshwright.spec.errors import PlanError
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.instructions import Opcode, StreamName

Ids = NDArray[np.int64]


class Parts(NamedTuple):
    """Columns of shape (parts,): bucket, first and last element, bytes, and place in the sequence of each part.

    Bucket b has the parts ``offsets[b]:offsets[b + 1]``.
    """

    bucket: Ids
    start: Ids
    stop: Ids
    num_bytes: Ids
    place: Ids
    offsets: Ids


class PartRows(NamedTuple):
    """Every part on every rank that holds it: columns of shape (rows,).

    ``ready`` is the handle, of an instruction or a mark, at which the rank has its gradients; ``group`` the number of
    the group of all ranks that hold it.
    """

    part: Ids
    bucket: Ids
    place: Ids
    num_bytes: Ids
    rank: Ids
    stage: Ids
    ready: Ids
    group: Ids


def append_rows(
    builder: ProgramBuilder,
    rows: PartRows,
    order: Ids,
    opcode: Opcode,
    num_bytes: Ids,
    group: Ids,
    *,
    stream: StreamName = "exchange",
    lane: int = 0,
) -> Ids:
    """Append one instruction per row in ``order``, in which ranks ascend, to the stream of its rank.

    Returns their handles, shape (rows,), with -1 for rows that are not in the order.
    """
    handles = np.full(len(rows.rank), -1, np.int64)
    handles[order] = builder.extend(
        np.searchsorted(rows.rank[order], np.arange(int(rows.rank.max(initial=-1)) + 2)),
        stream,
        lane=lane,
        opcode=opcode,
        stage=rows.stage[order],
        version=-1,
        peer=rows.part[order],
        num_bytes=num_bytes[order],
        group=group[order],
    )
    return handles


def cut_parts(buckets: tuple[Bucket, ...], exchange: GradientExchange) -> Parts:
    """Return the parts of a plan's buckets. Raises PlanError if the plan's sequence is not a permutation of them."""
    whole = np.array([bucket.num_elements for bucket in buckets], np.int64)
    width = np.array([bucket.num_bytes for bucket in buckets], np.int64) // np.maximum(whole, 1)
    most = np.maximum(exchange.partition_bytes // np.maximum(width, 1), 1)
    counts = np.maximum(-(-whole // most), 1) if exchange.partition_bytes else np.ones(len(whole), np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    bucket = np.repeat(np.arange(len(whole)), counts)
    number = np.arange(offsets[-1]) - offsets[bucket]
    share, rest = np.divmod(whole[bucket], counts[bucket])
    place = np.arange(offsets[-1])
    if exchange.sequence:
        given = np.array(exchange.sequence, np.int64)
        if not np.array_equal(np.sort(given), place):
            raise PlanError(
                f"The exchange has a sequence of {len(given)} parts, {list(given[:8])} ...; expected each of the parts "
                f"0 to {len(place) - 1} once. Leave the sequence out, or let `schedule_exchange` write it."
            )
        place[given] = np.arange(len(given))
    start = number * share + np.minimum(number, rest)
    stop = start + share + (number < rest)
    return Parts(bucket, start, stop, (stop - start) * width[bucket], place, offsets)


def parts_of(parts: Parts, buckets: Ids) -> tuple[Ids, Ids]:
    """For buckets of shape (n,): return all of their parts, concatenated, and the index of each part's bucket."""
    counts = np.diff(parts.offsets)[buckets]
    row = np.repeat(np.arange(len(buckets)), counts)
    first = np.cumsum(counts) - counts
    return parts.offsets[buckets][row] + np.arange(len(row)) - first[row], row
