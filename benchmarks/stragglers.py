"""Stragglers: figures of our experiment of 2026-11-20 beside the simulator's, and how far off; the target is 2 %.

16 workers; a backward takes exp(0.1 N(0, 1)), and three times that with a probability of 0.05; messages and updates
take no time. Rates are gradients per worker and unit of time until the first worker has done its iterations; gains of
backup workers are of gradients that count, over a synchronous step. "One slow": one of the workers always takes twice
as long. The experiment's figures are means of some hundred iterations: those of the one slow worker know the mean of
its draws by some 2 % only.

`simulated` compares the simulator with the experiment. `real` runs the same policies on 8 real workers, whose backwards
sleep for what was drawn, and compares rates of gradients that count with the simulator's for the same draws; their
order; and the decisions of the policy in a simulation of each real run with its log. `bound` runs 10,000 iterations of
four real workers without pauses under bounded delay, and counts how far a worker was ahead of the slowest.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from harness import Row, make_row, publish_sections
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshwright.program import ProgramBuilder
from meshwright.program.controllers import BackupWorkers, BoundedDelay, PartialReduce, StoppedBackups
from meshwright.runtime.controlled import DispatchedWork, run_controlled
from meshwright.simulator import bare_costs, replay_measured, simulate_controlled
from meshwright.spec import (
    AllReduce,
    Backward,
    Opcode,
    ProgramError,
    Send,
    read_document,
    write_document,
)
from meshwright.spec.decision_log import DecisionLog
from tests.program.delays import follow_clocks

WORKERS, TARGET = 16, 0.02
# Real workers sleep, in parts, so that they can be stopped.
REAL_WORKERS, UNIT_S, PART_S, REAL_TARGET = 8, 0.2, 0.01, 0.10
TIMEOUT_S = 300
# Four workers that compute nothing, but one backward in a hundred sleeps.
BOUND_WORKERS, BOUND_ITERATIONS, BOUND_LATE, BOUND_LATE_S = 4, 10_000, 0.01, 0.05
# The part of a run's decisions that is not counted.
WARM = 0.25
# Rates that the simulator has closer together than this may change their order.
NEAR = 0.05
REAL = {
    "synchronous": (BackupWorkers, {"num_backups": 0}),
    "1 backup": (BackupWorkers, {"num_backups": 1}),
    "2 backups": (BackupWorkers, {"num_backups": 2}),
    "1 stopped backup": (StoppedBackups, {"num_backups": 1}),
    "2 stopped backups": (StoppedBackups, {"num_backups": 2}),
    "bounded delay of 1": (BoundedDelay, {"max_delay": 1}),
    "bounded delay of 4": (BoundedDelay, {"max_delay": 4}),
    "partial reduce of 2": (PartialReduce, {"group_size": 2}),
    "partial reduce of 4": (PartialReduce, {"group_size": 4}),
    "partial reduce of 2, bridged": (PartialReduce, {"group_size": 2, "bridge_after": 14}),
}
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


def draw(count: int, workers: int) -> np.ndarray:
    """Durations of backwards by iteration and worker, shape (count, workers)."""
    random = np.random.default_rng(0)
    return random.lognormal(0, 0.1, (count, workers)) * np.where(random.random((count, workers)) < 0.05, 3, 1)


def simulate(policy, count: int, slow: float = 1.0):
    """The timeline of a policy under the same draws, in seconds."""
    draws = draw(count, WORKERS)
    draws[:, 0] *= slow
    return simulate_run(policy, draws).timeline


def simulate_run(policy, draws: np.ndarray):
    """The run of a policy whose microbatches take what was drawn, in seconds."""
    program = ProgramBuilder(policy.num_ranks).build(schedule="stragglers", plan_hash="")
    costs = bare_costs(program, [0, *np.rint(draws.reshape(-1) * 1e12).astype(np.int64)])

    def estimate(issue, _):
        is_backward = isinstance(issue.instruction, Backward)
        return (1 + issue.instruction.microbatch if is_backward else 0), -1

    return simulate_controlled(program, costs, policy, estimate)


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


def simulated(quick: bool) -> list[Row]:
    """The simulator beside the experiment."""
    count = 200 if quick else 1500
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
    return rows


class Sleeper:
    """A worker whose backwards sleep for what was drawn, and a server that does nothing."""

    def __init__(self, draws: np.ndarray) -> None:
        self._durations_s = (draws * UNIT_S).reshape(-1)

    def compute(self, work: DispatchedWork) -> None:
        """Sleep until the end of a backward, unless it is abandoned."""
        if not isinstance(work.instruction, Backward):
            return
        end = time.perf_counter() + self._durations_s[work.instruction.microbatch]
        while (left := end - time.perf_counter()) > 0:
            work.check()
            time.sleep(min(left, PART_S))

    def outgoing(self, send: Send) -> torch.Tensor:
        """Return what stands for parameters or a gradient."""
        return torch.zeros(send.num_bytes // 4)

    def summand(self, instruction: AllReduce) -> torch.Tensor:
        """Return what stands for a gradient."""
        return torch.zeros(instruction.num_bytes // 4)

    def summed(self, instruction: AllReduce, total: torch.Tensor, num_ranks: int) -> None:
        """Do nothing with a sum."""


def run_rank(rank: int, policy, draws: np.ndarray, port: int, folder: str) -> None:
    """Be a rank of a real run; rank 0 writes the log, and keeps the store until all have ended."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    found = run_controlled(
        policy, Sleeper(draws), rank=rank, num_ranks=policy.num_ranks, store=store, timeout_s=TIMEOUT_S
    )
    if found is not None:
        write_document(found.log, Path(folder) / "log.json")
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < policy.num_ranks:
        time.sleep(PART_S)


