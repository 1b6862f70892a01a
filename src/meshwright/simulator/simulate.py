"""Simulate a program with its costs (`simulate_program`): its Timeline, memory over time, processor time of transfers.

The span of a send is the time for which it holds its links, or shares them under ``fair`` contention. The span of a
receive is the time in which its bytes arrive: from the start of its send (or the end of the previous receive in its
stream, if later) to the receive's own end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.deadlock import raise_deadlock
from meshwright.simulator.engine import Contention, check_contention, run_network
from meshwright.simulator.message_matching import rank_of_streams
from meshwright.simulator.network import Network, durations, with_durations
from meshwright.simulator.program_costs import ProgramCosts, check_costs
from meshwright.simulator.unroll import Unrolled, unroll
from meshwright.spec import DeadlockError, Program, ProgramError, Timeline

Times = NDArray[np.int64]

# Later than every moment.
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryUse:
    """Memory in use over time: from ``time_ps`` on, ``rank`` uses ``in_use_bytes``; rows are ordered by rank and time.

    ``peak_parts_bytes``, of shape (ranks, parts), are the bytes of each part at the rank's peak.
    """

    rank: NDArray[np.int32]
    time_ps: Times
    in_use_bytes: NDArray[np.int64]
    peak_parts_bytes: NDArray[np.int64]


# An instruction allocates ``allocate_bytes`` of its cost class when it starts and frees ``free_bytes`` when it ends.
# The streams of a rank are merged in time; at the same moment frees come before allocations, because an allocator would
# reuse the bytes. Within a stream the order of the program holds.
def follow_memory(
    stream_ranks: NDArray[np.int32],
    stream_offsets: Times,
    cost_class: NDArray[np.int32],
    start_ps: Times,
    end_ps: Times,
    allocate_bytes: NDArray[np.int64],
    free_bytes: NDArray[np.int64],
    resident_bytes: NDArray[np.int64],
) -> MemoryUse:
    """Return the bytes in use of all ranks over time, and the parts of memory at their peaks.

    ``cost_class``, ``start_ps`` and ``end_ps`` are given per instruction, bytes as in `ProgramCosts`.
    """
    changes = np.concatenate([allocate_bytes, -free_bytes]).astype(np.int64)
    acts = (changes != 0).any(axis=1).reshape(2, -1).any(axis=0)
    capacity = 2 * int(np.count_nonzero(acts[cost_class])) + len(resident_bytes)
    rank, time_ps, in_use = np.empty(capacity, np.int32), np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    peak = resident_bytes.astype(np.int64)
    count = _merge_ranks(
        np.searchsorted(stream_ranks, np.arange(len(resident_bytes) + 1)),
        (stream_offsets, cost_class, start_ps, end_ps),
        acts,
        changes,
        changes.sum(axis=1),
        (rank, time_ps, in_use),
        peak,
    )
    return MemoryUse(rank=rank[:count], time_ps=time_ps[:count], in_use_bytes=in_use[:count], peak_parts_bytes=peak)


@compiled
def _merge_ranks(
    first_stream: Times,
    network: tuple[Times, NDArray[np.int32], Times, Times],
    acts: NDArray[np.bool_],
    changes: NDArray[np.int64],
    sums: NDArray[np.int64],
    series: tuple[NDArray[np.int32], Times, NDArray[np.int64]],
    peak: NDArray[np.int64],
) -> int:
    """Scan the moments of each rank in order; moment 2i is the start of instruction i, 2i + 1 its end.

    ``changes[c]`` are the changes by part at the start of an instruction of class c, ``changes[c + classes]`` those at
    its end; ``sums`` holds their totals, ``acts`` marks the classes that change anything. ``peak`` (R, P) initially
    holds the resident bytes, and is set to the peak.
    """
    stream_offsets, cost_class, start_ps, end_ps = network
    ranks, moments, in_use = series
    count = 0
    # Per stream of the rank that changes anything: number, next moment, its time, and the next moment at the peak.
    mine, event = np.empty(len(stream_offsets), np.int64), np.empty(len(stream_offsets), np.int64)
    time, at_peak = np.empty(len(stream_offsets), np.int64), np.empty(len(stream_offsets), np.int64)
    for rank in range(len(peak)):
        total, number = peak[rank].sum(), 0
        for stream in range(first_stream[rank], first_stream[rank + 1]):
            i = _next_acting(acts, cost_class, stream_offsets[stream], stream_offsets[stream + 1])
            if i < stream_offsets[stream + 1]:
                mine[number], event[number], time[number], at_peak[number] = stream, 2 * i, start_ps[i], 2 * i
                number += 1
        highest = total
        ranks[count], moments[count], in_use[count] = rank, 0, total
        while number:
            s = 0
            for other in range(1, number):
                # Ends before starts.
                if time[other] < time[s] or (time[other] == time[s] and event[other] & 1 > event[s] & 1):
                    s = other
            i, is_end, moment = event[s] >> 1, event[s] & 1, time[s]
            if moment == _NEVER:
                break
            total += sums[cost_class[i] + is_end * len(acts)]
            if is_end:
                last = stream_offsets[mine[s] + 1]
                i = _next_acting(acts, cost_class, i + 1, last)
                event[s], time[s] = 2 * i, start_ps[i] if i < last else _NEVER
            else:
                event[s], time[s] = event[s] + 1, end_ps[i]
            if total > highest:
                highest = total
                _copy_first(number, event, at_peak)
            if moments[count] != moment:
                count += 1
                ranks[count], moments[count] = rank, moment
            in_use[count] = total
        count += 1
        for s in range(number):
            _apply(changes, cost_class, 2 * stream_offsets[mine[s]], at_peak[s], peak[rank])
    return count


@compiled
def _copy_first(number: int, given: Times, made: Times) -> None:
    """Copy ``number`` elements; a slice takes seconds to compile, for its check of shapes."""
    for k in range(number):
        made[k] = given[k]


@compiled
def _apply(changes: NDArray[np.int64], cost_class: NDArray[np.int32], begin: int, end: int, parts: Times) -> None:
    """Add the changes of moments ``begin`` to ``end`` of a stream, by part."""
    for k in range(begin, end):
        row = cost_class[k >> 1] + (k & 1) * (len(changes) // 2)
        for part in range(len(parts)):
            parts[part] += changes[row, part]


@compiled
def _next_acting(acts: NDArray[np.bool_], cost_class: NDArray[np.int32], i: int, end: int) -> int:
    """Return the first instruction from ``i`` on that changes memory; ``end`` if none before it does."""
    while i < end and not acts[cost_class[i]]:
        i += 1
    return i


# Each round finds a share h / d of what the one before still missed; with h / d = 1/2 eight rounds leave less than a
# thousandth of the step (tests/simulator/test_host_time.py).
HOST_ROUNDS = 8


# On a CPU, copies and sockets of a transfer run on the cores that compute. Let transfer T hold its links during an
# interval of length d and need h of processor time from each participating rank. A computation that overlaps with T for
# a time o grows by h o / d; while a rank waits, T takes nothing from it. Marks inside a computation move in proportion.
#
# Overlaps depend on the times and the times on overlaps, so the simulation is repeated with the result of the round
# before, until nothing changes or `HOST_ROUNDS` are over.
def charge_host_time(program: Program, unrolled: Unrolled, host_ps: Times, start_ps: Times, end_ps: Times) -> Network:
    """Return the network with computations lengthened by the processor time of transfers that overlap with them.

    ``host_ps``: processor time by cost class; ``start_ps`` and ``end_ps``: times of a run, which give the overlaps.
    """
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


Ids = NDArray[np.int64]

# Instructions of all steps kept at once: 24 bytes each for the engine, about 100 for the timeline.
MAX_UNROLLED = 5_000_000


def simulate_program(
    program: Program, costs: ProgramCosts, num_steps: int = 1, *, contention: Contention = "queued"
) -> Timeline:
    """Simulate prologue, ``num_steps`` repetitions of the body, and epilogue; return the timeline.

    ``contention`` is the model of contended links: ``queued`` (`engine`) or ``fair`` (module `fair`).

    Raises DeadlockError, which names the instructions, if the program can never finish; ProgramError if the costs do
    not fit the program, if a transfer or collective lacks a counterpart, or if there are too few or too many steps.
    """
    return simulate_with_memory(program, costs, num_steps, contention)[0]


def simulate_with_memory(
    program: Program, costs: ProgramCosts, num_steps: int, contention: Contention = "queued"
) -> tuple[Timeline, MemoryUse]:
    """Simulate as `simulate_program` does; also return each rank's memory over time."""
    return record_run(program, costs, run_program(program, costs, num_steps, contention))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRun:
    """A finished run: start and end (ps) of each instruction of ``unrolled``.

    ``network`` has the durations of the run, which include processor time of transfers and waits for hosts.
    """

    unrolled: Unrolled
    network: Network
    start_ps: Ids
    end_ps: Ids


