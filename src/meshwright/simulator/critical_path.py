"""The chain of instructions that determines the length of a step (`find_critical_path`), and how to shorten the step.

`explain_step` explains a step of a plan; `find_levers` lists the classes of work that would shorten the step if they
were faster. The path is exact, in ps, from the times of a simulation. Every instruction i starts at the time s(i) at
which the last of its preconditions happens: its predecessor in its stream ends, an awaited instruction ends, a mark is
raised inside an awaited instruction, the last member of its collective arrives, or the transfer that holds its links
ends. An instruction that causes the last precondition is called *tight* for i. The walk goes back from the instruction
that ends last, each time to a tight instruction, until it reaches the beginning of the window:

    length = Σ (until(k) - max(s(k), begin)) = end - begin,     until(k) = s(k + 1)

so the segments leave no gap and add up to the window. A mark cuts the instruction that raises the mark: the work after
the mark is not on the path. For a join that needs k of its waits, the k-th wait that happens is tight, and no later
wait.

Under ``fair`` contention no transfer waits for a link. Instead, transfers that share a link take longer, so that they
are on the path. The progress of such a transfer when it raised a mark is not recorded, so its marks are tight only if
no other instruction is.

If hosts issue asynchronously (`host_issue`), an instruction that ends later than the device alone would need was issued
late. Then the path follows the host: from that end back to the time at which the host began to issue the instruction,
and through the instructions issued before, in the order of the stream, until the host had waited for the device. These
segments belong to the host.

If several instructions are tight, the path takes the predecessor in the stream, then an awaited instruction, then the
holder of a link; among equals the lowest instruction id. A collective is on the path as the lowest of its members that
has a tight instruction. The search takes time linear in the number of instructions. Source: the critical path method
(Kelley and Walker 1959), here on a known schedule, so that one walk suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention, check_contention
from meshwright.simulator.host_issue import IssuedRun, hosts_bind, issued_run, with_faster_hosts
from meshwright.simulator.network import Network, collectives, durations, need_of, route_of, routes, with_durations
from meshwright.simulator.plan_simulation import program_of, steady_steps
from meshwright.simulator.program_costs import ProgramCosts, check_costs
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.simulate import instruction_columns, run_unrolled
from meshwright.simulator.simulation import step_window
from meshwright.simulator.unroll import Unrolled, unroll
from meshwright.spec import Cluster, Graph, Opcode, Placement, Plan, Program, ProgramError, Timeline, to_seconds
from meshwright.spec.instructions import COMPUTATIONS, INSTRUCTIONS, STASHING, UPDATES

Ids = NDArray[np.int64]
Times = NDArray[np.int64]


class Bound(IntEnum):
    """Why a segment of the path did not begin earlier.

    ``BEGIN``: it is cut by the begin of the window. ``STREAM``: its predecessor in the stream ended. ``WAIT``: an
    awaited instruction ended. ``MARK``: a mark was raised. ``LINK``: a link became free. ``HOST``: the host issued it.
    """

    BEGIN = 0
    STREAM = 1
    WAIT = 2
    MARK = 3
    LINK = 4
    HOST = 5


# The compiled loops need plain numbers.
BY_STREAM, BY_WAIT, BY_MARK, BY_LINK, BY_HOST = (
    int(b) for b in (Bound.STREAM, Bound.WAIT, Bound.MARK, Bound.LINK, Bound.HOST)
)


class _Index(NamedTuple):
    """In CSR form: the members of each collective, ascending, and the streams that use each shared link."""

    member_offsets: Ids
    members: Ids
    link_offsets: Ids
    link_streams: Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticalPath:
    """The k segments of a critical path in order of time, as columns of shape (k,).

    ``instruction`` is an instruction id; ``bound`` says why the segment did not begin earlier (`Bound`). Each segment
    starts when the one before it ends.
    ``on_host``: whether the segment is time of the host that issues the instruction, not of the device.
    """

    instruction: Ids
    start_ps: Times
    end_ps: Times
    bound: NDArray[np.int8]
    on_host: NDArray[np.bool_]


def find_critical_path(
    network: Network, start_ps: Times, end_ps: Times, window: tuple[int, int], hosts: IssuedRun | None = None
) -> CriticalPath:
    """Return the critical path of a window (begin, end) in ps, where some instruction ends at ``end``.

    ``start_ps`` and ``end_ps`` (n,) are the times of the network's instructions, ``hosts`` the times at which host
    processors issue them, None if these are not simulated. Raises ProgramError if the times do not belong to the
    network: no instruction ends at the window's end, or an instruction starts when none of its preconditions happens.
    """
    begin, stop = window
    last = np.flatnonzero(end_ps == stop)[:1]
    if stop <= begin:
        return _path(np.zeros((5, 0), np.int64))
    if not len(last):
        raise ProgramError(
            f"No instruction ends at {stop} ps, the end of the window; give the window of a step of this simulation."
        )
    segments = np.zeros((5, len(end_ps)), np.int64)
    count = _walk(network, _index(network), start_ps, end_ps, begin, int(last[0]), segments, hosts)
    path = _path(segments[:, :count][:, ::-1].copy())
    if int(path.start_ps[0]) > begin:
        raise ProgramError(
            f"Instruction {int(path.instruction[0])} starts at {int(path.start_ps[0])} ps, but nothing that it needs "
            "happens then. Give the network and the times of one simulation."
        )
    return path


def _path(segments: Ids) -> CriticalPath:
    instruction, start_ps, end_ps, bound, on_host = segments
    return CriticalPath(
        instruction=instruction,
        start_ps=start_ps,
        end_ps=end_ps,
        bound=bound.astype(np.int8),
        on_host=on_host.astype(np.bool_),
    )


def _index(network: Network) -> _Index:
    collective = collectives(network)
    joined = np.flatnonzero(collective >= 0)
    sizes = network.collective_size
    link_offsets, link_streams = _streams_of_links(network, int(network.route_links.max(initial=-1)) + 1)
    return _Index(
        member_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        members=joined[np.argsort(collective[joined], kind="stable")],
        link_offsets=link_offsets,
        link_streams=link_streams,
    )


@compiled
def _streams_of_links(network: Network, num_links: int) -> tuple[Ids, Ids]:
    """The streams that use each link on routes for which others may wait, in CSR form."""
    offsets, place = np.zeros(num_links + 1, np.int64), np.zeros(num_links, np.int64)
    streams = np.empty(0, np.int64)
    for counted in (False, True):
        seen = np.full(num_links, -1, np.int64)
        for stream in range(len(network.stream_offsets) - 1):
            for i in range(network.stream_offsets[stream], network.stream_offsets[stream + 1]):
                r = route_of(network, i)
                if r < network.num_private:
                    continue
                for q in range(network.route_offsets[r], network.route_offsets[r + 1]):
                    link = network.route_links[q]
                    if seen[link] < stream:
                        seen[link] = stream
                        if counted:
                            streams[offsets[link] + place[link]] = stream
                        place[link] += 1
        if not counted:
            offsets[1:] = np.cumsum(place)
            streams, place = np.empty(offsets[-1], np.int64), np.zeros(num_links, np.int64)
    return offsets, streams


@compiled
def _walk(
    network: Network,
    index: _Index,
    start_ps: Times,
    end_ps: Times,
    begin: int,
    last: int,
    segments: Ids,
    hosts: IssuedRun | None,
) -> int:
    """Write the segments, the last one first; return their number."""
    i, until, count, issuing = last, int(end_ps[last]), 0, False
    while True:
        start, at, before, bound = int(start_ps[i]), i, -1, 0
        if hosts is not None:
            is_hosts = issuing or _is_late(network, hosts, end_ps, i, until)
            segments[4, count], issuing = is_hosts, is_hosts and hosts.follows[i]
            if issuing:
                start = int(hosts.begin_ps[i])
        if start > begin and issuing:
            before, bound = i - 1, BY_HOST
        elif start > begin:
            at, before, bound = _tight_member(network, index, start_ps, end_ps, i)
            if before < 0:
                before, bound = _holder(network, index, start, end_ps, i), BY_LINK
        segments[0, count], segments[1, count], segments[2, count] = at, max(start, begin), until
        segments[3, count] = bound
        count += 1
        if before < 0:
            return count
        i, until = before, start


@compiled
def _is_late(network: Network, hosts: IssuedRun, end_ps: Times, i: int, until: int) -> bool:
    """Whether the host, not the device, determined the time of the end, or of the mark, of an instruction."""
    if until == end_ps[i]:
        return bool(hosts.is_late[i])
    for m in range(len(network.mark_instruction)):
        if network.mark_instruction[m] == i and end_ps[i] + network.mark_shift_ps[m] == until:
            return bool(hosts.is_mark_late[m])
    return False


@compiled
def _tight_member(network: Network, index: _Index, start_ps: Times, end_ps: Times, i: int) -> tuple[int, int, int]:
    """Return ``i`` or the lowest member of its collective with a tight instruction; that one (-1: none); its bound."""
    c = network.resource[i] - (len(network.route_offsets) - 1)
    for is_known in (True, False):
        if c < 0:
            before, bound = _tight(network, start_ps, end_ps, i, is_known)
            if before >= 0:
                return i, before, bound
            continue
        for place in range(index.member_offsets[c], index.member_offsets[c + 1]):
            before, bound = _tight(network, start_ps, end_ps, index.members[place], is_known)
            if before >= 0:
                return int(index.members[place]), before, bound
    return i, -1, 0


@compiled
def _tight(network: Network, start_ps: Times, end_ps: Times, i: int, is_known: bool) -> tuple[int, int]:
    """Return the tight instruction of ``i``, its predecessor or one that it awaits, and the bound; -1 for none.

    Of marks, consider only those whose time is known (``is_known``), or only those whose time is not.
    """
    start = start_ps[i]
    stream = np.searchsorted(network.stream_offsets, i, side="right") - 1
    if is_known and i > network.stream_offsets[stream] and end_ps[i - 1] == start:
        return i - 1, BY_STREAM
    found, bound, earlier = -1, BY_WAIT, 0
    for w in range(network.wait_offsets[i], network.wait_offsets[i + 1]):
        awaited, shift = int(network.waits[w]), 0
        if awaited < 0:
            awaited, shift = int(network.mark_instruction[~awaited]), int(network.mark_shift_ps[~awaited])
        latest = end_ps[awaited] + shift
        if shift < 0 and end_ps[awaited] - start_ps[awaited] > network.class_ps[network.cost_class[awaited]]:
            is_tight = not is_known and start_ps[awaited] < start <= latest
        else:
            is_tight = is_known and latest == start
        if is_tight and (found < 0 or awaited < found):
            found, bound = awaited, BY_MARK if shift < 0 else BY_WAIT
        earlier += latest < start
    # A join that had enough waits before it started did not wait for this one.
    if found >= 0 and earlier >= need_of(network, i):
        return -1, BY_WAIT
    return found, bound


@compiled
def _holder(network: Network, index: _Index, start: int, end_ps: Times, i: int) -> int:
    """Return the lowest instruction that holds a link of ``i`` until ``start``; -1 for none."""
    found, r = -1, route_of(network, i)
    if r < 0:
        return found
    for q in range(network.route_offsets[r], network.route_offsets[r + 1]):
        link = network.route_links[q]
        for place in range(index.link_offsets[link], index.link_offsets[link + 1]):
            stream = index.link_streams[place]
            stop = network.stream_offsets[stream + 1]
            first = network.stream_offsets[stream]
            k = int(first + np.searchsorted(end_ps[first:stop], start))
            while k < stop and end_ps[k] == start and (found < 0 or k < found):
                if _uses(network, k, link):
                    found = k
                k += 1
    return found


@compiled
def _uses(network: Network, i: int, link: int) -> bool:
    """Whether an instruction holds a link."""
    r = route_of(network, i)
    if r >= 0:
        for q in range(network.route_offsets[r], network.route_offsets[r + 1]):
            if network.route_links[q] == link:
                return True
    return False


# The share of a class's time that is removed.
SHORTER = 0.1
# Most classes of each kind that are simulated again, largest first; a pipeline has two per stage.
MOST_SIMULATED = 8

LeverKind = Literal["work", "stage", "device", "link"]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A class of work on the critical path, such as all forwards of a stage or all transfers over one link.

    ``path_s`` is the class's time on the path. ``step_if_shorter_s`` is the step time if this class takes 10 % less
    time, ``step_if_free_s`` if it takes no time; None if this was not simulated. All are in seconds.
    """

    kind: LeverKind
    name: str
    path_s: float
    step_if_shorter_s: float | None
    step_if_free_s: float | None


