"""What simulating a change takes beside a full run: programs of some 10^4 instructions on 8 devices.

A change gives one instruction, drawn uniformly, 0.5 to 1.5 of its time, and is taken back; or it is kept, and the next
one comes on top of it. `placement_moves` has changes of place.
"""

from __future__ import annotations

import time

import numpy as np
from bare_network import bare_network
from harness import Row, make_row
from long_pipeline import pipeline
from placement_moves import measure_moves

from meshwright.simulator.delta import DeltaSimulation
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import Network, durations, with_durations

DEVICES = 8
# Issue: a change in half of a full run, and never in more than 1.2 of one.
MEDIAN_CHANGE, WORST_CHANGE = 1 / 2, 1.2


def noisy(network: Network, spread: float) -> Network:
    """Durations that differ by up to a share."""
    factor = 1 + spread * np.random.default_rng(0).uniform(-1, 1, len(network.cost_class))
    return with_durations(network, np.rint(1000 * durations(network) * factor).astype(np.int64), network.mark_shift_ps)


def on_shared_nics(network: Network, num_ranks: int) -> Network:
    """A network in which each group of ``num_ranks`` consecutive ranks shares one link per direction."""
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


def delta_rows(quick: bool) -> list[Row]:
    """Rows of all cases, and of moved ops."""
    rows = []
    for name, (network, num_links) in cases().items():
        middle, worst = measure_changes(network, num_links, 200 if quick else 2000)
        rows.append(make_row(f"delta, {name}: median", middle, "of a full run", target=MEDIAN_CHANGE))
        rows.append(make_row(f"delta, {name}: worst", worst, "of a full run", target=WORST_CHANGE))
        kept = measure_kept(network, num_links, 100 if quick else 500)
        rows.append(make_row(f"delta, {name}: all kept", kept, "of full runs"))
    found = measure_moves(500, 40 if quick else 300)
    for name, full in (("built, estimated and run", found.built + found.estimated), ("built and run", found.built)):
        ratios = found.followed / full
        unit = f"of the placement {name}"
        rows.append(
            make_row(f"delta, an op moves: median, {name}", float(np.median(ratios)), unit, target=MEDIAN_CHANGE)
        )
        rows.append(make_row(f"delta, an op moves: worst, {name}", float(ratios.max()), unit, target=WORST_CHANGE))
    alone = float(np.median(found.followed / found.run))
    rows.append(make_row("delta, an op moves: median, run alone", alone, "of the engine's part of it"))
    rows.append(make_row("delta, an op moves", 1e3 * float(np.median(found.followed)), "ms"))
    rows.append(make_row("delta, taking that back", 1e3 * float(np.median(found.undone)), "ms"))
    return rows


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


def measure_kept(network: Network, num_links: int, count: int) -> float:
    """Time of changes that all stay, over that of full runs; each gets 0.8 to 1.2 of what it took at first.

    The first tenth is not counted: it loads what other changes did not need.
    """
    rng, simulation = np.random.default_rng(2), DeltaSimulation(network, num_links)
    duration_ps, ours, full = durations(network), 0.0, 0.0
    for number, i in enumerate(rng.integers(len(duration_ps), size=count).tolist()):
        start = time.perf_counter()
        simulation.change(i, int(duration_ps[i] * rng.uniform(0.8, 1.2)) + 1)
        middle = time.perf_counter()
        ends = run_network(simulation.network, num_links).end_ps
        if number >= count // 10:
            ours, full = ours + middle - start, full + time.perf_counter() - middle
        assert np.array_equal(ends, simulation.end_ps), "not the result of a full run"
    return ours / full


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
