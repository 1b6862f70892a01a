"""Check the instructions that a controller issues, give them handles, and match sends, receives and collectives.

A message is identified by its stages, microbatch and payload, which must be unique in a program. The members of a
collective are matched within one decision: on each rank, the k-th instruction with the same kind, group and bucket.
Collectives are in the exchange streams, in the same order on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np

from meshwright.spec import AllReduce, Program, ProgramError, Receive, Section, Send
from meshwright.spec.control import Decision, Issue
from meshwright.spec.instructions import INSTRUCTIONS, SENDS, STREAM_NAMES, Collective, Payload

# The streams of real ranks (`runtime.controlled`).
RANK_STREAMS = ("compute", "send", "receive", "exchange")
PLACES = {name: place for place, name in enumerate(STREAM_NAMES)}

_Message = tuple[int, int, int, Payload]
_PAYLOADS = {int(opcode): row.payload for opcode, row in INSTRUCTIONS.items() if row.payload}
# Kind, group, bucket, and the number of equal ones that the rank has before.
_Members = tuple[str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """A checked issue and its numbers.

    ``stream`` is rank · len(`STREAM_NAMES`) + index of the name. ``waits`` are handles; a receive also waits for its
    send. ``collective`` is the number of the collective that the issue is a member of, -1 for other instructions.
    """

    handle: int
    stream: int
    issue: Issue
    waits: tuple[int, ...]
    collective: int


class IssueBook:
    """Checks and numbers the decisions of one run, in order; raises ProgramError if ``program`` cannot be extended.

    ``program`` must have only a body, with its streams in the order of `STREAM_NAMES`.
    """

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
        """Check a decision, made at ``now_ps``, and return its issues with their numbers.

        Raises ProgramError, which names the issue and what was expected, if the decision breaks a rule.
        """
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
                    "expected all of them in one decision, once each. Issue the collective for every member at once."
                )
        self.next_handle, self._num_collectives = stop, self._num_collectives + len(numbers)
        return filed

    def _check_decision(self, decision: Decision, now_ps: int) -> None:
        """Check the watched and abandoned handles and the timers of a decision."""
        if decision.watch and not self._is_first:
            raise ProgramError(
                f"The instructions {decision.watch} cannot be watched from {now_ps} ps on, because they may have ended "
                "before; expected `watch` in the first decision only. Give it there."
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

    def lose(self, handles: Set[int]) -> None:
        """Expect no receives of these sends, which a death prevents."""
        self._pending = {message: sent for message, sent in self._pending.items() if sent[0] not in handles}

    def check_end(self) -> None:
        """Raise ProgramError if the controller issued a send without its receive."""
        for (source, target, microbatch, payload), (handle, _) in self._pending.items():
            raise ProgramError(
                f"Instruction {handle} sends the {payload} of microbatch {microbatch} from stage {source} to {target}, "
                "but the controller issued no receive of this message. Issue both."
            )

    def unreceived(self) -> Decision:
        """Return the receives that are missing, as issues on the ranks of their sends.

        They complete a program that stopped before its receives were issued, so that it can be examined.
        """
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
                f"{issue.instruction} was issued with `abandonable=True`; expected a computation. Transfers and sums "
                "cannot be abandoned: issue them later."
            )
        if issue.group and not (min(issue.group) >= 0 and max(issue.group) < self._num_ranks):
            raise ProgramError(
                f"{issue.instruction} has the group {issue.group}; expected ranks of the program, which has "
                f"{self._num_ranks} ranks, from 0."
            )

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
                f"{receive} was issued, but no send of this message is pending. Issue the send before the receive, in "
                "the same decision or an earlier one."
            )
        handle, issue = self._pending.pop(message)
        if receive.num_bytes != getattr(issue.instruction, "num_bytes", None):
            raise ProgramError(f"{receive} was issued for {issue.instruction}; expected the same `num_bytes` in both.")
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
            "The program that a controller extends has its streams in a wrong order; expected them rank by rank, "
            f"and on each rank in the order {', '.join(STREAM_NAMES)}. Build it with `ProgramBuilder`."
        )


def _messages(section: Section) -> set[_Message]:
    """Return all messages sent in a section."""
    sends = np.flatnonzero(np.isin(section.opcode, SENDS))
    columns = (column[sends].tolist() for column in (section.stage, section.peer, section.microbatch, section.opcode))
    return {(stage, peer, mb, _PAYLOADS[opcode]) for stage, peer, mb, opcode in zip(*columns, strict=True)}


def check_for_ranks(issue: Issue) -> None:
    """Raise ProgramError for an issue that simulated controllers may make and real ranks cannot run."""
    instruction, group = issue.instruction, issue.group
    is_sum = isinstance(instruction, AllReduce)
    if issue.stream not in RANK_STREAMS or (issue.stream == "exchange" and not is_sum):
        raise ProgramError(
            f"{instruction} is not run under a controller; expected computations, sends, receives and all-reduces. "
            "Simulate such a controller."
        )
    if isinstance(instruction, Send | Receive) and not (
        len(group) == len(set(group)) == 2 and issue.rank == group[isinstance(instruction, Receive)]
    ):
        raise ProgramError(
            f"{instruction} was issued to rank {issue.rank} with the group {group}; expected two ranks, (sender, "
            "receiver)."
        )
