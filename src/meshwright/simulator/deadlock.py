"""Two parts: explain why a program stops (`raise_deadlock`), and which ranks need too much memory (`find_overflows`).

The explanation of a deadlock names the shortest cycle of instructions that wait for each other. A stopped stream has a
next instruction p. It waits for each instruction a that p awaits and that never ended, and, where p is a member of a
collective, for each member a that was never reached. If a is not the next instruction of its stream, it comes later in
that stream. So there is an edge from a stopped stream to the stream of each a, which has stopped too; from a join to
all its open waits, because too few of these ever happen. Every stopped stream has an edge, and there are finitely many
streams: they contain a cycle. The shortest is found by breadth-first search from each stream; among equals the one
through the lowest stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.memory import MemoryLimit
from meshwright.simulator.network import Network, awaited_instructions, collectives, need_of
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.unroll import Unrolled
from meshwright.spec import (
    Cluster,
    DeadlockError,
    Program,
    Timeline,
    format_bytes,
    format_seconds,
    instruction_name,
    to_seconds,
)

# Ranks that a message lists one by one; of the rest it gives the number.
_MOST_TOLD = 3
_MOST_PARTS = 3
# No margin: a plan that exceeds this limit cannot run, however accurate the prediction.
_LIMIT = MemoryLimit(margin=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """A rank needs more than its device has: first at ``time_s`` of the simulation, in ``span``; parts at its peak."""

    rank: int
    device: str
    limit_bytes: int
    reserved_bytes: int
    time_s: float
    span: str
    parts_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """The peak of what the rank needs."""
        return sum(self.parts_bytes.values())

    def row(self) -> dict[str, Any]:
        """Return plain values: the fields, and ``peak_bytes``."""
        names = ("rank", "device", "limit_bytes", "reserved_bytes", "peak_bytes", "time_s", "span", "parts_bytes")
        return {name: getattr(self, name) for name in names}

    def explain(self) -> str:
        """Return one sentence for people."""
        largest = sorted(self.parts_bytes.items(), key=lambda item: -item[1])[:_MOST_PARTS]
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        needs = "reserves" if self.reserved_bytes > self.peak_bytes else "needs"
        return (
            f"Rank {self.rank} {needs} up to {format_bytes(self.reserved_bytes)}, but its {self.device} has "
            f"{format_bytes(self.limit_bytes)}: too much from {format_seconds(self.time_s)} on, in {self.span}; most "
            f"at its peak are {parts}."
        )


def find_overflows(result: Simulation, cluster: Cluster, reserved: Sequence[int] = ()) -> tuple[Overflow, ...]:
    """Return every rank that needs more than its device has after CUDA and NCCL, by rank; empty if all fit.

    ``reserved``: bytes that each rank's allocator reserves (`predict_reserved`); by default peaks are compared.
    """
    needed = reserved or [use.total_bytes for use in result.memory]
    limits = [_LIMIT.usable_bytes(cluster.device_kind(rank)) for rank in range(len(result.memory))]
    return tuple(
        _overflow(result, cluster, rank, limits[rank], needed[rank])
        for rank in range(len(result.memory))
        if needed[rank] > limits[rank]
    )


def explain_overflows(overflows: Sequence[Overflow]) -> tuple[str, ...]:
    """Return lines for people: the first ranks one by one, the number of others, and advice; empty if all fit."""
    if not overflows:
        return ()
    more = len(overflows) - _MOST_TOLD
    return (
        *(item.explain() for item in overflows[:_MOST_TOLD]),
        *((f"So do {more} more ranks.",) if more > 0 else ()),
        "This plan would not run there: plan for this cluster (`meshwright plan --cluster`), with smaller microbatches "
        "(-m), more stages, or a schedule that keeps fewer in flight.",
    )


def _overflow(result: Simulation, cluster: Cluster, rank: int, limit_bytes: int, needed_bytes: int) -> Overflow:
    timeline, kind = result.timeline, cluster.device_kind(rank)
    mine = timeline.memory_rank == rank
    times, in_use = timeline.memory_time_ps[mine], timeline.memory_bytes[mine]
    # An excess that is over within one moment leaves no sample of its own: then take the moment of the largest sample.
    time_ps = int(times[np.argmax(np.minimum(in_use, limit_bytes + 1))])
    return Overflow(
        rank=rank,
        device=kind.name,
        limit_bytes=limit_bytes,
        reserved_bytes=needed_bytes,
        time_s=to_seconds(time_ps),
        span=_span_at(timeline, rank, time_ps),
        parts_bytes={name: size for name, size in result.memory[rank].parts.items() if size},
    )


def _span_at(timeline: Timeline, rank: int, time_ps: int) -> str:
    """Return the name of what a rank begins at a moment, computations first; at time 0 its resident memory."""
    tracks = [index for index, stream in enumerate(timeline.tracks) if stream.rank == rank]
    found = np.flatnonzero(np.isin(timeline.track, tracks) & (timeline.start_ps == time_ps))
    computed = [i for i in found.tolist() if timeline.tracks[timeline.track[i]].name == "compute"]
    chosen = (computed or found.tolist())[-1:]
    return timeline.name(chosen[0]) if chosen else "its resident memory"


Ids = NDArray[np.int64]

# Most instructions of a cycle that a message names; of a longer cycle it names the first ones.
_MOST_NAMED = 16


def raise_deadlock(program: Program, unrolled: Unrolled, end_ps: Ids, position: Ids) -> None:
    """Raise DeadlockError if a stream stopped before its end."""
    offsets = unrolled.network.stream_offsets
    num_stuck = int((position < offsets[1:]).sum())
    if num_stuck:
        # Every rank has a stream of each name, most of them empty.
        num_used = int((np.diff(offsets) > 0).sum())
        circle = find_circle(unrolled.network, unrolled.stream, end_ps, position)
        raise DeadlockError(
            f"The program can never finish: {num_stuck} of {num_used} streams wait in a circle or behind one. "
            f"{_tell(program, unrolled, end_ps, position, circle)}. "
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
    """Return the name of an instruction, its rank and its stream."""
    stream, row = program.streams[unrolled.stream[i]], int(unrolled.source[i])
    for _, section in program.sections():
        if row < section.num_instructions:
            break
        row -= section.num_instructions
    columns = section.opcode, section.stage, section.microbatch, section.peer
    name = instruction_name(*(int(column[row]) for column in columns))
    return f"{name} (rank {stream.rank}, {stream.name})"
