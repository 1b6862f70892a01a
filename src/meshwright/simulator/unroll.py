"""Unroll a Program (`unroll`): prologue, ``num_steps`` bodies and epilogue become one set of streams for the engine.

`SectionLayout` records where instructions come from. Streams continue from one section into the next, so a fast stream
may already work on step k + 1 while a slow stream is in step k. Instruction i of stream s in repetition k gets the id
``G[s] + (instructions of s before repetition k) + (i - offset of s)``, where G counts the instructions of the streams
before s.

If the steps of a program overlap, all repetitions become one section. A message may be sent in one repetition of the
body and arrive in another; its microbatch number, which increases from repetition to repetition, identifies its
receive. A late wait is for an instruction of an earlier repetition. So the sends and receives of all repetitions are
matched together. If repetitions interact only through the order of streams, each section is matched by itself.

Only requests for shared links must be handled in order of time; streams compute everything else independently. A link
is **private** if one stream takes part in every request for it. Its requests then form a chain: the next request is not
made before the last one has ended. One pass over the instructions finds private links. Examples are a link between two
ranks on which only one stream sends, and the links of a group that no other stream uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.program import Repeated, repeat_body
from meshwright.simulator.message_matching import Matches, match_section, stream_of_instructions, streams_of
from meshwright.simulator.network import Network
from meshwright.simulator.program_costs import IssueCosts, ProgramCosts, SectionCosts
from meshwright.spec import Program, ProgramError, Section, empty_section

Ids = NDArray[np.int64]
Column = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPart:
    """One section with its costs, matches and waits (CSR form); all repetitions of the body share one object.

    In ``waits``, every receive also waits for its send.
    """

    section: Section
    costs: SectionCosts
    matches: Matches
    wait_offsets: Ids
    waits: Ids


# The origin of instructions is computed when a report needs it; there are no slots, because derived columns are cached
# on the object. Part p (prologue, a repetition of the body, or epilogue) of stream s begins at id ``begins[p, s]``, so
# instruction i of a section gets the id ``begins[p, s] + i - stream_offsets[s]``.
@dataclass(frozen=True, kw_only=True, eq=False)
class SectionLayout:
    """Where the instructions of an unrolled program come from.

    ``made`` are prologue, body and epilogue. Part p of the unrolled program is ``made[which[p]]``; its instructions of
    stream s begin at id ``begins[p, s]``. ``stream_offsets`` (streams + 1,) are those of the network. ``joined`` is set
    for programs whose steps overlap: their repetitions are already one section.
    """

    made: tuple[SectionPart, SectionPart, SectionPart]
    which: tuple[int, ...]
    begins: Ids
    stream_offsets: Ids
    joined: Repeated | None = None

    @cached_property
    def only(self) -> SectionPart | None:
        """The only part with instructions, whose instructions keep their ids; None if several parts have some."""
        filled = [part for part in self.parts if part.section.num_instructions]
        return filled[0] if len(filled) == 1 else None

    @property
    def parts(self) -> list[SectionPart]:
        """All parts of the unrolled program, in order; repetitions of the body are the same object."""
        return [self.made[k] for k in self.which]

    def shifts(self, p: int) -> Ids:
        """Return, by stream, new id minus id in the section, for the instructions of part p."""
        shifts: Ids = self.begins[p] - self.made[self.which[p]].section.stream_offsets[:-1]
        return shifts

    def new_ids(self, p: int) -> Ids:
        """Return the ids in the unrolled program of the instructions of part p, in the order of its section."""
        section = self.made[self.which[p]].section
        ids: Ids = np.arange(section.num_instructions)
        return ids if self.only is not None else ids + np.repeat(self.shifts(p), np.diff(section.stream_offsets))

    @cached_property
    def stream(self) -> Column:
        """The index of each instruction's stream, shape (n,)."""
        counts = np.diff(self.stream_offsets)
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @cached_property
    def step(self) -> Column:
        """The repetition of the body of each instruction, from 0, shape (n,).

        The prologue has the number of the first repetition, the epilogue that of the last.
        """
        if self.joined is not None:
            return self.joined.step
        num_steps = len(self.which) - 2
        if num_steps == 1:
            return np.zeros(int(self.stream_offsets[-1]), np.int32)
        step = np.empty(int(self.stream_offsets[-1]), np.int32)
        for p, number in enumerate((0, *range(num_steps), num_steps - 1)):
            step[self.new_ids(p)] = number
        return step

    @cached_property
    def source(self) -> Ids:
        """The row of each instruction in the concatenated columns of prologue, body and epilogue, shape (n,)."""
        if self.joined is not None:
            return self.joined.source
        first = np.cumsum([0, *(part.section.num_instructions for part in self.made)])
        source = np.empty(int(self.stream_offsets[-1]), np.int64)
        for p, k in enumerate(self.which):
            source[self.new_ids(p)] = np.arange(first[k], first[k + 1])
        return source

    @cached_property
    def transfers(self) -> tuple[Ids, Ids]:
        """The ids of all receives, and the ids of their sends, in the same order."""
        if self.only is not None:
            return self.only.matches.receives, self.only.matches.sends
        new = [(self.new_ids(p), self.made[k].matches) for p, k in enumerate(self.which)]
        receives = np.concatenate([ids[matches.receives] for ids, matches in new])
        return receives, np.concatenate([ids[matches.sends] for ids, matches in new])

    @cached_property
    def send_of(self) -> Ids:
        """The id of the send that each receive waits for, -1 for other instructions; shape (n,)."""
        send_of = np.full(int(self.stream_offsets[-1]), -1, np.int64)
        receives, sends = self.transfers
        send_of[receives] = sends
        return send_of


