"""Put instructions into streams, take them out, move them, or give them other waits: all of it is a change of rows.

A row says where an instruction stands and what it waits for; one whose stream is -1 is not there. Its neighbours in the
stream are those of the nearest keys, which are looked for along the order, so a change takes time in proportion to what
it touches and to how many streams there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.simulator.delta.graph import (
    AFTER,
    BEFORE,
    FIRST_WAIT,
    NOWHERE,
    PLACE,
    STREAM,
    WAIT_AFTER,
    WAIT_BEGIN,
    WAIT_COUNT,
    WAIT_ROOM,
    WAITER,
    WORD,
    DeltaGraph,
    in_order,
    link_waits,
    spread,
    unlink_waits,
)
from meshwright.simulator.waiters import Column, Ids, Times

# Beyond this share of all instructions everything is put in order anew, which takes less than one by one.
_MANY = 1 / 4


class StreamRows(NamedTuple):
    """What some instructions are, each once: columns (k,), and whom they wait for in CSR form."""

    instruction: Ids
    stream: Column
    key: Times
    duration_ps: Times
    wait_offsets: Ids
    waits: Column


@compiled
def read_rows(graph: DeltaGraph, instructions: Ids) -> StreamRows:
    """What some instructions are now."""
    count = len(instructions)
    offsets = np.zeros(count + 1, np.int64)
    for r in range(count):
        offsets[r + 1] = offsets[r] + graph.node[instructions[r], WAIT_COUNT]
    waits, stream = np.empty(offsets[count], np.int32), np.empty(count, np.int32)
    for r in range(count):
        begin = graph.node[instructions[r], WAIT_BEGIN]
        waits[offsets[r] : offsets[r + 1]] = graph.waits[begin : begin + offsets[r + 1] - offsets[r]]
        stream[r] = graph.node[instructions[r], STREAM]
    return StreamRows(instructions, stream, graph.key[instructions], graph.duration_ps[instructions], offsets, waits)


@compiled
def rewire(graph: DeltaGraph, rows: StreamRows, num_streams: int, next_wait: int) -> tuple[Ids, int, int]:
    """Make instructions what ``rows`` say.

    Returns those that may start at another time, how many places of ``waits`` are in use then, and an instruction that
    needs what is not there or has no smaller key (-1: none).
    """
    count, num_touched = len(rows.instruction), 0
    touched = np.empty(3 * count, np.int64)
    is_many = count > _MANY * graph.used.sum()
    for r in range(count):
        i = rows.instruction[r]
        unlink_waits(graph, graph.node[i, WAIT_BEGIN], graph.node[i, WAIT_COUNT])
        if graph.node[i, STREAM] >= 0:
            touched[num_touched] = graph.node[i, AFTER]
            num_touched += 1
            _take_out(graph, i)
    for r in range(count):
        i, begin, size = rows.instruction[r], rows.wait_offsets[r], rows.wait_offsets[r + 1] - rows.wait_offsets[r]
        graph.duration_ps[i], graph.key[i], graph.node[i, STREAM] = rows.duration_ps[r], rows.key[r], rows.stream[r]
        if size > graph.node[i, WAIT_ROOM]:
            graph.node[i, WAIT_BEGIN], graph.node[i, WAIT_ROOM] = next_wait, size
            next_wait += size
        graph.node[i, WAIT_COUNT] = size
        graph.waits[graph.node[i, WAIT_BEGIN] : graph.node[i, WAIT_BEGIN] + size] = rows.waits[begin : begin + size]
        link_waits(graph, i, graph.node[i, WAIT_BEGIN], size)
        if rows.stream[r] >= 0 and not is_many:
            _put_in(graph, i, num_streams)
    if is_many:
        _put_all_in(graph, num_streams)
    wrong = NOWHERE
    for r in range(count):
        i = rows.instruction[r]
        if not _fits(graph, i):
            wrong = i
        if rows.stream[r] >= 0:
            touched[num_touched], touched[num_touched + 1] = i, graph.node[i, AFTER]
            num_touched += 2
    return touched[:num_touched][graph.node[touched[:num_touched], STREAM] >= 0], next_wait, wrong


@compiled
def _take_out(graph: DeltaGraph, i: int) -> None:
    before, after = graph.node[i, BEFORE], graph.node[i, AFTER]
    graph.node[before, AFTER], graph.node[after, BEFORE] = after, before
    place = graph.node[i, PLACE]
    word = place // WORD
    graph.used[word] -= 1
    for at in range(place, word * WORD + graph.used[word]):
        graph.order[at] = graph.order[at + 1]
        graph.node[graph.order[at], PLACE] = at
    graph.node[i, STREAM], graph.end_ps[i] = NOWHERE, NOWHERE


@compiled
def _put_in(graph: DeltaGraph, i: int, num_streams: int) -> None:
    """Stand an instruction in the order, and between those of its stream that are nearest there."""
    key, stream = graph.key[i], graph.node[i, STREAM]
    word = np.searchsorted(graph.lowest, key, side="right") - 1
    if graph.used[word] == WORD:
        spread(graph, in_order(graph))
        word = np.searchsorted(graph.lowest, key, side="right") - 1
    place = word * WORD + graph.used[word]
    graph.used[word] += 1
    while place > word * WORD and graph.key[graph.order[place - 1]] > key:
        graph.order[place] = graph.order[place - 1]
        graph.node[graph.order[place], PLACE] = place
        place -= 1
    graph.order[place], graph.node[i, PLACE] = i, place
    before, at = NOWHERE, place - 1
    while before < 0 and word >= 0:
        while at >= word * WORD and graph.node[graph.order[at], STREAM] != stream:
            at -= 1
        if at >= word * WORD:
            before = int(graph.order[at])
        else:
            word -= 1
            at = word * WORD + graph.used[word] - 1 if word >= 0 else NOWHERE
    _stand_behind(graph, i, before if before >= 0 else _start_of(graph, stream, num_streams))


@compiled
def _start_of(graph: DeltaGraph, stream: int, num_streams: int) -> int:
    return len(graph.key) - 1 - num_streams + stream


@compiled
def _stand_behind(graph: DeltaGraph, i: int, before: int) -> None:
    after = graph.node[before, AFTER]
    graph.node[i, BEFORE], graph.node[i, AFTER] = before, after
    graph.node[before, AFTER] = graph.node[after, BEFORE] = i


@compiled
def _put_all_in(graph: DeltaGraph, num_streams: int) -> None:
    """Put everything that is there in order anew."""
    none, first = len(graph.key) - 1, len(graph.key) - 1 - num_streams
    found = np.flatnonzero(graph.node[:first, STREAM] >= 0)
    there = found[np.argsort(graph.key[found])].astype(np.int32)
    spread(graph, there)
    last = np.arange(first, none)
    graph.node[first:, AFTER] = none
    for i in there:
        stream = graph.node[i, STREAM]
        _stand_behind(graph, i, int(last[stream]))
        last[stream] = i


@compiled
def _fits(graph: DeltaGraph, i: int) -> bool:
    """Whether what an instruction waits for is there with a smaller key; nobody waits for one that is not there."""
    if graph.node[i, STREAM] < 0:
        return bool(graph.node[i, FIRST_WAIT] < 0 and graph.node[i, WAIT_COUNT] == 0)
    for w in range(graph.node[i, WAIT_BEGIN], graph.node[i, WAIT_BEGIN] + graph.node[i, WAIT_COUNT]):
        k = graph.waits[w]
        if graph.node[k, STREAM] < 0 or graph.key[k] >= graph.key[i]:
            return False
    w = graph.node[i, FIRST_WAIT]
    while w >= 0:
        if graph.key[graph.edge[w, WAITER]] <= graph.key[i]:
            return False
        w = graph.edge[w, WAIT_AFTER]
    after = graph.node[i, AFTER]
    return bool(
        graph.key[graph.node[i, BEFORE]] < graph.key[i]
        and (graph.node[after, STREAM] < 0 or graph.key[i] < graph.key[after])
    )
