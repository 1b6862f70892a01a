"""An event simulation of eager batching in plain Python: lists, a heap, and nothing of the package but the facts."""

from __future__ import annotations

import heapq


def serve_eagerly(models, arrivals, owners, num_devices):
    """Requests in time and dropped ones, by model; models are (ns of batches from 1 on, SLO in ns).

    On an idle device the queue with the first deadline runs as large a batch as is in time; first requests that cannot
    even be met alone are dropped.
    """
    queues = [[] for _ in models]
    idle, ends = num_devices, []
    in_time, dropped = [0] * len(models), [0] * len(models)

    def drop(now, which):
        latency = models[which][0]
        while queues[which] and queues[which][0] < now + latency[0]:
            queues[which].pop(0)
            dropped[which] += 1

    def run(now):
        nonlocal idle
        while idle:
            for which in range(len(models)):
                drop(now, which)
            ready = [which for which in range(len(models)) if queues[which]]
            if not ready:
                return

            which = min(ready, key=lambda which: queues[which][0])
            latency = models[which][0]
            size = min(len(queues[which]), len(latency))
            while now + latency[size - 1] > queues[which][0]:
                size -= 1
            del queues[which][:size]
            in_time[which] += size
            idle -= 1
            heapq.heappush(ends, now + latency[size - 1])

    place = 0
    while place < len(arrivals) or ends:
        if ends and (place == len(arrivals) or ends[0] <= arrivals[place]):
            now = heapq.heappop(ends)
            idle += 1
        else:
            now, which = arrivals[place], owners[place]
            queues[which].append(now + models[which][1])
            place += 1
        run(now)
    for which in range(len(models)):
        dropped[which] += len(queues[which])
    return in_time, dropped
