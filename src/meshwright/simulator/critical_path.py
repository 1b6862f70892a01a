"""Find the chain of instructions that determines the length of a step. Exact, in ps, from the times of a simulation.

Every instruction i starts at the moment s(i) at which the last of its preconditions happens: its predecessor in its
stream ends, an awaited instruction ends, a mark is raised inside one, the last member of its collective arrives, or the
transfer that holds its links ends. What happens at s(i) is *tight* for i. The chain is walked back from the instruction
that ends last, each time to a tight one, until it reaches the beginning of the window:

    length = Σ (until(k) - max(s(k), begin)) = end - begin,     until(k) = s(k + 1)

so its segments leave no gap and add up to the window. A mark cuts the instruction that raises it: the work after the
mark is not on the path. For a join that needs k of its waits the k-th that happens is tight, and no later one.

Under ``fair`` contention no transfer waits for a link: transfers that share one take longer, and so they are on the
path. The progress of such a transfer when it raised a mark is not kept, so its marks are tight only if nothing else is.

Where hosts issue asynchronously (`host_issue`), an instruction that ends later than the device alone would need was
issued late. Then the path follows the host: from that end back to the moment at which the host began to issue the
instruction, and through the instructions issued before, in the order of the stream, until the host had waited for the
device. Those segments are the host's.

Where several instructions are tight, the order is total: the predecessor in the stream, then awaited instructions, then
the holder of a link; among equals the lowest instruction id. A collective is on the path as the lowest of its members
with a tight instruction. The search takes time linear in the number of instructions. Source: the critical path method
(Kelley and Walker 1959), here on a known schedule, so that one walk suffices.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.host_issue import IssuedRun
from meshwright.simulator.network import Network, collectives, need_of, route_of
from meshwright.spec import ProgramError

Ids = NDArray[np.int64]
Times = NDArray[np.int64]


class Bound(IntEnum):
    """What a segment of the path waited for before it began."""

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
    """Segments in order of time: instruction ids, start and end (ps), and the `Bound` of each; all of shape (k,).

    Each segment starts where the one before it ends. ``on_host`` (k,): whether the segment is the host's.
    """

    instruction: Ids
    start_ps: Times
    end_ps: Times
    bound: NDArray[np.int8]
    on_host: NDArray[np.bool_]


def find_critical_path(
    network: Network, start_ps: Times, end_ps: Times, window: tuple[int, int], hosts: IssuedRun | None = None
) -> CriticalPath:
    """Return the critical path between two moments (ps), the second of which is the end of an instruction.

    ``start_ps`` and ``end_ps`` (n,) are the times of the network's instructions, ``hosts`` those of their hosts, if
    any. Raises ProgramError if the times do not belong to this network: an instruction starts when none of its
    preconditions happens, or none ends at the window's end.
    """
    begin, stop = window
    last = np.flatnonzero(end_ps == stop)[:1]
    if stop <= begin:
        return _path(np.zeros((5, 0), np.int64))
    if not len(last):
        raise ProgramError(f"No instruction ends at {stop} ps; give the window of a step of this simulation.")
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
