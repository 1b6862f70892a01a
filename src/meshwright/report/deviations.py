"""Seconds of ranks by kind of work: where a step differs from its prediction, and which ranks are slow.

seconds[r, k, s]   of rank r, kind k (opcode and stage) and step s: the sum of its spans
difference         mean over steps of measured less predicted; of the slowest rank, the kind that differs most
straggler          a rank whose work of an opcode takes SLOW times as long as that of the others, in each of the last
                   recorded steps; "as long" is in shares of the predicted seconds where there are some, else of the
                   others' that hold the same stages
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Opcode, Timeline
from meshwright.spec.instructions import COMPUTATIONS
from meshwright.spec.units import format_seconds

Floats = NDArray[np.float64]

# Ranks of one machine differ by a few percent from step to step; a quarter is not chance (docs/concepts/running.md).
SLOW = 1.25
# A single slow step may have any cause.
_LEAST_STEPS = 2


class SlowRank(NamedTuple):
    """A rank whose work of an opcode takes ``ratio`` times as long as the others', since a recorded step."""

    rank: int
    opcode: Opcode
    ratio: float
    since: int


def seconds_by_kind(timeline: Timeline, *, per_span: bool = False) -> dict[tuple[int, Opcode, int], Floats]:
    """By rank, opcode and stage: seconds of each step, or of a span in it."""
    num_steps = int(timeline.step.max(initial=0)) + 1
    rank = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track]
    keys = np.stack([rank, timeline.opcode.astype(np.int64), timeline.stage.astype(np.int64)])
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    seconds = np.zeros((kinds.shape[1], num_steps))
    places = which.reshape(-1), timeline.step
    np.add.at(seconds, places, (timeline.end_ps - timeline.start_ps) / 1e12)
    if per_span:
        counts = np.zeros_like(seconds)
        np.add.at(counts, places, 1.0)
        seconds /= np.maximum(counts, 1.0)
    return {
        (int(r), Opcode(int(opcode)), int(stage)): row for (r, opcode, stage), row in zip(kinds.T, seconds, strict=True)
    }


def explain_difference(predicted: Timeline, measured: Timeline) -> str:
    """The kind of work that differs most from its prediction, in the direction of the whole step.

    A computation, or a link if no computation differs that way.
    """
    ours, theirs = (
        {key: float(row.mean()) for key, row in seconds_by_kind(item).items()} for item in (predicted, measured)
    )
    gap = float(np.median(measured.step_seconds()) - np.median(predicted.step_seconds()))
    sign = 1.0 if gap >= 0 else -1.0
    differing = {key: sign * (theirs.get(key, 0.0) - ours.get(key, 0.0)) for key in {*ours, *theirs}}
    computing = {key: value for key, value in differing.items() if key[1] in COMPUTATIONS}
    by_rank: dict[int, float] = {}
    for key, value in computing.items():
        by_rank[key[0]] = by_rank.get(key[0], 0.0) + value
    slowest = max(by_rank, key=lambda rank: by_rank[rank], default=0)
    chosen = computing if by_rank and by_rank[slowest] > abs(gap) / 2 else differing
    own = {key: value for key, value in chosen.items() if chosen is differing or key[0] == slowest}
    if not own:
        return ""
    rank, opcode, stage = max(own, key=lambda key: own[key])
    before, after = ours.get((rank, opcode, stage), 0.0), theirs.get((rank, opcode, stage), 0.0)
    return (
        f"Most of it: {_words(opcode)} of stage {stage} on rank {rank}, {format_seconds(after)} per step instead of "
        f"{format_seconds(before)}."
    )


def find_stragglers(measured: Timeline, predicted: Timeline | None = None) -> list[SlowRank]:
    """Ranks that are slower than others at the same work, with the first recorded step of that; the slowest first."""
    # Replicas may compute different numbers of microbatches.
    seconds = seconds_by_kind(measured, per_span=True)
    wanted = _expected(seconds, predicted)
    work: dict[tuple[int, Opcode], list[Floats]] = {}
    for (rank, opcode, stage), row in seconds.items():
        if opcode in COMPUTATIONS and wanted.get((rank, opcode, stage), 0.0) > 0.0:
            work.setdefault((rank, opcode), []).append(np.stack([row, np.full(len(row), wanted[rank, opcode, stage])]))
    ratios = {key: (total := np.sum(rows, axis=0))[0] / total[1] for key, rows in work.items()}
    found = []
    for (rank, opcode), ratio in ratios.items():
        others = [other for (r, kind), other in ratios.items() if kind == opcode and r != rank]
        if not others:
            continue
        slower = ratio / np.median(others, axis=0)
        quick = np.flatnonzero(slower < SLOW)
        since = int(quick[-1]) + 1 if len(quick) else 0
        if len(slower) - since >= min(_LEAST_STEPS, len(slower)):
            found.append(SlowRank(rank, opcode, float(np.median(slower[since:])), since))
    return sorted(found, key=lambda item: -item.ratio)


def explain_stragglers(stragglers: list[SlowRank], first_step: int = 0) -> list[str]:
    """A sentence for each; recorded step 0 is step number ``first_step`` of the run."""
    return [
        f"Rank {item.rank} is slow: {_words(item.opcode)} takes {item.ratio:.2f} times as long as elsewhere, since "
        f"step {first_step + item.since + 1}."
        for item in stragglers
    ]


def _expected(
    seconds: Mapping[tuple[int, Opcode, int], Floats], predicted: Timeline | None
) -> dict[tuple[int, Opcode, int], float]:
    """Seconds per step that a kind of work is compared with: predicted, or the median of ranks with the same work."""
    if predicted is not None:
        return {key: float(row.mean()) for key, row in seconds_by_kind(predicted, per_span=True).items()}
    alike: dict[tuple[Opcode, int], list[float]] = {}
    for (_, opcode, stage), row in seconds.items():
        alike.setdefault((opcode, stage), []).append(float(np.median(row)))
    return {
        (rank, opcode, stage): float(np.median(alike[opcode, stage]))
        for rank, opcode, stage in seconds
        if len(alike[opcode, stage]) > 1
    }


def _words(opcode: Opcode) -> str:
    return opcode.name.lower().replace("_", " ")
