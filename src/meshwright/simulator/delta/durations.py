"""What moves when a few durations change? Only that is simulated again, and the result is that of a full simulation.

Streams, waits, marks, collectives and links that one stream has to itself make the ends a function without any order:

    end(i) = max(end of the one before, moments awaited; of a collective: those of all members) + duration(i)

So a change is carried from the changed instructions to those that need them, in a topological order, until nothing
moves any more (`carry`); when a share of `SWEEP` has been looked at, all that comes after it in the order is
gone through, which costs less than a full run does. What moved is noted with its old end, so that a change can be taken
back at once. Source of the idea: FlexFlow (Jia et al. 2019, section 5.3).

Where links are shared, ends depend on the order of requests too. A change is carried as if that stayed, and everything
is simulated in full when it does not, or when a share of `GIVE_UP` has been looked at; taking that back puts the ends
of before in place. If it stays, the next change finds the order anew (`times`). Where instructions are joins,
hosts issue beside their devices, or links are shared fairly, every change is simulated in full.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshwright.simulator.delta.build import build_graph, is_served_in_order
from meshwright.simulator.delta.carry import GIVE_UP, SWEEP, TURNED_OVER, carry, empty_log, take_back
from meshwright.simulator.delta.graph import DeltaGraph
from meshwright.simulator.delta.times import order_by_time, renew_order
from meshwright.simulator.engine import Contention, check_contention, run_network
from meshwright.simulator.network import Network, collectives, durations, routes, with_durations
from meshwright.simulator.waiters import Ids, Times
from meshwright.spec import ProgramError

# Of rises together, so that ends stay below 2**63.
_MOST_PS = 2**61


class _Change(NamedTuple):
    """How to take a change back: ``noted`` entries of the log, or all ends of before where it was simulated in full."""

    instructions: Ids
    duration_ps: Times
    shift_ps: Times
    noted: int
    end_ps: Times | None
    risen_ps: int


class DeltaSimulation:
    """Follows changes of durations; ``end_ps`` (n,) is always that of a full simulation of ``network``.

    ``was_full`` says whether the last change was simulated in full. Raises ProgramError for a network that never
    finishes.
    """

    def __init__(self, network: Network, num_links: int, contention: Contention = "queued") -> None:
        check_contention(contention)
        self._num_links, self._contention = num_links, contention
        self._first_ps, self._first_shift_ps = durations(network), network.mark_shift_ps
        # Both are changed in place.
        self._duration_ps, self._shift_ps = self._first_ps.copy(), self._first_shift_ps.copy()
        self._given = network
        self.network = with_durations(network, self._duration_ps, self._shift_ps)
        outcome = run_network(self.network, num_links, contention)
        if (outcome.position < network.stream_offsets[1:]).any():
            raise ProgramError("The program never finishes, so nothing can be changed in it. Simulate it to learn why.")
        self._end_ps, self.was_full = outcome.end_ps, True
        self._collective, self._least_ps = collectives(network), (routes(network) >= 0).astype(np.int64)
        order = np.argsort(network.mark_instruction, kind="stable")
        self._mark_order, self._raising = order, network.mark_instruction[order]
        self._is_shared = bool((routes(network) >= network.num_private).any())
        self._limit = int((GIVE_UP if self._is_shared else SWEEP) * len(self._end_ps))
        self._graph: DeltaGraph | None = None
        if is_served_in_order(network) and not (self._is_shared and contention == "fair"):
            self._follow()
        # Whether links serve requests in the order that the graph has.
        self._is_in_order = self._graph is not None
        self._last: _Change | None = None
        # By how much all durations that are longer than at first are so, together.
        self._risen_ps = 0

    @property
    def end_ps(self) -> Times:
        """When each instruction ends, in ps: what stands there now, to be read only."""
        seen = self._end_ps.view()
        seen.setflags(write=False)
        return seen

    def _follow(self) -> None:
        """Find out who needs whom."""
        self._graph = graph = build_graph(self.network, self._num_links, self._end_ps)
        if self._is_shared:
            order_by_time(graph)
        count, room = len(self._end_ps), len(self._end_ps) + len(self._shift_ps)
        self._log, self._route = empty_log(room), routes(self.network)
        self._duration_ps, self._end_ps = graph.duration_ps[:count], graph.end_ps[:count]
        self._shift_ps = graph.duration_ps[count:room]
        self.network = self.network._replace(class_ps=self._duration_ps, mark_shift_ps=self._shift_ps)

    def change(self, instructions: ArrayLike, duration_ps: ArrayLike) -> None:
        """Give instructions (k,) other durations (k,); their marks move in proportion to the first durations.

        That of one member of a collective is that of all. Raises ProgramError for what is no whole number, for less
        than 0 ps, or less than 1 ps where a link is held, for instructions that are not there, and where all that got
        longer since the beginning did so by 2**61 ps (26 days) or more together, for ends must fit into 63 bits.
        """
        ids, wanted = self._spread(_whole(instructions), _whole(duration_ps))
        risen_ps = self._risen_by(ids, wanted)
        marks = self._marks_of(ids)
        if self._graph is not None and not self._is_in_order:
            self._take_over_ends(self._graph)
            renew_order(self._graph, self.network, self._route, self._num_links)
            self._is_in_order = True
        before = self._duration_ps[ids], self._shift_ps[marks]
        self._duration_ps[ids] = wanted
        if len(marks):
            self._shift_ps[marks] = self._moved_marks(marks)
        noted = TURNED_OVER
        if self._graph is not None:
            changed = np.append(ids, len(self._end_ps) + marks) if len(marks) else ids
            noted = carry(self._graph, changed, self._limit, not self._is_shared, self._log)
        self.was_full = noted == TURNED_OVER
        self._last = _Change(ids, *before, noted, self._end_ps if self.was_full else None, self._risen_ps)
        self._risen_ps = risen_ps
        if self.was_full:
            self._renew_hosts()
            self._end_ps = run_network(self.network, self._num_links, self._contention).end_ps
            self._is_in_order = False

    def undo(self) -> None:
        """Take the last change back. Raises ProgramError if there is none that was not taken back yet."""
        if self._last is None:
            raise ProgramError("No change is left to take back: only the last one can be, once.")
        ids, duration_ps, shift_ps, noted, end_ps, self._risen_ps = self._last
        self._duration_ps[ids] = duration_ps
        self._shift_ps[self._marks_of(ids)] = shift_ps
        if end_ps is not None:
            self._renew_hosts()
            self._end_ps, self._is_in_order = end_ps, self._graph is not None
        elif self._graph is not None:
            take_back(self._graph, self._log, noted)
        self._last = None

    def _renew_hosts(self) -> None:
        """How early an instruction ends that a host issues follows its duration."""
        if self._given.has_hosts:
            self.network = with_durations(self._given, self._duration_ps, self._shift_ps)

    def _take_over_ends(self, graph: DeltaGraph) -> None:
        """Let a graph have the ends of a full run."""
        count, raising = len(self._end_ps), self.network.mark_instruction
        graph.end_ps[:count] = self._end_ps
        graph.end_ps[count : count + len(raising)] = self._end_ps[raising] + self._shift_ps
        self._end_ps = graph.end_ps[:count]

    def _spread(self, ids: Ids, wanted: Times) -> tuple[Ids, Times]:
        """The instructions with all members of their collectives, each once, and what they shall take."""
        listed = ids.tolist()
        if ids.shape != wanted.shape or not listed or min(listed) < 0 or max(listed) >= len(self._end_ps):
            raise ProgramError(
                f"{len(wanted)} durations were given for {len(ids)} instructions; expected one for each, and "
                f"instructions from 0 to {len(self._end_ps) - 1}."
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

    def _risen_by(self, ids: Ids, wanted: Times) -> int:
        """By how much durations will have risen together, checked."""
        risen_ps, first_ps, duration_ps = self._risen_ps, self._first_ps[ids].tolist(), self._duration_ps[ids].tolist()
        for first, before, after in zip(first_ps, duration_ps, wanted.tolist(), strict=True):
            if after > first:
                risen_ps += after - first
            if before > first:
                risen_ps -= before - first
        if risen_ps >= _MOST_PS:
            raise ProgramError(
                f"Durations were to be {risen_ps} ps longer than at first, all together; expected less than {_MOST_PS} "
                "ps, for ends must fit into 63 bits."
            )
        return risen_ps

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


def _whole(values: ArrayLike) -> Ids:
    """Numbers (k,), none of which is cut or wrapped."""
    given = np.array(values, ndmin=1)
    if given.size and given.dtype.kind != "i":
        raise ProgramError(f"Numbers of type {given.dtype} were given; expected whole ones that fit into 64 bits.")
    return given.astype(np.int64, copy=False)
