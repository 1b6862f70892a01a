"""What moves when a few durations change? Only that is simulated again, and the result is that of a full simulation.

Streams, waits, marks, collectives and links that one stream has to itself make the ends a function without any order:

    end(i) = max(end of the one before, moments awaited; of a collective: those of all members) + duration(i)

So a change is carried from the changed instructions to those that need them, in a topological order, until nothing
moves any more. The order is found once; what is to be looked at stands in a bit set over it. What moved is noted with
its old end, so that a change can be taken back at once. Source of the idea: FlexFlow (Jia et al. 2019, section 5.3).

An instruction that is looked at again costs more than one of a full run, so when a share of `GIVE_UP` has been,
everything is simulated in full; taking that back puts the ends of before in place. Where links are shared or
instructions are joins, ends depend on the order of requests, which a change may turn over: such networks are simulated
in full at each change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cost.compiled import compiled
from meshwright.simulator.engine import Contention, run_network
from meshwright.simulator.network import (
    Network,
    awaited_instructions,
    collectives,
    durations,
    routes,
    with_durations,
)
from meshwright.simulator.waiters import Column, Ids, Times
from meshwright.spec import ProgramError

# An instruction that is looked at again costs up to four times as much as one of a full run, so an attempt that fails
# adds no more than a tenth to it (benchmarks/simulator.py).
GIVE_UP = 0.0125
_MARKED = np.uint64(1)
Bits = NDArray[np.uint64]


class _Needs(NamedTuple):
    """The columns of `Network` that say what an instruction waits for and takes."""

    wait_offsets: Column
    waits: Column
    mark_instruction: Column
    mark_shift_ps: Times
    duration_ps: Times


class _Graph(NamedTuple):
    """Who needs whom. A *group* is a collective or an instruction alone; groups are numbered in topological order.

    ``group`` (n,) of each instruction; the members of each group and the groups that wait for each instruction, in CSR
    form; whether an instruction is the first and the last of its stream, (n,).
    """

    group: Column
    member_offsets: Column
    members: Column
    waiter_offsets: Column
    waiters: Column
    is_first: NDArray[np.bool_]
    is_last: NDArray[np.bool_]


class _Log(NamedTuple):
    """Instructions that moved, and their ends before."""

    instruction: Column
    end_ps: Times


class _Change(NamedTuple):
    """How to take a change back: ``noted`` entries of the log, or all ends of before where it was simulated in full."""

    instructions: Ids
    duration_ps: Times
    shift_ps: Times
    noted: int
    end_ps: Times | None


class DeltaSimulation:
    """Follows changes of durations; ``end_ps`` (n,) is always that of a full simulation of ``network``.

    ``was_full`` says whether the last change was simulated in full. Raises ProgramError for a network that never
    finishes.
    """

    def __init__(self, network: Network, num_links: int, contention: Contention = "queued") -> None:
        self._first_ps, self._first_shift_ps = durations(network), network.mark_shift_ps
        # Both are changed in place.
        self._duration_ps, self._shift_ps = self._first_ps.copy(), self._first_shift_ps.copy()
        self.network = with_durations(network, self._duration_ps, self._shift_ps)
        self._needs = _Needs(
            network.wait_offsets, network.waits, network.mark_instruction, self._shift_ps, self._duration_ps
        )
        self._num_links, self._contention = num_links, contention
        outcome = run_network(self.network, num_links, contention)
        if (outcome.position < network.stream_offsets[1:]).any():
            raise ProgramError("The program never finishes, so nothing can be changed in it. Simulate it to learn why.")
        self.end_ps, self.was_full = outcome.end_ps, True
        self._collective, self._least_ps = collectives(network), (routes(network) >= 0).astype(np.int64)
        order = np.argsort(network.mark_instruction, kind="stable")
        self._mark_order, self._raising = order, network.mark_instruction[order]
        self._graph = _build_graph(self.network) if _is_free_of_order(self.network, self._collective) else None
        self._limit = int(GIVE_UP * len(self.end_ps))
        widest = 0 if self._graph is None else int(np.diff(self._graph.member_offsets).max(initial=1))
        room = self._limit + 1 + widest
        self._log = _Log(np.empty(room, np.int32), np.empty(room, np.int64))
        self._bits = np.zeros((len(self.end_ps) >> 6) + 1, np.uint64)
        self._last: _Change | None = None

    def change(self, instructions: ArrayLike, duration_ps: ArrayLike) -> None:
        """Give instructions (k,) other durations (k,); their marks move in proportion to the first durations.

        That of one member of a collective is that of all. Raises ProgramError for less than 0 ps, or less than 1 ps
        where a link is held, and for instructions that are not there.
        """
        ids, wanted = self._spread(np.array(instructions, np.int64, ndmin=1), np.array(duration_ps, np.int64, ndmin=1))
        marks = self._marks_of(ids)
        before = self._duration_ps[ids], self._shift_ps[marks]
        self._duration_ps[ids] = wanted
        if len(marks):
            self._shift_ps[marks] = self._moved_marks(marks)
        noted = -1
        if self._graph is not None:
            noted = _carry(self._needs, self._graph, self._bits, self.end_ps, ids, self._limit, self._log)
        self.was_full = noted < 0
        self._last = _Change(ids, *before, noted, self.end_ps if self.was_full else None)
        if self.was_full:
            self.end_ps = run_network(self.network, self._num_links, self._contention).end_ps

    def undo(self) -> None:
        """Take the last change back. Raises ProgramError if there is none that was not taken back yet."""
        if self._last is None:
            raise ProgramError("No change is left to take back: only the last one can be, once.")
        ids, duration_ps, shift_ps, noted, end_ps = self._last
        self._duration_ps[ids] = duration_ps
        self._shift_ps[self._marks_of(ids)] = shift_ps
        if end_ps is None:
            _take_back(self.end_ps, self._log, noted)
        else:
            self.end_ps = end_ps
        self._last = None

    def _spread(self, ids: Ids, wanted: Times) -> tuple[Ids, Times]:
        """The instructions with all members of their collectives, each once, and what they shall take."""
        listed = ids.tolist()
        if ids.shape != wanted.shape or not listed or min(listed) < 0 or max(listed) >= len(self.end_ps):
            raise ProgramError(
                f"{len(wanted)} durations were given for {len(ids)} instructions; expected one for each, and "
                f"instructions from 0 to {len(self.end_ps) - 1}."
            )
        if any(duration < self._least_ps[i] for i, duration in zip(listed, wanted.tolist(), strict=True)):
            raise ProgramError(
                f"An instruction was to take {int(wanted.min())} ps; expected 0 or more, and at least 1 where it holds "
                "a link."
            )
        if len(listed) == 1 and self._collective[listed[0]] < 0:
            return ids, wanted
        taken: dict[int, int] = {}
        for i, duration in zip(listed, wanted.tolist(), strict=True):
            c = int(self._collective[i])
            members = [i] if c < 0 else np.flatnonzero(self._collective == c).tolist()
            taken.update(dict.fromkeys(members, duration))
        return np.array(list(taken), np.int64), np.array(list(taken.values()), np.int64)

    def _marks_of(self, ids: Ids) -> Ids:
        if not len(self._raising):
            return ids[:0]
        first, last = (np.searchsorted(self._raising, ids, side=side) for side in ("left", "right"))
        return np.concatenate([self._mark_order[a:b] for a, b in zip(first, last, strict=True)])

    def _moved_marks(self, marks: Ids) -> Times:
        """Shifts of marks: the same share of an instruction has passed as at first, and 1 ps where a link is held."""
        raising = self.network.mark_instruction[marks]
        first_ps, duration_ps = self._first_ps[raising], self._duration_ps[raising]
        share = np.where(first_ps > 0, 1 + self._first_shift_ps[marks] / np.maximum(first_ps, 1), 1.0)
        offset_ps = np.maximum(np.rint(share * duration_ps).astype(np.int64), self._least_ps[raising])
        return np.minimum(offset_ps, duration_ps) - duration_ps


def _is_free_of_order(network: Network, collective: Column) -> bool:
    """Whether ends follow from durations alone, whatever comes first."""
    if len(network.join_instruction) or (routes(network) >= network.num_private).any():
        return False
    joint = np.flatnonzero(collective >= 0)
    longest = np.zeros(len(network.collective_size), np.int64)
    longest[collective[joint]] = durations(network)[joint]
    return bool((longest[collective[joint]] == durations(network)[joint]).all())


def _build_graph(network: Network) -> _Graph:
    collective, count = collectives(network), len(network.cost_class)
    # A group goes by the first of its members until it has its number.
    head = np.arange(count)
    joint = np.flatnonzero(collective >= 0)[::-1]
    heads = np.zeros(len(network.collective_size), np.int64)
    heads[collective[joint]] = joint
    head[joint] = heads[collective[joint]]
    is_first, is_last = np.zeros(count + 1, np.bool_), np.zeros(count + 1, np.bool_)
    used = np.diff(network.stream_offsets) > 0
    is_first[network.stream_offsets[:-1][used]] = is_last[network.stream_offsets[1:][used] - 1] = True
    by_head = np.argsort(head, kind="stable")
    awaited = awaited_instructions(network, network.waits)
    waiting = np.repeat(np.arange(count), np.diff(network.wait_offsets))[np.argsort(awaited, kind="stable")]
    waiter_offsets = np.concatenate([[0], np.cumsum(np.bincount(awaited, minlength=count))])
    sizes = np.bincount(head, minlength=count)
    edges = waiter_offsets, waiting, np.cumsum(sizes) - sizes, by_head
    group, order = _sort(network.wait_offsets.astype(np.int64), head, sizes, is_first, is_last, *edges)
    members = np.argsort(group, kind="stable").astype(np.int32)
    member_offsets = np.concatenate([[0], np.cumsum(sizes[order])])
    return _Graph(
        group=group,
        member_offsets=member_offsets.astype(np.int32),
        members=members,
        waiter_offsets=waiter_offsets.astype(np.int32),
        waiters=group[waiting],
        is_first=is_first[:count],
        is_last=is_last[:count],
    )


@compiled
def _sort(
    wait_offsets: Ids,
    head: Ids,
    sizes: Ids,
    is_first: NDArray[np.bool_],
    is_last: NDArray[np.bool_],
    waiter_offsets: Ids,
    waiting: Ids,
    member_offsets: Ids,
    members: Ids,
) -> tuple[Column, Ids]:
    """The number of each instruction's group in a topological order, and the heads of the groups in that order."""
    count = len(head)
    missing, group, order = np.zeros(count, np.int64), np.empty(count, np.int32), np.empty(count, np.int64)
    for i in range(count):
        missing[head[i]] += wait_offsets[i + 1] - wait_offsets[i] + (not is_first[i])
    found, place = 0, 0
    for i in range(count):
        if head[i] == i and missing[i] == 0:
            order[found] = i
            found += 1
    while place < found:
        h = order[place]
        for m in range(member_offsets[h], member_offsets[h] + sizes[h]):
            i = members[m]
            group[i] = place
            for q in range(waiter_offsets[i], waiter_offsets[i + 1] + (not is_last[i])):
                other = head[waiting[q] if q < waiter_offsets[i + 1] else i + 1]
                missing[other] -= 1
                if missing[other] == 0:
                    order[found] = other
                    found += 1
        place += 1
    return group, order[:found]


