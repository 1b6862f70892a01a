"""Eager batching under deadlines as a plain event simulation: a list for each queue, a heap of ends, and loops.

A queue is ready from the moment on at which one more request could not join its first one's batch, until it runs or is
empty. An idle device takes, of the ready queues, the one whose batch has to begin first; of the others, the one that is
ready next. It drops what cannot be met even alone, and runs the largest batch of first requests that is in time.
Requests of a ready queue that cannot be met any more are dropped the nanosecond after.
"""

from __future__ import annotations

import heapq

from meshwright.spec import Deployment


def nanoseconds(seconds):
    return round(seconds * 1e9)


def serve_eagerly(deployment: Deployment, moments, owners):  # noqa: C901 (one thing, told in one place)
    """Counts (arrived, in time, batches, dropped) of each model, and the sizes of all batches in order."""
    models = [model for model in deployment.models for _ in range(model.copies)]
    slo = [nanoseconds(model.slo) for model in models]
    delay, slack = nanoseconds(deployment.delay), nanoseconds(deployment.slack)
    num_devices = deployment.devices

    def length(model, batch):
        seconds = models[model].latency.alpha * batch + models[model].latency.beta
        return nanoseconds(seconds) if batch <= models[model].latency.largest and seconds <= models[model].slo else None

    waiting = [[] for _ in models]  # deadlines less the slack
    counts = [[0, 0, 0, 0] for _ in models]
    sizes, ready = [], set()
    idle, ends = list(range(num_devices)), []

    largest = [max(b for b in range(1, each.latency.largest + 1) if length(m, b)) for m, each in enumerate(models)]

    def drop(model, now):
        while waiting[model] and waiting[model][0] < now + delay + length(model, 1):
            waiting[model].pop(0)
            counts[model][3] += 1

    def most(model, room, limit):
        batch = 1
        while batch < limit and length(model, batch + 1) is not None and length(model, batch + 1) <= room:
            batch += 1
        return batch

    def look(model, now):
        """Drop what is late; is the queue ready now?"""
        drop(model, now)
        if not waiting[model]:
            ready.discard(model)
        elif window(model)[0] <= now:
            ready.add(model)

    def begin(model, now):
        """Run what there is on the first idle device, if there is something that can be met."""
        look(model, now)
        if waiting[model]:
            batch = most(model, waiting[model][0] - now - delay, len(waiting[model]))
            del waiting[model][:batch]
            device = heapq.heappop(idle)
            heapq.heappush(ends, (now + delay + length(model, batch), device))
            counts[model][1] += batch
            counts[model][2] += 1
            sizes.append(batch)
            ready.discard(model)
            look(model, now)

    def window(model):
        """From when on one more request could not join the largest possible batch, and until when that can begin."""
        first = waiting[model][0] - delay
        batch = min(len(waiting[model]), largest[model])
        is_full = batch == largest[model]
        return -1 if is_full else first - length(model, batch + 1), first - length(model, batch)

    def rank(model):
        begins, ends_at = window(model)
        return (0, ends_at, model) if model in ready else (1, begins, model)

    def look_next(model):
        """When something follows for a queue without any event."""
        return waiting[model][0] - delay - length(model, 1) + 1 if model in ready else window(model)[0]

    at = 0
    while True:
        timer = min((look_next(model) for model, queue in enumerate(waiting) if queue), default=None)
        moments_ahead = [moments[at]] if at < len(moments) else []
        moments_ahead += [ends[0][0]] if ends else []
        moments_ahead += [timer] if timer is not None else []
        if not moments_ahead:
            return counts, sizes
        now = min(moments_ahead)
        if ends and ends[0][0] <= now:
            heapq.heappush(idle, heapq.heappop(ends)[1])
            while idle and any(waiting):
                begin(min(rank(model) for model, queue in enumerate(waiting) if queue)[2], now)
        elif timer is not None and timer <= now:
            for model, queue in enumerate(waiting):
                if queue and look_next(model) <= now:
                    look(model, now)
        else:
            model = int(owners[at])
            counts[model][0] += 1
            if moments[at] + slo[model] - slack < now + delay + length(model, 1):
                counts[model][3] += 1
            else:
                waiting[model].append(moments[at] + slo[model] - slack)
                look(model, now)
                while idle and waiting[model]:
                    begin(model, now)
            at += 1
