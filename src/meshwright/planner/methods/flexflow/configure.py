"""Change the configuration of a layer of a strategy, and update its task graph. Compiled.

Each task waits for the tasks behind the arrow:

    forward of a part    ← the forwards whose results it reads, on its device or by transfers
    backward of a part   ← its forward, and the backwards of the parts that read its result
    transfer             ← the pass that sends it
    sync of a shard      ← the backwards of all parts that hold the shard (all-reduce of its gradient)

A pass occupies its device; transfers and syncs occupy the links that they use. The transfers of an edge follow from
which parts of its two layers intersect (`soap_arrays`). Parts hold the same shard of a weight if they have the same
position along every SOAP dim that splits the weight. The ring all-reduce of n devices, in ascending order, moves
2 (n - 1) / n of the shard over each of its links, in 2 (n - 1) messages:

    sync = 2 (n - 1) (latency + bytes / n * seconds per byte)    of the slowest link of the ring
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.flexflow.soap_arrays import (
    AFTER,
    BEFORE,
    HELD,
    TIME,
    Integers,
    Lists,
    Soap,
    Strategy,
)


@compiled
def configure(soap: Soap, strategy: Strategy, layer: int, candidate: int, devices: Integers) -> None:
    """Split a layer by row ``candidate`` of the degrees, with part i on ``devices[i]``, and update the task graph.

    Layers that share an edge with this layer must have a configuration, or never have had one (candidate -1).
    """
    if strategy.candidate[layer] >= 0:
        _hold(soap, strategy, layer, -1)
    strategy.candidate[layer] = candidate
    for part in range(soap.parts[candidate]):
        strategy.device[layer, part] = devices[part]
    _hold(soap, strategy, layer, 1)
    _begin_passes(soap, strategy, layer)
    for weight in range(soap.weight_offsets[layer], soap.weight_offsets[layer + 1]):
        _share_out(soap, strategy, weight)
    for k in range(soap.in_offsets[layer], soap.in_offsets[layer + 1]):
        if strategy.candidate[soap.source[soap.in_edges[k]]] >= 0:
            _connect(soap, strategy, soap.in_edges[k])
    for k in range(soap.out_offsets[layer], soap.out_offsets[layer + 1]):
        if strategy.candidate[soap.target[soap.out_edges[k]]] >= 0:
            _connect(soap, strategy, soap.out_edges[k])


@compiled
def configure_all(soap: Soap, strategy: Strategy, candidates: Integers, devices: Integers) -> None:
    """Configure all n layers from scratch; ``candidates`` (n,) and ``devices`` (n, P) are as in `configure`."""
    strategy.candidate[:] = -1
    strategy.memory_bytes[:] = 0
    strategy.update_ps[:] = 0
    for layer in range(len(candidates)):
        configure(soap, strategy, layer, candidates[layer], devices[layer])


@compiled
def _hold(soap: Soap, strategy: Strategy, layer: int, sign: int) -> None:
    """Add (sign 1) or subtract (-1) the memory and the optimizer time of a layer's parts, per device."""
    candidate = strategy.candidate[layer]
    for part in range(soap.parts[candidate]):
        device = strategy.device[layer, part]
        strategy.memory_bytes[device] += sign * soap.held_bytes[candidate]
        strategy.update_ps[device] += sign * soap.update_ps[candidate, soap.kind[device]]


@compiled
def _begin_passes(soap: Soap, strategy: Strategy, layer: int) -> None:
    """Write down what the passes of a layer take and hold; a backward waits for its forward."""
    candidate, num_layers = strategy.candidate[layer], len(soap.trains)
    task, pool = strategy.task, strategy.pool
    for part in range(soap.parts[candidate]):
        device = strategy.device[layer, part]
        forward, backward = (layer << soap.shift) + part, ((num_layers + layer) << soap.shift) + part
        for way in range(2):
            number = backward if way else forward
            task[number, TIME] = soap.pass_ps[candidate, soap.kind[device], way]
            pool[task[number, HELD]], pool[task[number, HELD] + 1] = 1, device
        pool[task[forward, AFTER] + 1] = pool[task[backward, AFTER] + 1] = pool[task[backward, BEFORE] + 1] = 0
        if soap.trains[layer]:
            _append(pool, task[forward, AFTER] + 1, backward)
            _append(pool, task[backward, BEFORE] + 1, forward)


@compiled
def _append(pool: Lists, section: int, number: int) -> None:
    """Add a task to a section."""
    pool[section] += 1
    pool[section + pool[section]] = number


