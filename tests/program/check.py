"""The rules that every program must satisfy, from any schedule.

1. Each (stage, microbatch) runs forward once, and backward at most once, after its forward on the same rank.
2. Sends and receives pair off: same stages, microbatch, payload and bytes; and every ordered pair of ranks sends and
   receives its
   messages in the same order (transports without tags deliver by order).
3. The ranks of a collective meet it equally often, in an order without cycles.
4. There are no cyclic waits: some order executes everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np

from meshwright.program import repeat_body
from meshwright.spec import DeadlockError, Opcode, Program, ProgramError, Section, instruction_name
from meshwright.spec.instructions import COLLECTIVES, RECEIVES, SENDS

# Opcode, group and bucket of a collective.
_Kind = tuple[int, int, int]


def check_program(program: Program) -> None:
    """Raise ProgramError (DeadlockError for rule 4) naming the first instruction that breaks a rule."""
    section = _two_steps(program) if program.crosses_steps else program.body
    ranks = _ranks(program, section)
    _check_computation(section, ranks)
    _check_pairs(program, section, ranks)
    _check_collectives(program, section, ranks)
    _check_progress(program, section, ranks)


def describe(section: Section, index: int, rank: int) -> str:
    """Return a name such as ``F0.3 on rank 1``."""
    name = instruction_name(
        int(section.opcode[index]), int(section.stage[index]), int(section.microbatch[index]), int(section.peer[index])
    )
    return f"{name} on rank {rank}"


def _ranks(program: Program, section: Section) -> np.ndarray:
    ranks = np.array([stream.rank for stream in program.streams], np.int64)
    return np.repeat(ranks, np.diff(section.stream_offsets))


def _check_computation(section: Section, ranks: np.ndarray) -> None:
    forwards: dict[tuple[int, int], tuple[int, int]] = {}
    backwards: set[tuple[int, int]] = set()
    for index in np.flatnonzero(section.opcode <= Opcode.BACKWARD).tolist():
        key = (int(section.stage[index]), int(section.microbatch[index]))
        where = describe(section, index, int(ranks[index]))
        if section.opcode[index] == Opcode.FORWARD:
            if key in forwards:
                raise ProgramError(
                    f"{where}: it already ran forward on rank {forwards[key][0]}; each microbatch runs once per stage."
                )
            forwards[key] = (int(ranks[index]), int(index))
        else:
            if key in backwards:
                raise ProgramError(f"{where}: it already ran backward; each microbatch runs once per stage.")
            if key not in forwards or forwards[key][0] != ranks[index] or forwards[key][1] > index:
                raise ProgramError(
                    f"{where}: its forward does not come before it on the same rank; nothing can be differentiated."
                )
            backwards.add(key)


def _check_pairs(program: Program, section: Section, ranks: np.ndarray) -> None:
    sent: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    received: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for index in range(section.num_instructions):
        opcode = int(section.opcode[index])
        if opcode not in (*SENDS, *RECEIVES):
            continue
        stage, peer, group = int(section.stage[index]), int(section.peer[index]), int(section.group[index])
        microbatch, num_bytes = int(section.microbatch[index]), int(section.num_bytes[index])
        sending = opcode in SENDS
        if group < 0 or program.groups[group][0 if sending else 1] != ranks[index]:
            raise ProgramError(
                f"{describe(section, index, int(ranks[index]))}: its pair of ranks does not name this rank at this end."
            )
        payload = SENDS.index(Opcode(opcode)) if sending else RECEIVES.index(Opcode(opcode))
        ends = (stage, peer) if sending else (peer, stage)
        (sent if sending else received)[group].append((payload, *ends, microbatch, num_bytes))
    for group in sent.keys() | received.keys():
        if sent[group] != received[group]:
            source, target = program.groups[group]
            first = next(
                (pair for pair in zip(sent[group], received[group], strict=False) if pair[0] != pair[1]),
                (len(sent[group]), len(received[group])),
            )
            raise ProgramError(
                f"Rank {source} sends and rank {target} receives different sequences: {first[0]} against {first[1]} "
                "(payload, source stage, target stage, microbatch, bytes; or counts). "
                "Every send needs its receive, in the same order."
            )


def _check_collectives(program: Program, section: Section, ranks: np.ndarray) -> None:
    met: dict[_Kind, Counter[int]] = defaultdict(Counter)
    for index in np.flatnonzero(np.isin(section.opcode, COLLECTIVES)).tolist():
        met[_kind(section, index)][int(ranks[index])] += 1
    for (opcode, group, bucket), counts in met.items():
        members = program.groups[group] if group >= 0 else ()
        if set(counts) != set(members) or len(set(counts.values())) != 1:
            raise ProgramError(
                f"The {Opcode(opcode).name.lower().replace('_', '-')} of bucket {bucket} has members {members}, but is "
                f"met {dict(counts)} times per rank; every member must meet it equally often."
            )


def _two_steps(program: Program) -> Section:
    """Return two repetitions in one section, in which no two computations are equal."""
    section = repeat_body(program, 2).section
    if program.advance:
        return section
    met: Counter[tuple[int, int, int]] = Counter()
    microbatch, each = section.microbatch.copy(), 1 + int(section.microbatch.max(initial=0))
    for index in np.flatnonzero(section.microbatch >= 0).tolist():
        key = (int(section.opcode[index]), int(section.stage[index]), int(section.microbatch[index]))
        microbatch[index] += each * met[key]
        met[key] += 1
    return replace(section, microbatch=microbatch)


def _kind(section: Section, index: int) -> _Kind:
    return int(section.opcode[index]), int(section.group[index]), int(section.peer[index])


def _check_progress(program: Program, section: Section, ranks: np.ndarray) -> None:
    """Execute without durations: an instruction runs when its waits are done, a collective when all have arrived."""
    done = np.zeros(section.num_instructions, bool)
    position = section.stream_offsets[:-1].copy()
    need = _needs(section)
    arrived: Counter[_Kind] = Counter()
    meeting: set[int] = set()
    progress = True
    while progress:
        progress = False
        for stream in range(len(program.streams)):
            while position[stream] < section.stream_offsets[stream + 1]:
                index = int(position[stream])
                happened = (bool(done[_awaited(section, wait)]) for wait in section.waits_of(index))
                if not (sum(happened) >= need[index] if index in need else all(happened)):
                    break
                if section.opcode[index] in COLLECTIVES:
                    key = _kind(section, index)
                    if index not in meeting:
                        meeting.add(index)
                        arrived[key] += 1
                        progress = True
                    if arrived[key] < len(program.groups[key[1]]):
                        break
                done[index] = True
                position[stream] += 1
                progress = True
    stuck = [int(position[s]) for s in range(len(program.streams)) if position[s] < section.stream_offsets[s + 1]]
    if stuck:
        raise DeadlockError(
            f"The program can never finish: {'; '.join(_describe_wait(section, done, ranks, i) for i in stuck[:6])}. "
            "Change the order in which these ranks compute."
        )


def _describe_wait(section: Section, done: np.ndarray, ranks: np.ndarray, index: int) -> str:
    awaited = (_awaited(section, wait) for wait in section.waits_of(index))
    missing = ", ".join(describe(section, other, int(ranks[other])) for other in awaited if not done[other])
    need = _needs(section).get(index)
    some = f"{need} of {len(section.waits_of(index))}, of which these never happen: " if need and missing else ""
    return f"{describe(section, index, int(ranks[index]))} waits for {some}{missing or 'the other members'}"


def _needs(section: Section) -> dict[int, int]:
    """Return the number of waits that each join needs."""
    return dict(zip(section.join_instruction.tolist(), section.join_need.tolist(), strict=True))


def _awaited(section: Section, wait: int) -> int:
    """Return the awaited instruction of a wait; for a mark, the instruction that raises it."""
    count = section.num_instructions
    return int(wait) if wait < count else int(section.mark_instruction[wait - count])