def run_policy(policy, draws: np.ndarray) -> DecisionLog:
    """The log of a real run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")  # torch is loaded, and has started no thread
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=run_rank, args=(rank, policy, draws, port, folder), daemon=True)
            for rank in range(policy.num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
        return read_document(DecisionLog, Path(folder) / "log.json")


def counted_rate(log: DecisionLog, gradients: int) -> float:
    """Gradients that count per worker and second, in the later decisions: the first iterations open connections."""
    begun = int(log.num_decisions * WARM)
    seconds = (int(log.now_ps[-1]) - int(log.now_ps[begun])) / 1e12
    return gradients * (1 - begun / log.num_decisions) / REAL_WORKERS / seconds


def repeats(policy, log: DecisionLog) -> bool:
    """Whether the policy decides in a simulation of the run as its log says."""
    try:
        replay_measured(policy, log)
    except ProgramError:
        return False
    return True


def real(quick: bool) -> list[Row]:
    """Real workers beside the simulator."""
    count = 8 if quick else 60
    draws, rows, rates, repeated = draw(count, REAL_WORKERS), list[Row](), dict[str, tuple[float, float]](), 0
    for name, (kind, facts) in REAL.items():
        named = {"BoundedDelay": "num_clocks", "PartialReduce": "num_iterations"}.get(kind.__name__, "num_versions")
        policy = kind(num_workers=REAL_WORKERS, num_bytes=4096, **facts, **{named: count})
        log, gradients = run_policy(policy, draws), (REAL_WORKERS - facts.get("num_backups", 0)) * count
        predicted = counted_rate(simulate_run(policy, draws).log, gradients)
        rates[name] = predicted, counted_rate(log, gradients) * UNIT_S
        repeated += repeats(policy, log)
        off = rates[name][1] / predicted - 1
        rows.append(make_row(f"{name}: {rates[name][1]:.3f}", abs(off), "off", baseline=predicted, target=REAL_TARGET))
    swapped = [
        pair
        for pair in combinations(rates.values(), 2)
        if abs(pair[0][0] / pair[1][0] - 1) > NEAR and (pair[0][0] > pair[1][0]) != (pair[0][1] > pair[1][1])
    ]
    rows.append(make_row("pairs in another order", len(swapped), "", target=0))
    rows.append(make_row(f"logs of {len(REAL)} with other decisions", len(REAL) - repeated, "", target=0))
    return rows


def bound(quick: bool) -> list[Row]:
    """Bounded delay of many iterations."""
    rows, count = list[Row](), 100 if quick else BOUND_ITERATIONS // BOUND_WORKERS
    random = np.random.default_rng(0)
    draws = np.where(random.random((count, BOUND_WORKERS)) < BOUND_LATE, BOUND_LATE_S / UNIT_S, 0.0)
    for delay in (1, 4):
        policy = BoundedDelay(num_workers=BOUND_WORKERS, max_delay=delay, num_clocks=count, num_bytes=4096)
        _, lead = follow_clocks(run_policy(policy, draws), BOUND_WORKERS)
        name = f"bounded delay of {delay}, {count * BOUND_WORKERS:,} iterations: largest lead"
        rows.append(make_row(name, lead, "", target=delay))
    return rows


def main() -> int:
    """Run the sections; 1 if a target was missed."""
    return publish_sections("stragglers", __doc__ or "", {"simulated": simulated, "real": real, "bound": bound})


if __name__ == "__main__":
    sys.exit(main())