class _Class(NamedTuple):
    """The instructions whose entry in ``column``, shape (n,), is one of ``values``."""

    kind: LeverKind
    name: str
    column: NDArray[Any]
    values: list[int]

    def covers(self, ids: NDArray[np.int64] | slice) -> Mask:
        """Return which of the given instructions belong to the class."""
        column = self.column[ids]
        return column == self.values[0] if len(self.values) == 1 else np.isin(column, self.values)


# A class c is a set of instructions: a kind of work, one stage's forwards or backwards, all computations of one kind of
# device, all transfers over one link. Let T be the step time, d_i the duration of instruction i, and P_c the part of
# the critical path that belongs to c. If every instruction of c takes (1 - x) d_i, then for a small x, as long as the
# path stays the longest one and its steps repeat,
#
#     T(x) = T - x P_c
#
# so P_c is the derivative of the step time by the relative speed of c. Another path soon becomes the longest, so the
# step is simulated again, exactly, for x = `SHORTER` and for x = 1. The latter is a bound: no improvement of c alone
# gives a shorter step, unless transfers that queue for a link then come in another order. Marks move with the
# instruction that raises them, and a link is held for at least 1 ps. Issue by hosts on the path is a class of its own.
def find_levers(
    path: CriticalPath,
    unrolled: Unrolled,
    costs: ProgramCosts,
    columns: dict[str, NDArray[Any]],
    devices: Sequence[str],
    simulate: Callable[[Unrolled], int],
) -> tuple[Lever, ...]:
    """Return every class of work with time on the path, by kind, the one with the most time first.

    ``columns`` are those of `instruction_columns`, ``devices`` names the kind of each stream's device, and ``simulate``
    returns the step time of a changed program in ps.
    """
    length = path.end_ps - path.start_ps
    on_host = int(length[path.on_host].sum())
    length = np.where(path.on_host, 0, length)
    sized = [
        (item, int(length[item.covers(path.instruction)].sum()))
        for item in _classes(path, unrolled, costs, columns, devices)
    ]
    levers: list[Lever] = []
    if on_host:
        steps = [
            to_seconds(simulate(replace(unrolled, network=with_faster_hosts(unrolled.network, share))))
            for share in (1 - SHORTER, 0.0)
        ]
        levers.append(
            Lever(
                kind="work",
                name="issuing by the host",
                path_s=to_seconds(on_host),
                step_if_shorter_s=steps[0],
                step_if_free_s=steps[1],
            )
        )
    for kind, group in groupby(sized, key=lambda pair: pair[0].kind):
        largest = sorted((pair for pair in group if pair[1]), key=lambda pair: -pair[1])
        for place, (item, path_ps) in enumerate(largest):
            shorter_s = free_s = None
            if place < MOST_SIMULATED:
                chosen = item.covers(slice(None))
                shorter_s = to_seconds(simulate(shorten(unrolled, chosen, 1 - SHORTER)))
                free_s = to_seconds(simulate(shorten(unrolled, chosen, 0.0)))
            path_s = to_seconds(path_ps)
            levers.append(
                Lever(kind=kind, name=item.name, path_s=path_s, step_if_shorter_s=shorter_s, step_if_free_s=free_s)
            )
    kinds = get_args(LeverKind)
    return tuple(sorted(levers, key=lambda item: (kinds.index(item.kind), -item.path_s)))


