"""Run one task of a SOAP simulation (`run_task`). Compiled."""

from __future__ import annotations

from meshwright.compiled import compiled
from meshwright.planner.methods.flexflow.soap_arrays import HELD, TIME, Integers, Lists


@compiled
def run_task(task: Integers, pool: Lists, free_ps: Integers, number: int, ready_ps: int) -> int:
    """Run task ``number`` once it is ready and its devices or links are free; return its end in picoseconds.

    ``free_ps`` of its devices and links is set to that end.
    """
    first = task[number, HELD] + 1
    count = pool[first - 1]
    if count == 1:
        end = max(ready_ps, free_ps[pool[first]]) + task[number, TIME]
        free_ps[pool[first]] = end
        return int(end)
    start = ready_ps
    for k in range(first, first + count):
        start = max(start, free_ps[pool[k]])
    end = start + task[number, TIME]
    for k in range(first, first + count):
        free_ps[pool[k]] = end
    return int(end)
