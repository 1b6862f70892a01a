"""One Markov chain over strategies: propose, simulate what changes, accept by Metropolis' rule. Compiled.

A proposal takes a layer at random and gives it

    with 1/2   a random candidate, on a run of neighbouring devices from a random one on (the original's device maps)
    with 1/4   a random candidate, on any distinct devices in any order (the paper's)
    with 1/4   the degrees and devices of a layer that it shares an edge with, if it can be split so

and is drawn again where that is what the layer has already: such a proposal changes nothing and is not counted. It is
accepted if the step becomes no longer, else with probability exp(-beta (new - old)). The number that decides is drawn
first: with ``cut``, the simulation ends as soon as it is certain that the proposal is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.planner.methods.flexflow.configure import configure, configure_all
from meshwright.planner.methods.flexflow.full import (
    BEYOND,
    NO_LIMIT,
    finish,
    fixed_end,
    run_all,
    simulate_all,
    simulate_within,
)
from meshwright.planner.methods.flexflow.soap_arrays import (
    AFTER,
    BEFORE,
    COUNT,
    END,
    ENDS,
    MARK,
    MOVED,
    NEED,
    NEW_COUNT,
    NEW_ENDS,
    NOTED,
    READY,
    ROW,
    SIZE,
    STAMP,
    Integers,
    Lists,
    Schedule,
    Soap,
    Strategy,
    empty_schedule,
    empty_strategy,
)
from meshwright.planner.methods.flexflow.task_run import run_task
from meshwright.simulator.sharing import pop, push

# Delta simulation: after a change of some layers only what it moves is simulated again, bit for bit. Compiled.
#
# The tasks of a change are those of the changed layers and what is next to them: **new** ones, those that are **gone**,
# and passes of neighbours, which wait for others now. One sweep goes over the tasks in the order of (ready, number), as
# the full simulation does, and merges two rows: those of before, in the order that they had, and a heap of those that
# have moved. A task of before that nothing before it in the sweep has moved is ready when it was; it is looked at only
# for whether what it holds is free then, which costs a fraction of a task that is run. What ends at another time than
# before moves all that waits for it:
#
#     moved        its time is not known yet; it comes out of the row of before, and into the heap when all that it
#                  waits
#                  for is known
#     suspected    it waits for something that moved; when its turn comes and that is still not known, it has moved
#
# Why the result is that of the full simulation: by induction over (ready, number) each task comes up when all tasks
# before it in that order are known, and then ready(t) and start(t) are as in `full`. A task that is suspected and whose
# turn comes waits for one that is ready later than it was itself, so that one ends later than before, and will tell.
#
# ``limit_ps``: give up as soon as it is certain that the step takes longer; of a task that ends at t, what must follow
# takes ``tail_ps`` at least. Metropolis' rule draws its number first, and so never sees a difference.
# Source of the idea: Jia et al. 2019, section 5.3, whose queue may update a task more than once; here each runs once.

# What `mark` says of a task above the stamp of the change; one with less is clean.
SUSPECTED, IS_MOVED, IS_KNOWN, IS_GONE = 1, 2, 3, 4
_STAMPS = 5
# When a task ended that was not there before.
NEVER = -1
# In place of a time, where a sweep gave up.
TOO_MANY = -2
# When this share of all tasks has moved, all are simulated: updating a task takes three times as long as running it.
GIVE_UP = 1 / 16


@compiled
def begin_change(schedule: Schedule) -> None:
    """A change begins; the last one is kept, or has been taken back."""
    schedule.state[STAMP] += _STAMPS
    schedule.state[NOTED] = schedule.state[SIZE] = schedule.state[MOVED] = 0


@compiled
def release(soap: Soap, strategy: Strategy, schedule: Schedule, layer: int) -> None:
    """Take the tasks of a layer out, before it is configured again."""
    for k in range(_tasks_of(soap, strategy, schedule.changed, layer)):
        strategy.task[schedule.changed[k], MARK] = schedule.state[STAMP] + IS_GONE


@compiled
def simulate_change(
    soap: Soap,
    strategy: Strategy,
    schedule: Schedule,
    layers: Integers,
    limit_ps: int,
    tail_ps: Integers,
    gives_up: bool,
) -> int:
    """The step time in ps after ``layers`` were released and configured; `BEYOND` if it exceeds ``limit_ps``.

    Call `keep` or `take_back` then. ``tail_ps`` is that of `shortest_tails`; with ``gives_up``, a change that moves
    much is simulated in full.
    """
    task, pool, log, state, changed = strategy.task, strategy.pool, schedule.log, schedule.state, schedule.changed
    stamp, stride, size = state[STAMP], 1 + (1 << soap.shift), 0
    for layer in layers:
        for k in range(_tasks_of(soap, strategy, changed, layer)):
            _move(task, pool, stride, stamp, log, state, changed[k])
            task[changed[k], END] = NEVER
        for k in range(_neighbours(soap, strategy, changed, layer)):
            _move(task, pool, stride, stamp, log, state, changed[k])
    for layer in layers:
        for way in range(2):
            if way == 0:
                count = _tasks_of(soap, strategy, changed, layer)
            else:
                count = _neighbours(soap, strategy, changed, layer)
            for k in range(count):
                if _look(task, pool, stride, stamp, changed[k]) == 0:
                    size = push(schedule.heap_ps, schedule.heap, size, task[changed[k], READY], changed[k])
    state[SIZE] = size
    limit = limit_ps - fixed_end(soap, strategy)
    last = _sweep(soap, strategy, schedule, limit, tail_ps, int(GIVE_UP * state[COUNT]) if gives_up else len(task))
    if last == TOO_MANY:
        last = _run_all(soap, strategy, schedule, limit, tail_ps)
    if last == BEYOND:
        return BEYOND
    step = finish(soap, strategy, schedule, last)
    return BEYOND if step > limit_ps else step


@compiled
def keep(schedule: Schedule) -> None:
    """Go on from the last change."""
    schedule.state[ROW] = 1 - schedule.state[ROW]
    schedule.state[COUNT], schedule.state[ENDS] = schedule.state[NEW_COUNT], schedule.state[NEW_ENDS]


@compiled
def take_back(strategy: Strategy, schedule: Schedule) -> None:
    """Make the last change undone; the layers must be given their old configurations, too."""
    for k in range(schedule.state[NOTED]):
        number = schedule.log[k, 0]
        strategy.task[number, READY], strategy.task[number, END] = schedule.log[k, 1], schedule.log[k, 2]


@compiled
def _tasks_of(soap: Soap, strategy: Strategy, found: Integers, layer: int) -> int:
    """Write down the passes of a layer, the transfers to and from it and its syncs; return how many."""
    count, task, pool = 0, strategy.task, strategy.pool
    num_passes, stride = 2 * len(soap.trains) << soap.shift, 1 + (1 << soap.shift)
    for way in range(1 + soap.trains[layer]):
        for part in range(soap.parts[strategy.candidate[layer]]):
            number = ((way * len(soap.trains) + layer) << soap.shift) + part
            found[count], count = number, count + 1
            for column in (BEFORE, AFTER):
                section = task[number, column] + 1
                for _ in range(pool[section - 1]):
                    for k in range(section + 1, section + 1 + pool[section]):
                        if pool[k] >= num_passes:
                            found[count], count = pool[k], count + 1
                    section += stride
    return count


@compiled
def _neighbours(soap: Soap, strategy: Strategy, found: Integers, layer: int) -> int:
    """Write down the passes that wait for what a layer makes, forwards and backwards; return how many."""
    num_layers, count = len(soap.trains), 0
    for k in range(soap.out_offsets[layer], soap.out_offsets[layer + 1]):
        other = soap.target[soap.out_edges[k]]
        for part in range(soap.parts[strategy.candidate[other]]):
            found[count], count = (other << soap.shift) + part, count + 1
    for k in range(soap.in_offsets[layer], soap.in_offsets[layer + 1]):
        other = soap.source[soap.in_edges[k]]
        if soap.has_gradient[soap.in_edges[k]]:
            for part in range(soap.parts[strategy.candidate[other]]):
                found[count], count = ((num_layers + other) << soap.shift) + part, count + 1
    return count


@compiled
def _move(task: Integers, pool: Lists, stride: int, stamp: int, log: Integers, state: Integers, number: int) -> None:
    """A task is not known any more; what waits for it is suspected, or waits for one more. Noted once a change."""
    if task[number, MARK] == stamp + IS_MOVED:
        return
    at = state[NOTED]
    log[at, 0], log[at, 1], log[at, 2] = number, task[number, READY], task[number, END]
    state[NOTED] = at + 1
    task[number, MARK] = stamp + IS_MOVED
    section = task[number, AFTER] + 1
    for _ in range(pool[section - 1]):
        for k in range(section + 1, section + 1 + pool[section]):
            other = pool[k]
            if task[other, MARK] == stamp + IS_MOVED:
                task[other, NEED] += 1
            else:
                task[other, MARK] = max(task[other, MARK], stamp + SUSPECTED)
        section += stride


@compiled
def _look(task: Integers, pool: Lists, stride: int, stamp: int, number: int) -> int:
    """Count what a moved task waits for and is not known; if that is nothing, find out when it is ready."""
    ready, need, section = 0, 0, task[number, BEFORE] + 1
    for _ in range(pool[section - 1]):
        for k in range(section + 1, section + 1 + pool[section]):
            need += task[pool[k], MARK] == stamp + IS_MOVED
            ready = max(ready, task[pool[k], END])
        section += stride
    task[number, NEED] = need
    if need == 0:
        task[number, READY] = ready
    return int(need)


@compiled
def _waits(task: Integers, pool: Lists, stride: int, stamp: int, number: int) -> bool:
    """Whether a task waits for one that is not known."""
    section = task[number, BEFORE] + 1
    for _ in range(pool[section - 1]):
        for k in range(section + 1, section + 1 + pool[section]):
            if task[pool[k], MARK] == stamp + IS_MOVED:
                return True
        section += stride
    return False


@compiled
def _run_all(soap: Soap, strategy: Strategy, schedule: Schedule, limit_ps: int, tail_ps: Integers) -> int:
    """Run all tasks, instead of a sweep that gave up; return when the last one ends, or `BEYOND`."""
    task, state, log, old = strategy.task, schedule.state, schedule.log, schedule.order[schedule.state[ROW]]
    take_back(strategy, schedule)
    for k in range(state[COUNT]):
        log[k, 0], log[k, 1], log[k, 2] = old[k], task[old[k], READY], task[old[k], END]
    state[NOTED] = state[COUNT]
    new = schedule.order[1 - state[ROW]]
    state[NEW_COUNT], state[NEW_ENDS] = run_all(soap, strategy, schedule, new, limit_ps, tail_ps)
    state[MOVED] = state[NEW_COUNT]
    return int(state[NEW_ENDS])


@compiled
def _sweep(  # noqa: C901 - one loop over two rows; what it calls would copy all arrays
    soap: Soap, strategy: Strategy, schedule: Schedule, limit_ps: int, tail_ps: Integers, most: int
) -> int:
    """Go over all tasks; return when the last one ends.

    `BEYOND` if what must follow a pass cannot end by ``limit_ps``, `TOO_MANY` if more than ``most`` tasks move.
    """
    state, task, pool, free_ps = schedule.state, strategy.task, strategy.pool, schedule.free_ps
    heap_ps, heap, log, size, stamp = schedule.heap_ps, schedule.heap, schedule.log, state[SIZE], state[STAMP]
    old, new, num_old, num_passes = (
        schedule.order[state[ROW]],
        schedule.order[1 - state[ROW]],
        state[COUNT],
        len(tail_ps),
    )
    place, count, last, num_moved, stride = 0, 0, 0, 0, 1 + (1 << soap.shift)
    free_ps[:] = 0
    while True:
        while place < num_old and task[old[place], MARK] >= stamp + IS_MOVED:
            place += 1
        if place == num_old and size == 0:
            break
        number = int(old[place] if place < num_old else heap[0])
        ready = int(task[number, READY])
        is_clean = place < num_old and (size == 0 or ready < heap_ps[0] or (ready == heap_ps[0] and number < heap[0]))
        if is_clean:
            place += 1
            if task[number, MARK] == stamp + SUSPECTED and _waits(task, pool, stride, stamp, number):
                _move(task, pool, stride, stamp, log, state, number)
                _look(task, pool, stride, stamp, number)
                continue
        else:
            number, ready = int(heap[0]), int(heap_ps[0])
            size = pop(heap_ps, heap, size)
            if task[number, MARK] != stamp + IS_MOVED or task[number, NEED] > 0 or task[number, READY] != ready:
                # It is known by now, or waits for what has moved since.
                continue
        end = run_task(task, pool, free_ps, number, ready)
        new[count], count, last = number, count + 1, max(last, end)
        has_changed = end != task[number, END]
        if is_clean and not has_changed:
            continue
        layer, num_moved = number >> soap.shift, num_moved + 1
        if layer < num_passes and end + tail_ps[layer] > limit_ps:
            return BEYOND
        if num_moved > most:
            return TOO_MANY
        if is_clean:
            _move(task, pool, stride, stamp, log, state, number)
        task[number, END], task[number, MARK] = end, stamp + IS_KNOWN
        section = task[number, AFTER] + 1
        for _ in range(pool[section - 1]):
            for k in range(section + 1, section + 1 + pool[section]):
                other = int(pool[k])
                if task[other, MARK] == stamp + IS_MOVED:
                    task[other, NEED] -= 1
                    if task[other, NEED] > 0:
                        continue
                elif has_changed:
                    _move(task, pool, stride, stamp, log, state, other)
                else:
                    continue
                if _look(task, pool, stride, stamp, other) == 0:
                    size = push(heap_ps, heap, size, task[other, READY], other)
            section += stride
    state[NEW_COUNT], state[NEW_ENDS], state[MOVED] = count, last, num_moved
    return last


# Entries of `Chain.tally`: proposals that were simulated, accepted ones, those that were longer, accepted ones of them,
# and proposals of which the simulation was cut short.
SIMULATED, ACCEPTED, WORSE, WORSE_ACCEPTED, CUT = range(5)


class Chain(NamedTuple):
    """A chain: where it is, the best it has seen (``candidates`` (n,), ``devices`` (n, P)), and counts.

    ``step_ps`` (2,): of where it is, and of the best. ``layer`` (1,) and ``devices_of`` (2, P) are room to work in:
    devices of a layer now, and of a proposal.
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
    """Begin at a strategy, which is the best so far; all counts go on."""
    configure_all(soap, chain.strategy, candidates, devices)
    chain.step_ps[:] = simulate_all(soap, chain.strategy, chain.schedule)
    chain.candidates[:] = candidates
    chain.devices[:] = chain.strategy.device


