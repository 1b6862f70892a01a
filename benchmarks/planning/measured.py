"""Two levels with noise: plans whose step is measured, by a simulator that knows what the planner does not.

A problem of `splits/planner_differentiable.json` ("measured"): the planner's closed form believes that all devices of a
kind are alike; in truth one node computes more slowly. Measurements are simulated steps on the true machines with
lognormal noise. The method starts at the best layout by gradients on what the planner believes. Arms, with equally many
measurements: scores guided by the gradient of the closed form; scores alone; random single moves kept when they measure
better. The value is the true step of the answer over the true step of the start; below one is better. Mean over seeds,
spread half of the middle 80 %.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from harness import make_row
from planning.chains import SPLITS
from planning.measured_search import NUM_AGAIN, NUM_FINALISTS, refine_measured, with_noise
from planning.unequal_devices import unequal_problem

from meshwright.cost import CostModel
from meshwright.planner import Choices, evaluate_plan
from meshwright.planner.methods.differentiable import differentiable_method
from meshwright.planner.methods.differentiable.differentiable_method import StageLayout
from meshwright.planner.methods.differentiable.stage_repair import layout_cost

MEASURED = SPLITS["measured"]


def measured_rows(quick, which="scored_seeds"):
    option, true_seconds = _believed_and_true()
    arms = {
        "scores, guided by gradients": partial(refine_measured, option.stages, guided=True),
        "scores alone": partial(refine_measured, option.stages, guided=False),
        "random single moves": partial(random_moves, option.stages),
    }
    table = []
    for share in MEASURED["noise"]:
        for name, arm in arms.items():
            ratios = []
            for seed in MEASURED[which][: 2 if quick else None]:
                random = np.random.default_rng(seed)
                start = min((option.draw(random, gradients=True) for _ in range(5)), key=lambda layout: layout.key)
                measure = with_noise(true_seconds, random, share)
                found = arm(start, measure, random, num_measurements=MEASURED["num_measurements"])
                ratios.append(true_seconds(found) / true_seconds(start))
            low, high = np.quantile(ratios, [0.1, 0.9])
            row = make_row(f"noise {share:.0%}: {name}", float(np.mean(ratios)), "", spread=float(high - low) / 2)
            table.append(row)
    return table


def random_moves(space, start, measure, random, *, num_measurements):
    """A boundary moves by a layer, two ranks swap, or one goes to the next stage; kept if that measures less."""
    best, best_s, known = start, measure(start), {}
    num_stages = len(start.edges) - 1
    for _ in range(num_measurements - NUM_FINALISTS * NUM_AGAIN - 1):
        edges, stage_of = best.edges.copy(), best.stage_of.copy()
        kind = random.integers(3)
        if kind == 0:
            edges[1 + random.integers(num_stages - 1)] += random.choice([-1, 1])
        elif kind == 1:
            one, other = random.choice(len(stage_of), 2, replace=False)
            stage_of[[one, other]] = stage_of[[other, one]]
        else:
            rank = random.integers(len(stage_of))
            stage_of[rank] = np.clip(stage_of[rank] + random.choice([-1, 1]), 0, num_stages - 1)
        if (np.diff(edges) < 1).any() or len(set(stage_of)) < num_stages:
            continue
        seconds, excess = layout_cost(space, edges, stage_of)
        layout = StageLayout(edges=edges, stage_of=stage_of, seconds=seconds, excess=excess)
        if excess == 0 and (taken := measure(layout)) < best_s:
            best, best_s = layout, taken
            known[edges.tobytes(), stage_of.tobytes()] = layout
    finalists = [start, *known.values()][-NUM_FINALISTS:]
    means = [np.mean([measure(layout) for _ in range(NUM_AGAIN)]) for layout in finalists]
    return finalists[int(np.argmin(means))]


def _believed_and_true():
    """The option that the planner descends, and the true seconds of a layout, each simulated once."""
    problem = unequal_problem(MEASURED)
    fixed = {"microbatch_sizes": (MEASURED["microbatch"],), "num_stages": (MEASURED["num_stages"],)}
    problem = replace(problem, choices=Choices(**fixed, schedules=("1f1b",)))
    (option,) = differentiable_method._options(problem)
    cluster, slow = problem.cluster, MEASURED["slow_node"]
    kind = cluster.device_kind(sum(node.num_devices for node in cluster.nodes[:slow]))
    slower = replace(
        kind,
        name=f"slow {kind.name}",
        peak_flops_per_s={name: rate / MEASURED["slower"] for name, rate in kind.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s / MEASURED["slower"],
    )
    nodes = list(cluster.nodes)
    nodes[slow] = replace(nodes[slow], devices=(replace(nodes[slow].devices[0], kind=slower.name),))
    truth = replace(cluster, device_kinds=(*cluster.device_kinds, slower), nodes=tuple(nodes))
    cost, known = CostModel(cluster=truth), {}

    def true_seconds(layout):
        key = layout.edges.tobytes(), layout.stage_of.tobytes()
        if key not in known:
            known[key] = evaluate_plan(option.plan(layout), problem.graph_for(1), truth, cost).step_time_s
        return known[key]

    return option, true_seconds
