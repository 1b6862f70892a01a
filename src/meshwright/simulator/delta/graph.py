"""Instructions that can be given other needs, kept in one order in which each comes after those that it needs.

Every instruction has a **key**, and needs only what has smaller ones; a stream is in the order of its keys. All that
are there stand by their keys in words of 64 places, so that a set of them is a bit per place, and one more moves no
more than its word. Before the first of stream s stands the start of that stream, number ``room + s``, which ends at 0.

A mark is an instruction too, in no stream: it waits for the one that raises it, and takes the time from there to its
moment, 0 or less.

What is asked of an instruction together stands together, in the row of a table:

    BEFORE, AFTER       its neighbours in its stream
    WAIT_BEGIN          where its waits stand, WAIT_COUNT of them, and behind them LINK_COUNT that had its links before
    WAIT_ROOM           how many may stand there
    FIRST_WAIT          the first wait for it, which leads to the others (WAIT_AFTER)
    MEMBER_AFTER        leads round the members of its collective, which share a place; to itself where it is alone
    STREAM              -1 where it is not there, and of marks
    REQUESTER           the stream in whose name it requests shared links, -1 where it does not
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.waiters import Column, Times

Bits = NDArray[np.uint64]

NOWHERE = -1
BEFORE, WAIT_BEGIN, WAIT_COUNT, MEMBER_AFTER, AFTER, PLACE, LINK_COUNT, FIRST_WAIT = range(8)
STREAM, REQUESTER, WAIT_ROOM, NODE_COLUMNS = range(8, 12)
WAITER, WAIT_AFTER, WAIT_BEFORE, EDGE_COLUMNS = range(4)
WORD = 64
# Places of a word that are taken when all instructions are spread over the words.
_TAKEN = 40


class DeltaGraph(NamedTuple):
    """Columns and a table per instruction (behind them the starts of streams), per wait, place and word.

    Few arrays, for each is handed to compiled code apart, which takes longer than most changes do.
    """

    end_ps: Times
    duration_ps: Times
    request_ps: Times
    key: Times
    node: Column
    waits: Column
    edge: Column
    order: Column
    used: Column
    lowest: Times
    bits: Bits


def empty_graph(room: int, num_streams: int, num_waits: int) -> DeltaGraph:
    """No instruction is there yet; there is room for so many, and for so many waits."""
    total, words = room + num_streams + 1, room // _TAKEN + 1
    node = np.zeros((total, NODE_COLUMNS), np.int32)
    node[:, [FIRST_WAIT, STREAM, REQUESTER]] = NOWHERE
    node[:, [BEFORE, AFTER]] = total - 1
    node[:, MEMBER_AFTER] = np.arange(total)
    return DeltaGraph(
        end_ps=np.zeros(total, np.int64),
        duration_ps=np.zeros(total, np.int64),
        request_ps=np.zeros(total, np.int64),
        key=np.full(total, NOWHERE, np.int64),
        node=node,
        waits=np.zeros(num_waits, np.int32),
        edge=np.full((num_waits, EDGE_COLUMNS), NOWHERE, np.int32),
        order=np.zeros(words * WORD, np.int32),
        used=np.zeros(words, np.int32),
        lowest=np.full(words, np.iinfo(np.int64).max),
        bits=np.zeros(words, np.uint64),
    )


@compiled
def spread(graph: DeltaGraph, heads: Column) -> None:
    """Stand these, which are in order, evenly in the words."""
    words, count = len(graph.used), len(heads)
    for word in range(words):
        begin, stop = word * count // words, (word + 1) * count // words
        graph.used[word] = stop - begin
        for at in range(begin, stop):
            place = word * WORD + at - begin
            graph.order[place] = heads[at]
            member = heads[at]
            while True:
                graph.node[member, PLACE] = place
                member = graph.node[member, MEMBER_AFTER]
                if member == heads[at]:
                    break
        # A word without any takes what comes before the first of the next.
        graph.lowest[word] = graph.key[heads[begin]] if begin < count else np.iinfo(np.int64).max
    graph.lowest[0] = np.iinfo(np.int64).min


@compiled
def in_order(graph: DeltaGraph) -> Column:
    """All that stand in the words."""
    there, count = np.empty(graph.used.sum(), np.int32), 0
    for word in range(len(graph.used)):
        there[count : count + graph.used[word]] = graph.order[word * WORD : word * WORD + graph.used[word]]
        count += graph.used[word]
    return there


@compiled
def link_waits(graph: DeltaGraph, i: int, begin: int, count: int) -> None:
    """Enter some waits of an instruction into the lists of those that it waits for."""
    for w in range(begin, begin + count):
        k = graph.waits[w]
        following = graph.node[k, FIRST_WAIT]
        graph.edge[w, WAITER], graph.edge[w, WAIT_AFTER], graph.edge[w, WAIT_BEFORE] = i, following, NOWHERE
        graph.node[k, FIRST_WAIT] = w
        if following >= 0:
            graph.edge[following, WAIT_BEFORE] = w


@compiled
def unlink_waits(graph: DeltaGraph, begin: int, count: int) -> None:
    """Take some waits out of these lists."""
    for w in range(begin, begin + count):
        following, before = graph.edge[w, WAIT_AFTER], graph.edge[w, WAIT_BEFORE]
        if following >= 0:
            graph.edge[following, WAIT_BEFORE] = before
        if before >= 0:
            graph.edge[before, WAIT_AFTER] = following
        else:
            graph.node[graph.waits[w], FIRST_WAIT] = following