@compiled
def _carry(needs: _Needs, graph: _Graph, bits: Bits, end: Times, changed: Ids, limit: int, log: _Log) -> int:
    """Move what needs the changed instructions and return the number of entries in the log; -1: more than the limit.

    Then ends and bits are as they were.
    """
    word, last, noted, looked = len(bits), 0, 0, 0
    for i in changed:
        word, last = min(word, graph.group[i] >> 6), max(last, graph.group[i] >> 6)
        bits[graph.group[i] >> 6] |= _MARKED << np.uint64(graph.group[i] & 63)
        # A mark may move where the end does not.
        for q in range(graph.waiter_offsets[i], graph.waiter_offsets[i + 1]):
            last = max(last, _look_at(bits, graph.waiters[q]))
    while word <= last:
        if bits[word] == 0:
            word += 1
            continue
        g = (word << 6) + _lowest_bit(bits[word])
        bits[word] &= bits[word] - _MARKED
        begin, stop = graph.member_offsets[g], graph.member_offsets[g + 1]
        looked += stop - begin
        if looked > limit:
            for k in range(word, last + 1):
                bits[k] = 0
            _take_back(end, log, noted)
            return -1
        time = 0
        for m in range(begin, stop):
            time = max(time, _arrival(needs, graph, end, int(graph.members[m])))
        time += needs.duration_ps[graph.members[begin]]
        if time == end[graph.members[begin]]:
            continue
        for m in range(begin, stop):
            i = graph.members[m]
            log.instruction[noted], log.end_ps[noted], end[i] = i, end[i], time
            noted += 1
            if not graph.is_last[i]:
                last = max(last, _look_at(bits, graph.group[i + 1]))
            for q in range(graph.waiter_offsets[i], graph.waiter_offsets[i + 1]):
                last = max(last, _look_at(bits, graph.waiters[q]))
    return noted


