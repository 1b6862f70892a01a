"""Programs by hand and at random, with costs. Rows are appended per section; stage s lives on rank s unless said."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from meshwright.simulator import ProgramCosts, SectionCosts
from meshwright.spec import Opcode, Program, Section, Stream
from meshwright.spec.instructions import STREAM_NAMES

NUM_STREAMS = len(STREAM_NAMES)
RECEIVES = (Opcode.RECEIVE_ACTIVATION, Opcode.RECEIVE_GRADIENT)


@dataclass(slots=True)
class Row:
    rank: int
    stream: str
    opcode: Opcode
    stage: int = 0
    microbatch: int = -1
    peer: int = -1
    group: int = -1
    num_bytes: int = 0
    cost: int = 0
    route: int = -1
    waits: list = field(default_factory=list)  # rows, or (row, offset) for a mark
    need: int | None = None  # of its waits; None for all

    def __hash__(self):
        return id(self)

    __eq__ = object.__eq__


def forward(rank: int, microbatch: int = 0, **facts) -> Row:
    return Row(rank=rank, stream="compute", opcode=Opcode.FORWARD, stage=rank, microbatch=microbatch, **facts)


def transfer(source: int, target: int, microbatch: int, *, waits, **facts) -> tuple[Row, Row]:
    ends = {"microbatch": microbatch}
    send = Row(
        rank=source,
        stream="send",
        opcode=Opcode.SEND_ACTIVATION,
        stage=source,
        peer=target,
        waits=waits,
        **ends,
        **facts,
    )
    receive = Row(
        rank=target, stream="receive", opcode=Opcode.RECEIVE_ACTIVATION, stage=target, peer=source, cost=0, **ends
    )
    return send, receive


def reduction(rank: int, *, waits, **facts) -> Row:
    return Row(
        rank=rank, stream="exchange", opcode=Opcode.ALL_REDUCE, stage=rank, group=0, peer=0, waits=waits, **facts
    )


def ends_by_name(timeline) -> dict[str, int]:
    ranks = [timeline.tracks[track].rank for track in timeline.track]
    return {f"{ranks[i]}: {timeline.name(i)}": int(timeline.end_ps[i]) for i in range(timeline.num_spans)}


def section_of(rows: list[Row], num_ranks: int) -> tuple[Section, SectionCosts]:
    """Columns and costs of rows in any order; a stream keeps the order of its rows."""
    key = lambda row: row.rank * NUM_STREAMS + STREAM_NAMES.index(row.stream)
    rows = sorted(rows, key=key)
    number = {row: i for i, row in enumerate(rows)}
    waits, offsets, marks, mark_offsets = [], [0], [], []
    for row in rows:
        for wait in row.waits:
            if isinstance(wait, tuple):
                waits.append(len(rows) + len(marks))
                marks.append(number[wait[0]])
                mark_offsets.append(wait[1])
            else:
                waits.append(number[wait])
        offsets.append(len(waits))
    column = lambda name, dtype: np.array([getattr(row, name) for row in rows], dtype)
    section = Section(
        stream_offsets=np.searchsorted([key(row) for row in rows], range(num_ranks * NUM_STREAMS + 1)).astype(np.int64),
        opcode=column("opcode", np.int8),
        stage=column("stage", np.int32),
        microbatch=column("microbatch", np.int32),
        version=np.zeros(len(rows), np.int32),
        peer=column("peer", np.int32),
        group=column("group", np.int32),
        num_bytes=column("num_bytes", np.int64),
        wait_offsets=np.array(offsets, np.int64),
        waits=np.array(waits, np.int64),
        mark_instruction=np.array(marks, np.int64),
        mark_index=np.arange(len(marks), dtype=np.int32),
        join_instruction=np.array([i for i, row in enumerate(rows) if row.need is not None], np.int64),
        join_need=np.array([row.need for row in rows if row.need is not None], np.int32),
    )
    section_costs = SectionCosts(
        cost_class=column("cost", np.int32),
        route=column("route", np.int32),
        mark_offset_ps=np.array(mark_offsets, np.int64),
    )
    return section, section_costs


def program_of(sections, num_ranks, durations, routes=(), groups=()) -> tuple[Program, ProgramCosts]:
    """Prologue, body and epilogue (lists of rows) as a program, with classes of ``durations`` and no memory."""
    made = [section_of(rows, num_ranks) for rows in sections]
    program = Program(
        schedule="test",
        plan_hash="",
        num_ranks=num_ranks,
        streams=tuple(Stream(rank=rank, name=name) for rank in range(num_ranks) for name in STREAM_NAMES),
        groups=tuple(groups),
        **dict(zip(("prologue", "body", "epilogue"), (section for section, _ in made), strict=True)),
    )
    links = [link for route in routes for link in route]
    costs = ProgramCosts(
        duration_ps=np.array(durations, np.int64),
        host_ps=np.zeros(len(durations), np.int64),
        allocate_bytes=np.zeros((len(durations), 1), np.int64),
        free_bytes=np.zeros((len(durations), 1), np.int64),
        memory_parts=("all",),
        resident_bytes=np.zeros((num_ranks, 1), np.int64),
        route_offsets=np.cumsum([0, *(len(route) for route in routes)]).astype(np.int64),
        route_links=np.array(links, np.int32),
        num_links=max(links, default=-1) + 1,
        **dict(zip(("prologue", "body", "epilogue"), (part for _, part in made), strict=True)),
    )
    return program, costs


def random_program(
    seed: int, size: int, *, may_deadlock: bool = False, joins: bool = False, body_alone: bool = False
) -> tuple[Program, ProgramCosts]:
    """Compute, transfers and collectives on 2-4 ranks, waiting for ends and marks of others, with many ties.

    With ``joins``, some of those that wait need only a few of their waits. Classes 0-2 may take no time and are for
    work without links; classes 3-5 take at least 1 ps.
    """
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 4)
    num_links = rng.randint(1, 4)
    durations = [rng.randint(0, 4) for _ in range(3)] + [rng.randint(1, 5) for _ in range(3)]
    routes = [rng.sample(range(num_links), rng.randint(1, min(2, num_links))) for _ in range(rng.randint(1, 5))]
    groups = [tuple(sorted(rng.sample(range(num_ranks), rng.randint(2, num_ranks)))) for _ in range(2)]
    owners = [None] * len(routes)
    for owner in [*((rank, "send") for rank in range(num_ranks)), *range(len(groups))]:
        # A link that only one stream or group uses, alone or together with one that everybody uses.
        routes.append([num_links, *rng.sample(range(num_links), rng.choice([0, 0, 1]))])
        owners.append(owner)
        num_links += 1
    sections = [
        _random_rows(
            rng, size if part == 1 else 0 if body_alone else rng.randint(0, size), num_ranks, durations, owners, groups
        )
        for part in range(3)
    ]
    if may_deadlock:
        for rows in sections:
            for _ in range(min(2, len(rows))):
                rng.choice(rows).waits.append(rng.choice(rows))
    if joins:
        rng = random.Random(seed + 1)
        for row in (row for rows in sections for row in rows if row.opcode not in RECEIVES):
            if row.waits and rng.random() < 0.6:
                row.need = rng.randint(1, len(row.waits))
    return program_of(sections, num_ranks, durations, routes, groups)


def _random_rows(rng, size, num_ranks, durations, owners, groups) -> list[Row]:
    rows: list[Row] = []

    def draw(**facts) -> Row:
        user = facts.get("group", (facts["rank"], facts["stream"]))
        route = rng.choice([-1, *(i for i, owner in enumerate(owners) if owner is None or owner == user)])
        row = Row(route=route, cost=rng.randint(0, 2) if route < 0 else rng.randint(3, 5), **facts)
        for other in rng.sample(rows, min(len(rows), rng.choice([0, 0, 1, 1, 2, 3]))):
            lowest = 0 if other.route < 0 else 1
            mark = rng.random() < 0.3
            row.waits.append((other, rng.randint(lowest, durations[other.cost])) if mark else other)
        return row

    while len(rows) < size:
        kind = rng.random()
        if kind < 0.4:
            rank = rng.randrange(num_ranks)
            rows.append(draw(rank=rank, stream="compute", opcode=Opcode.FORWARD, stage=rank, microbatch=len(rows)))
        elif kind < 0.8:
            source, target = rng.sample(range(num_ranks), 2)
            microbatch = rng.randrange(3)
            payload = rng.randrange(2)
            send = draw(
                rank=source,
                stream="send",
                opcode=(Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)[payload],
                stage=source,
                peer=target,
                microbatch=microbatch,
            )
            receive = draw(
                rank=target,
                stream="receive",
                opcode=(Opcode.RECEIVE_ACTIVATION, Opcode.RECEIVE_GRADIENT)[payload],
                stage=target,
                peer=source,
                microbatch=microbatch,
            )
            receive.route, receive.cost = -1, rng.randint(0, 2)
            receive.waits += [send] * rng.randrange(2)
            rows += [send, receive]
        else:
            group = rng.randrange(len(groups))
            facts = {"opcode": Opcode.ALL_REDUCE, "group": group, "peer": rng.randrange(2)}
            members = [draw(rank=rank, stage=rank, stream="exchange", **facts) for rank in groups[group]]
            for member in members:
                member.route, member.cost = members[0].route, members[0].cost
            rows += members
    return rows
