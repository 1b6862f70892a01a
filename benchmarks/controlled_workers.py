"""A parameter server that a controller extends: one decision per push and per update, some 3.5 instructions in each."""

from __future__ import annotations

import time

import numpy as np

from meshwright.program import ProgramBuilder
from meshwright.program.controllers import BoundedDelay
from meshwright.simulator import Contention, bare_costs, simulate_controlled
from meshwright.spec import Backward, OptimizerStep, Send


def measure_controlled(contention: Contention, num_clocks: int, repeats: int) -> tuple[np.ndarray, int, int]:
    """CPU seconds of all that `simulate_controlled` does, number of decisions, number of instructions.

    16 workers, at most 2 ahead; durations differ by up to a half, all messages meet on one link of the server.
    """
    policy = BoundedDelay(num_workers=16, max_delay=2, num_clocks=num_clocks)
    program = ProgramBuilder(policy.num_ranks).build(schedule="bounded delay", plan_hash="")
    durations = np.random.default_rng(0).integers(1_000_000, 1_500_000, 16 * num_clocks)
    costs = bare_costs(program, [0, 10_000, *durations], [(0,)])

    def estimate(issue, _):
        match issue.instruction:
            case Backward(microbatch=microbatch):
                return 2 + microbatch, -1
            case OptimizerStep():
                return 1, -1
            case Send():
                return 1, 0
            case _:
                return 0, -1

    seconds = np.empty(repeats)
    run = simulate_controlled(program, costs, policy, estimate, contention=contention)
    for k in range(repeats):
        start = time.process_time()
        run = simulate_controlled(program, costs, policy, estimate, contention=contention)
        seconds[k] = time.process_time() - start
    return seconds, run.log.num_decisions, run.timeline.num_spans
