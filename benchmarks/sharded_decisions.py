"""Symphony's scheduler in processes: one for each shard and one for the rank, with mailboxes in shared memory.

Each shard is given requests for its models on the real clock, as fast as it decides; devices are taken to be free when
their batches should have ended. What is measured is how many requests all shards decide about in a second.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from harness import Row, make_row
from scheduler_parts import PolicyShard, Rank, allocate_mailboxes

from meshwright.serving.policies.pool import RUN
from meshwright.serving.policies.sharding import ARRIVE
from meshwright.serving.policies.sharding.mailboxes import WIDTH

MS = 1_000_000
MODELS, DEVICES, TURN = 16, 256, 256
FACTS = {
    "latency": np.array([[0, *(2 * MS + 4000 * size for size in range(1, 513))]] * MODELS),
    "slo": np.full(MODELS, 50 * MS),
    "num_devices": DEVICES,
    "capacity": 16_384,
}
# A rank that has nothing to do leaves its core to others for so long.
REST_S = 50e-6
PATIENCE_S = 120.0


def run_shard(memory: str, number: int, shards: int, seconds: float, start: Any, results: Any) -> None:
    """Decide for so long; tells of decisions, those that were to run, wall and CPU seconds."""
    shared = SharedMemory(memory)
    shard = PolicyShard(FACTS, number, _mailboxes(shared, shards))
    models = len(range(number, MODELS, shards))
    arrivals = np.zeros((TURN, WIDTH), np.int64)
    arrivals[:, 0], arrivals[:, 2] = ARRIVE, np.arange(TURN) % models
    start.wait(PATIENCE_S)
    begin, cpu_begin = time.monotonic_ns(), time.process_time()
    end, now, request, decided, run = begin + int(seconds * 1e9), begin, 0, 0, 0
    while now < end:
        now = time.monotonic_ns()
        arrivals[:, 1], arrivals[:, 3], arrivals[:, 4] = now, np.arange(request, request + TURN), now + 50 * MS
        request += TURN
        for rows, _ in shard.turn(now, arrivals):
            decided += int(rows[:, 4].sum())
            run += int(rows[rows[:, 0] == RUN, 4].sum())
    results.put((decided, run, (now - begin) / 1e9, time.process_time() - cpu_begin))


def run_rank(memory: str, shards: int, start: Any, stop: Any, results: Any) -> None:
    """Assign devices until stopped; report the share of a core used."""
    shared = SharedMemory(memory)
    rank = Rank(FACTS, _mailboxes(shared, shards))
    start.wait(PATIENCE_S)
    begin, cpu_begin = time.monotonic(), time.process_time()
    while not stop.is_set():
        if rank.turn(time.monotonic_ns()) == 0:
            time.sleep(REST_S)
    results.put((time.process_time() - cpu_begin) / (time.monotonic() - begin))


def _mailboxes(shared: SharedMemory, shards: int) -> np.ndarray:
    like = allocate_mailboxes(shards, DEVICES)
    return np.ndarray(like.shape, like.dtype, shared.buf)


def decide(shards: int, seconds: float) -> tuple[float, float, float, float]:
    """Decisions per second, per CPU second of shards; shares of requests that were run, and of a core for the rank."""
    context = multiprocessing.get_context("spawn")
    shared = SharedMemory(create=True, size=allocate_mailboxes(shards, DEVICES).nbytes)
    start, stop = context.Barrier(shards + 1), context.Event()
    results, of_rank = context.Queue(), context.Queue()
    processes = [context.Process(target=run_rank, args=(shared.name, shards, start, stop, of_rank))]
    for number in range(shards):
        arguments = (shared.name, number, shards, seconds, start, results)
        processes.append(context.Process(target=run_shard, args=arguments))
    try:
        for process in processes:
            process.start()
        found = np.array([results.get(timeout=PATIENCE_S + seconds) for _ in range(shards)])
        stop.set()
        busy = float(of_rank.get(timeout=PATIENCE_S))
    finally:
        stop.set()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        shared.close()
        shared.unlink()
    decided, run, _, cpu_s = found.sum(axis=0)
    return float(decided / found[:, 2].max()), float(decided / cpu_s), float(run / decided), busy


def sharded(quick: bool) -> list[Row]:
    """One shard and two, alternated ABBA."""
    seconds, pairs = (1.0, 2) if quick else (3.0, 6)
    found = np.zeros((pairs, 2, 4))
    for pair in range(pairs):
        for arm in ((0, 1), (1, 0))[pair % 2]:
            found[pair, arm] = decide(arm + 1, seconds)
            rate, per_cpu, share, busy = found[pair, arm]
            print(
                f"{arm + 1} shard(s): {rate / 1e6:.2f} M decisions/s, {per_cpu / 1e6:.2f} M per CPU second of a shard, "
                f"{100 * share:.1f} % run, the rank took {100 * busy:.0f} % of a core",
                flush=True,
            )
    rows = []
    for name, column in (("second", 0), ("CPU second of a shard", 1)):
        one, two = found[:, 0, column], found[:, 1, column]
        low, middle, high = np.quantile(one / two, [0.1, 0.5, 0.9])
        rows.append(
            make_row(
                f"decisions per {name}, one shard over two",
                float(np.median(two)),
                "/s",
                baseline=float(np.median(one)),
                ratio=float(middle),
                spread=float((high - low) / 2 / middle),
            )
        )
    return rows