_MOST = np.iinfo(np.int32).max
_NOTHING_ISSUED = IssueCosts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unrolled:
    """An unrolled program: a network for the engine, and where its instructions come from (`SectionLayout`)."""

    network: Network
    num_links: int
    cost_class: Column
    layout: SectionLayout

    @property
    def stream(self) -> Column:
        """The index of each instruction's stream, shape (n,)."""
        return self.layout.stream

    @property
    def step(self) -> Column:
        """The repetition of the body of each instruction, shape (n,), as in `SectionLayout.step`."""
        return self.layout.step

    @property
    def source(self) -> Ids:
        """The row of each instruction in the concatenated columns of prologue, body and epilogue, shape (n,)."""
        return self.layout.source

    @property
    def send_of(self) -> Ids:
        """The id of the send that each receive waits for, -1 for other instructions; shape (n,)."""
        return self.layout.send_of


def unroll(program: Program, costs: ProgramCosts, num_steps: int) -> Unrolled:
    """Return a program as one network: prologue, ``num_steps`` times the body, epilogue.

    Raises ProgramError if a transfer or collective lacks a counterpart, or if there are more instructions or waits than
    32 bits can number.
    """
    if program.crosses_steps:
        flat, flat_costs, joined = join_repetitions(program, costs, num_steps)
        unrolled = unroll(flat, flat_costs, 1)
        return replace(unrolled, layout=replace(unrolled.layout, joined=joined))
    prologue, body, epilogue = (_make_part(program, item, getattr(costs, name)) for name, item in program.sections())
    made = prologue, body, epilogue
    which = 0, *[1] * num_steps, 2
    lengths = np.array([np.diff(made[k].section.stream_offsets) for k in which])
    stream_offsets = np.concatenate([[0], np.cumsum(lengths.sum(axis=0))])
    begins = stream_offsets[:-1] + np.cumsum(lengths, axis=0) - lengths
    layout = SectionLayout(made=made, which=which, begins=begins, stream_offsets=stream_offsets)
    network = _assemble(costs, layout)
    return Unrolled(network=network, num_links=costs.num_links, cost_class=network.cost_class, layout=layout)


