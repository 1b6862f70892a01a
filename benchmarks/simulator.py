"""The engine of the simulator: CPU time per instruction and per event, on one core, and its start in a new process.

Programs of 1F1B pipelines, unrolled before the clock starts; what is timed is `run_network`, all its arrays included.
"Shared" are instructions that want a link which others want too.

    private      64 stages x 512 microbatches in one node: every link has one user
    2 % shared   8 pipelines of 8 stages, one per node: sums of gradients through one network card per node
    30 % shared  64 stages on 64 nodes: sends in both directions meet in network cards

For `fair`, an event is the beginning or the end of a transfer on shared links, and the whole time goes to them, that of
the other instructions too; once with durations that make many events coincide, once with durations that
differ by up to 20 % (seed 0), so that none do.

`joins` are workers in rounds (`join_rounds.py`): every instruction goes on when k of the n of the round before ended.

`delta` is a change of one duration of some 10^4 instructions (`delta_changes.py`) beside a full run, both with all that
they hand back.

`linear` has pipelines of 10^5 to 10^8 instructions (`long_pipeline.py`), each once in a process of its own, so that the
time holds what the system takes to hand out fresh memory; `bytes` is all that such a process holds for the network, its
ends and what the engine needs meanwhile.

CPU time of this process, best of all runs: on a loaded machine other processes take caches and memory away, which
makes runs slower and never faster. The spread is that of all runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from delta_changes import cases as delta_cases
from delta_changes import measure_changes
from harness import make_row, parse_options, publish
from join_rounds import join_rounds
from long_pipeline import measure_apart

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshwright.program import build_program
from meshwright.simulator import price_program
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import collectives, durations, routes, with_durations
from meshwright.simulator.unroll import unroll
from meshwright.spec import Workload
from meshwright.spec.plan import GradientExchange, Plan, StagePlan
from tests.graphs import chain_graph
from tests.simulator.plans import FixedCost, small_cluster

# Issue: under `queued` 40 M and 7 M instructions per second, 3 M with joins everywhere; 1 M events per second under
# `fair`; start in 0.5 s; 40 bytes per instruction; a change in half of a full run, and never in more than 1.2 of one.
QUEUED_NS, BUSY_NS, JOIN_NS, EVENT_NS, START_S, MOST_BYTES = 1e3 / 40, 1e3 / 7, 1e3 / 3, 1e3 / 1, 0.5, 40
MEDIAN_CHANGE, WORST_CHANGE = 1 / 2, 1.2
START = """
import time
start = time.process_time()
import numba, numpy as np
libraries = time.process_time()
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import Network
imported = time.process_time()
ids = lambda *values: np.array(values, np.int64)
columns = lambda *values: np.array(values, np.int32)
network = Network(ids(0, 1), columns(0), ids(5), columns(0, 0), columns(), columns(), ids(), columns(0), 0,
    ids(0, 1), columns(0), columns(), columns(), columns(), columns(), columns())
