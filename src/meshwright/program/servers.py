"""Sums by parameter servers: every rank pushes its parts to the servers that hold them, and pulls the sums.

A server adds up a part when all ranks have pushed it, and answers each of them; what lies on its own rank does not
travel. Ranks then make their optimizer steps, as with any other sum. Servers may be ranks that train, or machines of
their own. Part by part goes to the server that has least of its share. With n ranks that train, all of which serve, and
k further machines, shares are those that keep every network card busy in both directions until the end, BytePS':

    a machine of its own   2 (n - 1) / (n² + k n - 2 k)          a rank that trains   (n - k) / (n² + k n - 2 k)

and else equal. Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); Jiang
et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters" (OSDI
2020), section 4.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.program.builder import ProgramBuilder
from meshwright.program.parts import PartRows, Parts
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.instructions import Opcode
from meshwright.spec.program import StreamName

Ids = NDArray[np.int64]

# To one server. Links are shared among those who send, so one that holds twice as much is reached by twice as many.
MAX_CONNECTIONS = 16


def server_shares(num_training: int, servers: tuple[int, ...]) -> NDArray[np.float64]:
    """The share of each server of all bytes, shape (servers,); ranks 0 to ``num_training`` - 1 train."""
    n, k = num_training, sum(server >= num_training for server in servers)
    both = 0 < k <= n and len(servers) == n + k and n > 1
    if not both:
        return np.full(len(servers), 1 / len(servers))
    own, spare = float(n - k), 2.0 * (n - 1)
    return np.array([own if server < n else spare for server in servers]) / (n * n + k * n - 2 * k)


def assign_parts(parts: Parts, shares: NDArray[np.float64]) -> Ids:
    """The place among the servers of each part's server: the one with least of its share, in the sequence of parts."""
    load, chosen = np.zeros(len(shares)), np.empty(len(parts.place), np.int64)
    for part in np.argsort(parts.place).tolist():
        filled = np.where(shares > 0, (load + parts.num_bytes[part]) / np.maximum(shares, 1e-300), np.inf)
        chosen[part] = int(filled.argmin())
        load[chosen[part]] += parts.num_bytes[part]
    return chosen


def _deal_connections(chosen: Ids, parts: Parts, shares: NDArray[np.float64]) -> Ids:
    """By which connection to its server each part goes: they take turns, and larger shares have more of them."""
    ratio = shares / shares[shares > 0].min()
    count = np.clip(np.rint(ratio).astype(np.int64), 1, MAX_CONNECTIONS)
    connection = np.empty(len(chosen), np.int64)
    for server in range(len(shares)):
        own = np.flatnonzero(chosen == server)
        connection[own[np.argsort(parts.place[own])]] = np.arange(len(own)) % count[server]
    return connection


def append_servers(
    builder: ProgramBuilder,
    rows: PartRows,
    parts: Parts,
    groups: Ids,
    num_training: int,
    exchange: GradientExchange,
) -> Ids:
    """Write pushes, sums and pulls; for each row the handle at which its rank has the sum.

    ``groups`` are the numbers of the ranks that sum each bucket. With credit, a rank pushes a part when the sums of all
    but that many bytes before it are there.
    """
    servers, credit_bytes = exchange.servers, exchange.credit_bytes
    ranks = np.arange(max(num_training, *(server + 1 for server in servers)) + 1)
    shares = server_shares(num_training, servers)
    chosen = assign_parts(parts, shares)
    server_of, connection = np.array(servers, np.int64)[chosen], _deal_connections(chosen, parts, shares)
    travels = np.flatnonzero(server_of[rows.part] != rows.rank)
    part, rank, place = rows.part[travels], rows.rank[travels], parts.place[rows.part[travels]]
    server = server_of[part]
    pairs = {pair: builder.group(pair) for pair in set(zip(rank.tolist(), server.tolist(), strict=True))}
    back = {(b, a): builder.group((b, a)) for a, b in pairs}

    def extend(whose: Ids, other: Ids, stream: StreamName, opcode: Opcode, group: Ids) -> Ids:
        """Messages of ``whose`` ranks, those of a connection in a lane of their own, in the sequence of parts."""
        handles = np.empty(len(part), np.int64)
        lanes = other * MAX_CONNECTIONS + connection[part]
        for lane in np.unique(lanes).tolist():
            own = np.flatnonzero(lanes == lane)
            own = own[np.lexsort((place[own], whose[own]))]
            handles[own] = builder.extend(
                np.searchsorted(whose[own], ranks),
                stream,
                lane=lane,
                opcode=opcode,
                stage=rows.stage[travels][own],
                version=-1,
                peer=part[own],
                num_bytes=parts.num_bytes[part[own]],
                group=group[own],
            )
        return handles

    there = np.array([pairs[pair] for pair in zip(rank.tolist(), server.tolist(), strict=True)], np.int64)
    again = np.array([back[pair] for pair in zip(server.tolist(), rank.tolist(), strict=True)], np.int64)
    pushes = extend(rank, server, "exchange", Opcode.PUSH, there)
    builder.wait_each(pushes, rows.ready[travels])
    sums = _append_sums(builder, rows, parts, groups, server_of, ranks)
    arrived = rows.ready.copy()
    arrived[travels] = pushes
    builder.wait_each(sums[rows.part], arrived)
    pulls = extend(server, rank, "reply", Opcode.PULL, again)
    builder.wait_each(pulls, sums[part])
    has_sum = sums[rows.part]
    has_sum[travels] = pulls
    if credit_bytes:
        _wait_for_credit(builder, (rank, place, parts.num_bytes[part]), pushes, pulls, credit_bytes)
    return has_sum


def _append_sums(builder: ProgramBuilder, rows: PartRows, parts: Parts, groups: Ids, server_of: Ids, ranks: Ids) -> Ids:
    """One sum per part on its server; their handles."""
    order = np.lexsort((parts.place, server_of))
    stage = np.zeros(len(server_of), np.int64)
    stage[rows.part] = rows.stage
    sums = np.empty(len(server_of), np.int64)
    sums[order] = builder.extend(
        np.searchsorted(server_of[order], ranks),
        "serve",
        opcode=Opcode.SUM,
        stage=stage[order],
        version=-1,
        peer=order,
        num_bytes=parts.num_bytes[order],
        group=groups[parts.bucket[order]],
    )
    return sums


def _wait_for_credit(
    builder: ProgramBuilder, columns: tuple[Ids, Ids, Ids], pushes: Ids, pulls: Ids, credit_bytes: int
) -> None:
    """Let a push wait until, of what its rank pushed before, no more than the credit less itself is not back."""
    rank, place, num_bytes = columns
    order = np.lexsort((place, rank))
    for own in np.split(order, np.flatnonzero(np.diff(rank[order])) + 1):
        pushed = np.cumsum(num_bytes[own])
        # Of row i all before j have to be back where the bytes from j to i are more than the credit.
        first = np.minimum(np.searchsorted(pushed - num_bytes[own], pushed - credit_bytes), np.arange(len(own)))
        for i in np.flatnonzero(first > 0).tolist():
            for j in range(int(first[i - 1]), int(first[i])):
                builder.wait(int(pushes[own[i]]), int(pulls[own[j]]))
