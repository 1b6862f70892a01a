"""The instructions of a placement as rows of streams (`rewire`): who stands where, and waits for whom.

Each has a number that it keeps wherever it goes, and a key, which says its place among all of a rank:

- Computations, by phase and microbatch as `program.placed` orders them, and by stage. The optimizer's steps follow.
- The sends of a channel in a slot, one after what makes each, its key that of the maker and a little more.
- Their receives: in the order of `program.transfers`, the key that of the computation that needs it, or a later message
  of the same sender, first; a little less.

So whatever an instruction needs has a smaller key, on all ranks: a message leaves after its maker, and what is needed
first of a sender's later messages is needed after the maker of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.transfers import Computations, Receives, Sends, StageRoutes, lay_out_transfers
from meshwright.simulator.delta.graph import NOWHERE
from meshwright.simulator.delta.rewire import StreamRows
from meshwright.simulator.waiters import Column, Ids, Times
from meshwright.spec import Opcode
from meshwright.spec.instructions import STREAM_NAMES

# Keys of a computation lie so far apart; its own is in the middle.
_APART = 1 << 22
_MIDDLE = _APART // 2
_COMPUTE, _SEND, _RECEIVE = (STREAM_NAMES.index(name) for name in ("compute", "send", "receive"))


class Sizes(NamedTuple):
    """How many there are of each; computations are numbered in the order of their keys, then come the optimizers."""

    stages: int
    microbatches: int
    ranks: int

    @property
    def num_computations(self) -> int:
        """Forwards and backwards, whether they are there or not."""
        return 2 * self.stages * self.microbatches

    @property
    def num_streams(self) -> int:
        """Streams of all ranks, in the order of programs."""
        return self.ranks * len(STREAM_NAMES)

    @property
    def first_transfer(self) -> int:
        """The first number of a send or receive."""
        return self.num_computations + self.ranks


class Channels(NamedTuple):
    """Which stages pass something on: columns by slot, ``key`` source times stages plus target, -1 in empty slots.

    ``forward_ps`` and ``backward_ps``: what a message takes; the second is -1 where no gradients return.
    """

    key: Ids
    forward_ps: Times
    backward_ps: Times


class Table(NamedTuple):
    """Columns of all instructions by number; ``waits`` (n, 2) of transfers, and of receives who waits for them."""

    stream: Ids
    key: Times
    duration_ps: Times
    waits: Ids
    reader: Ids


def write_table(sizes: Sizes, ranks: Ids, durations: tuple[Times, Times], channels: Channels) -> Table:
    """Lay all instructions out.

    ``ranks`` (stages,). ``durations``: of computations by number and of the optimizer's step by rank, -1 for what is
    not there.
    """
    computed_ps, stepped_ps = durations
    number = np.flatnonzero(computed_ps >= 0)
    number = number[np.argsort(ranks[_computations(sizes, number)[0]], kind="stable")]
    stage, microbatch, is_backward = _computations(sizes, number)
    computations = Computations(
        offsets=np.concatenate([[0], np.cumsum(np.bincount(ranks[stage], minlength=sizes.ranks))]),
        handle=np.arange(len(number)),
        opcode=np.where(is_backward, Opcode.BACKWARD, Opcode.FORWARD).astype(np.int8),
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        joint=np.zeros(len(number), np.bool_),
        replica_offsets=np.arange(sizes.stages + 1, dtype=np.int32),
        replicas=ranks.astype(np.int32),
        turn_offsets=np.arange(sizes.stages + 1, dtype=np.int32),
        turns=np.arange(sizes.stages, dtype=np.int32),
    )
    slot, routes, is_gradient = _routes(sizes, channels)
    found = lay_out_transfers(computations, routes)
    table = _empty_table(sizes.first_transfer + 4 * sizes.microbatches * len(channels.key))
    table.stream[number] = ranks[stage] * len(STREAM_NAMES) + _COMPUTE
    table.key[: sizes.first_transfer] = np.minimum(np.arange(sizes.first_transfer), sizes.num_computations) * _APART
    table.key[: sizes.first_transfer] += _MIDDLE
    table.duration_ps[: sizes.num_computations] = np.maximum(computed_ps, 0)
    steps = np.flatnonzero(stepped_ps >= 0)
    table.stream[sizes.num_computations + steps] = steps * len(STREAM_NAMES) + _COMPUTE
    table.duration_ps[sizes.num_computations + steps] = stepped_ps[steps]
    _write_transfers(sizes, table, found, number, (slot, routes, is_gradient), (ranks, channels))
    return table


def _computations(sizes: Sizes, number: Ids) -> tuple[Ids, Ids, NDArray[np.bool_]]:
    """Stage and microbatch of computations, and whether they go backward; backwards run the other way round."""
    half = sizes.num_computations // 2
    is_backward = number >= half
    place = np.where(is_backward, sizes.num_computations - 1 - number, number)
    microbatch, stage = np.divmod(place, sizes.stages)
    return stage, microbatch, is_backward


def computation(sizes: Sizes, stage: Ids | int, microbatch: Ids | int, is_backward: NDArray[np.bool_] | bool) -> Ids:
    """The number of a computation."""
    place = np.asarray(microbatch) * sizes.stages + stage
    return np.where(is_backward, sizes.num_computations - 1 - place, place)


def _routes(sizes: Sizes, channels: Channels) -> tuple[Ids, StageRoutes, NDArray[np.bool_]]:
    """The slot of each route, the routes as `crossings` numbers them, and whether they carry gradients."""
    slots = np.flatnonzero(channels.key >= 0)
    slots = slots[np.argsort(channels.key[slots])]
    returns = channels.backward_ps[slots] >= 0
    slot = np.repeat(slots, 1 + returns)
    is_gradient = np.zeros(len(slot), np.bool_)
    is_gradient[(np.cumsum(1 + returns) - 1)[returns]] = True
    low, high = np.divmod(channels.key[slot], sizes.stages)
    source, target = np.where(is_gradient, high, low), np.where(is_gradient, low, high)
    ends = [end + sizes.stages * is_gradient for end in (source, target)]
    leaving, arriving = (_by_end(end, 2 * sizes.stages) for end in ends)
    return slot, StageRoutes(source.astype(np.int32), target.astype(np.int32), *leaving, *arriving), is_gradient


def _by_end(end: Ids, count: int) -> tuple[Column, Column]:
    offsets = np.concatenate([[0], np.cumsum(np.bincount(end, minlength=count))])
    return offsets.astype(np.int32), np.argsort(end, kind="stable").astype(np.int32)


def _empty_table(count: int) -> Table:
    return Table(
        stream=np.full(count, NOWHERE, np.int64),
        key=np.zeros(count, np.int64),
        duration_ps=np.zeros(count, np.int64),
        waits=np.full((count, 2), NOWHERE, np.int64),
        reader=np.full(count, NOWHERE, np.int64),
    )


def _write_transfers(
    sizes: Sizes,
    table: Table,
    found: tuple[Sends, Receives],
    number: Ids,
    which: tuple[Ids, StageRoutes, NDArray[np.bool_]],
    facts: tuple[Ids, Channels],
) -> None:
    (sent, received), (slot, routes, is_gradient), (ranks, channels) = found, which, facts
    route, of = sent.route, received.send
    sends = sizes.first_transfer + (2 * slot[route] + is_gradient[route]) * 2 * sizes.microbatches
    sends = sends + sent.microbatch
    receives = sends[of] + sizes.microbatches
    maker, reader, first = number[sent.after], number[received.before], _first_readers(received.before)
    table.stream[sends] = ranks[routes.source[route]] * len(STREAM_NAMES) + _SEND
    table.key[sends] = maker * _APART + _MIDDLE + 1 + routes.target[route]
    table.duration_ps[sends] = np.where(is_gradient, channels.backward_ps[slot], channels.forward_ps[slot])[route]
    table.waits[sends, 0] = maker
    table.stream[receives] = ranks[routes.target[route[of]]] * len(STREAM_NAMES) + _RECEIVE
    table.key[receives] = number[first] * _APART + _running(first)
    table.waits[receives, 0] = sends[of]
    gated = received.gate >= 0
    table.waits[receives[gated], 1] = number[received.gate[gated]]
    table.reader[receives] = reader


def _first_readers(before: Ids) -> Ids:
    """Which computation needs each receive, or one behind it in its stream, first; those of a rank lie together."""
    return np.minimum.accumulate(before[::-1])[::-1]


def _running(values: Ids) -> Ids:
    """For each entry of a sorted column, how many equal ones stand before it."""
    places = np.arange(len(values))
    is_new = np.diff(values, prepend=-1) != 0
    return places - np.maximum.accumulate(np.where(is_new, places, 0))


def differing_rows(before: Table | None, after: Table) -> StreamRows:
    """The rows of what two tables do not agree on, as the second, which is not shorter, has them."""
    count = len(after.stream)
    before = _empty_table(count) if before is None else _lengthened(before, count)
    there = after.stream >= 0
    differs = (before.stream != after.stream) | (before.reader != after.reader)
    differs |= there & ((before.key != after.key) | (before.duration_ps != after.duration_ps))
    differs |= there & (before.waits != after.waits).any(axis=1)
    readers = differs & (before.reader != after.reader)
    for table in (before, after):
        known = table.reader[readers]
        differs[known[known >= 0]] = True
    ids = np.flatnonzero(differs)
    return _rows(after, ids)


def _lengthened(table: Table, count: int) -> Table:
    """The same with so many rows; nothing stands in the new ones."""
    if len(table.stream) == count:
        return table
    more = _empty_table(count - len(table.stream))
    return Table(*(np.concatenate(columns) for columns in zip(table, more, strict=True)))


def _rows(table: Table, ids: Ids) -> StreamRows:
    receives = np.flatnonzero(table.reader >= 0)
    receives = receives[np.argsort(table.reader[receives], kind="stable")]
    readers = table.reader[receives]
    begin, stop = (np.searchsorted(readers, ids, side=side) for side in ("left", "right"))
    own = table.waits[ids]
    own_count = (own >= 0).sum(axis=1)
    counts = np.where(table.stream[ids] >= 0, own_count + stop - begin, 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    waits = np.empty(offsets[-1], np.int32)
    from_table = own_count > 0
    place = np.repeat(np.where(from_table, 0, begin) - offsets[:-1], counts) + np.arange(offsets[-1])
    is_own = np.repeat(from_table, counts)
    row = np.repeat(np.arange(len(ids)), counts)
    waits[is_own] = own[row[is_own], place[is_own]]
    waits[~is_own] = receives[place[~is_own]]
    return StreamRows(ids, table.stream[ids].astype(np.int32), table.key[ids], table.duration_ps[ids], offsets, waits)