@compiled
def _look_at(bits: Bits, group: int) -> int:
    """Note that a group is to be looked at; return the place of its bit."""
    bits[group >> 6] |= _MARKED << np.uint64(group & 63)
    return int(group >> 6)


@compiled
def _lowest_bit(word: np.uint64) -> int:
    """The place of the lowest bit of a word that is not 0."""
    place = 0
    for width in (32, 16, 8, 4, 2, 1):
        if (word >> np.uint64(place)) & ((_MARKED << np.uint64(width)) - _MARKED) == 0:
            place += width
    return place


@compiled
def _arrival(needs: _Needs, graph: _Graph, end: Times, i: int) -> int:
    """When all that an instruction needs has happened."""
    time = np.int64(0) if graph.is_first[i] else end[i - 1]
    for w in range(needs.wait_offsets[i], needs.wait_offsets[i + 1]):
        k, shift = np.int64(needs.waits[w]), np.int64(0)
        if k < 0:
            shift, k = needs.mark_shift_ps[~k], np.int64(needs.mark_instruction[~k])
        time = max(time, end[k] + shift)
    return int(time)


@compiled
def _take_back(end: Times, log: _Log, noted: int) -> None:
    """Put the old ends back, the last that moved first."""
    for k in range(noted - 1, -1, -1):
        end[log.instruction[k]] = log.end_ps[k]
