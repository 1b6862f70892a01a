"""03  Two clusters: eight A100 in one node, or two rented hosts with four each and 25 Gbit/s between them?

    python examples/03_compare_clusters.py

Same devices, another network. A plan that is best on one of them need not be good on the other. No torch is needed.
"""

from pathlib import Path

from meshwright import Limits, Problem, Workload, load_cluster, search_plans, simulate_plan
from meshwright.planner import Plans
from meshwright.spec import Cluster, format_seconds, load_shipped_graph

graph = load_shipped_graph("gpt2-medium")
workload = Workload(global_batch=64, precision="mixed")
clusters = {
    "one node": load_cluster("8xA100"),
    "two hosts": load_cluster(Path(__file__).parent / "cluster.toml"),
}


def search(cluster: Cluster) -> Plans:
    return search_plans(
        Problem(graph_for=lambda _: graph, cluster=cluster, workload=workload, model=graph.name),
        limits=Limits(max_plans=8),
    )


plans = {name: search(cluster) for name, cluster in clusters.items()}
for name, found in plans.items():
    print(f"{name}: {found.explain()}\n")

# Each plan on the other machines: the same program, other links.
print("                       " + "".join(f"{'on ' + name:>16}" for name in clusters))
for made_for, found in plans.items():
    steps = [simulate_plan(found.best.plan, graph, cluster).step_time_s for cluster in clusters.values()]
    print(f"{'best for ' + made_for:23}" + "".join(f"{format_seconds(step):>16}" for step in steps))

# Where does the time go when the wrong plan meets the slow network?
wrong = simulate_plan(plans["one node"].best.plan, graph, clusters["two hosts"])
rank = max(wrong.ranks, key=lambda rank: rank.exposed_communication_s)
print(
    f"\nThe one-node plan on two hosts: its busiest rank computes for {format_seconds(rank.busy_s)} and waits for the "
    f"network for {format_seconds(rank.exposed_communication_s)} of a step."
)
