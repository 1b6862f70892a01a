"""Schedules that never flush against 1F1B with flush: what the simulator predicts, and what two ranks reach.

Both arms train the same stages on the same microbatches, from one measured table. An arm runs blocks of steps, so that
the pipeline of the other is emptied once per block and not once per step; blocks are alternated ABBA, the slower rank
counts. The figure is how far the measured ratio of step times is from the predicted one.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from harness import make_row, paired_ratios, ratio_row

from meshwright.capture import capture_model, flatten_batch
from meshwright.cost import CostModel
from meshwright.measurement import run_ranks
from meshwright.program import num_filling_steps
from meshwright.runtime import open_session
from meshwright.simulator import simulate_plan
from meshwright.spec import Optimizer, Plan, StagePlan, Workload, load_cluster
from meshwright.training import measure_here
from meshwright.zoo import load_model

MODEL, SIZES = "llama-tiny", {"sequence_length": 64}
NUM_MICROBATCHES, MICROBATCH_SIZE = 4, 8
BLOCK, QUICK_BLOCK = 12, 4
PAIRS, QUICK_PAIRS = 20, 4
ENDLESS = ("pipedream", "pipedream-vertical", "pipedream-2bw")
TOLERANCE = 0.10
NOTES = (
    "Rows of ratios: value = a step that never flushes, baseline = one of 1F1B, both measured; rows that compare: "
    "value = measured ratio over predicted ratio, less 1, without its sign."
)


def capture():
    source = load_model(MODEL, batch_size=NUM_MICROBATCHES * MICROBATCH_SIZE, **SIZES)
    captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
    return captured, flatten_batch(captured, source.inputs, source.targets)


def make_plan(graph, schedule):
    half = len(graph.layers) // 2
    return Plan(
        model=MODEL,
        model_sizes=tuple(SIZES.items()),
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(
            global_batch=NUM_MICROBATCHES * MICROBATCH_SIZE, optimizer=Optimizer(kind="sgd", momentum=True)
        ),
        stages=(
            StagePlan(start=0, stop=half, ranks=(0,)),
            StagePlan(start=half, stop=len(graph.layers), ranks=(1,)),
        ),
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
    )


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def block_of(session, tensors, size):
    """A block of steps: seconds per step of the slower rank."""
    count = [0]

    def run(steps=size):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            session.run_step(count[0], tensors)
            count[0] += 1
        seconds = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return run


def compare(_context, block, pairs):
    """Seconds per step of each schedule beside those of 1F1B, on one rank."""
    captured, tensors = capture()
    found = {}
    flushing = open_session(captured, make_plan(captured.graph, "1f1b"), make_sgd)
    theirs = block_of(flushing, tensors, block)
    theirs(2)
    for schedule in ENDLESS:
        # Weights of its own: minibatches are under way while the other arm updates.
        captured, tensors = capture()
        plan = make_plan(captured.graph, schedule)
        session = open_session(captured, plan, make_sgd)
        ours = block_of(session, tensors, block)
        ours(num_filling_steps(plan) + 2)
        found[schedule] = paired_ratios(ours, theirs, pairs)
        session.finish()
        session.close()
    found["A/A (1F1B against 1F1B)"] = paired_ratios(theirs, theirs, pairs)
    flushing.close()
    return found


def rows(quick: bool):
    """What is predicted and measured of each schedule."""
    captured, _ = capture()
    cluster, graph = load_cluster("2xcpu"), captured.graph
    table = measure_here(MODEL, [MICROBATCH_SIZE], sizes=tuple(SIZES.items()), num_ranks=2)
    cost = CostModel(cluster=cluster, measurements=table)
    predicted = {
        schedule: simulate_plan(make_plan(graph, schedule), graph, cluster, cost=cost, num_steps=4).step_time_s
        for schedule in ("1f1b", *ENDLESS)
    }
    print("predicted", predicted, file=sys.stderr)
    block, pairs = (QUICK_BLOCK, QUICK_PAIRS) if quick else (BLOCK, PAIRS)
    results = run_ranks(compare, block, pairs, num_ranks=2, timeout_s=1500)[0]
    table = []
    for name, (ours, theirs) in results.items():
        row = ratio_row(name if "A/A" in name else f"{name} against 1F1B, measured", ours, theirs)
        table.append(row)
        if name in predicted:
            wanted = predicted[name] / predicted["1f1b"]
            table.append(make_row(f"{name} against 1F1B, predicted", wanted, "", baseline=row.ratio))
            off = abs(row.ratio / wanted - 1)
            table.append(make_row(f"{name}: measured against predicted", off, "", spread=row.spread, target=TOLERANCE))
            step = abs(float(np.median(ours)) / predicted[name] - 1)
            table.append(make_row(f"{name}: measured step against predicted step", step, ""))
    return table