def _make_part(program: Program, section: Section, costs: SectionCosts) -> SectionPart:
    matches = match_section(program, section)
    wait_offsets, waits = _with_sends_awaited(section, matches)
    return SectionPart(section=section, costs=costs, matches=matches, wait_offsets=wait_offsets, waits=waits)


def _with_sends_awaited(section: Section, matches: Matches) -> tuple[Ids, Ids]:
    """Return the waits of a section, with each receive's send added if the program does not name it."""
    if matches.are_named:
        return section.wait_offsets, section.waits
    waiter = np.repeat(np.arange(section.num_instructions), np.diff(section.wait_offsets))
    send_of = np.full(section.num_instructions, -1, np.int64)
    send_of[matches.receives] = matches.sends
    named = np.zeros(section.num_instructions, np.bool_)
    named[waiter[section.waits == send_of[waiter]]] = True
    missing = np.sort(matches.receives[~named[matches.receives]])
    waits = np.insert(section.waits, section.wait_offsets[missing + 1], send_of[missing])
    added = np.zeros(section.num_instructions + 1, np.int64)
    added[missing + 1] = 1
    return section.wait_offsets + np.cumsum(added), waits


def _assemble(costs: ProgramCosts, layout: SectionLayout) -> Network:
    parts = layout.parts
    _check_size(layout)
    collective_route = np.concatenate([routes_of_collectives(part) for part in parts])
    links = costs.route_offsets.astype(np.int64), costs.route_links.astype(np.int32)
    cost_class, resource, wait_offsets, waits = _place_parts(layout, len(costs.route_offsets) - 1)
    shared = find_shared_links(layout.stream_offsets, resource, collective_route, *links, costs.num_links)
    number, num_private, route_offsets, route_links = _put_private_first(shared, *links)
    _renumber(number, resource)
    _renumber(number, collective_route)
    mark_instruction, mark_shift_ps = _place_marks(layout, costs.duration_ps)
    join_instruction, join_need = _place_joins(layout)
    issue, mark_earliest_ps = costs.issue or _NOTHING_ISSUED, _NOTHING_ISSUED.earliest_ps
    if costs.issue is not None:
        moments = [part.costs.mark_earliest_ps for part in parts]
        mark_earliest_ps = np.concatenate([each for each in moments if each is not None])
    return Network(
        stream_offsets=layout.stream_offsets,
        cost_class=cost_class,
        class_ps=costs.duration_ps.astype(np.int64),
        wait_offsets=wait_offsets,
        waits=waits,
        mark_instruction=mark_instruction,
        mark_shift_ps=mark_shift_ps,
        resource=resource,
        num_private=num_private,
        route_offsets=route_offsets,
        route_links=route_links,
        collective_route=collective_route,
        collective_size=np.concatenate([part.matches.sizes for part in parts]),
        collective_owner=np.concatenate([part.matches.owners for part in parts]),
        join_instruction=join_instruction,
        join_need=join_need,
        issue_ps=issue.host_ps,
        earliest_ps=issue.earliest_ps,
        is_awaited=issue.is_awaited,
        mark_earliest_ps=mark_earliest_ps,
    )


def _check_size(layout: SectionLayout) -> None:
    num_instructions, num_waits = int(layout.stream_offsets[-1]), sum(len(part.waits) for part in layout.parts)
    if max(num_instructions, num_waits) >= _MOST:
        raise ProgramError(
            f"{num_instructions} instructions with {num_waits} waits cannot be simulated; expected at most {_MOST - 1} "
            "of each. Simulate fewer steps."
        )