def run_program(
    program: Program, costs: ProgramCosts, num_steps: int, contention: Contention = "queued"
) -> SimulatedRun:
    """Compute start and end of each instruction of ``num_steps`` steps. Raises as `simulate_program`."""
    if num_steps < 1:
        raise ProgramError(f"{num_steps} steps were requested; expected 1 or more.")
    if num_steps > 2 and num_steps * program.body.num_instructions > MAX_UNROLLED:
        raise ProgramError(
            f"{num_steps} steps of {program.body.num_instructions} instructions were requested; simulate at most "
            f"{MAX_UNROLLED // program.body.num_instructions} steps (steady steps are alike)."
        )
    check_contention(contention)
    check_costs(program, costs)
    unrolled = unroll(program, costs, num_steps)
    network, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps, contention)
    return SimulatedRun(unrolled=unrolled, network=network, start_ps=start_ps, end_ps=end_ps)


def record_run(program: Program, costs: ProgramCosts, run: SimulatedRun) -> tuple[Timeline, MemoryUse]:
    """Return the timeline of a run, and each rank's memory over time."""
    unrolled = run.unrolled
    memory = follow_memory(
        rank_of_streams(program),
        unrolled.network.stream_offsets,
        unrolled.cost_class,
        run.start_ps,
        run.end_ps,
        costs.allocate_bytes,
        costs.free_bytes,
        costs.resident_bytes,
    )
    return record_spans(program, run, memory), memory


