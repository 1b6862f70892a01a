"""Lower bounds of the step time and memory of every uniform configuration, compiled.

A uniform configuration has S pipeline positions of R replicas each, and v stages (chunks) on each position, cut as
evenly as possible. In seconds, of position p: w is a microbatch's forward and backward in its stages, including the
copies around gathers and scatters; z the gathers and scatters of ZeRO 2 and 3 per microbatch; P(p) a microbatch in the
first stages of the positions before p; o the optimizer step; e the gradient reduction that does not overlap with the
last backward. With n = ceil(M / R) microbatches, a step takes at least the maximum over p of

    n · max(w, z) + e + o        the position's own work (on CPUs, n · (w + z) + e + o)
    P(p) + n · w                 for synchronous schedules with whole backwards

A rank of position p holds at least its parameters, gradients and states as sharded by ZeRO, the gathered parameters of
the largest layer, and the activations of the microbatches in flight: all (GPipe), min(n, S - p) (1F1B), or the chunks
that an interleaved schedule has in flight. With split backwards, some microbatches hold what the second part reads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.planner.exchange_search import sum_in_buckets
from meshwright.planner.rank_layouts import even_edges
from meshwright.spec.schedules import NAMED_SCHEDULES

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Schedules as codes for the compiled loops: those with known layout, number of microbatches in flight and backwards.
ALL_IN_FLIGHT, ONE_EACH, IN_TURN, WHOLE_IN_TURN, SPLIT = range(5)
_CODES = {
    ("single", "all", False): ALL_IN_FLIGHT,
    ("single", "1f1b", False): ONE_EACH,
    ("in turn", "1f1b", False): IN_TURN,
    ("in turn", "all", False): WHOLE_IN_TURN,
    ("single", "1f1b", True): SPLIT,
}
FLIGHTS = {
    name: _CODES[facts.layout, facts.in_flight, facts.splits_backward]
    for name, facts in NAMED_SCHEDULES.items()
    if (facts.layout, facts.in_flight, facts.splits_backward) in _CODES
}


class ConfigurationRows(NamedTuple):
    """Configurations and their lower bounds as columns, shape (rows,).

    ``positions``: length of the pipeline. ``schedule``: index among the given schedules. ``zero``: ZeRO stage.
    ``seconds`` and ``bytes``: lower bounds of the step time and of the memory of the fullest rank.
    """

    positions: Integers
    schedule: Integers
    zero: Integers
    seconds: Floats
    bytes: Floats


class Layers(NamedTuple):
    """Cumulative sums over L layers: entry l is the sum of the layers before l.

    In seconds, shape (device kinds, L + 1): ``forward``, ``backward``, ``accumulate`` (gradients), ``optimizer``. In
    bytes, shape (L + 1,): ``parameters``, ``states`` (of the optimizer), ``gradients``, ``kept`` (activations of one
    microbatch), ``waiting`` (of one microbatch, until the second part of a split backward).
    """

    forward: Floats
    backward: Floats
    accumulate: Floats
    optimizer: Floats
    parameters: Floats
    states: Floats
    gradients: Floats
    kept: Floats
    waiting: Floats


class Exchanges(NamedTuple):
    """Costs of communication among replicas; arrays have one entry per tried length of the pipeline, shape (counts,).

    ``latency_s`` and ``bucket_s``: seconds to all-reduce one byte and one bucket. ``gather_s`` and ``scatter_s``:
    seconds per byte of large all-gathers and reduce-scatters; ``copy_s``: seconds per byte of the copies around them.
    ``tied_parameters`` and ``tied_gradients``: bytes of parameters that several layers read, and of their gradients.
    ``overlap``: a reduction starts as soon as its bucket is full. ``wait``: ranks wait for gathers and scatters.
    """

    latency_s: Floats
    bucket_s: Floats
    gather_s: Floats
    scatter_s: Floats
    tied_parameters: float
    tied_gradients: float
    copy_s: float
    bucket_bytes: float
    overlap: bool
    wait: bool


class _Positions(NamedTuple):
    """Sums over the layers of each position, shape (positions,), seconds (kinds, positions), with room for the most.

    ``first`` are the seconds of a microbatch in a position's first stage; ``largest`` the parameters of the largest
    layer.
    """

    work: Floats
    backward: Floats
    accumulate: Floats
    optimizer: Floats
    first: Floats
    parameters: Floats
    states: Floats
    gradients: Floats
    largest: Floats


class Form(NamedTuple):
    """One configuration.

    ``positions``: length of the pipeline. ``replicas``: per position; ``sharing`` of them shard states among each
    other. ``chunks``: stages on each position. ``flight``: code of the schedule (`FLIGHTS`). ``rounds``: microbatches
    of a replica. ``flushes``: the schedule is synchronous. ``place``: index in the arrays of `Exchanges`.
    """

    positions: int
    replicas: int
    sharing: int
    chunks: int
    flight: int
    zero: int
    rounds: int
    flushes: bool
    place: int


@compiled
def cover(
    layers: Layers,
    work: Floats,
    exchanges: Exchanges,
    kind_of: Integers,
    num_microbatches: int,
    flushes: bool,
    counts: Integers,
    flights: Integers,
    chunks: Integers,
    zeros: Integers,
    shard_size: int,
    also_all: bool,
    has_masters: bool,
) -> ConfigurationRows:
    """Return all configurations of the given choices with lower bounds of their step time and memory.

    The choices are ``counts`` (lengths of the pipeline), schedules (``flights``, each with its number of ``chunks``)
    and ``zeros`` (ZeRO stages). ``work`` (L,): seconds of each layer, by which layers are cut. ``kind_of`` (ranks,):
    the device kind of each rank; position p has the ranks p · R to (p + 1) · R - 1. ``has_masters``: ranks hold master
    weights. Impossible configurations are left out: more stages than layers, fewer microbatches than replicas, numbers
    of microbatches that the schedule cannot interleave, replicas that ``shard_size`` does not divide, and unequal
    replicas under ZeRO 2 and 3. Duplicates are left out, too; with ``also_all``, also shard sizes equal to the number
    of replicas.
    """
    num_layers, num_ranks = len(work), len(kind_of)
    most = len(counts) * len(flights) * len(zeros)
    rows = ConfigurationRows(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most), np.empty(most)
    )
    edges, sums = np.empty(num_layers + 1, np.int64), _room(len(layers.forward), num_layers)
    made = 0
    for place in range(len(counts)):
        positions = counts[place]
        replicas = num_ranks // positions
        sharing = min(shard_size, replicas) if shard_size else replicas
        # One replica has no other to share with, whatever the shard size is.
        if replicas > num_microbatches or (shard_size and (replicas == 1 or replicas % shard_size)):
            continue
        if also_all and shard_size == replicas:
            continue
        rounds, cut = -(-num_microbatches // replicas), 0
        for index in range(len(flights)):
            num_stages = positions * chunks[index]
            in_turn = flights[index] in (IN_TURN, WHOLE_IN_TURN)
            if num_stages > num_layers or in_turn != (chunks[index] > 1) or (in_turn and positions == 1):
                continue
            # With one stage, all schedules are equal, and one microbatch in flight needs the least memory.
            if positions == 1 and flights[index] != ONE_EACH and (flights == ONE_EACH).any():
                continue
            if flights[index] == IN_TURN and rounds % max(1, rounds // positions):
                continue
            if num_stages != cut:
                cut = num_stages
                even_edges(work, num_stages, edges)
                _add_up(layers, edges, positions, chunks[index], sums)
            for zero in zeros:
                # One replica has no other to share with.
                if replicas == 1 and zero > zeros.min():
                    continue
                # The same rule as in `spec.plan.takes_part_alike`.
                if zero >= 2 and num_microbatches % replicas:
                    continue
                form = Form(positions, replicas, sharing, chunks[index], flights[index], zero, rounds, flushes, place)
                rows.positions[made], rows.schedule[made], rows.zero[made] = positions, index, zero
                rows.seconds[made] = _seconds(sums, exchanges, kind_of, form)
                rows.bytes[made] = _bytes(layers, sums, edges, form, has_masters)
                made += 1
    return ConfigurationRows(
        rows.positions[:made], rows.schedule[:made], rows.zero[:made], rows.seconds[:made], rows.bytes[:made]
    )


@compiled
def _room(num_kinds: int, most: int) -> _Positions:
    return _Positions(
        np.empty((num_kinds, most)),
        np.empty((num_kinds, most)),
        np.empty((num_kinds, most)),
        np.empty((num_kinds, most)),
        np.empty((num_kinds, most)),
        np.empty(most),
        np.empty(most),
        np.empty(most),
        np.empty(most),
    )


@compiled
def _add_up(layers: Layers, edges: Integers, positions: int, chunks: int, sums: _Positions) -> None:
    """Write the sums of positions whose stages are interleaved."""
    for position in range(positions):
        sums.parameters[position] = _sum(layers.parameters, edges, positions, chunks, position)
        sums.states[position] = _sum(layers.states, edges, positions, chunks, position)
        sums.gradients[position] = _sum(layers.gradients, edges, positions, chunks, position)
        sums.largest[position] = _largest(layers.parameters, edges, positions, chunks, position)
        start, stop = edges[position], edges[position + 1]
        for kind in range(len(layers.forward)):
            forward, backward, accumulate = layers.forward[kind], layers.backward[kind], layers.accumulate[kind]
            sums.backward[kind, position] = _sum(backward, edges, positions, chunks, position)
            both = _sum(forward, edges, positions, chunks, position) + sums.backward[kind, position]
            sums.work[kind, position] = both
            sums.accumulate[kind, position] = _sum(accumulate, edges, positions, chunks, position)
            sums.optimizer[kind, position] = _sum(layers.optimizer[kind], edges, positions, chunks, position)
            first = _between(forward, start, stop) + _between(backward, start, stop)
            sums.first[kind, position] = first - _between(accumulate, start, stop)


@compiled
def _seconds(sums: _Positions, exchanges: Exchanges, kind_of: Integers, form: Form) -> float:
    """Return a lower bound of the step time in seconds."""
    num_kinds, replicas = len(sums.work), form.replicas
    longest, before = 0.0, 0.0
    for position in range(form.positions):
        passing, exposed = _exchange(exchanges, form, sums.parameters[position], sums.gradients[position])
        parameters = _shared_out(form, sums.parameters[position], exchanges.tied_parameters)
        copied = exchanges.copy_s * _copied_bytes(form, parameters, sums.largest[position])
        fastest_way = np.inf
        for kind in range(num_kinds):
            if num_kinds > 1 and not (kind_of[position * replicas : (position + 1) * replicas] == kind).any():
                continue
            # Of unequal replicas, the slowest may have one microbatch fewer.
            rounds = form.rounds if num_kinds == 1 else max(form.rounds - 1, 1)
            each = sums.work[kind, position] + copied
            taken = rounds * each - sums.accumulate[kind, position]
            waited = taken + rounds * passing if exchanges.wait else max(taken, rounds * passing)
            hidden = sums.backward[kind, position] if exchanges.overlap else 0.0
            optimizer = sums.optimizer[kind, position] / (form.sharing if form.zero else 1)
            longest = max(longest, waited + max(exposed - hidden, 0.0) + optimizer)
            if form.flushes and form.flight != SPLIT:
                longest = max(longest, before + taken)
            fastest_way = min(fastest_way, sums.first[kind, position])
        before += fastest_way
    return longest


@compiled
def _exchange(exchanges: Exchanges, form: Form, parameters: float, gradients: float) -> tuple[float, float]:
    """Return seconds per microbatch of gathers and scatters, and seconds of the reduction at the end of a step."""
    if form.replicas == 1:
        return 0.0, 0.0
    if form.zero >= 2:
        parameters = _shared_out(form, parameters, exchanges.tied_parameters)
        gradients = _shared_out(form, gradients, exchanges.tied_gradients)
        # The parameters that ZeRO 3 gathers again for the backward may still be present.
        return parameters * exchanges.gather_s[form.place] + gradients * exchanges.scatter_s[form.place], 0.0
    if form.zero == 1:
        return 0.0, 0.0
    latency_s, bucket_s = exchanges.latency_s[form.place], exchanges.bucket_s[form.place]
    return 0.0, sum_in_buckets(gradients, exchanges.bucket_bytes, latency_s, bucket_s)[0]


@compiled
def _shared_out(form: Form, num_bytes: float, tied: float) -> float:
    """Return the bytes that are sharded at least: parameters that several stages read are not."""
    return num_bytes if form.positions * form.chunks == 1 else max(num_bytes - tied, 0.0)


@compiled
def _copied_bytes(form: Form, parameters: float, largest: float) -> float:
    """Return the bytes copied per microbatch: gathered parameters for ops, and gradients to be scattered."""
    if form.replicas == 1 or form.zero < 2:
        return 0.0
    # The first and the last layer of a model keep their gathered parameters for the backward.
    return 2 * parameters + (max(parameters - 2 * largest, 0.0) if form.zero == 3 else 0.0)


@compiled
def _bytes(layers: Layers, sums: _Positions, edges: Integers, form: Form, has_masters: bool) -> float:
    """Return a lower bound of the bytes of the fullest rank."""
    fullest, shared = 0.0, form.sharing
    for position in range(form.positions):
        parameters, gradients = sums.parameters[position], sums.gradients[position]
        static = sums.states[position] / (shared if form.zero >= 1 else 1)
        static += parameters_of_rank(parameters, form.zero, shared, has_masters)
        static += sums.largest[position] * (1.0 - 1.0 / shared) if form.zero >= 3 else 0.0
        held, waiting = 0.0, 0.0
        for chunk in range(form.chunks):
            place = chunk * form.positions + position
            kept = _between(layers.kept, edges[place], edges[place + 1])
            held += kept * in_flight(form, position, chunk)
            if form.flight == SPLIT:
                # When this number of microbatches has done the first part, the same number of forwards has followed.
                behind, flight = min(form.rounds, position + 1), in_flight(form, position, chunk)
                whole = min(form.rounds, flight + behind - 1) - behind
                waiting += behind * _between(layers.waiting, edges[place], edges[place + 1]) + (whole - flight) * kept
        # Gradients may exist only when the microbatches have freed what they kept; all exist at the end.
        fullest = max(
            fullest, static + held + max(waiting, 0.0), static + gradients / (shared if form.zero >= 2 else 1)
        )
    return fullest


@compiled
def parameters_of_rank(num_bytes: float, zero: int, shared: int, has_masters: bool) -> float:
    """Return the bytes of parameters that a rank holds permanently.

    With ZeRO 3 and master weights 0, because the rank's shard of the master weights replaces them.
    """
    if zero < 3 or shared == 1:
        return num_bytes
    return 0.0 if has_masters else num_bytes / shared


@compiled
def in_flight(form: Form, position: int, chunk: int) -> int:
    """Return the most microbatches of a chunk that are in flight at once: those before the first backward."""
    if form.flight in (ONE_EACH, SPLIT):
        return min(form.rounds, form.positions - position)
    if form.flight != IN_TURN:
        return form.rounds
    return forwards_of(form, chunk, forwards_ahead(form, position))


@compiled
def microbatches_in_turn(form: Form) -> int:
    """Return how many microbatches an interleaved schedule runs through one chunk before it runs the next chunk."""
    return form.rounds // max(1, form.rounds // form.positions)


@compiled
def forwards_ahead(form: Form, position: int) -> int:
    """Return how many forwards, of all chunks, precede the first backward of an interleaved schedule."""
    size = microbatches_in_turn(form)
    return min((form.chunks - 1) * size + 2 * (form.positions - 1 - position) + 1, form.rounds * form.chunks)


@compiled
def forwards_of(form: Form, chunk: int, count: int) -> int:
    """Return how many of the first ``count`` forwards of an interleaved schedule belong to one chunk."""
    size = microbatches_in_turn(form)
    cycles, rest = count // (size * form.chunks), count % (size * form.chunks)
    return int(cycles * size + min(max(rest - chunk * size, 0), size))


@compiled
def _sum(values: Floats, edges: Integers, positions: int, chunks: int, position: int) -> float:
    """Return the sum over the layers of a position."""
    total = 0.0
    for chunk in range(chunks):
        place = chunk * positions + position
        total += _between(values, edges[place], edges[place + 1])
    return total


@compiled
def _between(sums: Floats, start: int, stop: int) -> float:
    """Return the sum over layers ``start:stop``."""
    return float(sums[stop] - sums[start])


@compiled
def _largest(values: Floats, edges: Integers, positions: int, chunks: int, position: int) -> float:
    """Return the largest value of a layer of a position."""
    largest = 0.0
    for chunk in range(chunks):
        place = chunk * positions + position
        for layer in range(edges[place], edges[place + 1]):
            largest = max(largest, _between(values, layer, layer + 1))
    return largest