assert run_network(network, 1).end_ps[0] == 5
print(time.process_time() - imported + libraries - start, time.process_time() - start)
"""


def unrolled(num_nodes, num_devices, num_stages, num_replicas, num_microbatches, *, layers=1, num_steps=1):
    """A pipeline per replica; stage s of replica k is device s of node k where nodes hold whole pipelines."""
    graph = chain_graph(num_stages * layers)
    plan = Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="small",
        workload=Workload(global_batch=num_microbatches),
        num_microbatches=num_microbatches,
        stages=tuple(
            StagePlan(
                start=stage * layers,
                stop=(stage + 1) * layers,
                ranks=tuple(stage + replica * num_stages for replica in range(num_replicas)),
            )
            for stage in range(num_stages)
        ),
        exchange=GradientExchange(bucket_bytes=1),
    )
    cluster = small_cluster(num_nodes, num_devices)
    times = {"forward": 1e-6 / layers, "backward": 2e-6 / layers, "send": 1e-7, "all_reduce": 1e-6, "optimizer": 1e-6}
    cost = FixedCost(cluster=cluster, **times)
    program = build_program(plan, graph)
    made = unroll(program, price_program(program, plan, graph, cost), num_steps)
    return made.network, made.num_links


def shared(network):
    return routes(network) >= network.num_private


def num_events(network):
    """Two per transfer on shared links; a collective is one transfer."""
    sends = shared(network) & (collectives(network) < 0)
    return 2 * (int(sends.sum()) + int((network.collective_route >= network.num_private).sum()))


def with_noise(network):
    factor = np.random.default_rng(0).uniform(0.8, 1.2, len(network.cost_class))
    duration_ps = np.rint(durations(network) * factor).astype(np.int64)
    return with_durations(
        network, duration_ps, np.maximum(network.mark_shift_ps, -duration_ps[network.mark_instruction])
    )


def cpu_seconds(network, num_links, contention, repeats):
    seconds = np.empty(repeats)
    run_network(network, num_links, contention)
    for k in range(repeats):
        start = time.process_time()
        run_network(network, num_links, contention)
        seconds[k] = time.process_time() - start
    return seconds


def row(name, seconds, count, unit, target):
    low, high = np.quantile(seconds, [0.1, 0.9])
    spread = float(high - low) / 2 / float(np.median(seconds))
    return make_row(name, float(seconds.min()) / count, unit, spread=spread, target=target)


def main() -> int:
    options = parse_options(__doc__)
    repeats = 5 if options.quick else 40
    cases = {
        "private": (unrolled(1, 64, 64, 1, 512), QUEUED_NS),
        "2 % shared": (unrolled(8, 8, 8, 8, 8 * 40, layers=4, num_steps=20), QUEUED_NS),
        "30 % shared": (unrolled(64, 1, 64, 1, 512), BUSY_NS),
    }
    rows, notes = [], []
    for name, ((network, num_links), target) in cases.items():
        seconds, count = cpu_seconds(network, num_links, "queued", repeats), len(network.cost_class)
        rows.append(row(f"queued, {name}", seconds, count / 1e9, "ns per instruction", target))
        share = shared(network).mean()
        notes.append(
            f"{name}: {count} instructions, {share:.1%} on shared links, {count / seconds.min() / 1e6:.1f} M/s"
        )
    network, num_links = cases["30 % shared"][0]
    for name, changed in (("coinciding", network), ("apart", with_noise(network))):
        seconds, count = cpu_seconds(changed, num_links, "fair", repeats), num_events(changed)
        rows.append(row(f"fair, events {name}", seconds, count / 1e9, "ns per event", EVENT_NS))
        notes.append(f"fair, {name}: {count} events, {count / seconds.min() / 1e6:.2f} M/s")
    for need, num_workers in ((3, 4), (6, 8), (4, 8)):
        network, num_links = join_rounds(num_workers, need, 200_000 // num_workers)
        seconds, count = cpu_seconds(network, num_links, "queued", repeats), len(network.cost_class)
        rows.append(row(f"queued, joins {need} of {num_workers}", seconds, count / 1e9, "ns per instruction", JOIN_NS))
    for name, (network, num_links) in delta_cases().items():
        middle, worst = measure_changes(network, num_links, 200 if options.quick else 2000)
        # Where durations are equal a change moves most of what comes after it: only the worst case is bounded.
        target = None if name == "1F1B" else MEDIAN_CHANGE
        rows.append(make_row(f"delta, {name}: median", middle, "of a full run", target=target))
        rows.append(make_row(f"delta, {name}: worst", worst, "of a full run", target=WORST_CHANGE))
    sizes = [measure_apart(10**power) for power in range(5, 8 if options.quick else 9)]
    for size in sizes:
        name, value = f"linear, {size['count']:.3g} instructions", size["seconds"] / size["count"] * 1e9
        rows.append(make_row(name, value, "ns per instruction"))
    rows.append(make_row("the largest of these", sizes[-1]["bytes"], "bytes per instruction", target=MOST_BYTES))
    command = [sys.executable, "-c", START]
    outputs = [subprocess.run(command, capture_output=True, check=True).stdout.split() for _ in range(repeats // 4 + 2)]
    starts = np.array(outputs[1:], float).T
    rows.append(row("cached start: numpy, numba, first run", starts[0], 1, "CPU s", START_S))
    rows.append(row("the same with all of the package", starts[1], 1, "CPU s", None))
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return publish("simulator", rows, options, "; ".join(notes) + f". CPU time, best of {repeats} runs, {load}.")


if __name__ == "__main__":
    sys.exit(main())
