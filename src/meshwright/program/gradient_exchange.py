"""Gradient sums and updates of a synchronous program (`append_exchange`): the instructions after the last backwards.

    sums     after the last backward of a stage, or with overlap inside it, the stage's buckets are summed, whole or in
             parts: by collectives, by collectives on two levels (`append_hierarchical`, `append_hybrid`), or by
             parameter servers (`append_servers`)
    agreed   then all ranks all-reduce single numbers: the norm of all gradients, whether a gradient is infinite
    steps    the optimizer updates every stage
    back     with a sharded optimizer, sums were reduce-scattered and a step updated the rank's shard, so parameters are
             all-gathered; in local SGD gradients were not summed, and parameters are averaged instead. Parameters of
             the first layers come first; the first forward of a stage in the next step waits for its parameters

A *seat* is a stage on one of its ranks, numbered as in `stage_transfers.Computations.replicas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.buckets import Bucket, PartRows, append_rows, cut_parts, parts_of
from meshwright.program.builder import ProgramBuilder
from meshwright.program.stage_transfers import Computations, find_first_forwards, find_last_backwards
from meshwright.spec import GradientExchange, Graph, Opcode, PlanError, StageSlice
from meshwright.spec.instructions import StreamName
from meshwright.spec.precision import Numbers

Ids = NDArray[np.int64]

# Most connections to one server. Senders share links, so a server with twice the bytes needs twice the connections.
MAX_CONNECTIONS = 16
# Below this error of the ratio, more connections cost more than they balance, because each must fill first.
_NEAR = 0.1


# Every rank pushes its parts to the servers that hold them, and pulls the sums. A server adds up a part when all ranks
# have pushed it, and replies to each of them; a part on its own rank is not sent. Ranks then make their optimizer
# steps, as with any other sum. Servers may be ranks that train, or machines of their own. Each part goes to the server
# with the least load relative to its share. With n training ranks, all of which serve, and k further machines, shares
# are those of BytePS, which keep every network card busy in both directions until the end:
#
#     a machine of its own   2 (n - 1) / (n² + k n - 2 k)          a rank that trains   (n - k) / (n² + k n - 2 k)
#
# Otherwise shares are equal. Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI
# 2014); Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU
# Clusters" (OSDI 2020), section 4.1.
def server_shares(num_training: int, servers: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the fraction of all bytes that each server sums, shape (servers,).

    Ranks 0 to ``num_training`` - 1 train; ``servers`` are ranks, which may also train.
    """
    n, k = num_training, sum(server >= num_training for server in servers)
    both = 0 < k <= n and len(servers) == n + k and n > 1
    if not both:
        return np.full(len(servers), 1 / len(servers))
    own, spare = float(n - k), 2.0 * (n - 1)
    return np.array([own if server < n else spare for server in servers]) / (n * n + k * n - 2 * k)


def assign_parts(num_bytes: Ids, shares: NDArray[np.float64]) -> Ids:
    """Return the index of the server of each part, shape (parts,).

    Each part, in order, goes to the server that has the fewest bytes so far in relation to its fraction in ``shares``.
    """
    load, chosen = np.zeros(len(shares)), np.empty(len(num_bytes), np.int64)
    for part, size in enumerate(num_bytes.tolist()):
        filled = np.divide(load, shares, out=np.full(len(shares), np.inf), where=shares > 0)
        chosen[part] = int(filled.argmin())
        load[chosen[part]] += size
    return chosen


def append_servers(builder: ProgramBuilder, rows: PartRows, num_training: int, exchange: GradientExchange) -> Ids:
    """Append pushes, sums and pulls of parameter servers; return, by row, the handle after which the rank has the sum.

    With ``exchange.credit_bytes``, a rank pushes a part only while the bytes that it pushed and has not yet pulled
    back, this part included, are within that limit.
    """
    # One row of each part, in the sequence of parts.
    one = np.unique(rows.part, return_index=True)[1]
    one = one[np.argsort(rows.place[one])]
    shares = server_shares(num_training, exchange.servers)
    chosen, place = assign_parts(rows.num_bytes[one], shares), np.empty(len(one), np.int64)
    place[rows.part[one]] = np.arange(len(one))
    server = np.array(exchange.servers, np.int64)[chosen][place][rows.part]
    connection = _deal_connections(chosen, shares)[place][rows.part]
    travels = np.flatnonzero(server != rows.rank)
    there = _take(rows, travels)._replace(group=_pair_up(builder, rows.rank, server, travels))
    pushes = _append_messages(builder, there, Opcode.PUSH, "exchange", server[travels], connection[travels])
    builder.wait_each(pushes, there.ready)
    summing = _take(rows._replace(rank=server), one)
    sums = np.empty(len(one), np.int64)
    order = np.lexsort((summing.place, summing.rank))
    sums[summing.part] = append_rows(
        builder, summing, order, Opcode.SUM, summing.num_bytes, summing.group, stream="serve"
    )
    arrived = rows.ready.copy()
    arrived[travels] = pushes
    builder.wait_each(sums[rows.part], arrived)
    back = _take(rows._replace(rank=server), travels)._replace(group=_pair_up(builder, server, rows.rank, travels))
    pulls = _append_messages(builder, back, Opcode.PULL, "reply", rows.rank[travels], connection[travels])
    builder.wait_each(pulls, sums[back.part])
    has_sum = sums[rows.part]
    has_sum[travels] = pulls
    if exchange.credit_bytes:
        _wait_for_credit(builder, there, pushes, pulls, exchange.credit_bytes)
    return has_sum


