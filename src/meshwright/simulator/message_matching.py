"""Match the sends and receives of a section, and the members of its collectives, by the section's columns.

A send and a receive match if source stage, target stage, microbatch and payload agree; if several agree, they match in
the order of their ids. The members of a collective agree in kind, group and bucket; if a rank has several such
instructions, the k-th of each rank match.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.spec import Opcode, Program, ProgramError, Section, instruction_name
from meshwright.spec.instructions import COLLECTIVES, RECEIVES, SENDS

Ids = NDArray[np.int64]
Column = NDArray[np.int32]
# Opcode, stage, peer and microbatch.
_Columns = tuple[NDArray[np.int8], Column, Column, Column]

_SENDS, _RECEIVES = tuple(map(int, SENDS)), tuple(map(int, RECEIVES))
# Most table entries per instruction for which clearing the table is faster than sorting transfers: with 195,652
# transfers of 21 entries each the table takes 1 ms, sorting 10 ms (`python benchmarks/simulator.py`, 1T).
_MOST_ENTRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matches:
    """The matched transfers and collectives of a section.

    ``sends[k]`` and ``receives[k]`` are the instruction ids of one transfer; ``members[k]`` is an instruction that
    takes part in collective ``numbers[k]``. ``are_named``: every receive already waits for its send in the program.
    ``owners[c]`` is the lowest-numbered stream of collective c, ``sizes[c]`` its number of members.
    """

    sends: Ids
    receives: Ids
    are_named: bool
    members: Ids
    numbers: Column
    owners: Column
    sizes: Column


def match_section(program: Program, section: Section) -> Matches:
    """Match the transfers and collectives of one section.

    Raises ProgramError, which names the instruction, if a transfer or a member of a collective has no counterpart.
    """
    named = _named_transfers(section)
    sends, receives = _match_transfers(section) if named is None else named
    members, numbers, owners, sizes = _match_collectives(program, section)
    return Matches(
        sends=sends,
        receives=receives,
        are_named=named is not None,
        members=members,
        numbers=numbers,
        owners=owners,
        sizes=sizes,
    )


def stream_of_instructions(section: Section) -> Column:
    """Return the index of each instruction's stream, shape (n,)."""
    counts = np.diff(section.stream_offsets)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def streams_of(section: Section, instructions: Ids) -> Ids:
    """Return the index of the stream of each given instruction, in the same shape."""
    return np.searchsorted(section.stream_offsets, instructions, side="right") - 1


def rank_of_streams(program: Program) -> Column:
    """Return the rank of each stream, shape (streams,). Raises ProgramError unless streams are ordered by rank."""
    ranks = np.array([stream.rank for stream in program.streams], np.int32)
    if bool((np.diff(ranks) < 0).any()) or (len(ranks) and not 0 <= ranks.min() <= ranks.max() < program.num_ranks):
        raise ProgramError(
            f"The program's streams belong to ranks {ranks.tolist()}; expected them ordered by rank, from 0 to "
            f"{program.num_ranks - 1}. Build the program again from its plan."
        )
    return ranks


def _named_transfers(section: Section) -> tuple[Ids, Ids] | None:
    """Return sends and receives if each receive waits for its send and no two transfers are equal, else None."""
    columns = (section.opcode, section.stage, section.peer, section.microbatch)
    num_stages = 1 + int(section.stage.max(initial=0))
    num_microbatches = 1 + int(section.microbatch.max(initial=0))
    most = _MOST_ENTRIES * section.num_instructions
    if 2 * num_stages**2 > most:
        return None
    receives, route, num_routes, num_sends = _find_receives(columns, num_stages)
    if num_sends != len(receives) or num_routes * num_microbatches > most:
        return None
    met = np.zeros((num_routes, num_microbatches), np.bool_)
    sends = np.empty_like(receives)
    named = _follow_names(columns, section.wait_offsets, section.waits, receives, route, met, sends)
    return (sends, receives) if named else None


@compiled
def _find_receives(columns: _Columns, num_stages: int) -> tuple[Ids, Column, int, int]:
    """Return all receives, a route number (stages and payload) for each, the number of routes, and of sends.

    A route number of -1 means that a stage does not exist.
    """
    opcode, stage, peer, _ = columns
    num_receives = num_sends = num_routes = 0
    for i in range(len(opcode)):
        num_receives += opcode[i] == _RECEIVES[0] or opcode[i] == _RECEIVES[1]
        num_sends += opcode[i] == _SENDS[0] or opcode[i] == _SENDS[1]
    receives, route = np.empty(num_receives, np.int64), np.empty(num_receives, np.int32)
    numbers = np.full(2 * num_stages * num_stages, -1, np.int32)
    k = 0
    for i in range(len(opcode)):
        if opcode[i] != _RECEIVES[0] and opcode[i] != _RECEIVES[1]:
            continue
        receives[k], route[k] = i, -1
        if stage[i] >= 0 and 0 <= peer[i] < num_stages:
            place = (stage[i] * num_stages + peer[i]) * 2 + (opcode[i] == _RECEIVES[1])
            if numbers[place] < 0:
                numbers[place] = num_routes
                num_routes += 1
            route[k] = numbers[place]
        k += 1
    return receives, route, num_routes, num_sends