def shorten(unrolled: Unrolled, chosen: Mask, share: float) -> Unrolled:
    """Return the same program with the durations of some instructions multiplied by ``share`` (0..1).

    ``chosen`` is a mask over all instructions, shape (n,).
    """
    return replace(unrolled, network=with_durations(unrolled.network, *_shorten(unrolled.network, chosen, share)))


@compiled
def _shorten(network: Network, chosen: Mask, share: float) -> tuple[Times, Times]:
    """Compute durations and shifts of marks; an instruction that holds links takes at least 1 ps, as do its marks."""
    duration_ps, shift_ps = np.empty(len(chosen), np.int64), network.mark_shift_ps.copy()
    for i in range(len(duration_ps)):
        duration_ps[i] = network.class_ps[network.cost_class[i]]
        if chosen[i]:
            duration_ps[i] = max(int(np.rint(share * duration_ps[i])), int(route_of(network, i) >= 0))
    for m in range(len(shift_ps)):
        i = network.mark_instruction[m]
        if chosen[i]:
            moment = np.rint(share * (network.class_ps[network.cost_class[i]] + shift_ps[m]))
            shift_ps[m] = max(int(moment), int(route_of(network, i) >= 0)) - duration_ps[i]
    return duration_ps, shift_ps


def _classes(
    path: CriticalPath,
    unrolled: Unrolled,
    costs: ProgramCosts,
    columns: dict[str, NDArray[Any]],
    devices: Sequence[str],
) -> Iterator[_Class]:
    """Yield every class that the path touches."""
    here, network = path.instruction, unrolled.network
    route = routes(network)
    opcode, stage = columns["opcode"], columns["stage"]
    for code in np.unique(opcode[here]).tolist():
        yield _Class("work", INSTRUCTIONS[Opcode(code)].label, opcode, [code])
    for code in COMPUTATIONS:
        name = INSTRUCTIONS[code].label.replace("wards", "ward")
        stages = np.where(opcode == code, stage, -1)
        for place in _distinct(stages[here]):
            yield _Class("stage", f"{name} of stage {place}", stages, [place])
    computes = np.isin(opcode, (*COMPUTATIONS, *UPDATES, *STASHING))
    names, kinds = np.unique(np.array(devices), return_inverse=True)
    machines = np.where(computes, kinds[unrolled.stream], -1)
    for number in _distinct(machines[here]):
        yield _Class("device", f"{names[number]} computing", machines, [number])
    route_of_link = np.repeat(np.arange(len(network.route_offsets) - 1), np.diff(network.route_offsets))
    for link in _distinct(network.route_links[np.isin(route_of_link, route[here])]):
        name = costs.link_names[link] if costs.link_names else f"link number {link}"
        yield _Class("link", name, route, route_of_link[network.route_links == link].tolist())


