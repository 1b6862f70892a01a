"""What messages take on a rank beside what computing does: buffers of receives, and gradients that are being sent.

The runtime holds both longer than their transfers take, by the order of its computations alone:

    receives   are issued `RECEIVE_LOOKAHEAD` computations before their consumer and held until the microbatch's
               backward is done; buffers go back to a pool by size and are never given up (runtime/transport.py), so
               what was most of each size is there all the time
    sends      of gradients hold them until the oldest of `MAX_GRADIENT_SENDS` is waited for (runtime/executor.py)
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from meshwright.program.build import RECEIVE_LOOKAHEAD
from meshwright.spec import Opcode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meshwright.spec import Graph, Plan, Program, StageSlice

# As runtime/executor.py has it; under an own schedule nothing is waited for before the step's end.
MAX_GRADIENT_SENDS = 4


def compute_order(program: Program, rank: int) -> list[tuple[bool, int]]:
    """What a rank computes in a step: (is it a backward, of which microbatch)."""
    order = []
    for stream in program.streams_of(rank):
        if program.streams[stream].name != "compute":
            continue
        for _, section in program.sections():
            for index in section.stream_range(stream):
                opcode = int(section.opcode[index])
                if opcode in (Opcode.FORWARD, Opcode.BACKWARD):
                    order.append((opcode == Opcode.BACKWARD, int(section.microbatch[index])))
    return order


def receive_buffer_bytes(graph: Graph, plan: Plan, stage: StageSlice, order: Sequence[tuple[bool, int]]) -> int:
    """Bytes of the pool of buffers in which a rank receives."""
    forwards = {microbatch: place for place, (is_backward, microbatch) in enumerate(order) if not is_backward}
    backwards = {microbatch: place for place, (is_backward, microbatch) in enumerate(order) if is_backward}
    ends = {microbatch: backwards.get(microbatch, place) for microbatch, place in forwards.items()}
    values = _held(len(order), [(forwards[m], ends[m]) for m in forwards])
    gradients = _held(len(order), [(place, place) for place in backwards.values()])
    held: dict[int, NDArray[np.int64]] = defaultdict(lambda: np.zeros(len(order), np.int64))
    for channel in stage.incoming:
        for tensor in channel.tensors:
            held[_size(graph, plan, tensor)] += values
    for channel in stage.outgoing:
        for tensor in channel.gradients:
            held[_size(graph, plan, tensor)] += gradients
    return sum(size * int(count.max(initial=0)) for size, count in held.items())


def sent_gradient_bytes(
    graph: Graph, plan: Plan, stage: StageSlice, order: Sequence[tuple[bool, int]], microbatch_bytes: int
) -> int:
    """Bytes of earlier gradients still being sent when most is in use, each microbatch in flight keeping so much."""
    returning = [channel for channel in stage.incoming if channel.gradients]
    size = sum(channel.backward_bytes(graph, plan.microbatch_size, plan.workload.float_bytes) for channel in returning)
    if not size:
        return 0
    is_backward = np.array([item for item, _ in order])
    done = np.cumsum(is_backward) - is_backward
    in_flight = np.cumsum(~is_backward) - done
    kept = done if plan.has_own_schedule else np.minimum(done, MAX_GRADIENT_SENDS // len(returning))
    in_use = in_flight * microbatch_bytes
    return int((in_use + kept * size).max() - in_use.max())


def _held(count: int, spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """How many are held at each place, each from so many places before its first to its last."""
    changes = np.zeros(count + 1, np.int64)
    for start, stop in spans:
        changes[max(start - RECEIVE_LOOKAHEAD, 0)] += 1
        changes[stop + 1] -= 1
    held: NDArray[np.int64] = np.cumsum(changes)[:-1]
    return held


def _size(graph: Graph, plan: Plan, tensor: int) -> int:
    return graph.tensors[tensor].num_bytes(plan.microbatch_size, plan.workload.float_bytes)
