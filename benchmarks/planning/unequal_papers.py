"""AccPar and HetPipe's virtual workers by their own cost models, on the clusters of `splits/planner_unequal.json`.

AccPar: a cluster's figure is the geometric mean over the models of step time over that of data parallelism with equal
halves, in the same cost model; beside it HyPar and one weird trick. The paper has 6.30 x over data parallelism, 3.78 x
for HyPar and 2.98 x for one weird trick (geometric means over AlexNet, VGG and ResNet on 128 TPU v2 and 128 v3; Song et
al., HPCA 2020, section 6), on other hardware and models, so that these are no targets.

HetPipe: samples per second of each policy of allocation on the paper's own cluster, by `VirtualWorkers.wave_s`, for the
models of its kind (the paper has VGG-19 and ResNet-152).
"""

from __future__ import annotations

import numpy as np
from harness import make_row

from meshwright.planner.methods.unequal import (
    POLICIES,
    baselines,
    chain_layers,
    form_workers,
    halve,
    solve_accpar,
)
from meshwright.spec import PlanError

WORKER_MODELS, WORKER_SIZES = ("resnet101", "vgg16"), (8, 16, 32)


def accpar_rows(name, problems):
    """Rows of one cluster."""
    table = {}
    for problem in problems:
        batch = problem.workload.global_batch
        layers, group = chain_layers(problem.graph_for(batch), batch, problem.cost), halve(problem.cluster)
        allowed = {key: solve_accpar(layers, group, given).seconds for key, given in baselines(layers).items()}
        for key, seconds in {**allowed, "AccPar": solve_accpar(layers, group).seconds}.items():
            table.setdefault(key, []).append(seconds / allowed["data parallel"])
    rows = []
    for key in ("one weird trick", "HyPar", "AccPar"):
        spread = float(max(table[key]) - min(table[key])) / 2
        mean = float(np.exp(np.mean(np.log(table[key]))))
        rows.append(make_row(f"{name}: {key} over data parallelism, AccPar's model", mean, "ratio", spread=spread))
    return rows


def worker_rows(name, problems):
    """Rows of one cluster: the best of some sizes of minibatches for each policy."""
    rows = []
    for problem in problems:
        (space,) = problem.spaces()
        for policy in POLICIES:
            found = []
            for size in WORKER_SIZES:
                try:
                    workers = form_workers(space, size, policy)
                except PlanError:
                    continue
                found.append(len(workers.workers) * workers.wave * size / workers.wave_s)
            label = f"{name}, {problem.model}: virtual workers, {policy}"
            rows.append(make_row(label if found else f"{label} (nothing fits)", max(found, default=0.0), "samples/s"))
    return rows