def record_spans(program: Program, run: SimulatedRun, memory: MemoryUse | None = None) -> Timeline:
    """Return the timeline of a run, with memory samples if ``memory`` is given."""
    none = np.zeros(0, np.int64)
    return Timeline(
        origin="predicted",
        num_ranks=program.num_ranks,
        tracks=program.streams,
        **instruction_columns(program, run.unrolled),
        start_ps=run.start_ps,
        end_ps=run.end_ps,
        memory_rank=memory.rank if memory else none.astype(np.int32),
        memory_time_ps=memory.time_ps if memory else none,
        memory_bytes=memory.in_use_bytes if memory else none,
        peak_memory_bytes=tuple(memory.peak_parts_bytes.sum(axis=1).tolist()) if memory else (),
        reserved_memory_bytes=(),
    )


def instruction_columns(program: Program, unrolled: Unrolled) -> dict[str, NDArray[Any]]:
    """Return the columns of a Timeline except its times, one row per instruction of the unrolled program."""
    rows, only = [section for _, section in program.sections()], unrolled.layout.only
    names = ("opcode", "stage", "microbatch", "peer", "num_bytes")
    if only is not None and unrolled.layout.joined is None:
        facts = {name: getattr(only.section, name) for name in names}
    else:
        facts = {name: np.concatenate([getattr(section, name) for section in rows])[unrolled.source] for name in names}
    if program.advance:
        counted = facts["microbatch"] + unrolled.step * np.int32(program.advance)
        facts["microbatch"] = np.where(facts["microbatch"] < 0, np.int32(-1), counted)
    return {"track": unrolled.stream, "step": unrolled.step, **facts}


def run_unrolled(
    program: Program, unrolled: Unrolled, host_ps: Ids, contention: Contention = "queued"
) -> tuple[Network, Ids, Ids]:
    """Run an unrolled program; return the network with the durations of the run, and start and end of each span in ps.

    If transfers take processor time (``host_ps``, by cost class), they lengthen computations. Then the run is repeated
    until durations no longer change, at most `HOST_ROUNDS` times.
    """
    network = unrolled.network
    ran, start_ps, end_ps = _run(program, unrolled, network, contention)
    for _ in range(HOST_ROUNDS if host_ps.any() else 0):
        charged = charge_host_time(program, unrolled, host_ps, start_ps, end_ps)
        if np.array_equal(durations(charged), durations(network)):
            break
        network = charged
        ran, start_ps, end_ps = _run(program, unrolled, network, contention)
    return ran, start_ps, end_ps


def _run(program: Program, unrolled: Unrolled, network: Network, contention: Contention) -> tuple[Network, Ids, Ids]:
    outcome = run_network(network, unrolled.num_links, contention)
    try:
        raise_deadlock(program, unrolled, outcome.end_ps, outcome.position)
        is_too_long = outcome.end_ps.min(initial=0) < 0
    except DeadlockError:
        # Times that overflow also make others wait for ever.
        is_too_long = durations(network).sum(dtype=np.float64) >= 2.0**63
        if not is_too_long:
            raise
    if is_too_long:
        raise ProgramError(
            "The program takes longer than 2^63 ps, about 106 days, which the clock cannot count. Simulate fewer "
            "steps, or give shorter durations."
        )
    start_ps = outcome.start_ps()
    begin_receives(unrolled, start_ps, outcome.end_ps)
    return outcome.network, start_ps, outcome.end_ps


def begin_receives(unrolled: Unrolled, start_ps: Ids, end_ps: Ids) -> None:
    """Set the start of each receive's span to the time when its bytes begin to arrive; ``start_ps`` is changed."""
    _begin_receives(unrolled.network.stream_offsets, *unrolled.layout.transfers, start_ps, end_ps)


@compiled
def _begin_receives(stream_offsets: Ids, receives: Ids, sends: Ids, start_ps: Ids, end_ps: Ids) -> None:
    """A receive begins with its send, or at the end of the instruction before it in its stream if that is later."""
    is_first = np.zeros(len(end_ps) + 1, np.bool_)
    is_first[stream_offsets] = True
    for k in range(len(receives)):
        i = receives[k]
        start_ps[i] = max(start_ps[sends[k]], 0 if is_first[i] else end_ps[i - 1])
