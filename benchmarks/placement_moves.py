"""What simulating the move of one op to another device takes, beside building and simulating the placement anew.

A graph of ops, each of which reads two of the 50 before it, trained on one node of 8 devices in two microbatches,
every op a stage of its own on any device. Building is the program of the changed placement and its network, with costs
of instructions that are there already; what finding these takes in full (`estimate_program`, with memory) is reported
separately.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshwright.cost import CostModel
from meshwright.program import build_placed_program
from meshwright.simulator import estimate_program
from meshwright.simulator.delta import DeltaPlacement
from meshwright.simulator.engine import run_network
from meshwright.simulator.unroll import unroll
from meshwright.spec import load_cluster
from tests.planner.place_graphs import graph_of, moved, placement_of

DEVICES = 8


class Moves(NamedTuple):
    """Seconds of each move (moves,): followed, taken back; and in full: built and run, run alone, estimated."""

    followed: np.ndarray
    undone: np.ndarray
    built: np.ndarray
    run: np.ndarray
    estimated: np.ndarray
    num_instructions: int


def measure_moves(num_ops: int, count: int) -> Moves:
    """Ops and devices drawn uniformly; each move is compared with the full run and taken back."""
    rng = random.Random(0)
    names = [f"op{i}" for i in range(num_ops)]
    reads = lambda i: tuple(sorted({rng.choice(names[max(0, i - 50) : i]) for _ in range(2)})) if i else ("x",)
    graph = graph_of({name: reads(i) for i, name in enumerate(names)}, width=1024, mode="training")
    placement = placement_of(graph, [(rng.randrange(DEVICES), i) for i in range(num_ops)], 2)
    cost = CostModel(cluster=load_cluster("8xH100"), precision="float32")
    simulation, rows = DeltaPlacement(placement, graph, cost), []
    # No move twice: programs of placements are kept for a while.
    for number in rng.sample(range(num_ops * (DEVICES - 1)), count + 1):
        stage, further = divmod(number, DEVICES - 1)
        rank = (placement.stages[stage].rank + 1 + further) % DEVICES
        moments = [time.perf_counter()]
        simulation.move(stage, rank)
        moments.append(time.perf_counter())
        ends = simulation.end_ps()
        start = time.perf_counter()
        simulation.undo()
        undone = time.perf_counter() - start
        changed = moved(placement, stage, rank)
        moments.append(time.perf_counter())
        program = build_placed_program(changed, graph)
        moments.append(time.perf_counter())
        costs = estimate_program(program, changed, graph, cost)
        moments.append(time.perf_counter())
        unrolled = unroll(program, costs, 1)
        moments.append(time.perf_counter())
        outcome = run_network(unrolled.network, unrolled.num_links)
        moments.append(time.perf_counter())
        assert np.array_equal(outcome.end_ps, ends), "not the ends of the placement simulated anew"
        followed, _, built, estimated, laid_out, run = np.diff(moments)
        rows.append((followed, undone, built + laid_out + run, run, estimated))
    # The first one compiles.
    return Moves(*np.array(rows[1:]).T, num_instructions=len(ends))


if __name__ == "__main__":
    found = measure_moves(500, 40)
    print({name: float(np.median(value)) for name, value in found._asdict().items()})