def _distinct(numbers: NDArray[Any]) -> list[int]:
    """Return the distinct numbers, ascending, without -1."""
    return [int(number) for number in np.unique(numbers) if number >= 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """The critical path of a steady step and the classes of work on it.

    ``path`` has the spans on the critical path in order of time, cut to the parts that are on it, from time 0 to the
    end of the step. ``bounds[k]`` is the reason why span k did not begin earlier. ``levers`` are the classes of work on
    the path.
    """

    step_time_s: float
    path: Timeline
    bounds: tuple[Bound, ...]
    levers: tuple[Lever, ...]


# The step is a steady one, as for `simulate_plan`: from the end of the last step but one to the end of the last. For an
# asynchronous schedule it is the last one before the pipeline empties; `simulate_plan` gives the mean of several.
def explain_step(
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    *,
    cost: CostModel | None = None,
    contention: Contention = "queued",
) -> StepExplanation:
    """Explain a steady step of a plan or a placement. Arguments and errors are those of `simulate_plan`."""
    program = program_of(plan, graph, cluster)
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    costs = estimate_program(program, plan, graph, cost)
    devices = [cluster.device_kind(rank).name for rank in range(program.num_ranks)]
    return explain_program(program, costs, devices, contention=contention)


def explain_program(
    program: Program, costs: ProgramCosts, devices: list[str], *, contention: Contention = "queued"
) -> StepExplanation:
    """Explain a steady step of a program with its costs; ``devices`` names the kind of each rank's device.

    Raises the errors of `simulate_program`.
    """
    check_contention(contention)
    check_costs(program, costs)
    steps, drains = steady_steps(program)[0], program.epilogue.num_instructions > 0
    # Fast enough hosts run ahead of a steady step, so it is simulated without them first.
    for given in (costs.with_hosts_ahead(), costs):
        unrolled = unroll(program, given, steps)
        network, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps, contention)
        begin, stop = step_window(unrolled.step, end_ps, drains=drains)
        if given is costs or not hosts_bind(program, costs, stop - begin):
            break
    columns = instruction_columns(program, unrolled)
    # A receive's span shows the arrival of its bytes; the receive itself runs when they have arrived.
    start_ps = np.where(unrolled.send_of >= 0, end_ps - durations(network), start_ps)
    hosts = issued_run(unrolled.network, network, start_ps)
    path = find_critical_path(network, start_ps, end_ps, (begin, stop), hosts)

    def simulate(changed: Unrolled) -> int:
        ends = run_unrolled(program, changed, costs.host_ps, contention)[2]
        first, last = step_window(changed.step, ends, drains=drains)
        return last - first

    of_streams = [devices[stream.rank] for stream in program.streams]
    return StepExplanation(
        step_time_s=to_seconds(stop - begin) / program.body_steps,
        path=_timeline(program, path, columns, begin),
        bounds=tuple(map(Bound, path.bound.tolist())),
        levers=find_levers(path, unrolled, costs, columns, of_streams, simulate),
    )


def _timeline(program: Program, path: CriticalPath, columns: dict[str, NDArray[Any]], begin_ps: int) -> Timeline:
    none = np.zeros(0, np.int64)
    return Timeline(
        origin="predicted",
        num_ranks=program.num_ranks,
        tracks=program.streams,
        **{name: column[path.instruction] for name, column in columns.items()},
        start_ps=path.start_ps - begin_ps,
        end_ps=path.end_ps - begin_ps,
        memory_rank=none.astype(np.int32),
        memory_time_ps=none,
        memory_bytes=none,
        peak_memory_bytes=(),
        reserved_memory_bytes=(),
    )