def _place_parts(layout: SectionLayout, num_routes: int) -> tuple[Column, Column, Column, Column]:
    """Return the columns cost class, resource (with the routes of the costs), offsets of waits, and waits."""
    if layout.only is not None:
        return _take_columns(layout.only, num_routes)
    parts, num_instructions = layout.parts, int(layout.stream_offsets[-1])
    cost_class, resource = np.empty(num_instructions, np.int32), np.empty(num_instructions, np.int32)
    offsets, waits = np.zeros(num_instructions + 1, np.int32), np.empty(sum(len(p.waits) for p in parts), np.int32)
    number, marks = num_routes, 0
    for p, part in enumerate(parts):
        place = (part.section.stream_offsets, layout.shifts(p))
        _place_columns(
            place, (part.costs.cost_class, part.costs.route, part.wait_offsets), (cost_class, resource, offsets)
        )
        members = part.matches.members
        resource[members + layout.shifts(p)[streams_of(part.section, members)]] = number + part.matches.numbers
        number += len(part.matches.sizes)
    np.cumsum(offsets, out=offsets)
    for p, part in enumerate(parts):
        streams = stream_of_instructions(part.section)
        _place_waits((layout.shifts(p), streams, marks), (part.wait_offsets, part.waits), (offsets, waits))
        marks += len(part.section.mark_instruction)
    return cost_class, resource, offsets, waits


def _take_columns(part: SectionPart, num_routes: int) -> tuple[Column, Column, Column, Column]:
    """Return the columns of the only part, whose ids stay."""
    resource = part.costs.route.astype(np.int32)
    resource[part.matches.members] = num_routes + part.matches.numbers
    waits = part.waits.astype(np.int32)
    np.subtract(part.section.num_instructions - 1, waits, out=waits, where=waits >= part.section.num_instructions)
    return part.costs.cost_class.astype(np.int32, copy=False), resource, part.wait_offsets.astype(np.int32), waits


@compiled
def _place_columns(
    place: tuple[Ids, Ids], given: tuple[Column, Column, Ids], made: tuple[Column, Column, Column]
) -> None:
    """Copy the columns of a part; ``made[2]`` gets the number of waits of each instruction, shifted by one."""
    stream_offsets, shifts = place
    given_class, route, given_offsets = given
    cost_class, resource, counts = made
    for stream in range(len(shifts)):
        for i in range(stream_offsets[stream], stream_offsets[stream + 1]):
            k = i + shifts[stream]
            cost_class[k], resource[k] = given_class[i], route[i]
            counts[k + 1] = given_offsets[i + 1] - given_offsets[i]


@compiled
def _place_waits(place: tuple[Ids, Column, int], given: tuple[Ids, Ids], made: tuple[Column, Column]) -> None:
    """Copy the waits of a part, renumbered to the new ids of instructions and marks."""
    shift, streams, first = place
    given_offsets, given_waits = given
    offsets, waits = made
    count = len(streams)
    for i in range(count):
        q = offsets[i + shift[streams[i]]]
        for w in range(given_offsets[i], given_offsets[i + 1]):
            k = given_waits[w]
            waits[q] = k + shift[streams[k]] if k < count else ~(first + k - count)
            q += 1


def _place_marks(layout: SectionLayout, class_ps: Ids) -> tuple[Column, Ids]:
    """Return the instruction that raises each mark, and the mark's time after its end (0 or less), in ps."""
    instructions, shifts_ps = [], []
    for p, part in enumerate(layout.parts):
        raising = part.section.mark_instruction
        instructions.append((raising + layout.shifts(p)[streams_of(part.section, raising)]).astype(np.int32))
        shifts_ps.append(part.costs.mark_offset_ps - class_ps[part.costs.cost_class[raising]])
    return np.concatenate(instructions), np.concatenate(shifts_ps)


def _place_joins(layout: SectionLayout) -> tuple[Column, Column]:
    """Return the joins in the order of the network, and the number of waits that each needs."""
    ids = []
    for p, part in enumerate(layout.parts):
        joins = part.section.join_instruction
        ids.append((joins + layout.shifts(p)[streams_of(part.section, joins)]).astype(np.int32))
    need = np.concatenate([part.section.join_need for part in layout.parts]).astype(np.int32)
    order = np.argsort(np.concatenate(ids))
    return np.concatenate(ids)[order], need[order]


