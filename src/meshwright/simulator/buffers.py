"""Memory of messages on a rank, besides that of its computations: receive buffers, and gradients being sent.

The runtime holds both longer than their transfers take, in the order of its computations:

    receives   are issued `RECEIVE_LOOKAHEAD` computations before their consumer and held until the microbatch's
               backward is done; buffers go back to a pool by size and are never freed (runtime/transport.py), so the
               largest number of each size stays allocated
    sends      of gradients hold them until the oldest of `MAX_GRADIENT_SENDS` is waited for (runtime/messages.py)
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from meshwright.program import stays_on_rank
from meshwright.program.transfers import RECEIVE_LOOKAHEAD
from meshwright.spec import Opcode, Plan
from meshwright.spec.instructions import COMPUTATIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meshwright.spec import Graph, Placement, Program, StageSlice

    Ints = NDArray[np.int64]

# As in runtime/messages.py; with an own schedule or a placement, sends are waited for only at the end of the step.
MAX_GRADIENT_SENDS = 4


def _choose(*opcodes: Opcode) -> NDArray[np.bool_]:
    """Return a mask over opcodes that is true for the given ones, shape (opcodes,)."""
    chosen = np.zeros(len(Opcode), np.bool_)
    chosen[list(opcodes)] = True
    return chosen


_COMPUTES, _FORWARD = _choose(*COMPUTATIONS), _choose(Opcode.FORWARD)
# Which half of a backward in two parts is the last to read received values, and which one needs a received gradient.
_RELEASING = _choose(Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
_RECEIVING_GRADIENTS = _choose(Opcode.BACKWARD, Opcode.BACKWARD_INPUT)
_ENDING = _choose(Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


def compute_orders(program: Program) -> list[Ints]:
    """Return what each rank computes in a step: rows of opcode, stage and microbatch, shape (n, 3)."""
    parts: list[list[Ints]] = [[np.zeros((0, 3), np.int64)] for _ in range(program.num_ranks)]
    for _, section in program.sections():
        table = np.stack([section.opcode, section.stage, section.microbatch], axis=1, dtype=np.int64)
        for index, stream in enumerate(program.streams):
            if stream.name == "compute":
                own = table[section.stream_offsets[index] : section.stream_offsets[index + 1]]
                parts[stream.rank].append(own[_COMPUTES[own[:, 0]]])
    return [np.concatenate(rows) for rows in parts]


def served_bytes(program: Program) -> list[int]:
    """Return the bytes that each rank keeps as a parameter server: the sum of every part that it adds up."""
    sums = np.flatnonzero(program.body.opcode == Opcode.SUM)
    streams = np.searchsorted(program.body.stream_offsets, sums, side="right") - 1
    ranks = np.array([stream.rank for stream in program.streams], np.int64)[streams]
    held = np.zeros(program.num_ranks, np.int64)
    np.add.at(held, ranks, program.body.num_bytes[sums])
    return [int(num_bytes) for num_bytes in held]


def receive_buffer_bytes(graph: Graph, plan: Plan | Placement, stage: StageSlice, order: Ints) -> int:
    """Return the bytes of the buffer pool in which a rank receives for one of its stages."""
    arriving = [channel for channel in stage.incoming if not stays_on_rank(plan, channel.source, channel.target)]
    returning = [channel for channel in stage.outgoing if not stays_on_rank(plan, channel.source, channel.target)]
    here = order[:, 1] == stage.index
    begins = _places(order, here, _FORWARD)
    ends = np.maximum(begins, _places(order, here, _RELEASING))
    values = _held(len(order), begins[begins >= 0], ends[begins >= 0])
    needed = _places(order, here, _RECEIVING_GRADIENTS)
    gradients = _held(len(order), needed[needed >= 0], needed[needed >= 0])
    held: dict[int, Ints] = defaultdict(lambda: np.zeros(len(order), np.int64))
    for channel in arriving:
        for tensor in channel.tensors:
            held[_size(graph, plan, tensor)] += values
    for channel in returning:
        for tensor in channel.gradients:
            held[_size(graph, plan, tensor)] += gradients
    return sum(size * int(count.max(initial=0)) for size, count in held.items())


def sent_gradient_bytes(
    graph: Graph, plan: Plan | Placement, stage: StageSlice, order: Ints, microbatch_bytes: int
) -> int:
    """Return the bytes of gradients still being sent at the peak.

    Each microbatch in flight holds ``microbatch_bytes``.
    """
    returning = [
        channel
        for channel in stage.incoming
        if channel.gradients and not stays_on_rank(plan, channel.source, channel.target)
    ]
    size = sum(channel.backward_bytes(graph, plan.microbatch_size, plan.workload.float_bytes) for channel in returning)
    if not size:
        return 0
    here = order[:, 1] == stage.index
    is_sent = here & _RECEIVING_GRADIENTS[order[:, 0]]
    is_released = here & _ENDING[order[:, 0]]
    done = np.cumsum(is_sent) - is_sent
    in_flight = np.cumsum(here & (order[:, 0] == Opcode.FORWARD)) - (np.cumsum(is_released) - is_released)
    waits = isinstance(plan, Plan) and not plan.has_own_schedule
    kept = done if not waits else np.minimum(done, MAX_GRADIENT_SENDS // len(returning))
    in_use = in_flight * microbatch_bytes
    return int((in_use + kept * size).max() - in_use.max())


def _places(order: Ints, here: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Ints:
    """Return the position of each microbatch's last computation of the chosen kinds; -1 for none."""
    places = np.flatnonzero(here & chosen[order[:, 0]])
    found = np.full(order[:, 2].max(initial=-1) + 1, -1, np.int64)
    found[order[places, 2]] = places
    return found


def _held(count: int, first: Ints, last: Ints) -> Ints:
    """Count buffers held at each position, each from `RECEIVE_LOOKAHEAD` positions before its first to its last."""
    changes = np.zeros(count + 1, np.int64)
    np.add.at(changes, np.maximum(first - RECEIVE_LOOKAHEAD, 0), 1)
    np.subtract.at(changes, last + 1, 1)
    return np.cumsum(changes)[:-1]


def _size(graph: Graph, plan: Plan | Placement, tensor: int) -> int:
    return graph.tensors[tensor].num_bytes(plan.microbatch_size, plan.workload.float_bytes)
