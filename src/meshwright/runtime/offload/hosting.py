"""The host of a rank: pieces come down, are updated and go up, in parallel with the computations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from meshwright.runtime.offload.memory import HostMemory
from meshwright.runtime.offload.pieces import HostedPiece
from meshwright.runtime.offload.saved import SavedLayers
from meshwright.runtime.offload.streams import Act, HostStreams, HostWork
from meshwright.runtime.offload.updates import HostSteps
from meshwright.runtime.rank_program import HostItem, MarkKey
from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import Instruction
from meshwright.spec.offload_instructions import (
    CopyDown,
    CopyUp,
    HostStep,
    ReadStates,
    SavedDown,
    SavedUp,
    WriteStates,
)

# An additional condition of copies, if processes of a team have parts of gradients: that these are summed.
COMPLETED = -1


class Readiness:
    """Signals to the threads when values on the device are ready; ``complete()`` sums gradients within teams.

    ``partial`` are the parameters of whose gradients each process of the team has only a part.
    """

    def __init__(
        self,
        pieces: Sequence[HostedPiece],
        streams: HostStreams,
        partial: Collection[int],
        complete: Callable[[], None],
    ) -> None:
        self.streams, self._complete = streams, complete
        self.partial = {piece.facts.number for piece in pieces if not piece.facts.parameters.keys().isdisjoint(partial)}
        self._is_complete = False
        self._marks = _Marks(pieces, streams)

    def begin(self, marks: Collection[MarkKey]) -> None:
        """Start a section whose computations raise these marks."""
        self._is_complete = False
        self._marks.begin(marks)

    def computing(self, index: int) -> None:
        """Note that a computation starts."""
        self._marks.computing(index)

    def computed(self, index: int) -> None:
        """Note that it was issued completely."""
        self._marks.computed(index)
        self.streams.happened(index)

    @property
    def completes(self) -> bool:
        """Whether gradients have to be completed once all are summed."""
        return bool(self.partial) and not self._is_complete

    def complete(self) -> None:
        """Complete gradients; once per step."""
        if not self._is_complete:
            self._complete()
            self._is_complete = True
            self.streams.happened(COMPLETED)

    def close(self) -> None:
        """Stop the threads, and remove the hooks from the user's parameters."""
        self.streams.close()
        self._marks.close()


class Hosting:
    """The host of one rank: its pieces, activations of its stages, and the threads that process them.

    ``updates`` is None if the optimizer is on the device; ``saved`` has the layers of stages whose activations are
    on the host.
    """

    def __init__(
        self,
        pieces: Sequence[HostedPiece],
        updates: HostSteps | None,
        readiness: Readiness,
        memory: HostMemory,
        saved: Mapping[int, SavedLayers],
    ) -> None:
        self.readiness, self.memory, self._updates, self._saved = readiness, memory, updates, saved
        self._pieces = {piece.facts.number: piece for piece in pieces}

    @property
    def resident(self) -> set[int]:
        """The parameters that are on the host, by tensor id."""
        return {i for piece in self._pieces.values() if piece.facts.is_resident for i in piece.facts.parameters}

    @property
    def remark(self) -> str:
        """A remark for the user on where states are kept."""
        return self._updates.states.remark if self._updates is not None else ""

    @property
    def moved(self) -> list[tuple[Instruction, int]]:
        """The host's instructions in the last step, in the order of their ends, and the bytes of each."""
        return self.readiness.streams.moved

    def begin(self, items: Sequence[HostItem]) -> dict[int, HostWork]:
        """Start the host's work in a section."""
        self.readiness.begin({mark for item in items for mark in item.marks})
        more = {
            item.index: (COMPLETED,)
            for item in items
            if isinstance(item.instruction, CopyDown | HostStep) and item.instruction.piece in self.readiness.partial
        }
        acts = [(item, self._act(item.instruction)) for item in items]
        copies = [item.index for item in items if isinstance(item.instruction, SavedDown | SavedUp)]
        works = self.readiness.streams.begin(acts, more)
        for stage, layers in self._saved.items():
            layers.begin([works[index] for index in copies if works[index].item.instruction.stage == stage])
        return works

    def close(self) -> None:
        """Stop the threads, and delete the files on drives."""
        self.readiness.close()
        if self._updates is not None:
            self._updates.states.close()

    def _act(self, instruction: Instruction) -> Act:
        if isinstance(instruction, SavedDown):
            return lambda: self._saved[instruction.stage].copy_down(instruction)
        if isinstance(instruction, SavedUp):
            return lambda: self._saved[instruction.stage].copy_up(instruction)
        updates = self._updates
        assert updates is not None, "pieces are of optimizers on the host"
        match instruction:
            case CopyDown(piece=number):
                return self._pieces[number].copy_down
            case HostStep(piece=number):
                return lambda: updates.update(self._pieces[number])
            case CopyUp(piece=number):
                return self._pieces[number].copy_up
            case ReadStates(piece=number):
                return lambda: updates.states.read(self._pieces[number])
            case WriteStates(piece=number):
                return lambda: updates.states.write(self._pieces[number])
            case _:
                raise ProgramError(f"{instruction} is in the wrong stream. Build the program again.")


class _Marks:
    """Raises the marks of pieces outside all buckets, from hooks of their parameters."""

    def __init__(self, pieces: Sequence[HostedPiece], streams: HostStreams) -> None:
        self._streams = streams
        self._counts: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._of: defaultdict[int, list[MarkKey]] = defaultdict(list)
        self._raising = -1
        self._handles = []
        for piece in pieces:
            trained = [item for item in piece.facts.parameters.values() if item.requires_grad]
            if piece.facts.mark >= 0:
                self._counts[piece.facts.mark] = len(trained)
                hook = self._hook(piece.facts.mark)
                self._handles += [item.register_post_accumulate_grad_hook(hook) for item in trained]

    def begin(self, marks: Collection[MarkKey]) -> None:
        self._of.clear()
        for mark in marks:
            self._of[mark.instruction].append(mark)

    def computing(self, index: int) -> None:
        self._raising = index
        # `SavedLayers` raises the marks of layers.
        marks = (mark.number for mark in self._of.get(index, ()) if mark.number in self._counts)
        self._missing = {number: self._counts[number] for number in marks}

    def computed(self, index: int) -> None:
        self._missing = {}
        for mark in self._of.get(index, ()):
            self._streams.happened(mark)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, piece: int) -> Callable[[torch.Tensor], None]:
        def reached(_parameter: torch.Tensor) -> None:
            if piece in self._missing:
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    self._streams.happened(MarkKey(self._raising, piece))

        return reached
