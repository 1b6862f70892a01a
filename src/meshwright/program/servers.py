"""Gradient sums by parameter servers: every rank pushes its parts to the servers that hold them, and pulls the sums.

A server adds up a part when all ranks have pushed it, and replies to each of them; a part on its own rank is not
sent. Ranks then make their optimizer steps, as with any other sum. Servers may be ranks that train, or machines of
their own. Each part goes to the server with the least load relative to its share. With n training ranks, all of which
serve, and k further machines, shares are those of BytePS, which keep every network card busy in both directions until
the end:

    a machine of its own   2 (n - 1) / (n² + k n - 2 k)          a rank that trains   (n - k) / (n² + k n - 2 k)

Otherwise shares are equal. Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI
2014); Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU
Clusters" (OSDI 2020), section 4.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program.builder import ProgramBuilder
from meshwright.program.parts import PartRows, append_rows
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.instructions import Opcode, StreamName

Ids = NDArray[np.int64]

# Most connections to one server. Senders share links, so a server with twice the bytes needs twice the connections.
MAX_CONNECTIONS = 16
# Below this error of the ratio, more connections cost more than they balance, because each must fill first.
_NEAR = 0.1


def server_shares(num_training: int, servers: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the share of each server of all bytes, shape (servers,); ranks 0 to ``num_training`` - 1 train."""
    n, k = num_training, sum(server >= num_training for server in servers)
    both = 0 < k <= n and len(servers) == n + k and n > 1
    if not both:
        return np.full(len(servers), 1 / len(servers))
    own, spare = float(n - k), 2.0 * (n - 1)
    return np.array([own if server < n else spare for server in servers]) / (n * n + k * n - 2 * k)


def assign_parts(num_bytes: Ids, shares: NDArray[np.float64]) -> Ids:
    """Return each part's index among the servers: parts go in order to the server with least of its share."""
    load, chosen = np.zeros(len(shares)), np.empty(len(num_bytes), np.int64)
    for part, size in enumerate(num_bytes.tolist()):
        filled = np.divide(load, shares, out=np.full(len(shares), np.inf), where=shares > 0)
        chosen[part] = int(filled.argmin())
        load[chosen[part]] += size
    return chosen


def append_servers(builder: ProgramBuilder, rows: PartRows, num_training: int, exchange: GradientExchange) -> Ids:
    """Append pushes, sums and pulls; return, for each row, the handle at which its rank has the sum.

    With credit, a rank pushes a part when the sums of all but that many bytes before it have arrived.
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
