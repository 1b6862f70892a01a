"""Explain why a program can never finish (`raise_deadlock`): name the shortest cycle of waiting instructions.

Let p be the next instruction of a stopped stream. The stream waits for each instruction a that p awaits and that never
ended, and, if p is a member of a collective, for each member a that was never reached. If a is not the next instruction
of its stream, it comes later in that stream. So there is an edge from the stopped stream to the stream of each a, which
has stopped, too. A join has edges to all its open waits, because too few of them ever happen. Every stopped stream has
an edge, and there are finitely many streams, so they contain a cycle. The shortest cycle is found by breadth-first
search from each stream; among equals the one through the lowest stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.network import Network, awaited_instructions, collectives, need_of
from meshwright.simulator.unroll import Unrolled
from meshwright.spec import (
    DeadlockError,
    Program,
    instruction_name,
)

Ids = NDArray[np.int64]

# Most instructions of a cycle that a message names; of a longer cycle it names the first ones.
_MOST_NAMED = 16


def raise_deadlock(program: Program, unrolled: Unrolled, end_ps: Ids, position: Ids) -> None:
    """Raise DeadlockError, which names the shortest cycle, if a stream stopped before its end.

    ``end_ps`` is the end of each instruction, negative if it never ended; ``position`` the id of the instruction at
    which each stream stopped.
    """
    offsets = unrolled.network.stream_offsets
    num_stuck = int((position < offsets[1:]).sum())
    if num_stuck:
        # Every rank has a stream of each name, most of them empty.
        num_used = int((np.diff(offsets) > 0).sum())
        circle = find_circle(unrolled.network, unrolled.stream, end_ps, position)
        raise DeadlockError(
            f"The program can never finish: {num_stuck} of {num_used} streams wait for each other in a cycle, or for a "
            f"stream in it. {_tell(program, unrolled, end_ps, position, circle)}. "
            "Change the order of these instructions in the schedule."
        )


def find_circle(network: Network, stream_of: NDArray[np.int32], end_ps: Ids, position: Ids) -> list[tuple[int, int]]:
    """Return the shortest cycle as pairs (waiting, awaited) of instruction ids.

    ``waiting`` is the next instruction of a stopped stream. ``awaited`` belongs to the stream of the next pair's
    ``waiting`` and is that instruction or comes after it. At least one stream must have stopped before its end.
    """
    stuck = np.flatnonzero(position < network.stream_offsets[1:])
    number = np.full(len(position), -1)
    number[stuck] = np.arange(len(stuck))
    awaited = _awaited(network, end_ps, position[stuck])
    offsets = np.cumsum([0, *(len(ids) for ids in awaited)])
    ids = np.concatenate(awaited)
    edges = _shortest_circle(offsets, number[stream_of[ids]])
    waiting = position[stuck[np.searchsorted(offsets, edges, side="right") - 1]]
    return list(zip(waiting.tolist(), ids[edges].tolist(), strict=True))


def _awaited(network: Network, end_ps: Ids, stopped: Ids) -> list[Ids]:
    """Return what each next instruction of a stopped stream waits for."""
    awaited = []
    for i in stopped.tolist():
        ids = awaited_instructions(network, network.waits[network.wait_offsets[i] : network.wait_offsets[i + 1]])
        left = ids[end_ps[ids] < 0]
        # A join with enough waits is not stopped by the others, but by its collective.
        awaited.append(left if len(ids) - len(left) < need_of(network, i) else left[:0])
    arrived = stopped[[not len(ids) for ids in awaited]]
    collective = collectives(network)
    missing = np.setdiff1d(np.flatnonzero((collective >= 0) & (end_ps < 0)), arrived)
    for k in np.flatnonzero(np.isin(stopped, arrived)).tolist():
        awaited[k] = missing[collective[missing] == collective[stopped[k]]]
    return awaited


@compiled
def _shortest_circle(offsets: Ids, targets: Ids) -> Ids:
    """Return the edges, in order, of a shortest cycle of a graph in CSR form in which every node has an edge."""
    num_nodes = len(offsets) - 1
    best = np.empty(0, np.int64)
    queue, seen = np.empty(num_nodes, np.int64), np.full(num_nodes, -1, np.int64)
    distance, source, arrival = np.zeros((3, num_nodes), np.int64)
    for root in range(num_nodes):
        queue[0], seen[root], distance[root] = root, root, 0
        count, k, closing = 1, 0, -1
        while k < count and closing < 0 and (not len(best) or distance[queue[k]] + 1 < len(best)):
            node = queue[k]
            k += 1
            for edge in range(offsets[node], offsets[node + 1]):
                target = targets[edge]
                if target == root:
                    source[root], arrival[root], closing = node, edge, distance[node] + 1
                    break
                if seen[target] != root:
                    seen[target], distance[target] = root, distance[node] + 1
                    source[target], arrival[target] = node, edge
                    queue[count] = target
                    count += 1
        if closing >= 0:
            best = np.empty(closing, np.int64)
            node = root
            for place in range(closing - 1, -1, -1):
                best[place] = arrival[node]
                node = source[node]
    return best


def _tell(program: Program, unrolled: Unrolled, end_ps: Ids, position: Ids, circle: list[tuple[int, int]]) -> str:
    """Return 'A waits for B, which comes after C, which waits for ... A'."""
    network = unrolled.network
    first = circle[0][0]
    text = describe(program, unrolled, first)
    for waiting, awaited in circle[:_MOST_NAMED]:
        waits = network.waits[network.wait_offsets[waiting] : network.wait_offsets[waiting + 1]]
        found = waits[awaited_instructions(network, waits) == awaited]
        by_mark = len(found) and (found < 0).all()
        link = "" if waiting == first else ", which"
        text += f"{_tell_need(program, unrolled, end_ps, waiting)}{link} waits for {'a mark in ' if by_mark else ''}"
        text += describe(program, unrolled, awaited)
        ahead = int(position[unrolled.stream[awaited]])
        if ahead != awaited:
            text += f", which comes after {describe(program, unrolled, ahead)}"
    if len(circle) > _MOST_NAMED:
        text += f", and so on through {len(circle) - _MOST_NAMED} more back to the first"
    return text


def _tell_need(program: Program, unrolled: Unrolled, end_ps: Ids, i: int) -> str:
    """Return how many waits a join needs and has, and which are open; '' for other instructions."""
    network = unrolled.network
    ids = awaited_instructions(network, network.waits[network.wait_offsets[i] : network.wait_offsets[i + 1]])
    left = ids[end_ps[ids] < 0].tolist()
    if i not in network.join_instruction or not left:
        return ""
    names = ", ".join(describe(program, unrolled, other) for other in left[:_MOST_NAMED])
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    return f" [needs {need_of(network, i)} of {len(ids)}, has {len(ids) - len(left)}, lacks {names}{more}]"


def describe(program: Program, unrolled: Unrolled, i: int) -> str:
    """Return an instruction as text: ``F0.3 (rank 1, compute)``."""
    stream, row = program.streams[unrolled.stream[i]], int(unrolled.source[i])
    for _, section in program.sections():
        if row < section.num_instructions:
            break
        row -= section.num_instructions
    columns = section.opcode, section.stage, section.microbatch, section.peer
    name = instruction_name(*(int(column[row]) for column in columns))
    return f"{name} (rank {stream.rank}, {stream.name})"
