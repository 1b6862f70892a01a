"""The slicing problem of pipeDejavu's notebook, solved exactly: is every answer optimal, and how long does it take?

Instances and seeds: `splits/planner_differentiable.json`. Answers are held against all ways to cut where there are at
most two million, and up to 128 layers against the plain dynamic program for every possible slowest stage. CPU time of
this process, compiled code loaded, best of several runs, on the slowest of the seeds. The notebook's recorded
time for 128 layers and 50 stages is 5,430 s (another seed).
"""

import math
import time

import numpy as np
from harness import make_row
from planning.chain import solve_chain
from planning.chains import SLICING, by_every_threshold, by_trying_all, heterogeneous, scored

MOST_WAYS, NOTEBOOK_S, TARGET_S = 2_000_000, 5430.0, 0.020


def rows(quick):
    tried, checked = [0.0], [0.0]
    for _, problem in scored():
        found = solve_chain(problem).cost
        if quick and problem.num_layers > 48:
            continue
        checked.append(found - by_every_threshold(problem))
        if math.comb(problem.num_layers - 1, problem.num_stages - 1) <= MOST_WAYS / (20 if quick else 1):
            tried.append(found - by_trying_all(problem))
    return [
        make_row(f"largest excess over brute force, {len(tried) - 1} chains", max(tried), "cost", target=0.0),
        make_row(
            f"largest excess over the dynamic program, {len(checked) - 1} chains", max(checked), "cost", target=0.0
        ),
        *(_timed(*size, quick) for size in [*SLICING["heterogeneous"], *SLICING["large"]] if size[0] >= 128),
        _timed(128, 50, quick, fractional=True),
        _timed(512, 128, quick, fractional=True),
    ]


def _timed(num_layers, num_stages, quick, *, fractional=False):
    seconds = []
    for seed in SLICING["scored_seeds"]:
        problem = heterogeneous(num_layers, num_stages, seed, fractional=fractional)
        solve_chain(problem)
        seconds.append(min(_cpu_seconds(problem) for _ in range(3 if quick else 10)))
    low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9])
    named = (num_layers, num_stages) == (128, 50)
    return make_row(
        f"{num_layers} layers, {num_stages} stages{', fractional' if fractional else ''}",
        max(seconds),
        "CPU s",
        baseline=NOTEBOOK_S if named and not fractional else None,
        spread=float(high - low) / 2 / middle,
        target=TARGET_S if named else None,
    )


def _cpu_seconds(problem):
    start = time.process_time()
    solve_chain(problem)
    return time.process_time() - start
