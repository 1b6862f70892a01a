"""A sharper lower bound of a uniform configuration's memory, for those that are about to be simulated.

To what `cover` counts comes what a backward needs that begins: that of the last layer of a position's last stage, found
by a walk through this layer alone. With f of n microbatches in flight, a rank needs at least

    static + f · kept + first(last layer)                 when the first backward of a step begins
    static + g · kept + gradients + later(last layer)     when a later one does (GPipe, 1F1B); g is f, or n - 1 if f = n

Of activations that are on the hosts in between, those of a stage's last layer stay. With ZeRO 2 and 3 gradients are not
added to wider ones, for which a later backward would need a copy: the first one's needs stand for its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.planner.methods.grid.cover import (
    ALL_IN_FLIGHT,
    FLIGHTS,
    ONE_EACH,
    SPLIT,
    Form,
    in_flight,
    parameters_of_rank,
)

if TYPE_CHECKING:
    from meshwright.planner.methods.grid.figures import Figures
    from meshwright.planner.methods.grid.sheet import Configuration


def floor_bytes(figures: Figures, wanted: Configuration) -> float:
    """Bytes that the fullest rank needs at least; 0 for what is not followed: inference, backwards in two parts."""
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
    fullest = 0.0
    for position in range(positions):
        mine = [wanted.bounds[chunk * positions + position] for chunk in range(chunks)]
        parameters, states = (
            sum(float(column[start:stop].sum()) for start, stop in mine)
            for column in (weights.parameters, weights.states)
        )
        static = figures.library_bytes + parameters_of_rank(parameters, wanted.zero, shared, figures.has_masters)
        static += states / (shared if wanted.zero else 1)
        last = figures.moments.of_layer(mine[-1][1] - 1, size, recompute)
        counts = [in_flight(form, position, chunk) for chunk in range(chunks)]
        of_one = [
            float(kept[start:stop].sum()) if keeps else figures.moments.of_layer(stop - 1, size, recompute).kept
            for start, stop in mine
        ]
        held = sum(count * each for count, each in zip(counts, of_one, strict=True))
        fullest = max(fullest, static + held + last.first)
        if flight in (ALL_IN_FLIGHT, ONE_EACH) and rounds > 1:
            # One stage on each position.
            is_cut = wanted.zero >= 2 and shared > 1
            made = float(weights.gradients[mine[0][0] : mine[0][1]].sum()) / (shared if is_cut else 1)
            gone = of_one[0] if counts[0] == rounds else 0.0
            fullest = max(fullest, static + held - gone + made + (last.first if is_cut else last.later))
    return fullest
