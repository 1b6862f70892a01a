"""Repeat a program's body as one section: increase microbatches and versions, and resolve late waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.instructions import UPDATES
from meshwright.spec.program import Program, Section

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeated:
    """The section, and for each of its n instructions and m marks where it comes from.

    ``source`` (n,) and ``mark_source`` (m,) are rows in the concatenated columns of prologue, body and epilogue;
    ``step`` (n,) numbers the repetitions of the body (the prologue counts as the first, the epilogue as the last).
    """

    section: Section
    source: Ids
    mark_source: Ids
    step: NDArray[np.int32]


def repeat_body(program: Program, num_steps: int) -> Repeated:
    """Return prologue, ``num_steps`` repetitions of the body, and epilogue as one section."""
    made = [section for _, section in program.sections()]
    which = [0, *[1] * num_steps, 2]
    steps = [0, *range(num_steps), num_steps - 1]
    parts = [made[index] for index in which]
    lengths = np.array([np.diff(part.stream_offsets) for part in parts])
    stream_offsets = np.concatenate([[0], np.cumsum(lengths.sum(axis=0))])
    begins = stream_offsets[:-1] + np.cumsum(lengths, axis=0) - lengths
    new = [
        np.arange(part.num_instructions) + np.repeat(begin - part.stream_offsets[:-1], length)
        for part, begin, length in zip(parts, begins, lengths, strict=True)
    ]
    order = np.argsort(np.concatenate(new), kind="stable")
    source = _behind_each_other(which, [part.num_instructions for part in made])[order]
    mark_source = _behind_each_other(which, [len(part.mark_instruction) for part in made])
    step = np.repeat(np.array(steps, np.int32), [part.num_instructions for part in parts])[order]
    columns = ("opcode", "stage", "microbatch", "version", "peer", "group", "num_bytes")
    facts: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in made])[source] for name in columns}
    updates = _updates_per_body(program, int(facts["stage"].max(initial=0)) + 1) if program.advance else np.zeros(1)
    for name, advance in (("microbatch", program.advance), ("version", updates[facts["stage"] % len(updates)])):
        counted = facts[name] + (step * advance).astype(np.int32)
        facts[name] = np.where(facts[name] < 0, facts[name], counted)
    section = Section(
        stream_offsets=stream_offsets.astype(np.int64),
        **facts,
        **_waits(parts, new),
        mark_instruction=np.concatenate([ids[part.mark_instruction] for ids, part in zip(new, parts, strict=True)]),
        mark_index=np.concatenate([part.mark_index for part in parts]),
        **_joins(parts, new),
    )
    return Repeated(section=section, source=source, mark_source=mark_source, step=step)


def _behind_each_other(which: list[int], counts: list[int]) -> Ids:
    first = np.cumsum([0, *counts])
    return np.concatenate([np.arange(first[k], first[k + 1]) for k in which])


def _updates_per_body(program: Program, num_stages: int) -> Ids:
    """Return the number of weight versions that a repetition of the body makes for each stage."""
    body = program.body
    steps = np.flatnonzero(np.isin(body.opcode, UPDATES))
    streams = np.repeat(np.arange(len(program.streams)), np.diff(body.stream_offsets))[steps]
    made = np.bincount(body.stage[steps], minlength=num_stages)
    pairs = np.unique(np.stack([streams, body.stage[steps]]), axis=1)
    replicas: Ids = np.bincount(pairs[1], minlength=num_stages)
    return made // np.maximum(replicas, 1)


def _waits(parts: list[Section], new: list[Ids]) -> dict[str, Any]:
    num_instructions, num_marks = sum(len(ids) for ids in new), 0
    awaited, waiting = [], []
    for place, (part, ids) in enumerate(zip(parts, new, strict=True)):
        marks = num_instructions + num_marks + np.arange(len(part.mark_instruction))
        awaited.append(np.concatenate([ids, marks])[part.waits])
        waiting.append(np.repeat(ids, np.diff(part.wait_offsets)))
        num_marks += len(part.mark_instruction)
        for lag in np.unique(part.late_lag).tolist():
            if 0 <= place - lag < len(parts) - 1:
                meant = (part.late_lag == lag) & (part.late_section == min(place - lag, 1))
                awaited.append(new[place - lag][part.late_awaited[meant]])
                waiting.append(ids[part.late_instruction[meant]])
    waiters = np.concatenate(waiting)
    return {
        "wait_offsets": np.append(0, np.cumsum(np.bincount(waiters, minlength=num_instructions))).astype(np.int64),
        "waits": np.concatenate(awaited)[np.argsort(waiters, kind="stable")].astype(np.int64),
    }


def _joins(parts: list[Section], new: list[Ids]) -> dict[str, Any]:
    joins = np.concatenate([ids[part.join_instruction] for part, ids in zip(parts, new, strict=True)])
    order = np.argsort(joins)
    return {"join_instruction": joins[order], "join_need": np.concatenate([part.join_need for part in parts])[order]}
