"""Bounds of the grid beside simulated plans, on problems drawn at random: none lies above."""

from itertools import islice, pairwise

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem, evaluate_plan
from meshwright.planner.methods.grid import bound_grid
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.spec import (
    MeshwrightError,
    Offload,
    Optimizer,
    Plan,
    Sharding,
    StagePlan,
    Workload,
    load_cluster,
    load_shipped_graph,
)
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.sharding import UNSHARDED
from tests.planner.test_search import cluster_of, weighted_graph

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1")
SHARDINGS = (
    UNSHARDED,
    Sharding(tensor=2),
    Sharding(tensor=2, sequence_parallel=True),
    Sharding(context=2),
    Sharding(tensor=2, context=2),
)
OFFLOADS = (Offload(optimizer="host"), Offload(activations="host"), Offload(optimizer="host", activations="host"))


def draw_problem(random):
    """A chain of layers of unlike work, or a small GPT with split ops, on few devices."""
    is_gpt = random.random() < 0.5
    if is_gpt:
        graph = load_shipped_graph("gpt-tiny")
        cluster = load_cluster(str(random.choice(["4xA100", "2x4xA100", "8xH100", "2x2xL40S"])))
    else:
        flops = (10.0 ** random.uniform(6, 9, random.integers(3, 10))).astype(int).tolist()
        graph = weighted_graph(flops, width=int(random.choice([32, 256, 1024])))
        nodes = [int(count) for count in random.choice([1, 2, 4], random.integers(1, 3))]
        rates = (1e12, float(random.choice([1e12, 3e11])))[: 1 + int(random.random() < 0.4)]
        cluster = cluster_of(
            *nodes, **({"rates": rates} if len(nodes) == 1 else {"slow_nic": 10.0 ** random.uniform(8, 10)})
        )
    precision = str(random.choice(["mixed", "bfloat16", "float32"])) if is_gpt else "float32"
    away = OFFLOADS[random.integers(len(OFFLOADS))] if is_gpt and random.random() < 0.3 else ON_DEVICE
    choices = Choices(
        shardings=tuple(SHARDINGS[i] for i in random.choice(len(SHARDINGS), 2, replace=False))
        if is_gpt
        else (UNSHARDED,),
        zero=tuple(sorted({int(stage) for stage in random.choice([0, 1, 2, 3], 2)})),
        shard_sizes=(0, 2) if random.random() < 0.3 else (0,),
        recompute=tuple({str(word) for word in random.choice(["none", "op", "full"], 2)}) if is_gpt else ("none",),
        offload=(away,),
        schedules=tuple({str(name) for name in random.choice(SCHEDULES, 3)}),
        num_chunks=(int(random.choice([2, 3])),),
    )
    workload = Workload(global_batch=int(random.choice([4, 8, 12, 16])), precision=precision)
    cost = CostModel(cluster=cluster, precision=precision)
    return Problem(graph_for=lambda _: graph, cluster=cluster, workload=workload, cost=cost, choices=choices)


def draws(seed):
    """Bounds of seconds and bytes, and the sharper one of bytes, each with the plan that they are of, simulated.

    Problems are drawn without end.
    """
    random = np.random.default_rng(seed)
    while True:
        try:
            problem = draw_problem(random)
            found = bound_grid(problem)
        except MeshwrightError:
            # Axes, shard sizes or devices that do not go with each other.
            continue
        rows = []
        for sheet in found.sheets:
            sheet.refine()
            rows += [(sheet, row) for row in range(len(sheet.seconds))]
        for place in random.permutation(len(rows))[:40].tolist():
            sheet, row = rows[place]
            configuration = sheet.configuration(row)
            for plan in plans_of(problem, configuration):
                try:
                    item = evaluate_plan(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost)
                except MeshwrightError:
                    continue
                least_bytes = max(float(sheet.bytes[row]), found.share_needed(configuration) * sheet.limit_bytes)
                yield float(sheet.seconds[row]), least_bytes, configuration, item


def check(seed, count):
    above = []
    for seconds, num_bytes, configuration, item in islice(draws(seed), count):
        if not seconds <= item.step_time_s * (1 + 1e-9) or not num_bytes <= max(item.peak_memory_bytes):
            above.append((configuration, seconds / item.step_time_s, num_bytes / max(item.peak_memory_bytes)))
    assert not above, f"{len(above)} of {count} bounds lie above the simulated plan, as {above[:3]}"


def test_no_bound_lies_above_a_simulated_plan():
    check(seed=1, count=300)


def test_split_backwards_of_few_microbatches_keep_no_more_than_there_are():
    graph, cluster = load_shipped_graph("gpt2-small"), load_cluster("4xA100")
    workload = Workload(global_batch=12, precision="bfloat16", optimizer=Optimizer(kind="sgd"))
    cost = CostModel(cluster=cluster, precision="bfloat16")
    choices = Choices(schedules=("zb-h1", "1f1b"), num_stages=(4,), microbatch_sizes=(4, 6))
    problem = Problem(graph_for=lambda _: graph, cluster=cluster, workload=workload, cost=cost, choices=choices)
    found = bound_grid(problem)
    rows = [(sheet, row, sheet.configuration(row)) for sheet in found.sheets for row in range(len(sheet.seconds))]
    assert {configuration.microbatch_size for *_, configuration in rows if configuration.schedule == "zb-h1"} == {4, 6}
    for sheet, row, configuration in rows:
        for plan in plans_of(problem, configuration):
            peak = max(evaluate_plan(plan, graph, cluster, cost).peak_memory_bytes)
            assert sheet.bytes[row] <= peak, configuration


def test_stages_that_train_nothing_are_followed_without_a_backward():
    graph, cluster = load_shipped_graph("llama3-8b-lora"), load_cluster("4xA100")
    edges = (0, 1, 14, 30, len(graph.layers))
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=cluster.name,
        workload=Workload(global_batch=8),
        stages=tuple(StagePlan(start=a, stop=b, ranks=(i % 2,)) for i, (a, b) in enumerate(pairwise(edges))),
        num_microbatches=4,
        schedule="looped-bfs",
    )
    item = evaluate_plan(plan, graph, cluster, CostModel(cluster=cluster))
    assert all(held >= peak for held, peak in zip(item.reserved_bytes, item.peak_memory_bytes, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 12))
def test_no_bound_lies_above_one_of_many_simulated_plans(seed):
    check(seed, count=10_000)