@compiled
def _connect(soap: Soap, strategy: Strategy, edge: int) -> None:
    """Set the transfers of an edge: between which parts of its two layers, and how long each takes."""
    source, target, task, pool = soap.source[edge], soap.target[edge], strategy.task, strategy.pool
    one, other = strategy.candidate[source], strategy.candidate[target]
    num_made, num_read, rank = soap.parts[one], soap.parts[other], soap.length.shape[1]
    made_by, read_by, share, place = soap.made_by[edge], soap.read_by[edge], strategy.share, soap.place
    for dim in range(rank):
        a = soap.degrees[one, made_by[dim]] if made_by[dim] >= 0 else 1
        b = soap.degrees[other, read_by[dim]] if read_by[dim] >= 0 else 1
        _intersect(soap.length[edge, dim], a, b, read_by[dim] >= 0, soap.window[edge, dim], share[dim])
    stride, shift, num_layers, num_devices = 1 + (1 << soap.shift), soap.shift, len(soap.trains), len(soap.kind)
    out_at, in_at = 1 + strategy.out_section[edge] * stride, 1 + strategy.in_section[edge] * stride
    for way in range(1 + soap.has_gradient[edge]):
        first_made, first_read = (way * num_layers + source) << shift, (way * num_layers + target) << shift
        for j in range(num_made):
            pool[task[first_made + j, BEFORE if way else AFTER] + out_at] = 0
        for i in range(num_read):
            pool[task[first_read + i, AFTER if way else BEFORE] + in_at] = 0
        for j in range(num_made):
            here = strategy.device[source, j]
            for i in range(num_read):
                num_bytes = soap.element_bytes[edge]
                for dim in range(rank):
                    x = place[one, j, made_by[dim]] if made_by[dim] >= 0 else 0
                    y = place[other, i, read_by[dim]] if read_by[dim] >= 0 else 0
                    num_bytes *= share[dim, x, y]
                if num_bytes == 0:
                    continue
                there = strategy.device[target, i]
                a, b = (there, here) if way else (here, there)
                first, last = (first_read + i, first_made + j) if way else (first_made + j, first_read + i)
                leave, arrive = (in_at, out_at) if way else (out_at, in_at)
                number, reached = last, first
                if a != b:
                    number = (((2 * num_layers + ((way * len(soap.source) + edge) << shift)) + j) << shift) + i
                    task[number, TIME] = max(1, soap.latency_ps[a, b] + np.int64(num_bytes * soap.byte_ps[a, b]))
                    _send(task, pool, number, first, last, soap.hops[a, b], num_devices)
                    reached = number
                _append(pool, task[first, AFTER] + leave, number)
                _append(pool, task[last, BEFORE] + arrive, reached)


@compiled
def _intersect(length: int, num_made: int, num_read: int, slides: bool, window: Integers, share: Integers) -> None:
    """Elements of a dim that part x makes and part y reads, into ``share[x, y]``; all of it unless a window slides."""
    own, stride, before, size = window
    for y in range(num_read):
        low, high = 0, length
        if slides:
            low = max(0, y * own // num_read * stride - before)
            high = min(length, ((y + 1) * own // num_read - 1) * stride - before + size)
        for x in range(num_made):
            start, stop = x * length // num_made, (x + 1) * length // num_made
            share[x, y] = max(0, min(stop, high) - max(start, low))


@compiled
def _send(task: Integers, pool: Lists, number: int, first: int, last: int, links: Integers, num_devices: int) -> None:
    """Let a transfer lead from one pass to another, over these links."""
    before, after, held = task[number, BEFORE], task[number, AFTER], task[number, HELD]
    pool[before + 1], pool[before + 2] = 1, first
    pool[after + 1], pool[after + 2] = 1, last
    pool[held] = 0
    for link in links:
        if link >= 0:
            _append(pool, held, num_devices + link)


@compiled
def _share_out(soap: Soap, strategy: Strategy, weight: int) -> None:
    """Set the syncs of a weight: which parts hold which shard, and how long the all-reduce of each shard takes."""
    layer, task, pool = soap.weight_layer[weight], strategy.task, strategy.pool
    candidate, splits = strategy.candidate[layer], soap.splits_weight[weight]
    num_shards, first_backward = 1, (len(soap.trains) + layer) << soap.shift
    for dim in range(len(splits)):
        num_shards *= soap.degrees[candidate, dim] if splits[dim] else 1
    first = ((2 * len(soap.trains) + weight) << soap.shift) + (2 * len(soap.source) << (2 * soap.shift))
    strategy.num_shards[weight] = num_shards
    for shard in range(num_shards):
        pool[task[first + shard, BEFORE] + 1] = 0
    for part in range(soap.parts[candidate]):
        shard = 0
        for dim in range(len(splits)):
            if splits[dim]:
                shard = shard * soap.degrees[candidate, dim] + soap.place[candidate, part, dim]
        _append(pool, task[first + shard, BEFORE] + 1, first_backward + part)
    for shard in range(num_shards):
        num_bytes = soap.weight_bytes[weight] / num_shards
        time = _ring(soap, task, pool, strategy.device[layer], first + shard, num_bytes)
        task[first + shard, TIME] = time
        if time > 0 and not soap.barrier:
            members = task[first + shard, BEFORE] + 1
            for k in range(members + 1, members + 1 + pool[members]):
                _append(pool, task[pool[k], AFTER] + 1, first + shard)


@compiled
def _ring(soap: Soap, task: Integers, pool: Lists, device: Integers, number: int, num_bytes: float) -> int:
    """Find the links of the all-reduce of a shard; picoseconds that it takes, 0 if one device has all of it."""
    num_devices, members, held = len(soap.kind), task[number, BEFORE] + 1, task[number, HELD]
    holds, last_part = np.zeros(num_devices, np.bool_), (1 << soap.shift) - 1
    for k in range(members + 1, members + 1 + pool[members]):
        holds[device[pool[k] & last_part]] = True
    ring = np.flatnonzero(holds)
    if len(ring) < 2 or num_bytes <= 0.0:
        return 0
    slowest = 0.0
    pool[held] = 0
    for k in range(len(ring)):
        here, there = ring[k], ring[k + 1 if k + 1 < len(ring) else 0]
        slowest = max(slowest, soap.latency_ps[here, there] + num_bytes / len(ring) * soap.byte_ps[here, there])
        for link in soap.hops[here, there]:
            if link >= 0:
                _append(pool, held, num_devices + link)
    return int(max(1.0, 2 * (len(ring) - 1) * slowest))