@compiled
def reset(soap: Soap, chain: Chain) -> None:
    """Go back to the best."""
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
    follows_changes: bool,
    cut: bool,
) -> None:
    """Simulate a number of proposals, by delta simulation (``follows_changes``) or in full, with the same result."""
    strategy, schedule, now, new = chain.strategy, chain.schedule, chain.devices_of[0], chain.devices_of[1]
    for _ in range(num_proposals):
        candidate = propose(soap, strategy, random, chain.layer, now, new)
        if candidate < 0:
            return
        layer, before = chain.layer[0], strategy.candidate[chain.layer[0]]
        allowed = min(-np.log(1.0 - random.random()) / beta_per_ps, 2.0**61)
        limit = chain.step_ps[0] + np.int64(allowed)
        if follows_changes:
            begin_change(schedule)
            release(soap, strategy, schedule, layer)
            configure(soap, strategy, layer, candidate, new)
            step = simulate_change(soap, strategy, schedule, chain.layer, limit if cut else NO_LIMIT, tail_ps, True)
        else:
            configure(soap, strategy, layer, candidate, new)
            step = simulate_within(soap, strategy, schedule, limit if cut else NO_LIMIT, tail_ps)
        is_worse, is_accepted = step == BEYOND or step > chain.step_ps[0], step != BEYOND and step <= limit
        chain.tally[SIMULATED] += 1
        chain.tally[ACCEPTED] += is_accepted
        chain.tally[WORSE] += is_worse
        chain.tally[WORSE_ACCEPTED] += is_worse and is_accepted
        chain.tally[CUT] += step == BEYOND
        if is_accepted:
            if follows_changes:
                keep(schedule)
            chain.step_ps[0] = step
            if step < chain.step_ps[1]:
                chain.step_ps[1] = step
                chain.candidates[:] = strategy.candidate
                chain.devices[:] = strategy.device
        else:
            if follows_changes:
                take_back(strategy, schedule)
            configure(soap, strategy, layer, before, now)


@compiled
def propose(
    soap: Soap, strategy: Strategy, random: np.random.Generator, layer: Integers, now: Integers, new: Integers
) -> int:
    """Draw a layer and another configuration of it: its candidate, and devices into ``new``; those it has into ``now``.

    Returns -1 if a thousand draws find nothing else than what is there.
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
    """Simulate as many proposals as ``rises_ps`` has entries, accept none; write down by how much the longer ones rise.

    Returns how many are longer.
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
    simulate_all(soap, strategy, schedule)
    return count


def empty_chain(soap: Soap) -> Chain:
    """Room for a chain that has not begun."""
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
