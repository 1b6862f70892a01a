"""The place of a rank in its run (`Position`): the main thread writes it, the thread that watches the rank reads it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import Enum
from weakref import ref

from meshwright.runtime.rank_program import Computed, HostItem, IssuedInstruction, RankProgram, SectionName
from meshwright.spec import instruction_name
from meshwright.spec.instructions import instruction_row


class Phase(Enum):
    """What a rank does: the value completes the sentence "rank 1 ..."."""

    START = "starts"
    READING = "reads the batch of step {next}"
    STEP = "runs step {next}"
    # The user's own loop, such as its validation.
    BETWEEN = "is in the script after step {done}"
    # A call in which all ranks take part, such as a checkpoint.
    CALL = "calls `{call}` after step {done}"
    ENDED = "has ended after step {done}"
    FAILED = "has failed after step {done}"


# Those of this process, which may have several trainers.
_EVERY: list[ref[Position]] = []


def count_progress() -> int:
    """Return a number that changes with every instruction and phase of this process; any thread may call it."""
    return sum(item.count for known in list(_EVERY) if (item := known()) is not None)


class Position:
    """Phase, step and instruction of a rank.

    ``count`` changes with every instruction and phase. ``step``: the number (from 0) of the current or next step.
    ``slowest_s``: the time of the slowest step, before the first one that of the start. ``waited_s`` and
    ``computed_s``: the seconds in which all steps waited for others, and the rest of their time and of reading batches.
    ``has_stepped``: whether a step has ended.
    """

    def __init__(self) -> None:
        self.phase, self.call, self.step = Phase.START, "", 0
        _EVERY.append(ref(self, _EVERY.remove))
        self.count, self.slowest_s, self.waited_s, self.computed_s = 0, 0.0, 0.0, 0.0
        self._waited_before_s = 0.0
        self.entered_s, self.has_stepped = time.monotonic(), False
        # The instructions of the section that runs: the number of the current one, and of one that it waits for.
        self.programs: Mapping[SectionName, RankProgram] = {}
        self.section: SectionName = "body"
        self.instruction = self.awaited = -1

    def enter(self, phase: Phase, step: int, call: str = "") -> None:
        """Begin a phase; ``call`` names the call of `Phase.CALL`."""
        now = time.monotonic()
        if self.phase is Phase.START:
            self.slowest_s = now - self.entered_s
        elif self.phase is Phase.STEP:
            self.slowest_s = max(self.slowest_s if self.has_stepped else 0.0, now - self.entered_s)
            self.has_stepped = True
        if self.phase in (Phase.STEP, Phase.READING):
            self.computed_s += now - self.entered_s - (self.waited_s - self._waited_before_s)
        self._waited_before_s = self.waited_s
        self.phase, self.call, self.step, self.entered_s = phase, call, step, now
        self.instruction = self.awaited = -1
        self.count += 1

    def begin(self, programs: Mapping[SectionName, RankProgram], section: SectionName) -> None:
        """Begin a section of the rank's program."""
        self.programs, self.section = programs, section
        self.instruction = -1

    def describe(self) -> str:
        """Return the phase and the instruction, such as "runs step 3, in F0.1"."""
        said = self.phase.value.format(next=self.step + 1, done=self.step, call=self.call)
        awaited, current = self._name(self.awaited), self._name(self.instruction)
        if self.phase is not Phase.STEP:
            return said
        if awaited:
            return f"{said}, waits for {awaited}" + (f" before {current}" if current else "")
        return f"{said}, in {current}" if current else said

    def _name(self, index: int) -> str:
        """The name of an instruction in timelines; "" if the section does not have it."""
        if index < 0 or self.section not in self.programs:
            return ""
        program = self.programs[self.section]
        issued = [other for item in program.computations for other in (*item.then, *item.marked)]
        every: tuple[Computed | IssuedInstruction | HostItem, ...]
        every = (*program.computations, *program.first, *issued, *program.beside)
        for item in every:
            if item.index == index:
                opcode, stage, microbatch, _, peer, _ = instruction_row(item.instruction)
                return instruction_name(opcode, stage, microbatch, peer)
        return ""
