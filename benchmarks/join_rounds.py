"""Networks in which every instruction is a k-of-n join: rounds of workers, each of whom waits for k of all before."""

from __future__ import annotations

import numpy as np
from bare_network import bare_network

from meshwright.simulator.network import Network


def join_rounds(num_workers: int, need: int, num_rounds: int) -> tuple[Network, int]:
    """Worker w computes round r when ``need`` workers have ended round r - 1; durations differ by up to a half."""
    shape = num_workers, num_rounds
    ids = np.arange(num_workers * num_rounds, dtype=np.int32).reshape(shape)
    waits = np.broadcast_to(ids[:, :-1].T, (num_workers, num_rounds - 1, num_workers)).reshape(-1)
    num_waits = np.full(shape, num_workers)
    num_waits[:, 0] = 0
    joins = ids[:, 1:].reshape(-1)
    network = bare_network(
        stream_offsets=np.arange(num_workers + 1) * num_rounds,
        cost_class=ids.reshape(-1),
        class_ps=np.random.default_rng(0).integers(1_000_000, 1_500_000, num_workers * num_rounds),
        wait_offsets=np.concatenate([[0], np.cumsum(num_waits)]).astype(np.int32),
        waits=waits.copy(),
        join_instruction=joins,
        join_need=np.full(len(joins), need, np.int32),
    )
    return network, 0