def _deal_connections(chosen: Ids, shares: NDArray[np.float64]) -> Ids:
    """Return the connection of each part to its server: they take turns, and larger shares have more of them."""
    count = _count_connections(shares)
    connection = np.empty(len(chosen), np.int64)
    for server in range(len(shares)):
        own = np.flatnonzero(chosen == server)
        connection[own] = np.arange(len(own)) % count[server]
    return connection


def _count_connections(shares: NDArray[np.float64]) -> Ids:
    """Return connections of servers in the ratio of the shares: the fewest within 10 % of it, or the nearest."""
    ratio = np.where(shares > 0, shares / shares[shares > 0].min(), 1.0)
    counts = [np.rint(scale * ratio) for scale in range(1, MAX_CONNECTIONS + 1)]
    known = [np.clip(count, 1, MAX_CONNECTIONS).astype(np.int64) for count in counts if count.max() <= MAX_CONNECTIONS]
    known = known or [np.clip(counts[0], 1, MAX_CONNECTIONS).astype(np.int64)]
    errors = [float(np.abs(count / count.min() / ratio - 1).max()) for count in known]
    near = next((place for place, error in enumerate(errors) if error < _NEAR), int(np.argmin(errors)))
    chosen: Ids = known[near]
    return chosen


def _take(rows: PartRows, chosen: Ids) -> PartRows:
    return PartRows(*(column[chosen] for column in rows))


def _append_messages(
    builder: ProgramBuilder, rows: PartRows, opcode: Opcode, stream: StreamName, other: Ids, connection: Ids
) -> Ids:
    """Append messages to each other rank by each connection, in a lane of their own, in the sequence of parts."""
    handles, lanes = np.empty(len(rows.part), np.int64), other * MAX_CONNECTIONS + connection
    for lane in np.unique(lanes).tolist():
        own = np.flatnonzero(lanes == lane)
        of_lane = _take(rows, own)
        order = np.lexsort((of_lane.place, of_lane.rank))
        handles[own] = append_rows(
            builder, of_lane, order, opcode, of_lane.num_bytes, of_lane.group, stream=stream, lane=lane
        )
    return handles


def _pair_up(builder: ProgramBuilder, source: Ids, target: Ids, chosen: Ids) -> Ids:
    """Return the numbers of the groups (source, target) of some rows."""
    pairs = list(zip(source[chosen].tolist(), target[chosen].tolist(), strict=True))
    number = {pair: builder.group(pair) for pair in sorted(set(pairs))}
    return np.array([number[pair] for pair in pairs], np.int64)


def _wait_for_credit(builder: ProgramBuilder, rows: PartRows, pushes: Ids, pulls: Ids, credit_bytes: int) -> None:
    """Make a push wait until the bytes pushed before and not yet returned, with its own, are within the credit."""
    rank, num_bytes = rows.rank, rows.num_bytes
    order = np.lexsort((rows.place, rank))
    for own in np.split(order, np.flatnonzero(np.diff(rank[order])) + 1):
        pushed = np.cumsum(num_bytes[own])
        # Row i waits for all rows before j, where the bytes from j to i would exceed the credit.
        first = np.minimum(np.searchsorted(pushed - num_bytes[own], pushed - credit_bytes), np.arange(len(own)))
        for i in np.flatnonzero(first > 0).tolist():
            for j in range(int(first[i - 1]), int(first[i])):
                builder.wait(int(pushes[own[i]]), int(pulls[own[j]]))


