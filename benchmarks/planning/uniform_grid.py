"""The uniform grid for a GPT of a trillion parameters on 3,072 GPUs: CPU time to bound all configurations; then solved.

The model is that of Narayanan et al. 2021, table 1; the choices stand in `splits/planner_auto.json`. Its graph is
captured before, compiled code is loaded. CPU time of this process, best of several. Calculon evaluates 47.6
configurations per second on two cores of the same kind (own measurement of 2026-11-20 on its search for a model of
530B parameters).
"""

import time

from harness import make_row
from planning.portfolio import SPLIT
from planning.problems import solve
from simulator import trillion_graph

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem, list_shardings
from meshwright.planner.methods.grid import bound_grid
from meshwright.spec import Workload, load_cluster

CALCULON_PER_S = 47.6


def problem_of(graph, split):
    cluster = load_cluster(split["cluster"])
    shardings = [
        *list_shardings(tensor=split["tensor"], context=split["context"]),
        *list_shardings(tensor=[n for n in split["tensor"] if n > 1], context=split["context"], sequence_parallel=True),
    ]
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=split["batch"], precision="bfloat16"),
        cost=CostModel(cluster=cluster, precision="bfloat16"),
        choices=Choices(
            shardings=tuple(shardings),
            zero=tuple(split["zero"]),
            recompute=tuple(split["recompute"]),
            schedules=tuple(split["schedules"]),
            num_chunks=tuple(split["num_chunks"]),
        ),
    )


def rows(quick):
    graph, split = trillion_graph(), SPLIT["grid"]
    seconds = []
    for _ in range(3 if quick else 9):
        problem = problem_of(graph, split)
        begun = time.process_time()
        found = bound_grid(problem)
        seconds.append(time.process_time() - begun)
    count, best_s = found.num_configurations, min(seconds[1:])
    table = [
        make_row(
            "1T GPT on 3,072 GPUs: all configurations bounded",
            best_s,
            "s",
            spread=max(seconds[1:]) - best_s,
            target=1.0,
        ),
        make_row("1T GPT on 3,072 GPUs: configurations", count, "configurations"),
        make_row("1T GPT on 3,072 GPUs: configurations that may fit", found.num_fitting, "configurations"),
        make_row(
            "1T GPT on 3,072 GPUs: Calculon's rate over ours",
            count / best_s,
            "configurations/s",
            baseline=CALCULON_PER_S,
            ratio=CALCULON_PER_S / (count / best_s),
        ),
    ]
    if not quick:
        begun = time.perf_counter()
        plans = solve(problem_of(graph, split), "grid", deadline_s=120.0)
        table.append(make_row("1T GPT on 3,072 GPUs: solved", time.perf_counter() - begun, "s"))
        table.append(make_row("1T GPT on 3,072 GPUs: step of the best plan", plans.best.step_time_s, "s"))
        print(plans.explain())
    return table
