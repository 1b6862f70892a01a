"""Simulate a strategy: all of its tasks, in the order in which they become ready. Compiled.

    ready(t) = max end(tasks that t waits for)
    start(t) = max(ready(t), end of the previous task on each device or link that t occupies)
    end(t)   = start(t) + time(t)

Devices and links serve tasks first come, first served, by (ready, number), as in FlexFlow. Since tasks take time, tasks
leave one heap in the order in which they become ready. With a barrier, all-reduces begin after the last other task.
Then

    step = last end + longest optimizer step of a device + penalty * bytes beyond the devices' memory
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.flexflow.soap_arrays import (
    AFTER,
    BEFORE,
    END,
    NEED,
    READY,
    TIME,
    Integers,
    Schedule,
    Soap,
    Strategy,
)
from meshwright.planner.methods.flexflow.task_run import run_task
from meshwright.simulator.sharing import pop, push

# More than any time.
NO_LIMIT = 2**62
# In place of a time, where it is certain to exceed the limit.
BEYOND = -1


@compiled
def simulate_all(soap: Soap, strategy: Strategy, schedule: Schedule) -> int:
    """Simulate a strategy and return its step time in picoseconds; ``schedule`` is overwritten."""
    return simulate_within(soap, strategy, schedule, NO_LIMIT, schedule.no_tail_ps)


@compiled
def simulate_within(soap: Soap, strategy: Strategy, schedule: Schedule, limit_ps: int, tail_ps: Integers) -> int:
    """Simulate a strategy and return its step time in picoseconds, or `BEYOND` if that exceeds ``limit_ps``.

    ``tail_ps``, from `shortest_tails`, lets the simulation end early.
    """
    last = _run_all(soap, strategy, schedule, limit_ps - fixed_end(soap, strategy), tail_ps)
    if last == BEYOND:
        return BEYOND
    step = finish(soap, strategy, schedule, last)
    return BEYOND if step > limit_ps else step


@compiled
def _run_all(soap: Soap, strategy: Strategy, schedule: Schedule, limit_ps: int, tail_ps: Integers) -> int:
    """Run all tasks that no barrier holds back; return when the last ends.

    `BEYOND` as soon as what must follow a pass, ``tail_ps``, cannot end by ``limit_ps``.
    """
    task, pool = strategy.task, strategy.pool
    heap_ps, heap, free_ps = schedule.heap_ps, schedule.heap, schedule.free_ps
    first_transfer = 2 * len(soap.trains) << soap.shift
    first_sync = first_transfer + (2 * len(soap.source) << (2 * soap.shift))
    size = _begin(soap, strategy, schedule)
    count, last, stride = 0, 0, 1 + (1 << soap.shift)
    free_ps[:] = 0
    while size > 0:
        number, ready = int(heap[0]), int(heap_ps[0])
        size = pop(heap_ps, heap, size)
        end = run_task(task, pool, free_ps, number, ready)
        if number < first_transfer and end + tail_ps[number >> soap.shift] > limit_ps:
            return BEYOND
        task[number, END] = end
        schedule.order[count], count = number, count + 1
        last = max(last, end)
        section = task[number, AFTER] + 1
        for _ in range(pool[section - 1]):
            for k in range(section + 1, section + 1 + pool[section]):
                other = int(pool[k])
                if first_transfer <= other < first_sync:
                    # It waits for nothing else.
                    task[other, READY] = end
                    size = push(heap_ps, heap, size, end, other)
                    continue
                task[other, READY] = max(task[other, READY], end)
                task[other, NEED] -= 1
                if task[other, NEED] == 0:
                    size = push(heap_ps, heap, size, task[other, READY], other)
            section += stride
    schedule.num_run[0] = count
    return last


@compiled
def _begin(soap: Soap, strategy: Strategy, schedule: Schedule) -> int:
    """Count what each task waits for; put those that wait for nothing into the heap and return its size."""
    task, pool, num_layers, size = strategy.task, strategy.pool, len(soap.trains), 0
    for way in range(2):
        for layer in range(num_layers):
            if way == 1 and not soap.trains[layer]:
                continue
            for part in range(soap.parts[strategy.candidate[layer]]):
                number = ((way * num_layers + layer) << soap.shift) + part
                section, need = task[number, BEFORE] + 1, 0
                for _ in range(pool[section - 1]):
                    need += pool[section]
                    section += 1 + (1 << soap.shift)
                task[number, NEED], task[number, READY] = need, 0
                if need == 0:
                    size = push(schedule.heap_ps, schedule.heap, size, 0, number)
    first_sync = (2 * num_layers << soap.shift) + (2 * len(soap.source) << (2 * soap.shift))
    for weight in range(len(soap.weight_layer)):
        for shard in range(strategy.num_shards[weight]):
            number = first_sync + (weight << soap.shift) + shard
            task[number, NEED], task[number, READY] = pool[task[number, BEFORE] + 1], 0
    return size


@compiled
def finish(soap: Soap, strategy: Strategy, schedule: Schedule, last_ps: int) -> int:
    """Return the step time in picoseconds, given the end ``last_ps`` of all tasks before the barrier.

    With a barrier, the all-reduces run after ``last_ps``; `fixed_end` is added.
    """
    end = last_ps
    first_sync = (2 * len(soap.trains) << soap.shift) + (2 * len(soap.source) << (2 * soap.shift))
    if soap.barrier:
        schedule.free_ps[:] = 0
        for weight in range(len(soap.weight_layer)):
            for shard in range(strategy.num_shards[weight]):
                number = first_sync + (weight << soap.shift) + shard
                if strategy.task[number, TIME] > 0:
                    end = max(end, run_task(strategy.task, strategy.pool, schedule.free_ps, number, last_ps))
    return end + fixed_end(soap, strategy)


@compiled
def fixed_end(soap: Soap, strategy: Strategy) -> int:
    """Return the picoseconds after the last task: the longest optimizer step of a device, and the memory penalty."""
    longest, beyond = 0, 0
    for device in range(len(soap.kind)):
        longest = max(longest, strategy.update_ps[device])
        beyond += max(0, strategy.memory_bytes[device] - soap.limit_bytes[device])
    return longest + soap.penalty_ps_per_byte * beyond


@compiled
def shortest_tails(soap: Soap) -> Integers:
    """Return, for each pass, a lower bound of the picoseconds from its end to the end of the last pass.

    Shape (2 n,): the forwards of the n layers, then their backwards. The bound holds for every strategy.
    """
    num_layers = len(soap.trains)
    least, tails = np.zeros((2, num_layers), np.int64), np.zeros(2 * num_layers, np.int64)
    for layer in range(num_layers):
        own = soap.pass_ps[soap.candidates[layer] : soap.candidates[layer + 1]]
        least[0, layer], least[1, layer] = own[:, :, 0].min(), own[:, :, 1].min()
    for layer in range(num_layers):
        for k in range(soap.in_offsets[layer], soap.in_offsets[layer + 1]):
            edge = soap.in_edges[k]
            if soap.has_gradient[edge]:
                above = soap.source[edge]
                follows = least[1, above] + tails[num_layers + above]
                tails[num_layers + layer] = max(tails[num_layers + layer], follows)
    for layer in range(num_layers - 1, -1, -1):
        if soap.trains[layer]:
            tails[layer] = least[1, layer] + tails[num_layers + layer]
        for k in range(soap.out_offsets[layer], soap.out_offsets[layer + 1]):
            below = soap.target[soap.out_edges[k]]
            tails[layer] = max(tails[layer], least[0, below] + tails[below])
    return tails
