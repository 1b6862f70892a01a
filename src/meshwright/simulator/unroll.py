"""Unroll a Program: prologue, ``num_steps`` bodies and epilogue become one set of streams for the engine.

Streams continue from one section into the next, so a fast stream may already work on step k + 1 while a slow one is
in step k. Instruction i of stream s in repetition k gets the id ``G[s] + (instructions of s before repetition k) +
(i - offset of s)``, where G counts the instructions of the streams before s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.endless import join_repetitions
from meshwright.simulator.links import find_shared_links
from meshwright.simulator.matching import Matches, match_section, stream_of_instructions
from meshwright.simulator.network import Network, find_alone
from meshwright.simulator.prices import Prices, SectionPrices
from meshwright.spec import Program, Section

Ids = NDArray[np.int64]
Column = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unrolled:
    """A network for the engine and, per instruction of it, where it comes from.

    ``stream`` (n,); ``step`` (n,) numbers the repetitions of the body (the prologue counts to the first, the
    epilogue to the last); ``source`` (n,) is its row in the columns of prologue, body and epilogue, one behind the
    other; ``send_of`` (n,) is the send that a receive waits for, else -1.
    """

    network: Network
    num_links: int
    stream: Column
    step: Column
    source: Ids
    cost_class: Column
    send_of: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One section with all that is needed to copy it; shared by the repetitions of the body."""

    section: Section
    costs: SectionPrices
    matches: Matches
    streams: NDArray[np.int32]
    wait_offsets: Ids
    waits: Ids


def unroll(program: Program, prices: Prices, num_steps: int) -> Unrolled:
    """Lay the sections of a program behind each other, with the body ``num_steps`` times."""
    if program.advance:
        flat, flat_prices, joined = join_repetitions(program, prices, num_steps)
        return replace(unroll(flat, flat_prices, 1), step=joined.step, source=joined.source)
    made = [_make_part(program, section, getattr(prices, name)) for name, section in program.sections()]
    which = [0, *[1] * num_steps, 2]
    parts = [made[index] for index in which]
    lengths = np.array([np.diff(part.section.stream_offsets) for part in parts])
    stream_offsets = np.concatenate([[0], np.cumsum(lengths.sum(axis=0))])
    begins = stream_offsets[:-1] + np.cumsum(lengths, axis=0) - lengths
    ids = [_new_ids(part, begin) for part, begin in zip(parts, begins, strict=True)]
    order = np.concatenate(ids)
    counts = [part.section.num_instructions for part in made]
    first = np.cumsum([0, *counts])
    source = np.empty(len(order), np.int64)
    source[order] = np.concatenate([np.arange(first[k], first[k + 1]) for k in which])
    steps = np.array([0, *range(num_steps), num_steps - 1], np.int32)
    send_of = np.full(len(order), -1, np.int64)
    for part, new in zip(parts, ids, strict=True):
        send_of[new[part.matches.receives]] = new[part.matches.sends]
    cost_class = _scatter(order, [part.costs.cost_class for part in parts])
    return Unrolled(
        network=_assemble(prices, parts, ids, stream_offsets, prices.duration_ps[cost_class].astype(np.int64)),
        num_links=prices.num_links,
        stream=np.repeat(np.arange(len(stream_offsets) - 1, dtype=np.int32), np.diff(stream_offsets)),
        step=_scatter(order, [np.repeat(steps, [counts[k] for k in which])]),
        source=source,
        cost_class=cost_class,
        send_of=send_of,
    )


def _make_part(program: Program, section: Section, costs: SectionPrices) -> _Part:
    matches = match_section(program, section)
    wait_offsets, waits = _with_sends_awaited(section, matches)
    streams = stream_of_instructions(section)
    return _Part(section=section, costs=costs, matches=matches, streams=streams, wait_offsets=wait_offsets, waits=waits)


def _with_sends_awaited(section: Section, matches: Matches) -> tuple[Ids, Ids]:
    """The waits of a section, with each receive's send added where the program does not name it."""
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


def _new_ids(part: _Part, begin: Ids) -> Ids:
    shift = begin - part.section.stream_offsets[:-1]
    return np.arange(part.section.num_instructions) + shift[part.streams]


def _assemble(prices: Prices, parts: list[_Part], ids: list[Ids], stream_offsets: Ids, duration_ps: Ids) -> Network:
    order = np.concatenate(ids)
    wait_offsets, waits, wait_shift_ps = _place_waits(parts, ids, duration_ps)
    route = _scatter(order, [part.costs.route for part in parts])
    collective = _scatter(order, _number_collectives(parts))
    sizes = np.concatenate([part.matches.sizes for part in parts])
    links = prices.route_offsets.astype(np.int64), prices.route_links.astype(np.int32)
    shared = find_shared_links(stream_offsets, route, collective, *links, prices.num_links, len(sizes))
    route_shared = _any_per_route(shared[links[1]], links[0])
    return Network(
        stream_offsets=stream_offsets,
        duration_ps=duration_ps,
        wait_offsets=wait_offsets.astype(np.int32),
        waits=waits,
        wait_shift_ps=wait_shift_ps,
        awaited=np.where(wait_shift_ps < 0, ~waits, waits).astype(np.int32),
        route=route,
        route_offsets=links[0],
        route_links=links[1],
        route_shared=route_shared,
        collective=collective,
        collective_size=sizes,
        collective_owner=np.concatenate([part.matches.owners for part in parts]),
        alone=find_alone(route, route_shared, collective),
    )


def _scatter(order: Ids, columns: list[Column]) -> Column:
    """The int32 column whose rows ``order`` are those of ``columns``, one behind the other."""
    out = np.empty(len(order), np.int32)
    out[order] = np.concatenate(columns)
    return out


def _place_waits(parts: list[_Part], ids: list[Ids], duration_ps: Ids) -> tuple[Ids, Ids, Ids]:
    """Offsets, awaited instructions and, for marks, how long before their end (negative)."""
    offsets = np.zeros(len(duration_ps) + 1, np.int64)
    for part, new in zip(parts, ids, strict=True):
        offsets[new + 1] = np.diff(part.wait_offsets)
    np.cumsum(offsets, out=offsets)
    waits, shift_ps = np.empty(int(offsets[-1]), np.int64), np.empty(int(offsets[-1]), np.int64)
    for part, new in zip(parts, ids, strict=True):
        marked = new[part.section.mark_instruction]
        place = np.repeat(offsets[new] - part.wait_offsets[:-1], np.diff(part.wait_offsets))
        place += np.arange(len(part.waits))
        waits[place] = np.concatenate([new, marked])[part.waits]
        mark_shift = part.costs.mark_offset_ps - duration_ps[marked]
        shift_ps[place] = np.concatenate([np.zeros(len(new), np.int64), mark_shift])[part.waits]
    return offsets, waits, shift_ps


def _number_collectives(parts: list[_Part]) -> list[Column]:
    numbered: list[Column] = []
    first = 0
    for part in parts:
        collective = part.matches.collective
        numbered.append(np.where(collective >= 0, collective + np.int32(first), np.int32(-1)))
        first += len(part.matches.sizes)
    return numbered


def _any_per_route(shared: NDArray[np.bool_], route_offsets: Ids) -> NDArray[np.bool_]:
    totals = np.concatenate([[0], np.cumsum(shared)])
    return totals[route_offsets[1:]] > totals[route_offsets[:-1]]
