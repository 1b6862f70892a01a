"""Let the gradient reduction of one step overlap the next: every stage is updated just before its next forward.

In a synchronous program, all sums are awaited at the end of a step. ByteScheduler crosses that barrier: the next
forward of a layer waits for the parameters of that layer alone. Here each optimizer step moves before the first
forward of its stage in the next step, and has late waits for the sums of the step before. So the first step is a
prologue without updates, and an epilogue makes the last updates; one repetition of the body is one step, from update to
backward. Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP
2019), section 3.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.instructions import Opcode
from meshwright.spec.program import Program, Section

Ids = NDArray[np.int64]


def reach_across(program: Program) -> Program:
    """Return the program with its updates moved across the barrier between steps; unchanged if it has no updates."""
    body = program.body
    updates = np.flatnonzero(body.opcode == Opcode.OPTIMIZER_STEP)
    if not len(updates):
        return program
    stream = np.repeat(np.arange(len(program.streams)), np.diff(body.stream_offsets))
    place = np.arange(body.num_instructions, dtype=np.float64)
    place[updates] = _first_forwards(body, stream)[stream[updates], body.stage[updates]] - 0.5
    order = np.lexsort((place, stream))
    stays = body.opcode != Opcode.OPTIMIZER_STEP
    first = _select(body, np.flatnonzero(stays), stream)
    whole, last = _select(body, order, stream), _select(body, updates, stream)
    # Waits for sums become waits for those of the step before: for the prologue's in the first repetition.
    waiting = np.repeat(np.arange(body.num_instructions), np.diff(body.wait_offsets))
    late = np.flatnonzero(~stays[waiting])
    sums = _Late(waiting[late], body.waits[late], np.ones(len(late), np.int32))
    known = _Late(body.late_instruction, body.late_awaited, body.late_lag)
    both = _Late(
        np.concatenate([sums.waiting, known.waiting]),
        np.concatenate([sums.awaited, known.awaited]),
        np.concatenate([sums.lag, known.lag]),
    )
    return replace(
        program,
        prologue=first,
        body=_wait_late(whole, order, both, (np.flatnonzero(stays), order)),
        epilogue=_wait_late(last, updates, sums, (None, order)),
    )


class _Late(NamedTuple):
    """Waiting and awaited instructions, and the lag in repetitions: rows of the body, shape (n,)."""

    waiting: Ids
    awaited: Ids
    lag: NDArray[np.int32]


def _first_forwards(body: Section, stream: Ids) -> Ids:
    """Return the row of the first forward of each stage on each stream, shape (streams, stages)."""
    forwards = np.flatnonzero(body.opcode == Opcode.FORWARD)
    found = np.zeros((int(stream.max()) + 1, int(body.stage.max()) + 1), np.int64)
    found[stream[forwards[::-1]], body.stage[forwards[::-1]]] = forwards[::-1]
    return found


def _places(rows: Ids, count: int) -> Ids:
    """Return the index of each of ``count`` rows among the chosen ones, -1 for the others."""
    places = np.full(count, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return places


def _select(body: Section, rows: Ids, stream: Ids) -> Section:
    """Return a section of some rows, in their order, with their waits for each other, except those of updates."""
    count = body.num_instructions
    marks = np.flatnonzero(np.isin(body.mark_instruction, rows))
    places = np.concatenate([_places(rows, count), np.full(len(body.mark_instruction), -1)])
    places[count + marks] = len(rows) + np.arange(len(marks))
    waiting = np.repeat(np.arange(count), np.diff(body.wait_offsets))
    kept = np.flatnonzero(
        (places[waiting] >= 0) & (places[body.waits] >= 0) & (body.opcode[waiting] != Opcode.OPTIMIZER_STEP)
    )
    kept = kept[np.argsort(places[waiting[kept]], kind="stable")]
    counts = np.bincount(places[waiting[kept]], minlength=len(rows))
    columns = ("opcode", "stage", "microbatch", "version", "peer", "group", "num_bytes")
    return Section(
        stream_offsets=np.searchsorted(stream[rows], np.arange(len(body.stream_offsets))).astype(np.int64),
        **{name: getattr(body, name)[rows] for name in columns},
        wait_offsets=np.append(0, np.cumsum(counts)).astype(np.int64),
        waits=places[body.waits[kept]],
        mark_instruction=places[body.mark_instruction[marks]],
        mark_index=body.mark_index[marks],
    )


def _wait_late(section: Section, rows: Ids, late: _Late, earlier: tuple[Ids | None, Ids]) -> Section:
    """Return the section with late waits, in rows of the old body, for the sections of the ``earlier`` rows."""
    count = 1 + max(int(chosen.max(initial=0)) for chosen in (rows, *late[:2], *earlier) if chosen is not None)
    known = [(number, _places(chosen, count)) for number, chosen in enumerate(earlier) if chosen is not None]
    return replace(
        section,
        late_instruction=np.concatenate([_places(rows, count)[late.waiting] for _ in known]),
        late_section=np.concatenate([np.full(len(late.waiting), number, np.int8) for number, _ in known]),
        late_awaited=np.concatenate([places[late.awaited] for _, places in known]),
        late_lag=np.tile(late.lag, len(known)),
    )
