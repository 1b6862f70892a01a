"""HetPipe's virtual workers by their own cost model, on the cluster `hetpipe` of `splits/planner_unequal.json`.

Samples per second of each policy of allocation on the paper's own cluster, by `VirtualWorkers.wave_s`, for the
models of its kind (the paper has VGG-19 and ResNet-152).
"""

from harness import make_row

from meshwright.planner.methods.unequal import POLICIES, form_workers
from meshwright.spec import PlanError

WORKER_MODELS, WORKER_SIZES = ("resnet101", "vgg16"), (8, 16, 32)


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
