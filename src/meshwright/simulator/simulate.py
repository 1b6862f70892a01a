"""Simulate a program with its costs: predict its Timeline.

A send's span is the time for which it holds its links, or shares them under ``fair`` contention. A receive's span is
the arrival of its bytes: from the start of its send (or the end of the receive before it in its stream, if later) to
its own end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.deadlock import raise_deadlock
from meshwright.simulator.engine import Contention, check_contention, run_network
from meshwright.simulator.host_time import HOST_ROUNDS, charge_host_time
from meshwright.simulator.matching import rank_of_streams
from meshwright.simulator.memory import MemoryUse, follow_memory
from meshwright.simulator.network import Network, durations
from meshwright.simulator.program_costs import ProgramCosts, check_costs
from meshwright.simulator.unroll import Unrolled, unroll
from meshwright.spec import DeadlockError, Program, ProgramError, Timeline

Ids = NDArray[np.int64]

# Instructions of all steps kept at once: 24 bytes each for the engine, about 100 for the timeline.
MAX_UNROLLED = 5_000_000


def simulate_program(
    program: Program, costs: ProgramCosts, num_steps: int = 1, *, contention: Contention = "queued"
) -> Timeline:
    """Simulate prologue, ``num_steps`` repetitions of the body, and epilogue.

    ``contention`` says how transfers share contended links: ``queued`` (`engine`) or ``fair`` (`fair`).

    Raises DeadlockError, naming the instructions, if the program can never finish; ProgramError if the costs do
    not fit it or a transfer or collective lacks a counterpart.
    """
    return simulate_with_memory(program, costs, num_steps, contention)[0]


def simulate_with_memory(
    program: Program, costs: ProgramCosts, num_steps: int, contention: Contention = "queued"
) -> tuple[Timeline, MemoryUse]:
    """Like `simulate_program`; also return the parts of memory at each rank's peak."""
    return record_run(program, costs, run_program(program, costs, num_steps, contention))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRun:
    """The network as it ran (`run_unrolled`), and start and end of each instruction of ``unrolled`` in ps."""

    unrolled: Unrolled
    network: Network
    start_ps: Ids
    end_ps: Ids


def run_program(
    program: Program, costs: ProgramCosts, num_steps: int, contention: Contention = "queued"
) -> SimulatedRun:
    """Find the times of each instruction of ``num_steps`` steps. Raises as `simulate_program`."""
    if num_steps < 1:
        raise ProgramError(f"{num_steps} steps were asked for; simulate at least 1.")
    if num_steps > 2 and num_steps * program.body.num_instructions > MAX_UNROLLED:
        raise ProgramError(
            f"{num_steps} steps of {program.body.num_instructions} instructions were asked for; simulate at most "
            f"{MAX_UNROLLED // program.body.num_instructions} (steady steps are alike)."
        )
    check_contention(contention)
    check_costs(program, costs)
    unrolled = unroll(program, costs, num_steps)
    network, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps, contention)
    return SimulatedRun(unrolled=unrolled, network=network, start_ps=start_ps, end_ps=end_ps)


def record_run(program: Program, costs: ProgramCosts, run: SimulatedRun) -> tuple[Timeline, MemoryUse]:
    """Return the timeline of a run, and the parts of memory at each rank's peak."""
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
    """Run until durations no longer change. Return the network as it ran, and start and end of each span in ps.

    Host processor time of transfers, and waiting for it, lengthen the instructions' durations (`host_time`).
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
            "The program takes longer than 2^63 ps, 106 days, which the clock cannot count. Simulate fewer steps, or "
            "give shorter durations."
        )
    start_ps = outcome.start_ps()
    begin_receives(unrolled, start_ps, outcome.end_ps)
    return outcome.network, start_ps, outcome.end_ps


def begin_receives(unrolled: Unrolled, start_ps: Ids, end_ps: Ids) -> None:
    """Set the start of each receive's span to the start of its arrival; ``start_ps`` is changed in place."""
    _begin_receives(unrolled.network.stream_offsets, *unrolled.layout.transfers, start_ps, end_ps)


@compiled
def _begin_receives(stream_offsets: Ids, receives: Ids, sends: Ids, start_ps: Ids, end_ps: Ids) -> None:
    """A receive begins with its send, or at the end of the instruction before it in its stream if that is later."""
    is_first = np.zeros(len(end_ps) + 1, np.bool_)
    is_first[stream_offsets] = True
    for k in range(len(receives)):
        i = receives[k]
        start_ps[i] = max(start_ps[sends[k]], 0 if is_first[i] else end_ps[i - 1])
