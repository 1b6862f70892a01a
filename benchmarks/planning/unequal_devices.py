"""Problems without an exact method: unequal devices, memory, placements; methods side by side at equal time.

`splits/planner_differentiable.json`, "unequal". Every method gets the same wall time with one seed; its best plan is
simulated by the same simulator. The ratio is over the best of all methods; the value is the step time. "Random starts +
repair" is the differentiable method with its gradients left out.
"""

from dataclasses import replace
from functools import partial

from harness import make_row
from planning.chains import SPLITS
from planning.problems import solve

from meshwright.cost import CostModel
from meshwright.planner import METHODS, Choices, Problem, list_shardings
from meshwright.planner.methods.differentiable.differentiable_method import search_by_draws
from meshwright.spec import Cluster, MeshwrightError, Workload, load_cluster, load_shipped_graph

UNEQUAL = SPLITS["unequal"]
NAMES = ("slicing", "unequal", "flexflow", "auto", "differentiable")


def unequal_cluster(nodes):
    """Nodes of [kind, devices], each as shipped."""
    kinds, made = {}, []
    for place, (kind, num_devices) in enumerate(nodes):
        shipped = load_cluster(f"{num_devices}x{kind}")
        kinds[kind] = shipped.device_kinds[0]
        made.append(replace(shipped.nodes[0], name=f"{kind}-{place}"))
    return Cluster(
        name="-".join(f"{count}x{kind}" for kind, count in nodes), device_kinds=(*kinds.values(),), nodes=(*made,)
    )


def unequal_problem(spec):
    graph, cluster = load_shipped_graph(spec["model"]), unequal_cluster(spec["nodes"])
    workload = Workload(global_batch=spec["batch"])
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=workload,
        cost=CostModel(cluster=cluster, precision=workload.precision),
        model=spec["model"],
        choices=Choices(
            shardings=list_shardings(tensor=spec.get("tensor", [1])),
            zero=tuple(spec.get("zero", [0])),
            recompute=tuple(spec.get("recompute", ["none"])),
        ),
    )


def unequal_rows(quick, which="scored"):
    named = {name: name for name in NAMES if name in METHODS}
    named["random starts + repair"] = partial(search_by_draws, gradients=False)
    table = []
    for spec in UNEQUAL[which][: 1 if quick else None]:
        seconds = {}
        for name, method in named.items():
            try:
                plans = solve(unequal_problem(spec), method, deadline_s=UNEQUAL["seconds"], seed=UNEQUAL["seed"])
                seconds[name] = plans.best.step_time_s
            except MeshwrightError:
                seconds[name] = float("inf")
        best = min(seconds.values())
        for name, step_s in seconds.items():
            table.append(make_row(f"{spec['name']}: {name}", step_s, "s", baseline=best, ratio=step_s / best))
    return table
