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

`controlled` is a parameter server (`controlled_workers.py`): all that `simulate_controlled` does, the policy in Python,
the log and the timeline too.

`linear` has pipelines of 10^5 to 10^8 instructions (`long_pipeline.py`), each once in a process of its own, so that the
time holds what the system takes to hand out fresh memory; `bytes` is all that such a process holds for the network, its
ends and what the engine needs meanwhile.
Orders are found for 8 stages x 64 microbatches whose times differ by up to a half and whose transfers take a tenth of a
forward, in the memory of 1F1B: 20 draws (seeds 0 to 19). The length is held against the best named schedule that fits,
and against the bound.

And whole plans. SC'21: the GPT of a trillion parameters on 3,072 GPUs (Narayanan et al. 2021, table 1), here as 64
stages of 48 replicas with 512 microbatches each, without tensor parallelism: building the program, estimating it, and
simulating it with memory, of the one pipeline that stands for all; everything together, and with every op of every
layer. Compiled code is loaded, and the cost model knows ops and collectives; program, costs of stages and routes are
made anew. A smaller plan is simulated with and without folding, and many plans with one process and with one per core
(wall time, so that it means something on idle cores only).

And the local graph of one of five ranks that split GPT-2 XL, nothing kept from before.

CPU time of this process, best of all runs: on a loaded machine other processes take caches and memory away, which
makes runs slower and never faster. The spread is that of all runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from controlled_workers import measure_controlled
from harness import make_row, paired_ratios, parse_options, publish, ratio_row
from join_rounds import join_rounds
from long_pipeline import measure_apart

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import meshwright.simulator.plan_simulation as simulating
from meshwright.cost import CostModel
from meshwright.program import StageTimes, build_folded_program, build_program, find_orders, shard_graph
from meshwright.program.build import forget_programs
from meshwright.program.sharding.dims import op_dims
from meshwright.simulator import estimate_program, simulate_plan, simulate_plans
from meshwright.simulator.engine import CONTENTIONS, run_network
from meshwright.simulator.network import collectives, durations, routes, with_durations
from meshwright.simulator.pipeline_alike import find_fold
from meshwright.simulator.simulate import record_run, run_program
from meshwright.simulator.unroll import unroll
from meshwright.spec import GradientExchange, Plan, Sharding, StagePlan, Workload, load_cluster, load_shipped_graph
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import FixedCost, small_cluster

# Issue: under `queued` 40 M and 7 M instructions per second, 3 M with joins everywhere; 1 M events per second under
# `fair`; start in 0.5 s; 40 bytes per instruction.
QUEUED_NS, BUSY_NS, JOIN_NS, EVENT_NS, START_S, MOST_BYTES = 1e3 / 40, 1e3 / 7, 1e3 / 3, 1e3 / 1, 0.5, 40
FOUND_S = 1.0
SHARDED_S = 0.1
# A step of 1T parameters built and simulated with memory in 10 ms, with every op in 1 s; many plans 1.9 x on 2 cores.
TRILLION_S, TRILLION_OPS_S, MANY_RATIO = 0.010, 1.0, 1 / 1.9
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
    made = unroll(program, estimate_program(program, plan, graph, cost), num_steps)
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


def replicated(graph, cluster, num_stages, num_replicas, num_microbatches, schedule="1f1b"):
    """A plan of equal pipelines, each on neighbouring devices, with ``num_microbatches`` microbatches each."""
    cuts = [len(graph.layers) * stage // num_stages for stage in range(num_stages + 1)]
    return Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=cluster.name,
        workload=Workload(global_batch=num_microbatches * num_replicas),
        num_microbatches=num_microbatches * num_replicas,
        schedule=schedule,
        stages=tuple(
            StagePlan(
                start=cuts[stage],
                stop=cuts[stage + 1],
                ranks=tuple(stage + replica * num_stages for replica in range(num_replicas)),
            )
            for stage in range(num_stages)
        ),
    )


