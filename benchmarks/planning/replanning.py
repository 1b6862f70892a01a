"""A plan of 64 devices made anew after devices are lost or links slow: wall time, and its step beside a search's."""

import time

import numpy as np
from harness import make_row
from planning.portfolio import SPLIT

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.planner import Choices, Limits, Problem, replan, search_plans
from meshwright.simulator.scenarios import apply_scenario
from meshwright.spec import Workload, load_cluster, load_shipped_graph
from meshwright.spec.scenario import Scenario, SlowLink
from meshwright.spec.selectors import Links


def rows(quick):
    split = SPLIT["replan"]
    graph, cluster = load_shipped_graph(split["model"]), load_cluster(split["cluster"])
    workload = Workload(global_batch=split["batch"], precision="bfloat16")
    sizes = split["microbatch_sizes"]
    slow = Scenario(effects=(SlowLink(links=Links("between nodes"), factor=split["slowed"]),))
    changes = {f"devices {lost} lost": (lambda cost, lost=lost: without_devices(cost, lost)) for lost in split["lost"]}
    changes["links between nodes slowed"] = lambda cost: apply_scenario(cost, slow)
    table = []
    for name, change in changes.items():
        seconds = []
        for _ in range(2 if quick else 5):
            # The cost model has what the search asked it, as that of a running job has; nothing of the change.
            cost = CostModel(cluster=cluster, precision="bfloat16")
            plan = search_plans(
                Problem(
                    graph_for=lambda _: graph,
                    cluster=cluster,
                    workload=workload,
                    cost=cost,
                    choices=Choices(microbatch_sizes=sizes),
                ),
                "slicing",
                Limits(max_plans=2),
            ).best.plan
            left = change(cost)
            begun = time.perf_counter()
            found = replan(plan, lambda _: graph, left)
            seconds.append(time.perf_counter() - begun)
        anew = search_plans(
            Problem(
                graph_for=lambda _: graph,
                cluster=left.cluster,
                workload=workload,
                cost=left,
                choices=Choices(microbatch_sizes=sizes),
            ),
            "slicing",
            Limits(max_plans=4),
        )
        low, middle, high = np.quantile(seconds[1:], [0.1, 0.5, 0.9])
        table.append(make_row(f"{name}: seconds", middle, "s", spread=(high - low) / 2 / middle, target=1.0))
        table.append(
            make_row(
                f"{name}: step over that of a whole search",
                found.best.step_time_s,
                "s",
                baseline=anew.best.step_time_s,
                ratio=found.best.step_time_s / anew.best.step_time_s,
            )
        )
    return table