# Sums in two levels: with r ranks of a bucket in each group, a part of b bytes is first reduce-scattered among the r;
# the l-th of them sums its b / r with the l-th ranks of the other groups, all r at once.
#
#     hierarchical   groups are nodes, and each gathers at once. Each of the three collectives has a lane of the
#                    exchange stream of its own, so that one part crosses nodes while others move inside. Where ranks
#                    share network cards, their transfers queue there
#     hybrid         groups are those that shard states (`GradientExchange.shard_size`), which gather parameters after
#                    the update. Sums across groups have a lane of their own, too: each follows its scatter
def append_hierarchical(builder: ProgramBuilder, rows: PartRows, buckets: tuple[Bucket, ...], node_size: int) -> Ids:
    """Append a reduce-scatter in the node, an all-reduce across nodes and an all-gather in the node for each row.

    Returns, by row, the handle after which the row's rank has the sum. Raises PlanError if a bucket has different
    numbers of ranks on its nodes.
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
    """Append a reduce-scatter in the group that shards states, and an all-reduce across such groups, for each row.

    Returns, by row, the handle of the last of these collectives and the number of the sharding group. There is no
    all-reduce for a bucket whose ranks are all in one group. ``gradient_bytes``: bytes of one element.
    """
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


# Bytes of a number on which ranks agree.
_NUMBER_BYTES = 4


class ExchangeSeats(NamedTuple):
    """Stage, rank, and index (in `Computations`) of the last backward of each seat; columns of shape (seats,)."""

    stage: Ids
    rank: Ids
    last: Ids


class SeatMap(NamedTuple):
    """Which seats hold the parameters of which rows: the stage of ``seat[h]`` holds the part of ``row[h]``."""

    seat: Ids
    row: Ids


class ExchangeHandles(NamedTuple):
    """Handles of the instructions that `append_exchange` has appended.

    ``sums``: of the gradient sums, shape (rows,), None if replicas update independently. ``steps``: of the optimizer
    steps, shape (seats,), -1 for a stage without trained parameters. ``agreed``: one array of shape (ranks,) per number
    that all ranks all-reduce.
    """

    seats: ExchangeSeats
    rows: PartRows
    held: SeatMap
    sums: Ids | None
    agreed: list[Ids]
    steps: Ids


def find_trained(graph: Graph, stages: tuple[StageSlice, ...]) -> NDArray[np.bool_]:
    """Return whether each stage has a parameter to train, shape (stages,)."""
    return np.array([any(graph.tensors[item].requires_grad for item in stage.parameters) for stage in stages])


def append_exchange(
    builder: ProgramBuilder,
    computations: Computations,
    trained: NDArray[np.bool_],
    buckets: tuple[Bucket, ...],
    exchange: GradientExchange,
    numbers: Numbers,
    num_agreed: int,
    first: Computations,
) -> ExchangeHandles:
    """Append the gradient sums of the buckets and the optimizer steps of the trained stages; return their handles.

    ``numbers`` has the bytes per element of gradients and parameters. ``num_agreed``: how many single numbers (norm,
    infinity check) all ranks all-reduce before the steps. ``first``: the computations of the first step of the body;
    the body has ``exchange.every_steps`` steps.
    """
    num_replicas = np.diff(computations.replica_offsets)
    seats = ExchangeSeats(
        np.repeat(np.arange(len(trained)), num_replicas),
        computations.replicas.astype(np.int64),
        find_last_backwards(computations),
    )
    rows, held = _lay_out(builder, computations, seats, buckets, exchange)
    sums: Ids | None
    gathering = rows.group
    if exchange.shard_optimizer and exchange.shard_size:
        sums, gathering = append_hybrid(builder, rows, buckets, exchange, numbers.gradient_bytes)
    else:
        sums = _append_sums(builder, rows, buckets, exchange, len(computations.offsets) - 1)
    stepping = np.flatnonzero(trained[seats.stage])
    stepping = stepping[np.lexsort((seats.stage[stepping], seats.rank[stepping]))]
    agreed = _append_agreements(builder, computations, seats, rows, sums, num_agreed)
    steps = np.full(len(seats.stage), -1, np.int64)
    steps[stepping] = builder.extend(
        np.searchsorted(seats.rank[stepping], np.arange(len(computations.offsets))),
        "compute",
        opcode=Opcode.OPTIMIZER_STEP,
        stage=seats.stage[stepping],
    )
    if sums is not None:
        builder.wait_each(steps[held.seat], sums[held.row])
    for agreement in agreed:
        builder.wait_each(steps[stepping], agreement[seats.rank[stepping]])
    if exchange.shard_optimizer or exchange.every_steps > 1:
        order = np.lexsort((rows.part, -rows.bucket, rows.stage, rows.rank))
        opcode = Opcode.ALL_GATHER if exchange.shard_optimizer else Opcode.ALL_REDUCE
        num_bytes = rows.num_bytes * numbers.value_bytes // numbers.gradient_bytes
        back = append_rows(builder, rows, order, opcode, num_bytes, gathering)
        builder.wait_each(back[held.row], steps[held.seat])
        forwards = first.handle[find_first_forwards(first)[held.seat]]
        builder.wait_late_each(forwards, back[held.row])
    return ExchangeHandles(seats, rows, held, sums, agreed, steps)


def _append_sums(
    builder: ProgramBuilder, rows: PartRows, buckets: tuple[Bucket, ...], exchange: GradientExchange, num_ranks: int
) -> Ids | None:
    """Return, for each row, the handle at which its rank has the sum; None if replicas update independently."""
    if exchange.every_steps > 1:
        return None
    if exchange.servers:
        return append_servers(builder, rows, num_ranks, exchange)
    if exchange.algorithm == "hierarchical":
        return append_hierarchical(builder, rows, buckets, exchange.node_size)
    order = np.lexsort((rows.place, rows.rank))
    opcode = Opcode.REDUCE_SCATTER if exchange.shard_optimizer else Opcode.ALL_REDUCE
    sums = append_rows(builder, rows, order, opcode, rows.num_bytes, rows.group)
    builder.wait_each(sums, rows.ready)
    return sums


def _append_agreements(
    builder: ProgramBuilder,
    computations: Computations,
    seats: ExchangeSeats,
    rows: PartRows,
    sums: Ids | None,
    count: int,
) -> list[Ids]:
    """Return, for each number on which all ranks agree, the handle of every rank."""
    num_ranks = len(computations.offsets) - 1
    group = builder.group(tuple(range(num_ranks)))
    lowest = np.full(num_ranks, len(seats.stage), np.int64)
    np.minimum.at(lowest, seats.rank, seats.stage)
    found: list[Ids] = []
    for number in range(count):
        handles = builder.extend(
            np.arange(num_ranks + 1),
            "exchange",
            opcode=Opcode.ALL_REDUCE,
            stage=lowest,
            version=-1,
            peer=int(rows.part.max(initial=-1)) + 1 + number,
            num_bytes=_NUMBER_BYTES,
            group=group,
        )
        builder.wait_each(handles[seats.rank], computations.handle[seats.last])
        if sums is not None:
            builder.wait_each(handles[rows.rank], sums)
        found.append(handles)
    return found


def _lay_out(
    builder: ProgramBuilder,
    computations: Computations,
    seats: ExchangeSeats,
    buckets: tuple[Bucket, ...],
    exchange: GradientExchange,
) -> tuple[PartRows, SeatMap]:
    """Return every part on every rank that holds it, and the seats that hold it there.

    A parameter that several stages of a rank share is exchanged once, when all its gradients are ready.
    """
    index = np.repeat([bucket.index for bucket in buckets], [len(bucket.stages) for bucket in buckets]).astype(np.int64)
    stages = np.array([stage for bucket in buckets for stage in bucket.stages], np.int64)
    counts = np.diff(computations.replica_offsets)[stages]
    begin = computations.replica_offsets[stages] - (np.cumsum(counts) - counts)
    seat, index = np.repeat(begin, counts) + np.arange(counts.sum()), np.repeat(index, counts)
    order = np.lexsort((seats.last[seat], index, seats.rank[seat]))
    seat, index = seat[order], index[order]
    latest = np.flatnonzero((np.diff(index, append=-1) != 0) | (np.diff(seats.rank[seat], append=-1) != 0))
    exchanged = np.searchsorted(latest, np.arange(len(seat)))
    bucket, ending, parts = index[latest], seat[latest], cut_parts(buckets, exchange)
    ready = computations.handle[seats.last[ending]]
    if exchange.overlap and exchange.every_steps == 1:
        ready = builder.mark_each(ready, bucket)
    part, row = parts_of(parts, bucket)
    rows = PartRows(
        part=part,
        bucket=bucket[row],
        place=parts.place[part],
        num_bytes=parts.num_bytes[part],
        rank=seats.rank[ending[row]],
        stage=seats.stage[ending[row]],
        ready=ready[row],
        group=np.array([builder.group(item.ranks) for item in buckets], np.int64)[bucket[row]],
    )
    # The parts of a bucket on a rank are consecutive rows.
    begins, ends = (np.searchsorted(row, exchanged, side=side) for side in ("left", "right"))
    which = np.repeat(np.arange(len(seat)), ends - begins)
    before = np.cumsum(ends - begins) - (ends - begins)
    return rows, SeatMap(seat[which], begins[which] + np.arange(len(which)) - before[which])
