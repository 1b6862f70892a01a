"""01  Plan without a GPU, and without torch: how should Llama 3 8B be trained, and what would more devices bring?

    python examples/01_plan_without_gpu.py

The graph of every shipped model lies in the package, so nothing is captured and no weight is made.
"""

from meshwright import Limits, Problem, Workload, load_cluster, search_plans
from meshwright.spec import NoFeasiblePlanError, format_bytes, load_shipped_graph

graph = load_shipped_graph("llama3-8b")
print(f"{graph.name}: {graph.num_parameters() / 1e9:.2f} billion parameters in {len(graph.layers)} layers\n")

# The same 64 sequences per step on ever more devices. Does it fit, how fast is it, and how well are devices used?
workload = Workload(global_batch=64, precision="mixed")
best = {}
for name in ("1xH100", "4xH100", "8xH100"):
    try:
        plans = search_plans(
            Problem(graph_for=lambda _: graph, cluster=load_cluster(name), workload=workload, model=graph.name),
            limits=Limits(max_plans=2),
        )
    except NoFeasiblePlanError as error:
        print(f"{name:9} {error}\n")
        continue
    best[name] = plans
    row = plans.rows()[0]
    print(
        f"{name:9} {row['samples_per_s']:.1f} samples/s, {100 * row['bubble_share']:.0f} % of the time idle, at most "
        f"{format_bytes(row['peak_memory_bytes'])} on a device: {row['plan']}"
    )

# Every answer says why.
print("\nWhy is this the plan for 8xH100?")
print(best["8xH100"].explain())
