"""Stragglers: figures of our experiment of 2026-11-20 beside the simulator's, and how far off; the target is 2 %.

16 workers; a backward takes exp(0.1 N(0, 1)), and three times that with a probability of 0.05; messages and updates
take no time. Rates are gradients per worker and unit of time until the first worker has done its iterations; gains of
backup workers are of gradients that count, over a synchronous step. "One slow": one of the workers always takes twice
as long. The experiment's figures are means of some hundred iterations: those of the one slow worker know the mean of
its draws by some 2 % only.
"""

from __future__ import annotations

import sys

import numpy as np
from harness import make_row, parse_options, publish

from meshwright.program import ProgramBuilder
from meshwright.program.controllers import BackupWorkers, BoundedDelay, PartialReduce, StoppedBackups
from meshwright.simulator import bare_costs, simulate_controlled
from meshwright.spec import Backward, Opcode

WORKERS, TARGET = 16, 0.02
RATES = {
    "bounded delay of 1": (BoundedDelay, {"max_delay": 1}, 0.666),
    "bounded delay of 2": (BoundedDelay, {"max_delay": 2}, 0.773),
    "bounded delay of 4": (BoundedDelay, {"max_delay": 4}, 0.839),
    "bounded delay of 8": (BoundedDelay, {"max_delay": 8}, 0.875),
    "bounded delay of 32": (BoundedDelay, {"max_delay": 32}, 0.908),
    "partial reduce of 2": (PartialReduce, {"group_size": 2}, 0.881),
    "partial reduce of 4": (PartialReduce, {"group_size": 4}, 0.820),
    "partial reduce of 8": (PartialReduce, {"group_size": 8}, 0.678),
}
SLOW = {
    "bounded delay of 4": (BoundedDelay, {"max_delay": 4}, 0.459),
    "bounded delay of 32": (BoundedDelay, {"max_delay": 32}, 0.471),
    "partial reduce of 4": (PartialReduce, {"group_size": 4}, 0.794),
}


def simulate(policy, count: int, slow: float = 1.0):
    """The timeline of a policy under the same draws, in seconds."""
    random = np.random.default_rng(0)
    draws = random.lognormal(0, 0.1, (count, WORKERS)) * np.where(random.random((count, WORKERS)) < 0.05, 3, 1)
    draws[:, 0] *= slow
    program = ProgramBuilder(policy.num_ranks).build(schedule="stragglers", plan_hash="")
    costs = bare_costs(program, [0, *np.rint(draws.reshape(-1) * 1e12).astype(np.int64)])

    def estimate(issue, _):
        is_backward = isinstance(issue.instruction, Backward)
        return (1 + issue.instruction.microbatch if is_backward else 0), -1

    return simulate_controlled(program, costs, policy, estimate).timeline


def rate(policy, facts, count: int, slow: float = 1.0) -> float:
    """Gradients per worker and second until the first worker has done all."""
    counted = {"num_clocks": count} if policy is BoundedDelay else {"num_iterations": count}
    timeline = simulate(policy(num_workers=WORKERS, **facts, **counted), count, slow)
    is_backward = timeline.opcode == Opcode.BACKWARD
    ends, microbatches = timeline.end_ps[is_backward], timeline.microbatch[is_backward]
    until = ends[microbatches // WORKERS == count - 1].min()
    return float((ends <= until).sum() / WORKERS / until * 1e12)


def compare(name: str, ours: float, published: float):
    """How far off, relative to the published figure."""
    return make_row(f"{name}: {ours:.4g}", abs(ours / published - 1), "of it", baseline=published, target=TARGET)


def main() -> int:
    """Simulate everything; 1 if a target was missed."""
    options = parse_options(__doc__)
    count = 200 if options.quick else 1500
    synchronous = (
        simulate(BackupWorkers(num_workers=WORKERS, num_backups=0, num_versions=count), count).duration_s / count
    )
    rows = [compare("mean synchronous step", synchronous, 2.27)]
    for backups, published in ((1, 1.43), (2, 1.65), (3, 1.66), (4, 1.59)):
        policy = StoppedBackups(num_workers=WORKERS, num_backups=backups, num_versions=count)
        gain = synchronous * count / simulate(policy, count).duration_s * (WORKERS - backups) / WORKERS
        rows.append(compare(f"gain of {backups} stopped backups", gain, published))
    rows += [compare(name, rate(policy, facts, count), published) for name, (policy, facts, published) in RATES.items()]
    slow = (
        simulate(BackupWorkers(num_workers=WORKERS, num_backups=0, num_versions=count), count, 2.0).duration_s / count
    )
    rows.append(compare("one slow, synchronous", 1 / slow, 0.368))
    rows += [
        compare(f"one slow, {name}", rate(policy, facts, count, 2.0), published)
        for name, (policy, facts, published) in SLOW.items()
    ]
    return publish("stragglers", rows, options, __doc__)


if __name__ == "__main__":
    sys.exit(main())
