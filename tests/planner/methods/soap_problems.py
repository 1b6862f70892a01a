"""Small SOAP problems drawn at random, as lists of layers, edges and weights, and strategies in them."""

from itertools import product

import numpy as np

from meshwright.planner.methods.flexflow.soap_spaces import Edge, LayerTable, SoapMachine, Weight, assemble

SIZE = 12


def draw_problem(random, *, num_layers=5, num_devices=4, num_nodes=2, barrier=False, most_ps=40):
    """Layers, edges, weights, machine and options of a random problem; ties are frequent where ``most_ps`` is small."""
    num_kinds = int(random.integers(1, 3))
    degrees = [d for d in product((1, 2, 3, 4), repeat=3) if np.prod(d) <= num_devices]
    layers, edges, weights = [], [], []
    for layer in range(num_layers):
        chosen = [degrees[0], *(d for d in degrees[1:] if random.random() < 0.6)]
        count = len(chosen)
        layers.append(
            LayerTable(
                degrees=np.array(chosen, np.int64),
                pass_ps=random.integers(1, most_ps, (count, num_kinds, 2)),
                update_ps=random.integers(0, 5, (count, num_kinds)),
                held_bytes=random.integers(0, 10, count),
                trains=bool(layer or random.random() < 0.7),
            )
        )
        sources = [source for source in range(max(0, layer - 3), layer) if random.random() < 0.5]
        edges += [_draw_edge(random, layers, source, layer) for source in sources]
        for _ in range(int(random.integers(0, 3)) if layers[-1].trains else 0):
            splits = tuple(bool(random.random() < 0.5) for _ in range(3))
            weights.append(Weight(layer=layer, num_bytes=int(random.integers(0, 50)), splits=splits))
    return layers, edges, weights, draw_machine(random, num_devices, num_nodes, num_kinds), barrier


def _draw_edge(random, layers, source, target):
    length, made_by, read_by, window = [], [], [], []
    wanted = random.permutation([-1, 0, 1, 2])
    for dim, own in enumerate(random.permutation(3)):
        length.append(SIZE)
        made_by.append(int(own))
        read_by.append(int(wanted[dim]))
        slides = [(SIZE, 1, 0, 1), (SIZE, 1, 1, 3), (SIZE // 2, 2, 1, 3), (SIZE // 2, 2, 0, 1)]
        window.append(slides[random.integers(len(slides))])
    return Edge(
        source=source,
        target=target,
        length=tuple(length),
        made_by=tuple(made_by),
        read_by=tuple(read_by),
        window=tuple(window),
        element_bytes=int(random.integers(1, 3)),
        has_gradient=layers[source].trains and layers[target].trains and bool(random.random() < 0.9),
    )


def draw_machine(random, num_devices, num_nodes, num_kinds):
    """Devices spread over nodes: a link per pair in a node, a NIC out and a NIC in of each node between them."""
    node = np.arange(num_devices) * num_nodes // num_devices
    hops = np.full((num_devices, num_devices, 2), -1, np.int64)
    for a, b in product(range(num_devices), repeat=2):
        if a != b and node[a] == node[b]:
            hops[a, b, 0] = a * num_devices + b
        elif a != b:
            hops[a, b] = num_devices**2 + 2 * node[a], num_devices**2 + 2 * node[b] + 1
    return SoapMachine(
        kind=random.integers(0, num_kinds, num_devices),
        limit_bytes=random.integers(0, 30, num_devices),
        latency_ps=random.integers(0, 4, (num_devices, num_devices)),
        byte_ps=random.uniform(0, 0.05, (num_devices, num_devices)),
        hops=hops,
        num_links=num_devices**2 + 2 * num_nodes,
    )


def draw_configuration(random, table, num_devices):
    """A candidate (row of the table) and devices, several parts on one device included."""
    row = int(random.integers(len(table.degrees)))
    return row, random.integers(0, num_devices, int(table.degrees[row].prod()))


def draw_strategy(random, layers, num_devices):
    return [draw_configuration(random, table, num_devices) for table in layers]


def as_arrays(soap, strategy):
    """Candidates (n,) and devices (n, P) of a list of configurations."""
    candidates = soap.candidates[:-1] + np.array([row for row, _ in strategy])
    devices = np.zeros((len(strategy), 1 << soap.shift), np.int64)
    for row, (_, own) in zip(devices, strategy, strict=True):
        row[: len(own)] = own
    return candidates, devices


def make_soap(problem, penalty=7):
    layers, edges, weights, machine, barrier = problem
    return assemble(layers, edges, weights, machine, barrier=barrier, penalty_ps_per_byte=penalty)
