"""Alpa's intra-operator pass: from a captured graph to the placements of all ops on a logical mesh.

CPU time of one process, from the graph in memory to the placements: costs of ops and collectives, folding of equal
blocks, strategies, the integer program with HiGHS on one thread, layouts of all ops. Importing and reading the graph
are left out. "first" is the first call in a new process, where tables of measured kernels are read and compiled code is
loaded; "again" are calls in a warm process with a new cost model, of which the median counts and the spread is the half
width of the middle 80 % over it.

"tiled" are stacks whose equal blocks are solved as one, beside the program of all blocks: ratio of the objectives (1 is
equal), and seconds of both. The instances stand in ``splits/planner_alpa.json``.

"following": the objective where ops that do little follow their operand, as in Alpa, over that where every op chooses.
"limited": seconds under a limit of memory per device, and the objective over that without.

"stages": the simulated step of the best plan by the paper's objective, which knows no communication between stages,
over that of the best plan by the estimated one; both with placements by the integer program. The simulator has shared
network cards in both. "placed": the best plan of the method over that of slicing, which has the rules' placements only.

AutoParallel's seconds are quoted from its pull request 521 (meta-pytorch/autoparallel, table "total"): Llama 8B on a
machine of its authors, tracing, strategies and solver together; the same kind of question, not the same measurement.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from harness import Row, make_row

from meshwright.cost import CostModel
from meshwright.planner import Choices, Method, Problem, SearchState, search_plans
from meshwright.planner.methods.alpa import Placements, amounts_of, mesh_of_cluster, place_ops
from meshwright.planner.methods.alpa.alpa_method import Objective, alpa
from meshwright.planner.search_method import Steps
from meshwright.spec import Graph, Sharding, Workload, load_cluster, load_shipped_graph

SPLITS = Path(__file__).parent.parent / "splits" / "planner_alpa.json"
TARGET_S, AUTOPARALLEL_S = 2.0, 46.8
_FIRST = "import json, sys; sys.path[:0] = {path!r}; from planning.alpa import first_call; print(first_call())"


def place(graph: Graph, instance: dict, **options: object) -> tuple[Placements, float]:
    """Placements of an instance and the CPU seconds that they took; ``options`` of `place_ops`."""
    cluster, size = load_cluster(instance["cluster"]), instance["batch_size"]
    workload = Workload(global_batch=size, precision=instance["precision"])
    start = time.process_time()
    cost = CostModel(cluster=cluster, precision=workload.precision)
    work = amounts_of(graph, workload, cost, batch_size=size)
    placements = place_ops(graph, mesh_of_cluster(cost, tuple(instance["mesh"])), work, **options)
    return placements, time.process_time() - start


def first_call() -> float:
    """CPU seconds of the scored instance, the first that this process is asked."""
    import highspy  # noqa: F401 - imports are not counted

    instance = json.loads(SPLITS.read_text())["scored"]
    return place(load_shipped_graph(instance["model"]), instance)[1]


def rows(quick: bool) -> list[Row]:
    """All rows."""
    splits = json.loads(SPLITS.read_text())
    some = slice(1) if quick else slice(None)
    return [
        *_scored(splits["scored"], 3 if quick else 15),
        *_limited(splits["limited"]),
        *_tiled(splits["tiled"][some]),
        *_following(splits["following"][some]),
        *_stages(splits["stages"][some]),
    ]


def _scored(instance: dict, runs: int) -> list[Row]:
    graph = load_shipped_graph(instance["model"])
    code = _FIRST.format(path=[str(Path(__file__).parent.parent), *sys.path])
    first = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    place(graph, instance)
    results = [place(graph, instance) for _ in range(runs)]
    seconds = np.array([taken for _, taken in results])
    low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9])
    placements, name = results[-1][0], _name(instance)
    return [
        make_row(f"{name}, again", float(middle), "s", spread=float((high - low) / 2 / middle), target=TARGET_S),
        make_row(
            f"{name}, first",
            float(np.median(first)),
            "s",
            spread=float(np.ptp(first) / 2 / np.median(first)),
            target=TARGET_S,
        ),
        make_row(f"{name}, beside AutoParallel (quoted)", float(middle), "s", baseline=AUTOPARALLEL_S),
        make_row(f"{name}, variables", placements.solution.num_variables, ""),
        make_row(f"{name}, gap", placements.gap, "", target=1e-6),
    ]


def _tiled(instances: list[dict]) -> list[Row]:
    found = []
    for instance in instances:
        graph = load_shipped_graph(instance["model"])
        place(graph, instance)
        tiled, seconds = place(graph, instance)
        whole, whole_s = place(graph, instance, tiled=False)
        name = _name(instance)
        ratio = tiled.seconds / whole.seconds
        found.append(
            make_row(
                f"{name}, objective tiled / all blocks",
                tiled.seconds,
                "s",
                baseline=whole.seconds,
                ratio=ratio,
                target=1 + 1e-6,
            )
        )
        found.append(
            make_row(f"{name}, solving tiled / all blocks", seconds, "s", baseline=whole_s, ratio=seconds / whole_s)
        )
    return found


def _limited(instance: dict) -> list[Row]:
    graph = load_shipped_graph(instance["model"])
    free, _ = place(graph, instance)
    limited, seconds = place(graph, instance, memory_limit_bytes=instance["limit_gib"] * 2**30)
    name = f"{_name(instance)}, {instance['limit_gib']} of {free.memory_bytes / 2**30:.0f} GiB"
    return [
        make_row(f"{name}, solving", seconds, "s"),
        make_row(
            f"{name}, objective / without a limit",
            limited.seconds,
            "s",
            baseline=free.seconds,
            ratio=limited.seconds / free.seconds,
        ),
    ]


def _following(instances: list[dict]) -> list[Row]:
    found = []
    for instance in instances:
        graph = load_shipped_graph(instance["model"])
        following, choosing = (place(graph, instance, following=way)[0] for way in (True, False))
        name = f"{_name(instance)}, objective following / all choose"
        ratio = following.seconds / choosing.seconds
        found.append(make_row(name, following.seconds, "s", baseline=choosing.seconds, ratio=ratio))
    return found


def _stages(instances: list[dict]) -> list[Row]:
    found = []
    for instance in instances:
        graph, cluster = load_shipped_graph(instance["model"]), load_cluster(instance["cluster"])
        workload = Workload(global_batch=instance["global_batch"], precision=instance["precision"])
        shardings = [Sharding(tensor=size) for size in instance["tensor"]]
        best = {}
        for name, method in (
            ("slicing", "slicing"),
            ("alpa", "alpa"),
            ("paper", _only("alpa")),
            ("estimated", _only("estimated")),
        ):
            plans = search_plans(
                Problem(
                    graph_for=lambda _, graph=graph: graph,
                    cluster=cluster,
                    workload=workload,
                    choices=Choices(shardings=shardings),
                ),
                method,
            )
            best[name] = plans.best.step_time_s
        name = f"{instance['model']} {instance['cluster']}"
        pairs = (
            ("paper's objective / estimated", "paper", "estimated"),
            ("placed / slicing by rules", "alpa", "slicing"),
        )
        for what, ours, theirs in pairs:
            ratio = best[ours] / best[theirs]
            found.append(make_row(f"{name}, step {what}", best[ours], "s", baseline=best[theirs], ratio=ratio))
    return found


def _only(objective: Objective) -> Method:
    """The method with one objective of the stages."""

    def method(problem: Problem, state: SearchState) -> Steps:
        yield from alpa(problem, state, objectives=(objective,))

    return method


def _name(instance: dict) -> str:
    return f"{instance['model']} {'x'.join(map(str, instance['mesh']))}"
