"""Draws docs/images/scenarios.svg: the step of three plans for four devices, of which one gets slower.

    python docs/pictures/scenarios.py

GPT-2 small, 32 samples per step in 16 microbatches, on 4xA100 by datasheet. A test (tests/docs/test_pictures.py) runs
this and compares with the file.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.cost import CostModel
from meshwright.report import draw_curves
from meshwright.simulator.scenarios import read_parameter, sweep_cases
from meshwright.spec import Plan, StagePlan, Workload, load_cluster, load_shipped_graph, write_text
from meshwright.spec.scenario import load_scenario

PICTURE = Path(__file__).resolve().parent.parent / "images" / "scenarios.svg"
LAYOUTS = ((1, 4), (2, 2), (4, 1))


def draw() -> str:
    """The whole picture as SVG."""
    graph, cost = load_shipped_graph("gpt2-small"), CostModel(cluster=load_cluster("4xA100"))
    factor, rows = read_parameter("slow-device.factor=1..3:9"), []
    for num_stages, replicas in LAYOUTS:
        cuts = [len(graph.layers) * stage // num_stages for stage in range(num_stages + 1)]
        plan = Plan(
            model="gpt2-small",
            graph_hash=graph.content_hash,
            cluster="4xA100",
            workload=Workload(global_batch=32),
            stages=tuple(
                StagePlan(start=cuts[k], stop=cuts[k + 1], ranks=tuple(range(k * replicas, (k + 1) * replicas)))
                for k in range(num_stages)
            ),
            num_microbatches=16,
        )
        sweep = sweep_cases([factor], plan, graph, cost, load_scenario("slow-device"), num_processes=1)
        rows += [{"layout": f"{num_stages} × {replicas}", **row} for row in sweep.rows]
    title = "GPT-2 small on four A100, stages × replicas; the first device is slower"
    return draw_curves(rows, [factor.name, "layout"], "step_time_s", title=title)


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
