"""Draws docs/images/found.svg: a pipeline with one slow stage under 1F1B, ZB-H1, and orders that are found for it.

    python docs/pictures/found.py

Transfers take next to nothing. What is found has the memory of the schedule above it: at most 4, 3, 2 and 1
microbatches on the four ranks, or 4 on each. A test (tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from drawing import COLOURS, IDLE, Panel, chain, cluster, lay_out, legend, stack

from meshwright.cost import CostModel
from meshwright.program import Order, find_orders, with_schedule, write_orders
from meshwright.simulator import Simulation, simulate_plan, stage_times
from meshwright.spec import Cluster, Graph, Opcode, Plan, write_text

PICTURE = Path(__file__).resolve().parent.parent / "images" / "found.svg"
PIXELS_PER_S = 10.2
# Seconds of a layer's forward; two layers are a stage.
SECONDS = (1, 1, 1.5, 1.5, 1, 1, 1, 1)
STAGES = [(2, (rank,)) for rank in range(4)]
LEGEND = legend(
    (COLOURS[Opcode.FORWARD], "forward"),
    (COLOURS[Opcode.BACKWARD], "backward"),
    (COLOURS[Opcode.BACKWARD_INPUT], "its part for the input"),
    (COLOURS[Opcode.BACKWARD_WEIGHT], "its part for the weights"),
    (IDLE, "idle"),
)


def draw() -> str:
    """The whole picture as SVG."""
    graph, machines = chain(SECONDS), cluster(4)
    named = {name: lay_out(graph, STAGES, name) for name in ("1f1b", "zb-h1")}
    results = (
        ("1F1B: stage 1 takes half as long again as the others", simulate_plan(named["1f1b"], graph, machines)),
        ("found, in the memory of 1F1B", _found(named["1f1b"], graph, machines, (4, 3, 2, 1))),
        ("ZB-H1: up to 4 microbatches on every rank", simulate_plan(named["zb-h1"], graph, machines)),
        ("found, in the memory of ZB-H1", _found(named["zb-h1"], graph, machines, (4, 4, 4, 4))),
    )
    panels = [Panel(title=title, result=result, pixels_per_s=PIXELS_PER_S) for title, result in results]
    return stack("Orders found for a pipeline with a slow stage", LEGEND, panels)


def _found(plan: Plan, graph: Graph, machines: Cluster, most: tuple[int, ...]) -> Simulation:
    times = stage_times(plan, graph, CostModel(cluster=machines))
    found = find_orders(plan, replace(times, kept_bytes=1, limit_bytes=most))
    orders = tuple(Order(rank=rank, columns=columns) for rank, columns in enumerate(found.columns))
    with TemporaryDirectory() as folder:
        path = write_text(write_orders(plan, orders).text, Path(folder) / "found.csv")
        return simulate_plan(with_schedule(plan, str(path)), graph, machines)


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
