"""Hosts that issue work to their devices asynchronously: when an instruction is issued, and when it ends therefore.

One thread of a rank's host issues everything that the rank computes, in the order of its compute stream. The host waits
for the device only if the program requires it (`program_estimate`: if an update depends on a number that the host
reads). Let an instruction take H on the host and D on the device, and let it end at least E after the host began to
issue it (`span_parts`). Then, with ``ready``, the time at which the device could begin,

    begin  = end of the host's last issue             (not before ``ready`` if the host waits for the device)
    end    = max(ready + D, begin + E)                the host continues at begin + H

which equals a replay op by op. Marks inside the instruction follow the same rule with their own D and E. A span begins
at ``ready``, so the part of the span beyond D is waiting for the host. Transfers follow computations, which end after
they were issued; the issue of transfers themselves is not counted.

CUDA's queue of about 1,024 launches, which stops a host that is further ahead, is not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.message_matching import rank_of_streams
from meshwright.simulator.network import Network, durations, with_durations
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.sharing import Ids, Times
from meshwright.spec import Program


class Hosts(NamedTuple):
    """State of issuing hosts.

    ``clock_ps``: per stream, the end of the host's last issue. ``ready_ps``: per instruction, when the device could
    begin. The marks of instruction i are ``marks[first_mark[i] : first_mark[i + 1]]``; ``usual_shift_ps`` is the time
    of each mark after the end of its instruction (0 or less) if no host is late.
    """

    clock_ps: Times
    ready_ps: Times
    first_mark: Ids
    marks: Ids
    usual_shift_ps: Times


class IssuedRun(NamedTuple):
    """Times of the hosts in a run.

    Per instruction: ``begin_ps``, when its issue began; ``follows``, whether directly after the issue before;
    ``is_late``, whether it ended later than if everything had been issued in time. ``is_mark_late``: the same per mark.
    """

    begin_ps: Times
    follows: NDArray[np.bool_]
    is_late: NDArray[np.bool_]
    is_mark_late: NDArray[np.bool_]


def prepare_hosts(network: Network) -> Hosts | None:
    """Return the state of hosts at time 0; None if the network has no asynchronous hosts."""
    if not network.has_hosts:
        return None
    count = len(network.cost_class)
    per_instruction = np.bincount(network.mark_instruction, minlength=count)
    return Hosts(
        clock_ps=np.zeros(len(network.stream_offsets) - 1, np.int64),
        ready_ps=np.zeros(count, np.int64),
        first_mark=np.concatenate([[0], np.cumsum(per_instruction)]).astype(np.int64),
        marks=np.argsort(network.mark_instruction, kind="stable").astype(np.int64),
        usual_shift_ps=network.mark_shift_ps,
    )


def as_run(network: Network, start_ps: Times, end_ps: Times, mark_shift_ps: Times) -> Network:
    """Return the network with the durations of a run, which include waiting for hosts, and without hosts."""
    return with_durations(network.with_hosts_ahead(), end_ps - start_ps, mark_shift_ps)


def issued_run(network: Network, ran: Network, ready_ps: Times) -> IssuedRun | None:
    """Return the times of the hosts in a run; None if ``network`` has no asynchronous hosts.

    ``ran`` is the network with the run's durations, ``ready_ps`` when the device could begin each instruction.
    """
    if not network.has_hosts:
        return None
    begin_ps, follows = np.zeros(len(ready_ps), np.int64), np.zeros(len(ready_ps), np.bool_)
    _follow_hosts(network, ready_ps, begin_ps, follows)
    took_ps, usual_ps, raising = durations(ran), durations(network), network.mark_instruction
    moment_ps, usual_moment_ps = took_ps[raising] + ran.mark_shift_ps, usual_ps[raising] + network.mark_shift_ps
    return IssuedRun(begin_ps, follows, took_ps > usual_ps, moment_ps > usual_moment_ps)


@compiled
def _follow_hosts(network: Network, ready_ps: Times, begin_ps: Times, follows: NDArray[np.bool_]) -> None:
    """Fill in when each host began with each instruction, and whether directly after the one before."""
    for stream in range(len(network.stream_offsets) - 1):
        clock = 0
        for i in range(network.stream_offsets[stream], network.stream_offsets[stream + 1]):
            kind = network.cost_class[i]
            begin_ps[i] = max(clock, ready_ps[i]) if network.is_awaited[kind] else clock
            follows[i] = begin_ps[i] == clock
            clock = begin_ps[i] + network.issue_ps[kind]


def hosts_bind(program: Program, costs: ProgramCosts, step_ps: float) -> bool:
    """Return whether devices wait for hosts in steady repetitions of the body that take the devices ``step_ps``.

    A host that needs less time per repetition than the devices gets further ahead each time; otherwise the devices wait
    for the host. The result is also True if a host waits for its device somewhere in the body.
    """
    if costs.issue is None:
        return False
    classes = costs.body.cost_class
    return bool(costs.issue.is_awaited[classes].any()) or int(issued_ps(program, costs).max()) > step_ps


def issued_ps(program: Program, costs: ProgramCosts) -> Times:
    """Return how long each rank's host issues work in one repetition of the body, in ps, shape (ranks,)."""
    if costs.issue is None:
        return np.zeros(program.num_ranks, np.int64)
    ranks = np.repeat(rank_of_streams(program), np.diff(program.body.stream_offsets))
    total: Times = np.zeros(program.num_ranks, np.int64)
    np.add.at(total, ranks, costs.issue.host_ps[costs.body.cost_class])
    return total


def with_faster_hosts(network: Network, share: float) -> Network:
    """Return the network with the hosts' times multiplied by ``share``, 0 to 1.

    Strictly between 0 and 1, ends are slightly too late: E (module docstring) is convex in ``share``, but is
    interpolated linearly between D and its own value.
    """
    done_ps = network.class_ps
    moment_ps = (durations(network)[network.mark_instruction] + network.mark_shift_ps).astype(np.int64)
    return network._replace(
        issue_ps=np.rint(network.issue_ps * share).astype(np.int64),
        earliest_ps=_between(done_ps, network.earliest_ps, share),
        mark_earliest_ps=_between(moment_ps, network.mark_earliest_ps, share),
    )


def _between(done_ps: Times, earliest_ps: Times, share: float) -> Times:
    later_ps = np.maximum(earliest_ps - done_ps, 0)
    return np.where(earliest_ps > 0, done_ps + np.rint(later_ps * share).astype(np.int64), 0)
