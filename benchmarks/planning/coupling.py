"""Where the loss of a model and the cost of a plan couple: stages that never wait work on old weights.

A chain of 64 layers (`splits/planner_differentiable.json`, first scored seed, cuts free) in k stages. A pipeline that
never flushes makes an update per slowest stage, but gradients of its first stage are k - 1 updates old. Training is
gradient descent on a quadratic with 16 curvatures from 0.01 to 1, equal in loss at the start, with that delay; steps
are those until the loss is a thousandth, at the best of 200 rates. A synchronous pipeline computes the same function
for every k: the number of its steps does not depend on the plan, and the best plan is that of the least step time.
"""

import numpy as np
from harness import make_row
from planning.chain import ChainProblem, solve_chain
from planning.chains import SLICING, heterogeneous

STAGES, NUM_LAYERS, MOST_STEPS, TARGET_LOSS = (1, 2, 4, 8, 16, 32), 64, 20_000, 1e-3
NUM_RATES = 200


def coupling_rows():
    layers = heterogeneous(NUM_LAYERS, 2, SLICING["scored_seeds"][0]).layer_costs
    rates = np.geomspace(0.01, 1.9, NUM_RATES)
    table, times = [], {}
    for num_stages in STAGES:
        free = np.zeros((NUM_LAYERS - 1, num_stages - 1))
        slowest = solve_chain(ChainProblem(layer_costs=layers, cut_costs=free, num_microbatches=2)).slowest
        steps = int(steps_to_loss(num_stages - 1, rates))
        times[num_stages] = steps * slowest
        table += [
            make_row(f"{num_stages} stages that never flush: seconds per update", slowest, "layer costs"),
            make_row(f"{num_stages} stages that never flush: updates to the loss", steps, "updates"),
            make_row(f"{num_stages} stages that never flush: time to the loss", times[num_stages], "layer costs"),
        ]
    best = min(times, key=times.get)
    ratio = times[STAGES[-1]] / times[best]
    return [*table, make_row("stages of the least time to the loss", best, "stages", baseline=STAGES[-1], ratio=ratio)]


def steps_to_loss(delay, rates):
    """The fewest steps of any of the rates; gradients are ``delay`` steps old."""
    curvature = np.geomspace(0.01, 1, 16)
    past = np.repeat((1 / np.sqrt(curvature))[None, :, None], delay + 1, axis=0) * np.ones(len(rates))
    first = (curvature[:, None] * past[0] ** 2).sum(axis=0)
    for step in range(1, MOST_STEPS + 1):
        place = step % (delay + 1)
        # The oldest of the weights stands where the newest goes.
        newest = past[(step - 1) % (delay + 1)] - rates * curvature[:, None] * past[place]
        past[place] = np.where(np.abs(newest) < 1e12, newest, 1e12)
        if ((curvature[:, None] * past[place] ** 2).sum(axis=0) <= TARGET_LOSS * first).any():
            return step
    return MOST_STEPS
