"""Alpa's intra-operator pass: from a captured graph to the placements of all ops on a logical mesh.

CPU time of one process, from the graph in memory to the placements: prices of ops and collectives, folding of equal
blocks, strategies, the integer program with HiGHS on one thread, layouts of all ops. Importing and reading the graph
are left out. "first" is the first call in a new process, where tables of measured kernels are read and compiled code is
loaded; "again" are calls in a warm process with a new cost model, of which the median counts and the spread is the half
width of the middle 80 % over it.

"tiled" are stacks whose equal blocks are solved as one, beside the program of all blocks: ratio of the objectives (1 is
equal), and seconds of both. The instances stand in ``splits/planner_alpa.json``.

AutoParallel's seconds are quoted from its pull request 521 (meta-pytorch/autoparallel, table "total"): Llama 8B on a
machine of theirs, tracing, strategies and solver together; the same kind of question, not the same measurement.
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
from meshwright.planner.methods.alpa import Placements, amounts_of, mesh_of_cluster, place_ops
from meshwright.spec import Graph, Workload, load_cluster, load_shipped_graph

SPLITS = Path(__file__).parent.parent / "splits" / "planner_alpa.json"
TARGET_S, AUTOPARALLEL_S = 2.0, 46.8
_FIRST = "import json, sys; sys.path[:0] = {path!r}; from planning.alpa import first_call; print(first_call())"


def place(graph: Graph, instance: dict, *, tiled: bool = True) -> tuple[Placements, float]:
    """Placements of an instance and the CPU seconds that they took."""
    cluster, size = load_cluster(instance["cluster"]), instance["batch_size"]
    workload = Workload(global_batch=size, precision=instance["precision"])
    start = time.process_time()
    cost = CostModel(cluster=cluster, precision=workload.precision)
    work = amounts_of(graph, workload, cost, batch_size=size)
    placements = place_ops(graph, mesh_of_cluster(cost, tuple(instance["mesh"])), work, tiled=tiled)
    return placements, time.process_time() - start


def first_call() -> float:
    """CPU seconds of the scored instance, the first that this process is asked."""
    import highspy  # noqa: F401 - imports are not counted

    instance = json.loads(SPLITS.read_text())["scored"]
    return place(load_shipped_graph(instance["model"]), instance)[1]


def rows(quick: bool) -> list[Row]:
    """All rows."""
    splits = json.loads(SPLITS.read_text())
    return [*_scored(splits["scored"], 3 if quick else 15), *_tiled(splits["tiled"][: 1 if quick else None])]


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
    placements, name = results[-1][0], f"{instance['model']} {'x'.join(map(str, instance['mesh']))}"
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
        name = f"{instance['model']} {'x'.join(map(str, instance['mesh']))}"
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
