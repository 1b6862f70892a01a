"""Host processor time that transfers take from computations of the same rank.

On a CPU, copies and sockets of a transfer run on the cores that compute. Let transfer T hold its links during an
interval of length d and need h of processor time from each participating rank. A computation that overlaps with T for
a time o grows by h o / d; while a rank waits, T takes nothing from it. Marks inside a computation move in proportion.

Overlaps depend on the times and the times on overlaps, so the simulation is repeated with the result of the round
before, until nothing changes or `HOST_ROUNDS` are over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.matching import rank_of_streams
from meshwright.simulator.network import Network, durations, with_durations
from meshwright.simulator.unroll import Unrolled
from meshwright.spec import Program

# Each round finds a share h / d of what the one before still missed; with h / d = 1/2 eight rounds leave less than a
# thousandth of the step (tests/simulator/test_host_time.py).
HOST_ROUNDS = 8

Times = NDArray[np.int64]


def charge_host_time(program: Program, unrolled: Unrolled, host_ps: Times, start_ps: Times, end_ps: Times) -> Network:
    """Return the network with computations lengthened by the transfers that overlap them at the given times."""
    network = unrolled.network
    ranks = rank_of_streams(program)[unrolled.stream]
    senders = np.flatnonzero(host_ps[unrolled.cost_class] > 0)
    receivers = np.flatnonzero(unrolled.send_of >= 0)
    transfer = np.concatenate([senders, unrolled.send_of[receivers]])
    taken = _take_time(
        np.concatenate([ranks[senders], ranks[receivers]]).astype(np.int64),
        start_ps[transfer],
        end_ps[transfer],
        host_ps[unrolled.cost_class[transfer]],
        _compute_ranges(program, network),
        start_ps,
        end_ps,
    )
    usual_ps = durations(network)
    duration_ps = usual_ps + np.rint(taken).astype(np.int64)
    scale = (duration_ps / np.maximum(usual_ps, 1))[network.mark_instruction]
    return with_durations(network, duration_ps, np.rint(network.mark_shift_ps * scale).astype(np.int64))


def _compute_ranges(program: Program, network: Network) -> Times:
    """Return begin and end ids of each rank's compute stream, shape (num_ranks, 2)."""
    ranges = np.zeros((program.num_ranks, 2), np.int64)
    for index, stream in enumerate(program.streams):
        if stream.name == "compute":
            ranges[stream.rank] = network.stream_offsets[index : index + 2]
    return ranges


@compiled
def _take_time(
    ranks: Times, starts: Times, ends: Times, host: Times, compute: Times, start_ps: Times, end_ps: Times
) -> NDArray[np.float64]:
    """Return, per instruction, the time that the transfers (rank, start, end, host time) take from it."""
    taken = np.zeros(len(start_ps))
    for k in range(len(ranks)):
        first, last = compute[ranks[k], 0], compute[ranks[k], 1]
        i = first + np.searchsorted(end_ps[first:last], starts[k], side="right")
        while i < last and start_ps[i] < ends[k]:
            overlap = min(end_ps[i], ends[k]) - max(start_ps[i], starts[k])
            taken[i] += host[k] * (overlap / (ends[k] - starts[k]))
            i += 1
    return taken
