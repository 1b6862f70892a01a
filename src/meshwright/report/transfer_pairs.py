"""Match the sends and receives of a timeline.

Payload, stages and microbatch identify a pair within a step; several equal ones are paired by start. Under an
asynchronous schedule microbatch numbers continue from step to step, and a message may arrive in a later step: a
transfer without a partner in its step is paired regardless of steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Opcode, Timeline
from meshwright.spec.instructions import RECEIVES, SENDS

Ids = NDArray[np.int64]

_GRADIENTS = (Opcode.SEND_GRADIENT, Opcode.RECEIVE_GRADIENT)
_MOVES = (*SENDS, *RECEIVES)


def pair_transfers(timeline: Timeline) -> Ids:
    """For each send the index of its receive and the reverse; -1 elsewhere. Shape (num_spans,)."""
    partner = np.full(timeline.num_spans, -1, np.int64)
    moves = np.flatnonzero(_choose(_MOVES)[timeline.opcode])
    if not _look_up(timeline, moves, partner):
        _pair(timeline, moves, partner, by_step=True)
    left = moves[partner[moves] < 0]
    if len(left):
        _pair(timeline, left, partner, by_step=False)
    return partner


def _choose(opcodes: tuple[Opcode, ...]) -> NDArray[np.bool_]:
    """Which opcodes are among some, by opcode."""
    return np.isin(list(Opcode), opcodes)


def _look_up(timeline: Timeline, moves: Ids, partner: Ids) -> bool:
    """Pair distinct transfers in place by a table of all possible keys.

    Returns False if the table would be too large or keys repeat. Sorting takes ten times as long. Steps and
    microbatches count up from 0, and few stages send to each other.
    """
    opcode, stage, peer = (column[moves] for column in (timeline.opcode, timeline.stage, timeline.peer))
    receives = _choose(RECEIVES)[opcode]
    num_stages = 1 + int(max(stage.max(initial=0), peer.max(initial=0)))
    num_steps, num_microbatches = (
        1 + int(column[moves].max(initial=0)) for column in (timeline.step, timeline.microbatch)
    )
    lowest = min(int(column[moves].min(initial=0)) for column in (timeline.stage, timeline.peer, timeline.microbatch))
    if lowest < 0 or 2 * num_stages**2 > len(moves):
        return False
    route = (np.where(receives, peer, stage) * num_stages + np.where(receives, stage, peer)) * 2 + _choose(_GRADIENTS)[
        opcode
    ]
    used = np.flatnonzero(np.bincount(route, minlength=2 * num_stages**2))
    size = len(used) * num_steps * num_microbatches
    if size > 4 * len(moves):
        return False
    number = np.zeros(2 * num_stages**2, np.int64)
    number[used] = np.arange(len(used))
    place = (number[route] * num_steps + timeline.step[moves]) * num_microbatches + timeline.microbatch[moves]
    table = np.full((2, size), -1, np.int64)
    for way, chosen in enumerate((~receives, receives)):
        table[way, place[chosen]] = moves[chosen]
    if not np.array_equal(table[receives.astype(np.int8), place], moves):
        return False
    partner[moves] = table[1 - receives, place]
    return True


def _pair(timeline: Timeline, moves: Ids, partner: Ids, *, by_step: bool) -> None:
    """Pair some transfers, in place."""
    opcode, stage, peer = (column[moves] for column in (timeline.opcode, timeline.stage, timeline.peer))
    receives = np.isin(opcode, RECEIVES)
    keys = (
        timeline.step[moves] * np.int32(by_step),
        timeline.microbatch[moves],
        np.where(receives, stage, peer),
        np.where(receives, peer, stage),
        np.isin(opcode, _GRADIENTS),
    )
    order = np.lexsort((timeline.start_ps[moves], receives, *keys))
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for key in keys:
        same &= np.diff(key[order].astype(np.int64)) == 0
    # Among equal keys the sends come first: the k-th receive belongs to the k-th send.
    group = np.cumsum(np.append(False, ~same)[: len(order)])
    first = np.searchsorted(group, group)
    num_sends = np.bincount(group, ~receives[order]).astype(np.int64)[group] if len(order) else group
    place = np.arange(len(order)) - first
    send = first + place - num_sends
    paired = receives[order] & (place - num_sends < num_sends)
    ends = moves[order[paired]], moves[order[send[paired]]]
    partner[ends[0]], partner[ends[1]] = ends[1], ends[0]
