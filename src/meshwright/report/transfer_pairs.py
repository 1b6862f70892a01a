"""Which receive is the other end of which send in a timeline?

Payload, stages and microbatch say what belongs together, within a step; what occurs several times pairs up by start.
Where a schedule never flushes, microbatches are counted on from step to step, and a message may arrive in a later one:
what finds no partner in its step is paired without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Opcode, Timeline

Ids = NDArray[np.int64]

_RECEIVES = (Opcode.RECEIVE_ACTIVATION, Opcode.RECEIVE_GRADIENT)
_GRADIENTS = (Opcode.SEND_GRADIENT, Opcode.RECEIVE_GRADIENT)
_MOVES = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT, *_RECEIVES)


def pair_transfers(timeline: Timeline) -> Ids:
    """For each send the index of its receive and the reverse; -1 elsewhere. Shape (num_spans,)."""
    partner = np.full(timeline.num_spans, -1, np.int64)
    moves = np.flatnonzero(np.isin(timeline.opcode, _MOVES))
    _pair(timeline, moves, partner, by_step=True)
    left = moves[partner[moves] < 0]
    if len(left):
        _pair(timeline, left, partner, by_step=False)
    return partner


def _pair(timeline: Timeline, moves: Ids, partner: Ids, *, by_step: bool) -> None:
    """Pair some transfers, in place."""
    opcode, stage, peer = (column[moves] for column in (timeline.opcode, timeline.stage, timeline.peer))
    receives = np.isin(opcode, _RECEIVES)
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
    # Of those with equal keys the sends stand first: the k-th receive belongs to the k-th send.
    group = np.cumsum(np.append(False, ~same)[: len(order)])
    first = np.searchsorted(group, group)
    num_sends = np.bincount(group, ~receives[order]).astype(np.int64)[group] if len(order) else group
    place = np.arange(len(order)) - first
    send = first + place - num_sends
    paired = receives[order] & (place - num_sends < num_sends)
    ends = moves[order[paired]], moves[order[send[paired]]]
    partner[ends[0]], partner[ends[1]] = ends[1], ends[0]