def routes_of_collectives(part: SectionPart) -> Column:
    """Return the route of each collective of a section: that of its member with the lowest id."""
    route = np.empty(len(part.matches.sizes), np.int32)
    route[part.matches.numbers[::-1]] = part.costs.route[part.matches.members[::-1]]
    return route


def _put_private_first(shared: NDArray[np.bool_], offsets: Ids, links: Column) -> tuple[Column, int, Ids, Column]:
    """Renumber routes, those without a shared link first. Return new numbers, their count, and links by new number."""
    totals = np.concatenate([[0], np.cumsum(shared[links])])
    is_shared = totals[offsets[1:]] > totals[offsets[:-1]]
    order = np.argsort(is_shared, kind="stable")
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order))
    new_offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[order])])
    route_of_link = np.repeat(number, np.diff(offsets))
    return number, int((~is_shared).sum()), new_offsets, links[np.argsort(route_of_link, kind="stable")]


@compiled
def _renumber(number: Column, resource: Column) -> None:
    """Replace route numbers by new ones, in place; other values stay."""
    for i in range(len(resource)):
        if 0 <= resource[i] < len(number):
            resource[i] = number[resource[i]]


def join_repetitions(program: Program, costs: ProgramCosts, num_steps: int) -> tuple[Program, ProgramCosts, Repeated]:
    """Return a program whose body has all repetitions, its costs, and where the rows of the body come from."""
    joined = repeat_body(program, num_steps)
    parts = [getattr(costs, name) for name, _ in program.sections()]
    earliest = [part.mark_earliest_ps for part in parts if part.mark_earliest_ps is not None]
    body = SectionCosts(
        cost_class=np.concatenate([part.cost_class for part in parts])[joined.source],
        route=np.concatenate([part.route for part in parts])[joined.source],
        mark_offset_ps=np.concatenate([part.mark_offset_ps for part in parts])[joined.mark_source],
        mark_earliest_ps=np.concatenate(earliest)[joined.mark_source] if earliest else None,
    )
    none, nothing = empty_section(len(program.streams)), np.zeros(0, np.int32)
    empty = SectionCosts(
        cost_class=nothing,
        route=nothing,
        mark_offset_ps=nothing.astype(np.int64),
        mark_earliest_ps=nothing.astype(np.int64) if earliest else None,
    )
    flat = replace(program, prologue=none, body=joined.section, epilogue=none, advance=0)
    return flat, replace(costs, prologue=empty, body=body, epilogue=empty), joined


@compiled
def find_shared_links(
    stream_offsets: NDArray[np.int64],
    resource: NDArray[np.int32],
    collective_route: NDArray[np.int32],
    route_offsets: NDArray[np.int64],
    route_links: NDArray[np.int32],
    num_links: int,
) -> NDArray[np.bool_]:
    """Return whether each link is shared by several streams, shape (num_links,); ``resource`` is as in `Network`.

    Only requests for shared links must be handled in order of time.
    """
    num_routes = len(route_offsets) - 1
    requests, most = np.zeros(num_links, np.int64), np.zeros(num_links, np.int64)
    mine, counted_for = np.zeros(num_links, np.int64), np.full(num_links, -1, np.int64)
    # All requests of a stream for one route are equal, so it suffices to count one of them.
    asked = np.full(num_routes, -1, np.int64)
    counted = np.zeros(len(collective_route), np.bool_)
    for stream in range(len(stream_offsets) - 1):
        for i in range(stream_offsets[stream], stream_offsets[stream + 1]):
            route, new = np.int64(resource[i]), True
            if route < 0:
                continue
            if route >= num_routes:
                c = route - num_routes
                route, new = np.int64(collective_route[c]), not counted[c]
                counted[c] = True
                if route < 0:
                    continue
            elif asked[route] == stream:
                continue
            else:
                asked[route] = stream
            for q in range(route_offsets[route], route_offsets[route + 1]):
                link = route_links[q]
                if counted_for[link] != stream:
                    counted_for[link], mine[link] = stream, 0
                mine[link] += 1
                most[link] = max(most[link], mine[link])
                requests[link] += new
    return most < requests
