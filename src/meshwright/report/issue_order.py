"""Compare the order in which the runtime issued instructions with the predicted order, by stream and step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Timeline, instruction_name
from meshwright.spec.instructions import STREAM_NAMES, StreamName

IssueOrder = NDArray[np.int64]
_EMPTY: IssueOrder = np.zeros((0, 4), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Whether one stream issued the predicted instructions in order; ``difference`` describes the first deviation."""

    rank: int
    stream: StreamName
    same: bool
    difference: str = ""


def compare_orders(predicted: Timeline, measured: Timeline) -> tuple[StreamOrder, ...]:
    """Compare every stream that either timeline uses, in every measured step; sorted by rank and stream."""
    ours, theirs = issued_sequences(predicted), issued_sequences(measured)
    last = int(predicted.step.max(initial=0))
    num_steps = int(measured.step.max(initial=0)) + 1
    found = []
    for stream in sorted(ours.keys() | theirs.keys(), key=lambda key: (key[0], STREAM_NAMES.index(key[1]))):
        expected, seen = ours.get(stream, {}), theirs.get(stream, {})
        difference = ""
        for step in range(num_steps):
            difference = _first_difference(expected.get(min(step, last), _EMPTY), seen.get(step, _EMPTY))
            if difference:
                difference = f"rank {stream[0]} {stream[1]}, step {step}, {difference}"
                break
        found.append(StreamOrder(rank=stream[0], stream=stream[1], same=not difference, difference=difference))
    return tuple(found)


def issued_sequences(timeline: Timeline) -> dict[tuple[int, StreamName], dict[int, IssueOrder]]:
    """Return the instructions of each stream (rank, name) by step, in order of their start.

    The instructions of a step have shape (n, 4): opcode, stage, microbatch, peer. Instructions with equal starts keep
    the order of the timeline.
    """
    order = np.lexsort((timeline.start_ps, timeline.step, timeline.track))
    columns = (timeline.opcode, timeline.stage, timeline.microbatch, timeline.peer)
    rows = np.stack([column[order].astype(np.int64) for column in columns], axis=1)
    track, step = timeline.track[order], timeline.step[order]
    edges = np.flatnonzero((np.diff(track) != 0) | (np.diff(step) != 0)) + 1
    sequences: dict[tuple[int, StreamName], dict[int, IssueOrder]] = defaultdict(dict)
    if not len(order):
        return sequences
    for start, part in zip([0, *edges.tolist()], np.split(rows, edges), strict=True):
        stream = timeline.tracks[int(track[start])]
        sequences[stream.rank, stream.name][int(step[start])] = part
    return sequences


def _first_difference(expected: IssueOrder, seen: IssueOrder) -> str:
    shared = min(len(expected), len(seen))
    different = np.flatnonzero((expected[:shared] != seen[:shared]).any(axis=1))
    place = int(different[0]) if len(different) else shared
    if place == len(expected) == len(seen):
        return ""
    return f"instruction {place}: predicted {_name(expected, place)}, measured {_name(seen, place)}"


def _name(sequence: IssueOrder, place: int) -> str:
    if place >= len(sequence):
        return "nothing more"
    opcode, stage, microbatch, peer = sequence[place].tolist()
    return instruction_name(opcode, stage, microbatch, peer)
