"""Which sections of a program run when a global batch arrives: a whole step, or the next part of an endless stream.

A synchronous program is its body, once per step. In an asynchronous one W microbatches enter in its prologue and W more
in its epilogue; with M microbatches in a global batch, that is A = W / M batches each.

    batch b < 2 A     the prologue, as far as the available microbatches allow
    batch b >= 2 A    the body once more: A batches enter that came before, so that none is missing
    finish            the epilogue: batches in the pipeline leave, and the last A batches enter and leave

Only the waits of the program apply in between: sends and sums of one repetition continue in the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from meshwright.runtime.executor import Executor, Inputs, Outputs, Visit
from meshwright.runtime.rank_program import SectionName
from meshwright.spec.errors import RunError
from meshwright.spec.instructions import UPDATES
from meshwright.spec.program import Program
from meshwright.spec.units import format_count

_PROLOGUE = -1


class Steps(Protocol):
    """Runs a program batch by batch."""

    # The number of batches that fill and empty the pipeline; a run has at least this number.
    num_filling: int

    @property
    def next_repetition(self) -> int:
        """The next repetition of the body, as the recorder numbers them."""

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Run the batch of a step: ``inputs[s][m]`` are the inputs of stage s for microbatch m, in its order."""

    def finish(self) -> Outputs:
        """Finish all work in progress."""


class FlushingSteps:
    """Every batch is a step by itself; works that the next one waits for may continue meanwhile."""

    num_filling = 0

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._place = 0

    @property
    def next_repetition(self) -> int:
        """The next step."""
        return self._place

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Run a step to its end."""
        self._executor.feed(0, inputs)
        self._executor.begin(Visit("body", self._place, step))
        self._executor.go_on()
        self._executor.end_step()
        self._place += 1
        return self._executor.take_outputs()

    def finish(self) -> Outputs:
        """Wait for the works that the next step would wait for."""
        self._executor.settle()
        return {}


class EndlessSteps:
    """Batches enter one after the other; the outputs of a call may be those of earlier batches.

    Streams may follow each other: after `finish` the next batch fills the pipeline again.
    """

    def __init__(self, executor: Executor, program: Program, rank: int, num_filling: int) -> None:
        self._executor = executor
        self._size = program.advance
        self.num_filling = num_filling
        own = np.concatenate([program.body.stream_range(stream) for stream in program.streams_of(rank)])
        self._updates = int(np.isin(program.body.opcode[own.astype(np.int64)], UPDATES).sum())
        self._first = 0
        self._fed = 0
        self._is_filled = False
        # The places of consecutive streams are numbered consecutively.
        self._base = 0

    @property
    def next_repetition(self) -> int:
        """The repetition of the next batch, once the pipeline is full."""
        return self._base + max(self._fed - self.num_filling, 0)

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Add a batch, and run what is due.

        Raises RunError for a step that does not follow the one before.
        """
        if self._fed and step != self._first + self._fed:
            raise RunError(
                f"Step {step} was given after step {self._first + self._fed - 1}, while minibatches are in flight. "
                "Number steps consecutively, or call `finish` in between."
            )
        if not self._fed:
            self._first = step
            self._executor.begin(self._visit(_PROLOGUE))
        self._executor.feed(self._fed, inputs)
        self._fed += 1
        if not self._is_filled:
            self._is_filled = self._executor.go_on(self._fed * self._size)
        elif self._fed > self.num_filling:
            place = self._fed - self.num_filling - 1
            self._executor.begin(self._visit(place))
            self._executor.go_on()
            # The others have long received these sends: this frees memory that no answer has freed.
            self._executor.settle(self._base + place - self.num_filling // 2 - 1)
        self._executor.release()
        return self._executor.take_outputs()

    def finish(self) -> Outputs:
        """Empty the pipeline.

        Raises RunError if fewer batches came than are needed to fill and empty it.
        """
        if not self._fed:
            return {}
        repetitions = self._fed - self.num_filling
        if repetitions < 0:
            raise RunError(
                f"The pipeline was given {format_count(self._fed, 'step')}; expected at least {self.num_filling}, "
                f"which this schedule needs to fill and empty it. Run {-repetitions} more, then finish or save "
                "again; what was saved before is complete."
            )
        self._executor.begin(self._visit(repetitions))
        self._executor.go_on()
        self._executor.settle()
        self._executor.restart()
        self._base += repetitions + 2
        self._fed, self._is_filled = 0, False
        return self._executor.take_outputs()

    def _visit(self, place: int) -> Visit:
        """The section at a place; sections are numbered as if the body came once, so one after it has lower offsets."""
        if place == _PROLOGUE:
            return Visit("prologue", self._base + place, self._first)
        name: SectionName = "epilogue" if place == self._fed - self.num_filling else "body"
        on = place - (name == "epilogue")
        return Visit(name, self._base + place, self._first, on * self._size, on * self._updates)