@compiled
def _follow_names(
    columns: _Columns,
    wait_offsets: Ids,
    waits: Ids,
    receives: Ids,
    route: Column,
    met: NDArray[np.bool_],
    sends: Ids,
) -> bool:
    """Write the send that each receive waits for; return False if one names no send, or two transfers are equal."""
    opcode, stage, peer, microbatch = columns
    for r in range(len(receives)):
        i, send = receives[r], np.int64(-1)
        if route[r] < 0 or microbatch[i] < 0 or met[route[r], microbatch[i]]:
            return False
        met[route[r], microbatch[i]] = True
        for w in range(wait_offsets[i], wait_offsets[i + 1]):
            k = waits[w]
            # The opcode of a send comes before that of its receive.
            if k < len(opcode) and opcode[k] == opcode[i] - 1 and stage[k] == peer[i] and peer[k] == stage[i]:
                send = k if microbatch[k] == microbatch[i] else send
        if send < 0:
            return False
        sends[r] = send
    return True


def _match_transfers(section: Section) -> tuple[Ids, Ids]:
    opcode = section.opcode
    kinds = np.zeros((2, len(Opcode)), np.bool_)
    kinds[0, list(SENDS)] = kinds[1, list(RECEIVES)] = True
    sends, receives = np.flatnonzero(kinds[0][opcode]), np.flatnonzero(kinds[1][opcode])
    stage, peer, microbatch = section.stage, section.peer, section.microbatch

    def sort(ids: Ids, source: Column, target: Column) -> tuple[Ids, Ids]:
        # Streams have long runs in this order, which a stable sort by one number merges quickly.
        payload = (opcode[ids] == Opcode.SEND_GRADIENT) | (opcode[ids] == Opcode.RECEIVE_GRADIENT)
        keys = np.stack([microbatch[ids], payload, target[ids], source[ids]]).astype(np.int64)
        num_stages, num_microbatches = 2 + keys[2:].max(initial=0), 2 + keys[0].max(initial=0)
        number = ((keys[3] * num_stages + keys[2]) * 2 + keys[1]) * num_microbatches + keys[0]
        order = np.argsort(number, kind="stable")
        return ids[order], keys[:, order]

    sends, send_keys = sort(sends, stage, peer)
    receives, receive_keys = sort(receives, peer, stage)
    if not np.array_equal(send_keys, receive_keys):
        raise ProgramError(_unmatched_transfer(section, sends, send_keys, receives, receive_keys))
    return sends, receives


def _unmatched_transfer(section: Section, sends: Ids, send_keys: Ids, receives: Ids, keys: Ids) -> str:
    shared = min(len(sends), len(receives))
    differs = np.append((send_keys[:, :shared] != keys[:, :shared]).any(axis=0), True)
    at = int(np.argmax(differs))
    later = at >= len(sends) or (at < len(receives) and tuple(keys[::-1, at]) < tuple(send_keys[::-1, at]))
    lonely, what = (int(receives[at]), "send") if later else (int(sends[at]), "receive")
    return (
        f"{_name(section, lonely)!r} has no matching {what} in its section of the program; expected one with "
        "the same stages, microbatch and payload. Build the program again, or add what is missing to the schedule."
    )


def _match_collectives(program: Program, section: Section) -> tuple[Ids, Column, Column, Column]:
    ids = np.flatnonzero(np.isin(section.opcode, COLLECTIVES))
    if not len(ids):
        return ids, *np.zeros((3, 0), np.int32)
    streams = streams_of(section, ids)
    ranks = rank_of_streams(program)[streams]
    keys = np.stack([section.opcode[ids], section.peer[ids], section.group[ids]])
    repetition = _count_repetitions(np.concatenate([ranks[None], keys]))
    keys = np.concatenate([repetition[None], keys])
    order = np.lexsort(np.concatenate([ranks[None], keys]))
    starts = np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)])
    number = np.cumsum(starts) - 1
    sizes = np.bincount(number)
    _check_members(program, section, ids[order], ranks[order], np.flatnonzero(starts), sizes)
    owners = np.full(len(sizes), len(program.streams), np.int32)
    np.minimum.at(owners, number, streams[order].astype(np.int32))
    numbers = np.empty(len(ids), np.int32)
    numbers[order] = number
    return ids, numbers, owners, sizes.astype(np.int32)


def _count_repetitions(keys: Column) -> Column:
    """Return, for each column of ``keys``, the number of equal columns before it."""
    order = np.lexsort(keys)
    starts = np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)])
    positions = np.arange(len(order))
    repetition = np.empty(len(order), np.int32)
    repetition[order] = positions - np.maximum.accumulate(np.where(starts, positions, 0))
    return repetition


def _check_members(program: Program, section: Section, ids: Ids, ranks: Column, starts: Ids, sizes: Ids) -> None:
    group = section.group[ids[starts]]
    lengths = np.fromiter(map(len, program.groups), np.int64)
    complete = (group >= 0) & (lengths[group] == sizes)
    if complete.all():
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        members = np.fromiter(chain.from_iterable(program.groups), np.int32)
        expected = members[np.lexsort((members, np.repeat(np.arange(len(lengths)), lengths)))]
        positions = np.arange(len(ids)) + np.repeat(offsets[group] - starts, sizes)
        complete = np.logical_and.reduceat(expected[positions] == ranks, starts)
    if not complete.all():
        c = int(np.argmin(complete))
        issued = ranks[starts[c] : starts[c] + sizes[c]].tolist()
        wanted = sorted(program.groups[group[c]]) if group[c] >= 0 else "the ranks of a group"
        raise ProgramError(
            f"{_name(section, int(ids[starts[c]]))!r} is issued by ranks {issued}; expected {wanted}, once each. "
            "Build the program again, or let every member of the group issue it."
        )


def _name(section: Section, index: int) -> str:
    columns = section.opcode, section.stage, section.microbatch, section.peer
    return instruction_name(*(int(column[index]) for column in columns))
