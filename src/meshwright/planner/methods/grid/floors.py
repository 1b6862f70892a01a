"""A sharper lower bound of a uniform configuration's memory, for configurations about to be simulated.

It adds to the bound of `cover` what a backward needs at its start: the needs of the last layer of a position's last
stage, found by a walk through this layer alone. With f of n microbatches in flight, a rank needs at least

    static + f · kept + first(last layer)                 when the first backward of a step starts
    static + g · kept + gradients + later(last layer)     when a later one does; g is f, or n - 1 if f = n

If a rank has several chunks, each has its own f and g, and the later backward is the first that starts after every
chunk has made its gradients. ZeRO 3 adds the parameters gathered then. If activations are in host memory between
passes, only those of a stage's last layer stay. With ZeRO 2 and 3, gradients are not added to wider ones, for which a
later backward would need a copy: the needs of the first one are used instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.methods.grid.cover import (
    FLIGHTS,
    IN_TURN,
    SPLIT,
    Form,
    forwards_ahead,
    forwards_of,
    in_flight,
    microbatches_in_turn,
    parameters_of_rank,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.planner.methods.grid.figures import Figures
    from meshwright.planner.methods.grid.sheet import Configuration


def floor_bytes(figures: Figures, wanted: Configuration) -> float:
    """Return the least bytes of the fullest rank; 0 if not modelled: inference, split backwards."""
    flight = FLIGHTS[wanted.schedule]
    if figures.workload.kind != "training" or flight == SPLIT:
        return 0.0
    size, recompute = wanted.microbatch_size, wanted.recompute
    positions, chunks = wanted.positions, wanted.chunks
    weights, keeps = figures.bytes(recompute), figures.keeps_on_device
    replicas = wanted.num_ranks // positions
    shared = min(wanted.shard_size, replicas) if wanted.shard_size else replicas
    rounds = -(-(figures.workload.global_batch // size) // replicas)
    form = Form(positions, replicas, shared, chunks, flight, wanted.zero, rounds, True, 0)
    kept = weights.kept_fixed + size * weights.kept_per_sample
    is_cut, is_gathered = wanted.zero >= 2 and shared > 1, wanted.zero >= 3 and shared > 1
    fullest = 0.0
    for position in range(positions):
        mine = [wanted.bounds[chunk * positions + position] for chunk in range(chunks)]
        parameters, states = (
            sum(float(column[start:stop].sum()) for start, stop in mine)
            for column in (weights.parameters, weights.states)
        )
        static = figures.library_bytes + parameters_of_rank(parameters, wanted.zero, shared, figures.has_masters)
        static += states / (shared if wanted.zero else 1)
        counts = [in_flight(form, position, chunk) for chunk in range(chunks)]
        ends = [figures.moments.of_layer(stop - 1, size, recompute) for _, stop in mine]
        of_one = [
            float(kept[start:stop].sum()) if keeps else end.kept for (start, stop), end in zip(mine, ends, strict=True)
        ]
        held = _add_up(counts, of_one)
        gathered = [_gathered_bytes(figures, recompute, mine, chunk) if is_gathered else 0.0 for chunk in range(chunks)]
        fullest = max(fullest, static + gathered[-1] + held + ends[-1].first)
        if rounds > 1:
            made = sum(float(weights.gradients[start:stop].sum()) for start, stop in mine) / (shared if is_cut else 1)
            chunk, left = _left_later(form, position, counts)
            last = ends[chunk]
            begun = last.first if is_cut else last.later
            fullest = max(fullest, static + gathered[chunk] + _add_up(left, of_one) + made + begun)
    return fullest


def _left_later(form: Form, position: int, counts: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return the chunk of the first backward with all gradients made, and the microbatches in flight of each chunk.

    ``counts`` are those in flight when the first backward of a step starts.
    """
    rounds, chunks = form.rounds, form.chunks
    if chunks == 1:
        return 0, [counts[0] - (counts[0] == rounds)]
    size = microbatches_in_turn(form)
    if form.flight != IN_TURN or rounds == size:
        # The first chunk's second backward; the other chunks have freed what they kept.
        return 0, [rounds - 1, *[0] * (chunks - 1)]
    # The first backward of the second turn.
    forwards = min(forwards_ahead(form, position) + size * chunks, rounds * chunks)
    return chunks - 1, [forwards_of(form, chunk, forwards) - size for chunk in range(chunks)]


def _gathered_bytes(figures: Figures, recompute: str, mine: Sequence[tuple[int, int]], chunk: int) -> float:
    """Return the bytes of parameters that ZeRO 3 has gathered at the start of a chunk's backward.

    The layers of the root are always gathered (`cost.memory.shared_units`). Of the others, the last one is gathered; so
    is the one before it if the chunk's last layer is outside the root.
    """
    parameters, in_root = figures.bytes(recompute).parameters, figures.is_in_root
    root = sum(float(parameters[start:stop][in_root[start:stop]].sum()) for start, stop in mine) - figures.tied_bytes
    start, stop = mine[chunk]
    units = np.flatnonzero(~in_root[start:stop])[-1 - (not in_root[stop - 1]) :] + start
    return max(root, 0.0) + float(parameters[units].sum())


def _add_up(counts: Sequence[int], each: Sequence[float]) -> float:
    return sum(count * value for count, value in zip(counts, each, strict=True))
