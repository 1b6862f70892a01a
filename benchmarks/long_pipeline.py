"""How much time and memory does the engine need per instruction, from 10^5 to 10^8 of them? One process per size.

A 1F1B pipeline of 64 stages is written straight into the columns of a `Network`: per rank a stream that computes, one
that sends and one that receives, links between neighbours. Memory is what the process holds at most while it builds and
simulates, above what it held before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from bare_network import bare_network

from meshwright.compiled import compiled
from meshwright.simulator.engine import run_network
from meshwright.simulator.network import Network

STAGES, FORWARD_PS, BACKWARD_PS, TRANSFER_PS = 64, 1_000_000, 2_000_000, 1


@compiled
def _work_at(place: int, warmup: int, num_microbatches: int) -> tuple[bool, int]:
    """Whether the computation at a place of 1F1B goes backward, and its microbatch."""
    if place < warmup:
        return False, place
    if place < 2 * num_microbatches - warmup:
        return (place - warmup) % 2 == 1, warmup * (1 - (place - warmup) % 2) + (place - warmup) // 2
    return True, place - num_microbatches


@compiled
def _place_of(backward: bool, microbatch: int, warmup: int, num_microbatches: int) -> int:
    """The other way round."""
    if not backward:
        return microbatch if microbatch < warmup else 2 * microbatch - warmup
    return warmup + 2 * microbatch + 1 if microbatch < num_microbatches - warmup else num_microbatches + microbatch


@compiled
def _transfer(offsets, rank, backward, microbatch, stream, num_ranks, num_microbatches):
    """The instruction in the stream of sends (1) or receives (2) of a rank that belongs to one of its computations."""
    place = microbatch
    if 0 < rank < num_ranks - 1:
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        place = _place_of(backward, microbatch, warmup, num_microbatches)
    return offsets[3 * rank + stream] + place


@compiled
def _fill(offsets, num_microbatches, cost_class, wait_offsets, waits, resource):
    num_ranks, w = (len(offsets) - 1) // 3, 0
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        for stream in range(3):
            i = offsets[3 * rank + stream]
            for place in range(2 * num_microbatches):
                backward, microbatch = _work_at(place, warmup, num_microbatches)
                toward, source = (rank - 1, rank + 1) if backward else (rank + 1, rank - 1)
                other = source if stream == 2 else toward
                if stream > 0 and not 0 <= other < num_ranks:
                    continue
                wait_offsets[i], resource[i] = w, -1
                if stream == 0:
                    cost_class[i] = 2 * rank + backward
                    if 0 <= source < num_ranks:
                        waits[w] = _transfer(offsets, rank, backward, microbatch, 2, num_ranks, num_microbatches)
                        w += 1
                elif stream == 1:
                    cost_class[i], resource[i] = 2 * num_ranks, 2 * rank + backward
                    waits[w] = offsets[3 * rank] + place
                    w += 1
                else:
                    cost_class[i] = 2 * num_ranks + 1
                    waits[w] = _transfer(offsets, source, backward, microbatch, 1, num_ranks, num_microbatches)
                    w += 1
                i += 1
    wait_offsets[-1] = w


def pipeline(num_ranks: int, num_microbatches: int) -> tuple[Network, int]:
    """The network of a 1F1B pipeline and its number of links."""
    inner = np.full((num_ranks, 3), 2 * num_microbatches)
    inner[[0, -1], 1:] = num_microbatches
    offsets = np.concatenate([[0], np.cumsum(inner)])
    count, no_wait = int(offsets[-1]), 2 * num_microbatches
    cost_class, resource = np.empty(count, np.int32), np.empty(count, np.int32)
    wait_offsets, waits = np.empty(count + 1, np.int32), np.empty(count - no_wait, np.int32)
    _fill(offsets, num_microbatches, cost_class, wait_offsets, waits, resource)
    links = np.arange(2 * num_ranks, dtype=np.int32)
    network = bare_network(
        stream_offsets=offsets,
        cost_class=cost_class,
        class_ps=np.array([FORWARD_PS, BACKWARD_PS] * num_ranks + [TRANSFER_PS, 0]),
        wait_offsets=wait_offsets,
        waits=waits,
        resource=resource,
        num_private=len(links),
        route_offsets=np.arange(len(links) + 1),
        route_links=links,
    )
    return network, len(links)


def measure(count: int) -> dict[str, float]:
    """Instructions, CPU seconds of one simulation and peak bytes per instruction, in this process."""
    import resource

    run_network(*pipeline(4, 8))
    page = resource.getpagesize()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * page
    num_microbatches = round(count / (6 * STAGES - 4))
    network, num_links = pipeline(STAGES, num_microbatches)
    start = time.process_time()
    outcome = run_network(network, num_links)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    expected = (num_microbatches + STAGES - 1) * (FORWARD_PS + BACKWARD_PS)
    assert 0 <= int(outcome.end_ps.max()) / expected - 1 < 1e-4, "not the time of a 1F1B pipeline"
    total = len(network.cost_class)
    return {"count": total, "seconds": seconds, "bytes": peak / total}


def measure_apart(count: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, str(count)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
