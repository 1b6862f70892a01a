"""A Markov chain over strategies (`walk`): propose, simulate, accept by Metropolis' rule. Compiled.

A proposal changes a random layer: with the given probability, the layer gets

    1/2   a random candidate (degrees), on consecutive devices from a random one on (as in FlexFlow's code)
    1/4   a random candidate, on any distinct devices in any order (as in the paper)
    1/4   the degrees and devices of a layer with which it shares an edge, if it can be split in this way

A proposal that changes nothing is drawn again and not counted. A proposal is accepted if the step does not become
longer; otherwise with probability exp(-beta (new - old)). The random number that decides is drawn before the
simulation: with ``cut``, the simulation ends as soon as it is certain that the proposal is rejected.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.planner.methods.flexflow.configure import configure, configure_all
from meshwright.planner.methods.flexflow.full import BEYOND, NO_LIMIT, simulate_all, simulate_within
from meshwright.planner.methods.flexflow.soap_arrays import (
    Integers,
    Schedule,
    Soap,
    Strategy,
    empty_schedule,
    empty_strategy,
)

# Entries of `Chain.tally`: numbers of proposals that were simulated, accepted, slower, slower and accepted, and whose
# simulation was cut short.
SIMULATED, ACCEPTED, WORSE, WORSE_ACCEPTED, CUT = range(5)


class Chain(NamedTuple):
    """The state of a Markov chain over strategies.

    ``strategy`` and ``schedule`` are current; ``candidates`` (n,) and ``devices`` (n, P) are the best strategy so far.
    ``step_ps`` (2,): step times of the current and of the best strategy, in picoseconds. ``tally`` (5,): counts of
    proposals. Scratch space: ``layer`` (1,), the layer of a proposal; ``devices_of`` (2, P), its devices before and
    after.
    """

    strategy: Strategy
    schedule: Schedule
    candidates: Integers
    devices: Integers
    step_ps: Integers
    tally: Integers
    layer: Integers
    devices_of: Integers


@compiled
def start(soap: Soap, chain: Chain, candidates: Integers, devices: Integers) -> None:
    """Set the chain to a strategy, which also becomes the best one; the tally is kept."""
    configure_all(soap, chain.strategy, candidates, devices)
    chain.step_ps[:] = simulate_all(soap, chain.strategy, chain.schedule)
    chain.candidates[:] = candidates
    chain.devices[:] = chain.strategy.device


@compiled
def reset(soap: Soap, chain: Chain) -> None:
    """Set the current strategy of the chain to its best one."""
    configure_all(soap, chain.strategy, chain.candidates, chain.devices)
    chain.step_ps[0] = simulate_all(soap, chain.strategy, chain.schedule)


@compiled
def walk(
    soap: Soap,
    chain: Chain,
    random: np.random.Generator,
    tail_ps: Integers,
    num_proposals: int,
    beta_per_ps: float,
    cut: bool,
) -> None:
    """Simulate ``num_proposals`` proposals and accept each by Metropolis' rule, at inverse temperature ``beta_per_ps``.

    With ``cut``, a simulation ends once it is certain that the proposal is rejected; ``tail_ps`` is from
    `shortest_tails`.
    """
    strategy, schedule, now, new = chain.strategy, chain.schedule, chain.devices_of[0], chain.devices_of[1]
    for _ in range(num_proposals):
        candidate = propose(soap, strategy, random, chain.layer, now, new)
        if candidate < 0:
            return
        layer, before = chain.layer[0], strategy.candidate[chain.layer[0]]
        allowed = min(-np.log(1.0 - random.random()) / beta_per_ps, 2.0**61)
        limit = chain.step_ps[0] + np.int64(allowed)
        configure(soap, strategy, layer, candidate, new)
        step = simulate_within(soap, strategy, schedule, limit if cut else NO_LIMIT, tail_ps)
        is_worse, is_accepted = step == BEYOND or step > chain.step_ps[0], step != BEYOND and step <= limit
        chain.tally[SIMULATED] += 1
        chain.tally[ACCEPTED] += is_accepted
        chain.tally[WORSE] += is_worse
        chain.tally[WORSE_ACCEPTED] += is_worse and is_accepted
        chain.tally[CUT] += step == BEYOND
        if is_accepted:
            chain.step_ps[0] = step
            if step < chain.step_ps[1]:
                chain.step_ps[1] = step
                chain.candidates[:] = strategy.candidate
                chain.devices[:] = strategy.device
        else:
            configure(soap, strategy, layer, before, now)


@compiled
def propose(
    soap: Soap, strategy: Strategy, random: np.random.Generator, layer: Integers, now: Integers, new: Integers
) -> int:
    """Draw a layer and another configuration of it; return the candidate (row of the degrees).

    Writes the layer into ``layer``, its present devices into ``now`` and the proposed ones into ``new``. Returns -1 if
    1000 draws give only the present configuration.
    """
    num_layers = len(soap.trains)
    for _ in range(1000):
        drawn = int(random.integers(0, num_layers))
        layer[0] = drawn
        now[:] = strategy.device[drawn]
        way = random.random()
        candidate = _copy(soap, strategy, random, drawn, new) if way >= 0.75 else -1
        if candidate < 0:
            candidate = random.integers(soap.candidates[drawn], soap.candidates[drawn + 1])
            _place(soap, random, soap.parts[candidate], new, way < 0.5)
        if candidate != strategy.candidate[drawn]:
            return candidate
        for part in range(soap.parts[candidate]):
            if new[part] != now[part]:
                return candidate
    return -1


@compiled
def _place(soap: Soap, random: np.random.Generator, num_parts: int, devices: Integers, in_a_run: bool) -> None:
    """Draw devices, a run of neighbours or any that are distinct."""
    num_devices = len(soap.kind)
    if in_a_run:
        first = random.integers(0, num_devices)
        for part in range(num_parts):
            devices[part] = (first + part) % num_devices
        return
    for part in range(num_parts):
        is_new = False
        while not is_new:
            devices[part] = random.integers(0, num_devices)
            is_new = True
            for other in range(part):
                is_new = is_new and devices[other] != devices[part]


@compiled
def _copy(soap: Soap, strategy: Strategy, random: np.random.Generator, layer: int, devices: Integers) -> int:
    """Take the degrees and devices of a neighbour; -1 without a neighbour, or if this layer cannot be split like it."""
    num_in = soap.in_offsets[layer + 1] - soap.in_offsets[layer]
    num_out = soap.out_offsets[layer + 1] - soap.out_offsets[layer]
    if num_in + num_out == 0:
        return -1
    drawn = random.integers(0, num_in + num_out)
    if drawn < num_in:
        other = soap.source[soap.in_edges[soap.in_offsets[layer] + drawn]]
    else:
        other = soap.target[soap.out_edges[soap.out_offsets[layer] + drawn - num_in]]
    wanted = soap.degrees[strategy.candidate[other]]
    for candidate in range(soap.candidates[layer], soap.candidates[layer + 1]):
        is_same = True
        for dim in range(len(wanted)):
            is_same = is_same and soap.degrees[candidate, dim] == wanted[dim]
        if is_same:
            for part in range(soap.parts[candidate]):
                devices[part] = strategy.device[other, part]
            return candidate
    return -1


@compiled
def sample_rises(soap: Soap, chain: Chain, random: np.random.Generator, rises_ps: NDArray[np.float64]) -> int:
    """Simulate one proposal per entry of ``rises_ps``, accept none of them, and return the number of slower ones.

    The front of ``rises_ps`` gets the increases of the step time of these slower proposals, in picoseconds.
    """
    strategy, schedule, now, new, count = chain.strategy, chain.schedule, chain.devices_of[0], chain.devices_of[1], 0
    for _ in range(len(rises_ps)):
        candidate = propose(soap, strategy, random, chain.layer, now, new)
        if candidate < 0:
            break
        layer, before = chain.layer[0], strategy.candidate[chain.layer[0]]
        configure(soap, strategy, layer, candidate, new)
        step = simulate_all(soap, strategy, schedule)
        chain.tally[SIMULATED] += 1
        if step > chain.step_ps[0]:
            rises_ps[count], count = step - chain.step_ps[0], count + 1
        configure(soap, strategy, layer, before, now)
    return count


def empty_chain(soap: Soap) -> Chain:
    """Return a chain with arrays of the right sizes and no strategy; `start` sets one."""
    num_layers, width = len(soap.trains), 1 << soap.shift
    return Chain(
        strategy=empty_strategy(soap),
        schedule=empty_schedule(soap),
        candidates=np.zeros(num_layers, np.int64),
        devices=np.zeros((num_layers, width), np.int64),
        step_ps=np.zeros(2, np.int64),
        tally=np.zeros(5, np.int64),
        layer=np.zeros(1, np.int64),
        devices_of=np.zeros((2, width), np.int64),
    )
