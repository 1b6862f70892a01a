"""An independent simulation of a SOAP strategy: sets of elements, dictionaries, one event after the other."""

from itertools import product
from math import prod


def coordinates(degrees):
    return list(product(*(range(int(d)) for d in degrees)))


def interval(edge, dim, soap_dim, degrees, place, *, reads):
    length = edge.length[dim]
    if soap_dim < 0:
        return set(range(length))
    degree, at = int(degrees[soap_dim]), place[soap_dim]
    if not reads:
        return set(range(at * length // degree, (at + 1) * length // degree))
    own, stride, before, window = edge.window[dim]
    found = set()
    for position in range(at * own // degree, (at + 1) * own // degree):
        found |= set(range(position * stride - before, position * stride - before + window))
    # What a stride jumps over between the first and the last is fetched with it.
    return set(range(min(found), max(found) + 1)) & set(range(length))


class Tasks:
    """Tasks by number: time, what they hold, what they wait for; the numbers of the syncs."""

    def __init__(self, problem, strategy):
        self.layers, self.edges, self.weights, self.machine, _ = problem
        self.strategy, self.time, self.holds, self.waits, self.syncs = strategy, {}, {}, {}, []
        self.width = 1
        while self.width < max(int(table.degrees.prod(axis=1).max()) for table in self.layers):
            self.width *= 2
        self.degrees = [self.layers[o].degrees[row] for o, (row, _) in enumerate(strategy)]
        self.backward = len(self.layers) * self.width
        self.transfers = 2 * self.backward
        self.first_sync = self.transfers + 2 * len(self.edges) * self.width**2
        for layer in range(len(self.layers)):
            self.add_passes(layer)
        for number, edge in enumerate(self.edges):
            self.add_edge(number, edge)
        for number, weight in enumerate(self.weights):
            self.add_weight(number, weight)

    def links(self, a, b):
        return [("link", int(h)) for h in self.machine.hops[a, b] if h >= 0]

    def add_passes(self, layer):
        table, (row, devices) = self.layers[layer], self.strategy[layer]
        for i, device in enumerate(devices):
            forward = layer * self.width + i
            for number, way in ((forward, 0), (self.backward + forward, 1))[: 1 + table.trains]:
                self.time[number] = int(table.pass_ps[row, self.machine.kind[device], way])
                self.holds[number], self.waits[number] = [("device", int(device))], set()
            if table.trains:
                self.waits[self.backward + forward].add(forward)

    def add_edge(self, at, edge):
        makers, readers = (list(enumerate(coordinates(self.degrees[o]))) for o in (edge.source, edge.target))
        for (j, made), (i, read) in product(makers, readers):
            count = prod(
                len(
                    interval(edge, d, edge.made_by[d], self.degrees[edge.source], made, reads=False)
                    & interval(edge, d, edge.read_by[d], self.degrees[edge.target], read, reads=True)
                )
                for d in range(len(edge.length))
            )
            if count:
                self.add_pair(at, edge, j, i, count * edge.element_bytes)

    def add_pair(self, at, edge, j, i, num_bytes):
        maker, reader = edge.source * self.width + j, edge.target * self.width + i
        a, b = int(self.strategy[edge.source][1][j]), int(self.strategy[edge.target][1][i])
        for way in range(1 + edge.has_gradient):
            here, there = (b, a) if way else (a, b)
            first, last = (self.backward + reader, self.backward + maker) if way else (maker, reader)
            if a == b:
                self.waits[last].add(first)
                continue
            number = self.transfers + ((way * len(self.edges) + at) * self.width + j) * self.width + i
            wire = int(self.machine.latency_ps[here, there]) + int(num_bytes * self.machine.byte_ps[here, there])
            self.time[number] = max(1, wire)
            self.holds[number], self.waits[number] = self.links(here, there), {first}
            self.waits[last].add(number)

    def add_weight(self, at, weight):
        shards, split = {}, [d for d in range(3) if weight.splits[d]]
        for i, place in enumerate(coordinates(self.degrees[weight.layer])):
            shards.setdefault(tuple(place[d] for d in split), []).append(i)
        for s, members in enumerate(sorted(shards)):
            ring = sorted({int(self.strategy[weight.layer][1][i]) for i in shards[members]})
            if len(ring) < 2 or not weight.num_bytes:
                continue
            pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
            size = weight.num_bytes / len(shards) / len(ring)
            slowest = max(self.machine.latency_ps[a, b] + size * self.machine.byte_ps[a, b] for a, b in pairs)
            number = self.first_sync + at * self.width + s
            self.syncs.append(number)
            self.time[number] = max(1, int(2 * (len(ring) - 1) * slowest))
            self.holds[number] = [link for a, b in pairs for link in self.links(a, b)]
            self.waits[number] = {self.backward + weight.layer * self.width + i for i in shards[members]}

    def fixed_end(self, penalty):
        """What follows the last end: the longest optimizer step, and the penalty for memory."""
        memory, update = [[0] * len(self.machine.kind) for _ in range(2)]
        for table, (row, devices) in zip(self.layers, self.strategy, strict=True):
            for device in devices:
                memory[device] += int(table.held_bytes[row])
                update[device] += int(table.update_ps[row, self.machine.kind[device]])
        pairs = zip(memory, self.machine.limit_bytes, strict=True)
        return max(update) + penalty * sum(max(0, held - int(limit)) for held, limit in pairs)


def simulate(problem, strategy, penalty=7):
    """Step time in ps, and (ready, end) of each task by its number."""
    tasks = Tasks(problem, strategy)
    late = set(tasks.syncs) if problem[-1] else set()
    times = {}
    for group in (set(tasks.time) - late, late):
        barrier = max([end for _, end in times.values()], default=0)
        free, left = {}, set(group)
        while left:
            ready = {
                t: barrier if t in late else max([times[p][1] for p in tasks.waits[t]], default=0)
                for t in left
                if t in late or all(p in times for p in tasks.waits[t])
            }
            task = min(ready, key=lambda t: (ready[t], t))
            end = max([ready[task], *(free.get(what, 0) for what in tasks.holds[task])]) + tasks.time[task]
            free.update(dict.fromkeys(tasks.holds[task], end))
            times[task] = ready[task], end
            left.remove(task)
    return max(end for _, end in times.values()) + tasks.fixed_end(penalty), times
