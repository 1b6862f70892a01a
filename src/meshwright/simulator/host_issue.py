"""Hosts that issue what their devices compute, beside them: when is an instruction issued, and when does it end then?

One thread of a rank's host issues all that the rank computes, in the order of its compute stream, and waits for the
device only where the program says so (`program_estimate`: where an update depends on a number that the host reads). Let
an instruction take the host H and the device D, and let it end E after the host began with it at the earliest
(`span_parts`). Then, with the moment ``ready`` at which the device could begin,

    begin  = end of the host's last issue             (not before ``ready`` where the host waits for the device)
    end    = max(ready + D, begin + E)                the host goes on at begin + H

which is what a replay op by op gives. Marks inside of it follow the same rule with their own D and E. A span begins at
``ready``, so that what it is longer than D is waiting for the host. Transfers follow computations, which end after they
were issued; that they are issued themselves is not counted.

CUDA's queue of some 1,024 launches, which makes a host wait that is further ahead, is not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.matching import rank_of_streams
from meshwright.simulator.network import Network, durations, with_durations
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.waiters import Ids, Times
from meshwright.spec import Program


class Hosts(NamedTuple):
    """What changes while hosts issue: by stream when the last issue ended, by instruction when the device could begin.

    Marks of instruction i are ``marks[first_mark[i] : first_mark[i + 1]]``.
    """

    clock_ps: Times
    ready_ps: Times
    first_mark: Ids
    marks: Ids
    usual_shift_ps: Times


class IssuedRun(NamedTuple):
    """What hosts did in a run, by instruction: when one began, and whether with no wait behind the one before.

    ``is_late`` and, by mark, ``is_mark_late``: whether that came later than if all had been issued before.
    """

    begin_ps: Times
    follows: NDArray[np.bool_]
    is_late: NDArray[np.bool_]
    is_mark_late: NDArray[np.bool_]


def prepare_hosts(network: Network) -> Hosts | None:
    """Hosts that have issued nothing yet; None where devices have none beside them."""
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
    """The network in which each instruction takes what it took, and waiting for hosts is a part of that."""
    return with_durations(network.with_hosts_ahead(), end_ps - start_ps, mark_shift_ps)


def issued_run(network: Network, ran: Network, ready_ps: Times) -> IssuedRun | None:
    """What hosts did in a run of a network, which ``ran`` so; None where devices have none beside them."""
    if not network.has_hosts:
        return None
    begin_ps, follows = np.zeros(len(ready_ps), np.int64), np.zeros(len(ready_ps), np.bool_)
    _follow_hosts(network, ready_ps, begin_ps, follows)
    took_ps, usual_ps, raising = durations(ran), durations(network), network.mark_instruction
    moment_ps, usual_moment_ps = took_ps[raising] + ran.mark_shift_ps, usual_ps[raising] + network.mark_shift_ps
    return IssuedRun(begin_ps, follows, took_ps > usual_ps, moment_ps > usual_moment_ps)


@compiled
def _follow_hosts(network: Network, ready_ps: Times, begin_ps: Times, follows: NDArray[np.bool_]) -> None:
    """When each host began with each instruction, and whether as soon as it was done with the one before."""
    for stream in range(len(network.stream_offsets) - 1):
        clock = 0
        for i in range(network.stream_offsets[stream], network.stream_offsets[stream + 1]):
            kind = network.cost_class[i]
            begin_ps[i] = max(clock, ready_ps[i]) if network.is_awaited[kind] else clock
            follows[i] = begin_ps[i] == clock
            clock = begin_ps[i] + network.issue_ps[kind]


def hosts_bind(program: Program, costs: ProgramCosts, step_ps: float) -> bool:
    """Whether repetitions of the body that take the devices ``step_ps`` wait for hosts.

    Devices never make a host wait, so that it gets further ahead with each step if it needs less time for one than they
    do; else they go on at its pace. Not so where it waits for them.
    """
    if costs.issue is None:
        return False
    classes = costs.body.cost_class
    return bool(costs.issue.is_awaited[classes].any()) or int(issued_ps(program, costs).max()) > step_ps


def issued_ps(program: Program, costs: ProgramCosts) -> Times:
    """How long the host of each rank issues in one repetition of the body, in ps, (ranks,)."""
    if costs.issue is None:
        return np.zeros(program.num_ranks, np.int64)
    ranks = np.repeat(rank_of_streams(program), np.diff(program.body.stream_offsets))
    total: Times = np.zeros(program.num_ranks, np.int64)
    np.add.at(total, ranks, costs.issue.host_ps[costs.body.cost_class])
    return total


def with_faster_hosts(network: Network, share: float) -> Network:
    """The network with hosts that take a share of their time, 0 to 1; between these, ends come a little late.

    E is convex in that share, so that it lies on or below the line from D to what it was.
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
