"""Programs of some 10^4 instructions on 8 devices, and what simulating a change takes beside a full run."""

from __future__ import annotations

import time

import numpy as np
from bare_network import bare_network
from long_pipeline import pipeline

from meshwright.simulator.delta import DeltaSimulation
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import Network, durations, with_durations

DEVICES = 8


def noisy(network: Network, spread: float) -> Network:
    """Durations that differ by up to a share."""
    factor = 1 + spread * np.random.default_rng(0).uniform(-1, 1, len(network.cost_class))
    return with_durations(network, np.rint(1000 * durations(network) * factor).astype(np.int64), network.mark_shift_ps)


def on_shared_nics(network: Network, num_ranks: int) -> Network:
    """What so many ranks in a row send in either direction takes one link."""
    links = np.arange(len(network.route_links)) // (2 * num_ranks)
    return network._replace(num_private=0, route_links=links.astype(np.int32))


def op_graph(count: int, span: int) -> tuple[Network, int]:
    """Ops at random on devices, each of which reads from two of the ``span`` before it."""
    rng = np.random.default_rng(0)
    device = rng.integers(0, DEVICES, count)
    inputs = [np.unique(rng.integers(max(0, i - span), i, 2)) if i else np.zeros(0, np.int64) for i in range(count)]
    order = np.argsort(device, kind="stable")
    number = np.empty(count, np.int64)
    number[order] = np.arange(count)
    waits = [number[inputs[i]] for i in order]
    network = bare_network(
        stream_offsets=np.concatenate([[0], np.cumsum(np.bincount(device, minlength=DEVICES))]),
        cost_class=np.arange(count, dtype=np.int32),
        class_ps=rng.integers(1_000, 1_000_000, count),
        wait_offsets=np.cumsum([0, *map(len, waits)]).astype(np.int32),
        waits=np.concatenate(waits).astype(np.int32),
    )
    return network, 0


def cases() -> dict[str, tuple[Network, int]]:
    """By name: a network and its number of links."""
    network, num_links = pipeline(DEVICES, 208)
    return {
        "1F1B": (network, num_links),
        "1F1B, durations ± 20 %": (noisy(network, 0.2), num_links),
        "1F1B ± 20 %, NICs of two": (on_shared_nics(noisy(network, 0.2), 2), num_links),
        "1F1B ± 20 %, one NIC": (on_shared_nics(noisy(network, 0.2), DEVICES), num_links),
        "ops, inputs from the last 50": op_graph(10_000, 50),
        "ops, inputs from the last 2000": op_graph(10_000, 2000),
    }


def measure_changes(network: Network, num_links: int, count: int) -> tuple[float, float]:
    """Median and largest time of a change over that of a full run; some instruction gets 0.5 to 1.5 of its time.

    Each is the best of some in alternation, of many for the changes that seem the slowest. All are compared with the
    full run and taken back.
    """
    rng, simulation = np.random.default_rng(1), DeltaSimulation(network, num_links)
    duration_ps = durations(network)
    drawn = rng.integers(len(duration_ps), size=count)
    wanted = (duration_ps[drawn] * rng.uniform(0.5, 1.5, count)).astype(np.int64) + 1
    _ratio(simulation, num_links, int(drawn[0]), int(wanted[0]), 10)
    ratios = np.array(
        [_ratio(simulation, num_links, i, d, 3) for i, d in zip(drawn.tolist(), wanted.tolist(), strict=True)]
    )
    slowest = np.argsort(ratios)[-10:].tolist()
    worst = max(_ratio(simulation, num_links, int(drawn[k]), int(wanted[k]), 300) for k in slowest)
    return float(np.median(ratios)), worst


def _ratio(simulation: DeltaSimulation, num_links: int, i: int, duration_ps: int, repeats: int) -> float:
    ours, full = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        simulation.change(i, duration_ps)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        ends = run_network(simulation.network, num_links).end_ps
        full.append(time.perf_counter() - start)
        assert np.array_equal(ends, simulation.end_ps), "not the result of a full run"
        simulation.undo()
    return min(ours) / min(full)
