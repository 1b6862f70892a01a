"""Check and number a controller's issues: what it may issue, and which issues belong together.

A message is identified by its stages, microbatch and payload, which must be unique in a program. The k-th members on
each rank with one kind, group and bucket within a decision belong together, and are in the exchange streams, where
members have the same order on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from meshwright.spec import Program, ProgramError, Receive, Section, Send
from meshwright.spec.control import Decision, Issue
from meshwright.spec.instructions import INSTRUCTIONS, SENDS, STREAM_NAMES, Collective, Payload

PLACES = {name: place for place, name in enumerate(STREAM_NAMES)}

_Message = tuple[int, int, int, Payload]
_PAYLOADS = {int(opcode): row.payload for opcode, row in INSTRUCTIONS.items() if row.payload}
# Kind, group, bucket, and the number of equal ones that the rank has before.
_Members = tuple[str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """A checked issue.

    It has a handle, a stream (rank by rank, all of `STREAM_NAMES`), its waits (a receive also for its send), and the
    number of its collective, else -1.
    """

    handle: int
    stream: int
    issue: Issue
    waits: tuple[int, ...]
    collective: int


class IssueBook:
    """Checks decisions against each other and against the program that they extend."""

    def __init__(self, program: Program) -> None:
        _check_program(program)
        self._num_ranks, self._num_body = program.num_ranks, program.body.num_instructions
        self._num_marks = len(program.body.mark_instruction)
        self._sent = _messages(program.body)
        self._pending: dict[_Message, tuple[int, Issue]] = {}
        self._is_first = True
        self._abandonable: set[int] = set()
        self.next_handle = self._num_body
        self._num_collectives = 0

    def file(self, decision: Decision, now_ps: int) -> list[Filed]:
        """Check a decision and number its issues. Raises ProgramError that names the issue and what was expected."""
        self._check_decision(decision, now_ps)
        stop = self.next_handle + len(decision.issues)
        filed: list[Filed] = []
        members: defaultdict[_Members, list[int]] = defaultdict(list)
        numbers: dict[_Members, int] = {}
        for handle, issue in enumerate(decision.issues, self.next_handle):
            self._check(issue, stop)
            waits, collective = issue.waits, -1
            if isinstance(issue.instruction, Send):
                self._send(issue, issue.instruction, handle)
            elif isinstance(issue.instruction, Receive):
                send = self._receive(issue.instruction)
                waits = waits if send in waits else (*waits, send)
            elif isinstance(issue.instruction, Collective):
                key = _collective(issue, issue.instruction.bucket, members)
                collective = numbers.setdefault(key, self._num_collectives + len(numbers))
                members[key].append(issue.rank)
            if issue.abandonable:
                self._abandonable.add(handle)
            stream = issue.rank * len(STREAM_NAMES) + PLACES[issue.stream]
            filed.append(Filed(handle=handle, stream=stream, issue=issue, waits=waits, collective=collective))
        for (kind, group, bucket, _), ranks in members.items():
            if sorted(ranks) != sorted(group):
                raise ProgramError(
                    f"The {kind} of bucket {bucket} was issued for ranks {sorted(ranks)} of the group {group}; "
                    "expected all of them in one decision, once each. One decision is made for all members."
                )
        self.next_handle, self._num_collectives = stop, self._num_collectives + len(numbers)
        return filed

    def _check_decision(self, decision: Decision, now_ps: int) -> None:
        """Check the watched and abandoned handles and the timers of a decision."""
        if decision.watch and not self._is_first:
            raise ProgramError(
                f"The instructions {decision.watch} cannot be watched from {now_ps} ps on, when they may have ended; "
                "expected `watch` with the first decision only. Give it there."
            )
        self._is_first = False
        for handle in decision.watch:
            if not 0 <= handle < self._num_body:
                raise ProgramError(
                    f"Instruction {handle} cannot be watched; expected one of the {self._num_body} of the program's "
                    "body. Watch issued instructions with `Issue(watched=True)`."
                )
        for handle in decision.abandon:
            if handle not in self._abandonable:
                raise ProgramError(
                    f"Instruction {handle} cannot be abandoned; expected a computation that an earlier decision issued "
                    "with `abandonable=True`."
                )
        for timer in decision.timers:
            if timer.at_ps < now_ps or timer.number < 0:
                raise ProgramError(
                    f"{timer} was set at {now_ps} ps; expected that moment or a later one, and a number of 0 or more."
                )

    def check_end(self) -> None:
        """Raise ProgramError if a message was sent that no rank receives."""
        for (source, target, microbatch, payload), (handle, _) in self._pending.items():
            raise ProgramError(
                f"Instruction {handle} sends the {payload} of microbatch {microbatch} from stage {source} to {target}, "
                "and the controller issued no receive of it. Issue both."
            )

    def unreceived(self) -> Decision:
        """Return the missing receives, on the ranks that sent, to examine a program that stopped before them."""
        issues = []
        for _, issue in self._pending.values():
            send = issue.instruction
            assert isinstance(send, Send)
            receive = Receive(
                stage=send.peer,
                microbatch=send.microbatch,
                peer=send.stage,
                payload=send.payload,
                num_bytes=send.num_bytes,
            )
            issues.append(replace(issue, stream="receive", instruction=receive, waits=(), need=None, watched=False))
        return Decision(issues=tuple(issues))

    def _check(self, issue: Issue, stop: int) -> None:
        if not 0 <= issue.rank < self._num_ranks or issue.stream not in PLACES:
            raise ProgramError(
                f"{issue.instruction} was issued to stream {issue.stream!r} of rank {issue.rank}; expected one of "
                f"{', '.join(STREAM_NAMES)} of ranks 0 to {self._num_ranks - 1}. Build the program with the ranks that "
                "the controller uses; for a policy that is `ProgramBuilder(policy.num_ranks)`."
            )
        if issue.waits and not (min(issue.waits) >= -self._num_marks and max(issue.waits) < stop):
            raise ProgramError(
                f"{issue.instruction} waits for {issue.waits}; expected handles of instructions, up to {stop - 1}, "
                f"and marks of the program, down to {-self._num_marks}."
            )
        if issue.need is not None and (
            not 1 <= issue.need <= len(issue.waits) or isinstance(issue.instruction, Receive)
        ):
            raise ProgramError(
                f"{issue.instruction} needs {issue.need} of {len(issue.waits)} waits; expected 1 up to that number, "
                "and not for a receive, which always waits for its send. Leave `need` out to wait for all."
            )
        if issue.abandonable and issue.stream != "compute":
            raise ProgramError(
                f"{issue.instruction} was issued as abandonable; expected a computation. To abandon a transfer or a "
                "sum, do not issue it."
            )
        if issue.group and not (min(issue.group) >= 0 and max(issue.group) < self._num_ranks):
            raise ProgramError(f"{issue.instruction} names the ranks {issue.group}; there are {self._num_ranks}.")

    def _send(self, issue: Issue, send: Send, handle: int) -> None:
        message: _Message = (send.stage, send.peer, send.microbatch, send.payload)
        if message in self._sent:
            raise ProgramError(
                f"{send} was issued twice. Number microbatches so that no two messages agree "
                "in stages, microbatch and payload."
            )
        self._sent.add(message)
        self._pending[message] = handle, issue

    def _receive(self, receive: Receive) -> int:
        message: _Message = (receive.peer, receive.stage, receive.microbatch, receive.payload)
        if message not in self._pending:
            raise ProgramError(
                f"{receive} was issued, but it has no pending send. Issue the send before, in the same "
                "decision or an earlier one."
            )
        handle, issue = self._pending.pop(message)
        if receive.num_bytes != getattr(issue.instruction, "num_bytes", None):
            raise ProgramError(f"{receive} was issued for {issue.instruction}; expected as many bytes as are sent.")
        return handle


def _collective(issue: Issue, bucket: int, members: dict[_Members, list[int]]) -> _Members:
    """Return the key of the collective that a member belongs to."""
    if issue.rank not in issue.group:
        raise ProgramError(
            f"{issue.instruction} of the group {issue.group} was issued to rank {issue.rank}; expected "
            "one of its members."
        )
    kind, nth = type(issue.instruction).__name__, 0
    while issue.rank in members.get((kind, issue.group, bucket, nth), ()):
        nth += 1
    return kind, issue.group, bucket, nth


def _check_program(program: Program) -> None:
    """Raise ProgramError unless the program is only a body, with streams rank by rank in the order `STREAM_NAMES`."""
    if program.advance or program.prologue.num_instructions or program.epilogue.num_instructions:
        raise ProgramError(
            "The program that a controller extends has a prologue, an epilogue or an asynchronous body; expected "
            "a body alone, which runs once. Build it with `ProgramBuilder`."
        )
    keys = [stream.rank * len(STREAM_NAMES) + PLACES[stream.name] for stream in program.streams]
    if bool((np.diff(keys) <= 0).any()):
        raise ProgramError(
            "The program that a controller extends has streams in an order of its own; expected them rank by rank, "
            f"each with {', '.join(STREAM_NAMES)}. Build it with `ProgramBuilder`."
        )


def _messages(section: Section) -> set[_Message]:
    """Return all messages sent in a section."""
    sends = np.flatnonzero(np.isin(section.opcode, SENDS))
    columns = (column[sends].tolist() for column in (section.stage, section.peer, section.microbatch, section.opcode))
    return {(stage, peer, mb, _PAYLOADS[opcode]) for stage, peer, mb, opcode in zip(*columns, strict=True)}