def trillion_graph():
    """The graph of the trillion-parameter GPT, captured without weights."""
    from meshwright.capture import capture_model
    from meshwright.zoo import load_model

    shape = """schema = "meshwright/gptshape/1"
source = "Narayanan et al. 2021, table 1"
num_layers = 128
width = 25600
num_heads = 160
vocabulary = 51200
context = 2048
batch_size = 1
sequence_length = 2048
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt-1t.toml"
        path.write_text(shape)
        source = load_model(str(path), fake=True)
        captured = capture_model(
            source.model, source.inputs, targets=source.targets, loss=source.loss, name="gpt-1t", verify=False
        )
    return captured.graph


def trillion_rows(repeats):
    """Rows of the 1T step, and a note on what was simulated."""
    graph, cluster = trillion_graph(), load_cluster("384x8xA100")
    plan = replicated(graph, cluster, 64, 48, 512)
    cost = CostModel(cluster=cluster)
    result = simulate_plan(plan, graph, cluster, cost=cost, detail="ops")
    names = (
        "find what is alike",
        "build",
        "cost",
        "simulate with memory",
        "all, seconds per rank too",
        "with every op",
    )
    taken = {name: [] for name in names}
    for _ in range(repeats):
        forget_programs()
        marks = [time.process_time()]
        fold = find_fold(plan, graph, cluster)
        marks.append(time.process_time())
        program = build_folded_program(fold, graph)
        marks.append(time.process_time())
        costs = estimate_program(program, fold.plan, graph, cost, fold=fold)
        marks.append(time.process_time())
        record_run(program, costs, run_program(program, costs, 1))
        marks.append(time.process_time())
        for detail in ("instructions", "ops"):
            forget_programs()
            marks.append(time.process_time())
            simulate_plan(plan, graph, cluster, cost=cost, detail=detail)
            marks.append(time.process_time())
        spent = np.diff(marks)
        for name, seconds in zip(names, (*spent[:4], spent[5], spent[7]), strict=True):
            taken[name].append(seconds)
    both = np.array(taken["build"]) + np.array(taken["simulate with memory"])
    rows = [
        row("1T: build and simulate with memory", both, 1, "CPU s", TRILLION_S),
        *(row(f"1T: {name}", np.array(taken[name]), 1, "CPU s", None) for name in names[:-1]),
        row(f"1T: {names[-1]}", np.array(taken[names[-1]]), 1, "CPU s", TRILLION_OPS_S),
    ]
    note = (
        f"1T: {len(result.fold.ranks)} of {len(result.ranks)} ranks simulated, {result.simulated.num_spans} "
        f"instructions, {result.simulated_ops.num_parts} ops; step {result.step_time_s:.0f} s"
    )
    return rows, note


def folding_rows(pairs):
    """16 stages of 16 replicas with 32 microbatches each: folded against unfolded, CPU time."""
    graph, cluster = load_shipped_graph("gpt2-xl"), load_cluster("32x8xA100")
    plan, cost = replicated(graph, cluster, 16, 16, 32), CostModel(cluster=cluster)

    def seconds(find):
        forget_programs()
        start = time.process_time()
        simulating.find_fold, kept = find, simulating.find_fold
        simulate_plan(plan, graph, cluster, cost=cost)
        simulating.find_fold = kept
        return time.process_time() - start

    ours, theirs = lambda: seconds(find_fold), lambda: seconds(lambda *_: None)
    ours(), theirs()
    return [ratio_row("256 ranks, folded against all", *paired_ratios(ours, theirs, pairs))]


def many_rows(pairs):
    """144 plans of 2 to 64 ranks: a process per core against one process, wall time."""
    graph, cluster = load_shipped_graph("gpt2-xl"), load_cluster("8x8xA100")
    plans = [
        replicated(graph, cluster, stages, replicas, count, schedule)
        for stages in (2, 4, 8, 16)
        for replicas in (1, 2, 4)
        for count in (32, 64, 96, 128, 192, 256)
        for schedule in ("gpipe", "1f1b")
    ]
    cost = CostModel(cluster=cluster)

    def seconds(num_processes):
        forget_programs()
        start = time.perf_counter()
        simulate_plans(plans, graph, cluster, cost=cost, num_processes=num_processes)
        return time.perf_counter() - start

    seconds(1)
    cores = len(os.sched_getaffinity(0))
    ours, theirs = paired_ratios(lambda: seconds(cores), lambda: seconds(1), pairs)
    return [ratio_row(f"{len(plans)} plans, {cores} processes against 1", ours, theirs, MANY_RATIO)]


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


def found_rows():
    """CPU time of a search for orders, and how long they are."""
    plan = make_plan(chain_graph(8), even_bounds(8, 8), [1] * 8, 64)
    seconds, ratios, gaps = [], [], []
    for seed in range(20):
        drawn = np.random.default_rng(seed).integers(1000, 1500, (3, 8))
        start = time.process_time()
        found = find_orders(
            plan,
            StageTimes(
                forward_ps=drawn[0],
                inputs_ps=drawn[1],
                weights_ps=drawn[2],
                sending_ps=100,
                returning_ps=100,
                kept_bytes=1,
                limit_bytes=np.arange(8, 0, -1),
            ),
        )
        seconds.append(time.process_time() - start)
        ratios.append(found.length_ps / min(found.named_ps.values()))
        gaps.append(1 + found.gap)
    # The first search compiles, or loads what was compiled.
    rows = [row("orders found, 8 stages x 64 microbatches", np.array(seconds[1:]), 1, "CPU s", FOUND_S)]
    for name, values, target in (("best named that fits", ratios, 1.0), ("bound", gaps, None)):
        low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
        rows.append(
            make_row(
                f"their length over the {name}",
                float(middle),
                "",
                spread=float(high - low) / 2 / float(middle),
                target=target,
            )
        )
    return rows


def sharding_rows(repeats):
    """CPU time of a local graph with its collectives."""
    graph, seconds = load_shipped_graph("gpt2-xl"), []
    hash(graph)
    for _ in range(repeats):
        shard_graph.cache_clear()
        op_dims.cache_clear()
        start = time.process_time()
        shard_graph(graph, Sharding(tensor=5, sequence_parallel=True))
        seconds.append(time.process_time() - start)
    return [row("local graph of GPT-2 XL over 5 ranks", np.array(seconds), 1, "CPU s", SHARDED_S)]


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
    for contention in CONTENTIONS:
        seconds, num_decisions, num_issued = measure_controlled(contention, 100, max(repeats // 4, 3))
        rows.append(row(f"controlled, {contention}", seconds, num_decisions / 1e6, "µs per decision", None))
        each = seconds.min() / num_issued * 1e6
        rows.append(make_row(f"controlled, {contention}: per instruction", each, "µs per instruction"))
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
    rows += found_rows()
    rows += sharding_rows(repeats)
    made, note = trillion_rows(repeats)
    rows += [*made, *folding_rows(max(repeats // 4, 2)), *many_rows(max(repeats // 8, 2))]
    notes.append(note)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return publish("simulator", rows, options, "; ".join(notes) + f". CPU time, best of {repeats} runs, {load}.")


if __name__ == "__main__":
    sys.exit(main())
