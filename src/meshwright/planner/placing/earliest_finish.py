"""List scheduling of tasks on devices: each task goes where it finishes earliest (HEFT).

    up(t) = w(t) + max over readers r of (c(t, r) + up(r))         w, c: means over devices and pairs of them
    finish(t, d) = max(free gap on d, max over inputs of t of their arrival on d) + w(t, d)

Tasks are taken by descending up(t), an order in which each follows what it reads; a task may fill a gap between two
others on its device. A tensor arrives on a device once, however many tasks there read it. Devices whose memory limit
would be exceeded are skipped. Source: Topcuoglu, Hariri, Wu: Performance-effective and low-complexity task scheduling
for heterogeneous computing, IEEE TPDS 13(3), 2002.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.placing.op_tasks import Tasks

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskCosts:
    """``seconds`` to compute a task on a device and ``num_bytes`` that it holds there, shape (tasks, devices).

    ``send_s(tensor, source, target)`` returns the seconds to move a tensor between two devices and, in training, its
    gradient back. ``limit_bytes`` has shape (devices,).
    """

    seconds: Floats
    num_bytes: Floats
    limit_bytes: Floats
    send_s: Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The device of each task and its estimated start in seconds, each of shape (tasks,)."""

    devices: tuple[int, ...]
    starts: tuple[float, ...]


def schedule_tasks(
    tasks: Tasks, costs: TaskCosts, allowed: Sequence[tuple[int, ...]], together: Sequence[int]
) -> Assignment | None:
    """Put each task on one of its ``allowed`` devices (numbers of columns); None if memory does not suffice.

    Tasks with the same number in ``together`` share a device, that of the first one.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for task, group in enumerate(together):
        members[group].append(task)
    chosen: dict[int, int] = {}
    free = costs.limit_bytes.copy()
    timetable = _Timetable(tasks, costs)
    for task in _by_upward_rank(tasks, costs):
        group = together[task]
        if group not in chosen:
            need = costs.num_bytes[members[group]].sum(axis=0)
            fitting = [device for device in allowed[task] if need[device] <= free[device]]
            if not fitting:
                return None
            chosen[group] = min(fitting, key=lambda device: (timetable.finish(task, device), device))
            free[chosen[group]] -= need[chosen[group]]
        timetable.put(task, chosen[group])
    return Assignment(devices=tuple(chosen[group] for group in together), starts=tuple(timetable.starts))


class _Timetable:
    """The timetable of each device, and the arrival times of tensors."""

    def __init__(self, tasks: Tasks, costs: TaskCosts) -> None:
        self._tasks, self._costs = tasks, costs
        self._device = [-1] * len(tasks.ops)
        self._finish = [0.0] * len(tasks.ops)
        self._arrived: dict[tuple[int, int, int], float] = {}
        self._busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.starts = [0.0] * len(tasks.ops)

    def finish(self, task: int, device: int) -> float:
        """Return the time at which a task would finish on a device."""
        seconds = float(self._costs.seconds[task, device])
        return self._gap(device, self._ready(task, device), seconds) + seconds

    def put(self, task: int, device: int) -> None:
        """Schedule a task on a device."""
        seconds = float(self._costs.seconds[task, device])
        start = self._gap(device, self._ready(task, device), seconds)
        for source, tensor in self._tasks.reads[task]:
            self._arrived[source, tensor, device] = self._arrival(source, tensor, device)
        self._device[task], self._finish[task], self.starts[task] = device, start + seconds, start
        bisect.insort(self._busy[device], (start, start + seconds))

    def _ready(self, task: int, device: int) -> float:
        return max((self._arrival(source, tensor, device) for source, tensor in self._tasks.reads[task]), default=0.0)

    def _arrival(self, source: int, tensor: int, device: int) -> float:
        known = self._arrived.get((source, tensor, device))
        if known is not None:
            return known
        if self._device[source] == device:
            return self._finish[source]
        return self._finish[source] + self._costs.send_s(tensor, self._device[source], device)

    def _gap(self, device: int, ready: float, seconds: float) -> float:
        """Return the earliest start in a gap that is long enough."""
        start, busy = ready, self._busy[device]
        for begin, end in busy[bisect.bisect_right(busy, ready, key=lambda span: span[1]) :]:
            if begin - start >= seconds:
                return start
            start = max(start, end)
        return start


def _by_upward_rank(tasks: Tasks, costs: TaskCosts) -> list[int]:
    num_devices = costs.seconds.shape[1]
    pairs = [(a, b) for a in range(num_devices) for b in range(num_devices) if a != b]
    mean_send: dict[int, float] = {}

    def move_s(tensor: int) -> float:
        if tensor not in mean_send:
            total = sum(costs.send_s(tensor, *pair) for pair in pairs)
            mean_send[tensor] = total / len(pairs) if pairs else 0.0
        return mean_send[tensor]

    rank = [0.0] * len(tasks.ops)
    order = order_tasks(tasks, [0.0] * len(tasks.ops))
    place = {task: at for at, task in enumerate(order)}
    for task in reversed(order):
        rank[task] += float(costs.seconds[task].mean())
        for source, tensor in tasks.reads[task]:
            rank[source] = max(rank[source], rank[task] + move_s(tensor))
    # If ranks are equal, which happens only for tasks without work, the maker comes before the reader.
    return sorted(order, key=lambda task: (-rank[task], place[task]))


def order_tasks(tasks: Tasks, starts: Sequence[float]) -> list[int]:
    """Return all tasks, each after those that it reads, otherwise ordered by start."""
    waiting = [len({source for source, _ in reads}) for reads in tasks.reads]
    readers = tasks.readers()
    ready = sorted((starts[task], task) for task, count in enumerate(waiting) if not count)
    order: list[int] = []
    while ready:
        task = ready.pop(0)[1]
        order.append(task)
        for reader in readers[task]:
            waiting[reader] -= 1
            if not waiting[reader]:
                bisect.insort(ready, (starts[reader], reader))
    return order
