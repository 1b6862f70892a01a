"""Gradient buckets (`gradient_buckets`): the gradients that are summed together, and the ranks that sum them.

The gradient of a parameter is summed over all ranks that hold it: the replicas of its stage, for a tied parameter the
replicas of every stage that uses it, and under a placement the ranks that compute with it. Parameters with the same
holders share buckets of up to ``bucket_bytes``. Buckets are filled in the order in which a backward pass makes
gradients ready (the reverse of the forward order), so that the first bucket can be sent early. A rank with several
stages sends the buckets of later stages first. Buckets of parameters that several stages share come last: then every
rank reaches the collectives in one global order, without deadlock. `cut_parts` cuts large buckets into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.builder import ProgramBuilder
from meshwright.spec import GradientExchange, Graph, Opcode, Placement, Plan, PlanError, slice_stages
from meshwright.spec.exchange import WAVES, Axis, summing_axes
from meshwright.spec.instructions import StreamName


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are summed together.

    ``parameters`` are tensor ids, in the order in which a backward makes their gradients ready; ``stages`` and
    ``ranks`` hold these parameters. ``num_elements`` and ``num_bytes`` are the amount sent, in the workload's gradient
    precision. ``axes``: where a rank is a team of devices, the mesh axes over which the devices of each team sum these
    gradients, too (`spec.exchange`).
    """

    index: int
    parameters: tuple[int, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    num_elements: int
    num_bytes: int
    axes: tuple[Axis, ...] = ()


def exchange_of(plan: Plan | Placement) -> GradientExchange:
    """Return the plan's settings of the gradient reduction; the default settings for a placement."""
    return plan.exchange if isinstance(plan, Plan) else GradientExchange()


@lru_cache(maxsize=64)
def gradient_buckets(graph: Graph, plan: Plan | Placement) -> tuple[Bucket, ...]:
    """Return all buckets, in the order in which every rank sums them; () if no parameter is on several ranks.

    With ZeRO stages 2 and 3, gradients are reduce-scattered inside backwards, and buckets hold only parameters that
    several stages share. The replicas of a stage then have one bucket without parameters: they synchronise there,
    because no reduce-scatter ends before all replicas have entered it.
    """
    if isinstance(plan, Placement) and graph.mode != "training":
        return ()
    holders: dict[int, list[int]] = {}
    for stage in slice_stages(graph, plan):
        for parameter in stage.parameters:
            if graph.tensors[parameter].requires_grad:
                holders.setdefault(parameter, []).append(stage.index)
    by_holders: dict[tuple[tuple[int, ...], tuple[Axis, ...]], list[int]] = {}
    inside = summing_axes(graph)
    for parameter, holding in holders.items():
        is_scattered = exchange_of(plan).zero >= 2 and len(holding) == 1
        held = by_holders.setdefault((tuple(holding), () if is_scattered else inside.get(parameter, ())), [])
        held += [] if is_scattered else [parameter]
    first_use = first_uses(graph)
    buckets: list[Bucket] = []
    for (stages, axes), parameters in sorted(by_holders.items(), key=_order):
        ranks = tuple(sorted({rank for stage in stages for rank in plan.stages[stage].ranks}))
        if len(ranks) == 1:
            continue
        ready_order = sorted(parameters, key=lambda parameter: (-first_use[parameter], parameter))
        for chosen, num_bytes in fill_buckets(graph, ready_order, plan):
            bucket = Bucket(
                index=len(buckets),
                parameters=chosen,
                stages=stages,
                ranks=ranks,
                num_elements=sum(graph.tensors[i].num_elements(0) for i in chosen),
                num_bytes=num_bytes,
                axes=axes,
            )
            buckets.append(bucket)
    return tuple(buckets)


def _order(item: tuple[tuple[tuple[int, ...], tuple[Axis, ...]], list[int]]) -> tuple[bool, list[int], list[Axis]]:
    (stages, axes), _ = item
    return len(stages) > 1, [-stage for stage in stages], list(axes)


def first_uses(graph: Graph) -> dict[int, int]:
    """Return, by tensor id, the index of the first op that reads the tensor."""
    first: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            first.setdefault(tensor, index)
    return first


def fill_buckets(graph: Graph, parameters: list[int], plan: Plan | Placement) -> list[tuple[tuple[int, ...], int]]:
    """Fill buckets of the plan's ``bucket_bytes`` with parameters in order; return (parameters, bytes) per bucket.

    A bucket holds parameters of one dtype, and at least one parameter even if its gradient is larger than the bucket.
    """
    filled: list[tuple[tuple[int, ...], int]] = []
    chosen: list[int] = []
    total = 0
    dtype = None
    for parameter in parameters:
        tensor = graph.tensors[parameter]
        num_bytes = plan.workload.gradient_bytes(tensor)
        if chosen and (total + num_bytes > exchange_of(plan).bucket_bytes or tensor.dtype != dtype):
            filled.append((tuple(chosen), total))
            chosen, total = [], 0
        chosen.append(parameter)
        total += num_bytes
        dtype = tensor.dtype
    return [*filled, (tuple(chosen), total)]


def cut_pieces(sizes: Sequence[int], place: int, count: int) -> tuple[range, ...]:
    """Return which elements of a bucket's parameters lie in its part number ``place`` of ``count``.

    The bucket is flattened and padded to ``count`` equal parts. ``sizes`` are the numbers of elements of its
    parameters. The result has one range per parameter: indices within that part, empty if the part has no element of
    the parameter.
    """
    own = -(-sum(sizes) // count)
    ends = list(accumulate(sizes, initial=-place * own))
    return tuple(range(max(begin, 0), max(min(end, own), begin, 0)) for begin, end in pairwise(ends))


def num_bucket_copies(plan: Plan | Placement) -> int:
    """Return how many buffers a stage has for each of its buckets.

    Usually 1. The hetpipe schedule needs 2 + D with D = ``exchange.staleness``: one buffer is filled, one is summed,
    and D wait.
    """
    return 2 + plan.exchange.staleness if isinstance(plan, Plan) and plan.schedule == WAVES else 1


Ids = NDArray[np.int64]


# A bucket of n elements is cut into ⌈n / s⌉ parts of nearly equal size, where s elements (at least one) fit into the
# plan's ``partition_bytes``. Parts are numbered in the order of the buckets. They are sent, as whole buckets or pieces,
# in the plan's ``sequence``, by default in the order of their numbers. Every rank skips those that it does not hold, so
# that all ranks reach the collectives in one order.
class Parts(NamedTuple):
    """All parts of all buckets, as columns of shape (parts,).

    ``bucket`` is the index of the part's bucket; the part has its elements ``start:stop`` and ``num_bytes`` bytes.
    ``place`` is its position in the order of sending. Bucket b has the parts ``offsets[b]:offsets[b + 1]``.
    """

    bucket: Ids
    start: Ids
    stop: Ids
    num_bytes: Ids
    place: Ids
    offsets: Ids


class PartRows(NamedTuple):
    """Every part on every rank that holds it, as columns of shape (rows,).

    ``place`` is the part's position in the order of sending. ``ready`` is the handle of the instruction or mark after
    which the rank has the part's gradients. ``group`` is the number of the process group of all ranks that hold it.
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
    """Append one instruction per row of ``order`` (indices of rows, by ascending rank) to a stream of the row's rank.

    ``num_bytes`` and ``group`` have one entry per row. Returns the instructions' handles, shape (rows,), with -1 for
    rows that are not in ``order``.
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
    """Cut buckets into parts of at most ``exchange.partition_bytes``; a bucket is one part if that is 0.

    Raises PlanError if ``exchange.sequence`` is given and does not contain the number of each part once.
    """
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
                f"The plan's exchange.sequence has {len(given)} entries, {given[:8].tolist()} ...; expected each of "
                f"the parts 0 to {len(place) - 1} once. Leave `sequence` out, or let `schedule_exchange` write it."
            )
        place[given] = np.arange(len(given))
    start = number * share + np.minimum(number, rest)
    stop = start + share + (number < rest)
    return Parts(bucket, start, stop, (stop - start) * width[bucket], place, offsets)


def parts_of(parts: Parts, buckets: Ids) -> tuple[Ids, Ids]:
    """Return the numbers of all parts of the given buckets, concatenated, and for each part an index into ``buckets``.

    ``buckets`` are bucket indices of shape (n,); both results have shape (parts of these buckets,).
    """
    counts = np.diff(parts.offsets)[buckets]
    row = np.repeat(np.arange(len(buckets)), counts)
    first = np.cumsum(counts) - counts
    return parts.offsets[buckets][row] + np.arange(len(row)) - first[row], row
