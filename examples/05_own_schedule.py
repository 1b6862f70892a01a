"""05  A schedule of your own: search with it, hold it against GPipe and 1F1B, draw it. Needs no GPU and no torch.

python examples/05_own_schedule.py
"""

from own_schedules import eager, thrifty
from rich.console import Console

from meshwright import Choices, Problem, Workload, load_cluster, search_plans
from meshwright.cost import CostModel
from meshwright.planner import compare_schedules, schedule_rows
from meshwright.program import max_in_flight, picture_schedule
from meshwright.report import draw_slots, schedules_table
from meshwright.spec import load_shipped_graph

console = Console()
graph = load_shipped_graph("gpt2-small")
cluster = load_cluster("4x1xA100")
workload = Workload(global_batch=16, precision="mixed")
cost = CostModel(cluster=cluster, precision=workload.precision)

# A function is as good as a name. The search simulates what it keeps; no formula is assumed of our own schedules.
plans = search_plans(
    Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=workload,
        cost=cost,
        choices=Choices(num_stages=(4,), microbatch_sizes=(2,), schedules=("1f1b", eager)),
    )
)
best = plans.best.plan
print(plans.explain())

# The same stages under other schedules: time, bubble, microbatches in flight, memory.
items = compare_schedules(best, graph, cluster, ["gpipe", "1f1b", thrifty], cost=cost)
console.print(schedules_table(schedule_rows(items, graph, cost)))

# As papers draw it.
in_flight = [max_in_flight(best, stage) for stage in range(len(best.stages))]
console.print(draw_slots(picture_schedule(best), in_flight, max_width=console.width - len("rank 0 ")))
assert any(item.plan.schedule.endswith("own_schedules.py:eager") for item in plans.ranked)
