"""Where the optimizer's states of pieces lie: in the memory of the host, or in a file on its drives.

A state is what an optimizer keeps of a parameter in the parameter's own shape; numbers, as AdamW's counter, stay with
the optimizer. On drives each piece has a region of one file, with its master weights and states one behind the other.
What of a piece is read or written is in one of `PIECES_AT_HAND` buffers meanwhile, as the program lets no more pieces
be there at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from meshwright.program import PIECES_AT_HAND
from meshwright.runtime.offload.drives import PAGE_BYTES, DriveFile
from meshwright.runtime.offload.memory import ALIGNMENT, HostBuffer, HostMemory, round_up
from meshwright.runtime.offload.pieces import HostedPiece
from meshwright.runtime.offload.room import FOLDER_ADVICE, explain_memory

# A state by its parameter's tensor id and its name.
_Name = tuple[int, str]


class PieceStates(Protocol):
    """Where the states of pieces are between steps."""

    remark: str

    def read(self, piece: HostedPiece) -> int:
        """Bring a piece's states to the host; the bytes."""

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """The optimizer updated a piece, so that there may be new states; ``replaced``: it was given others."""

    def write(self, piece: HostedPiece) -> int:
        """Put a piece's states back; the bytes."""

    @contextmanager
    def at_hand(self, pieces: Sequence[HostedPiece]) -> Iterator[None]:
        """Within, tensors of all states can be read."""

    def close(self) -> None:
        """Give up what was kept."""


class StatesOnHost:
    """States in the memory of the host."""

    remark = ""

    def __init__(self, optimizer: torch.optim.Optimizer | None, memory: HostMemory) -> None:
        self._optimizer, self._memory = optimizer, memory
        self._own: dict[tuple[int, _Name], torch.Tensor] = {}
        # Pieces whose parameters all had a gradient once: no state is to come.
        self._settled: set[int] = set()

    def read(self, piece: HostedPiece) -> int:  # noqa: ARG002 - nothing is elsewhere
        """Nothing is elsewhere."""
        return 0

    def write(self, piece: HostedPiece) -> int:  # noqa: ARG002 - as above
        """Nothing is elsewhere."""
        return 0

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """New states are moved to memory that is kept."""
        number = piece.facts.number
        if number in self._settled and not replaced:
            return
        if len(piece.present) == len(piece.facts.parameters):
            self._settled.add(number)
        for (i, name), value in find_states(self._optimizer, piece).items():
            assert self._optimizer is not None, "it has states"
            key = number, (i, name)
            if self._own.get(key) is not value:
                own = self._own[key] = self._own[key].copy_(value) if key in self._own else self._memory.moved(value)
                self._optimizer.state[piece.hosted[i]][name] = own

    @contextmanager
    def at_hand(self, pieces: Sequence[HostedPiece]) -> Iterator[None]:  # noqa: ARG002 - all are
        """They always can."""
        yield

    def close(self) -> None:
        """Memory goes with its tensors."""


class _Region(NamedTuple):
    """Of a piece in the file: where, how much room there is, and where its states begin; "" are master weights."""

    start: int
    room: int
    offsets: dict[_Name, int]
    num_bytes: int


class StatesOnDrives:
    """States in a file, which has room for ``bytes_per_element`` at once. Master weights are written then."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        memory: HostMemory,
        file: DriveFile,
        pieces: Sequence[HostedPiece],
        bytes_per_element: int,
    ) -> None:
        self._optimizer, self._memory, self._file = optimizer, memory, file
        self._bytes_per_element = bytes_per_element
        self.remark = explain_memory(file.folder)
        if not self.remark and not file.is_direct:
            self.remark = (
                f"{file.folder}: takes no direct reads and writes, so that optimizer states go through the system's "
                f"cache, which takes memory of the host. {FOLDER_ADVICE}"
            )
        self._places = {piece.facts.number: place for place, piece in enumerate(pieces)}
        self._slots: dict[int, HostBuffer] = {}
        self._regions: dict[int, _Region] = {}
        for piece in pieces:
            if piece.has_masters and piece.facts.size:
                piece.place_values(self._slot(piece).view(0, (piece.facts.size,), piece.values.dtype))
                piece.read_values()
            self.write(piece)

    def read(self, piece: HostedPiece) -> int:
        """From the file to the piece's buffer, where the optimizer finds them."""
        region = self._regions[piece.facts.number]
        if not region.num_bytes:
            return 0
        slot = self._slot(piece)
        assert slot.memory is not None, "buffers of drives are mapped"
        self._file.read(region.start, memoryview(slot.memory)[: round_up(region.num_bytes, PAGE_BYTES)])
        self._bind(piece, region, slot)
        return self._held_bytes(piece)

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """States go to the file when the program says so."""

    def write(self, piece: HostedPiece) -> int:
        """To the file; nothing of them stays with the optimizer."""
        held = self._held(piece)
        region = self._regions.get(piece.facts.number)
        if region is None or region.offsets.keys() != held.keys():
            region = self._regions[piece.facts.number] = self._make_room(piece, held, region)
        if not region.num_bytes:
            return 0
        slot = self._slot(piece)
        for name, offset in region.offsets.items():
            value, here = held[name], slot.view(offset, tuple(held[name].shape), held[name].dtype)
            if value.data_ptr() != here.data_ptr():
                here.copy_(value)
        assert slot.memory is not None, "buffers of drives are mapped"
        self._file.write(region.start, memoryview(slot.memory)[: round_up(region.num_bytes, PAGE_BYTES)])
        self._put_away(piece, held)
        return sum(value.nbytes for value in held.values())

    @contextmanager
    def at_hand(self, pieces: Sequence[HostedPiece]) -> Iterator[None]:
        """Tensors are mapped from the file; what was taken of them stays readable."""
        for piece in pieces:
            region = self._regions[piece.facts.number]
            if region.num_bytes:
                self._bind(piece, region, self._file.map(region.start, round_up(region.num_bytes, PAGE_BYTES)))
        yield
        for piece in pieces:
            self._put_away(piece, self._held(piece))

    def close(self) -> None:
        """Give the file up."""
        self._file.close()

    def _held(self, piece: HostedPiece) -> dict[_Name, torch.Tensor]:
        masters = {(-1, ""): piece.values} if piece.has_masters else {}
        return masters | find_states(self._optimizer, piece)

    def _held_bytes(self, piece: HostedPiece) -> int:
        return sum(value.nbytes for value in self._held(piece).values())

    def _make_room(self, piece: HostedPiece, held: dict[_Name, torch.Tensor], before: _Region | None) -> _Region:
        offsets, end = {}, 0
        for name, value in held.items():
            offsets[name] = end
            end = round_up(end + value.nbytes, ALIGNMENT)
        # An optimizer makes most of its states in its first step.
        room = max(round_up(end, PAGE_BYTES), self._room_of(piece))
        if before is not None and room <= before.room:
            return _Region(before.start, before.room, offsets, end)
        return _Region(self._file.reserve(room), room, offsets, end)

    def _room_of(self, piece: HostedPiece) -> int:
        return round_up(piece.facts.size * self._bytes_per_element, PAGE_BYTES)

    def _slot(self, piece: HostedPiece) -> HostBuffer:
        """The buffer of a piece; larger ones if its optimizer keeps more than the plan says."""
        number = piece.facts.number
        place = self._places[number] % PIECES_AT_HAND
        room = self._regions[number].room if number in self._regions else self._room_of(piece)
        if place not in self._slots or self._slots[place].num_bytes < room:
            if place in self._slots:
                self._memory.free(self._slots[place])
            self._slots[place] = self._memory.new(room)
        return self._slots[place]

    def _bind(self, piece: HostedPiece, region: _Region, buffer: HostBuffer) -> None:
        """Let the optimizer find states in a buffer."""
        for (i, name), offset in region.offsets.items():
            if not name:
                piece.place_values(buffer.view(offset, (piece.facts.size,), piece.values.dtype))
                continue
            state = self._state(piece, i)
            state[name] = buffer.view(offset, piece.shape_of(i), state[name].dtype)

    def _put_away(self, piece: HostedPiece, held: Iterable[_Name]) -> None:
        """Let nothing keep what will be overwritten."""
        for i, name in held:
            if not name:
                piece.place_values(piece.values.new_empty(0))
            else:
                state = self._state(piece, i)
                state[name] = state[name].new_empty(0)

    def _state(self, piece: HostedPiece, tensor: int) -> dict[str, torch.Tensor]:
        assert self._optimizer is not None, "it has states"
        found: dict[str, torch.Tensor] = self._optimizer.state[piece.hosted[tensor]]
        return found


def find_states(optimizer: torch.optim.Optimizer | None, piece: HostedPiece) -> dict[_Name, torch.Tensor]:
    """What an optimizer keeps of a piece's parameters in their shapes, as far as it is there."""
    found: dict[_Name, torch.Tensor] = {}
    for i, parameter in piece.hosted.items():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for name, value in state.items():
            is_whole = isinstance(value, torch.Tensor) and value.shape == piece.shape_of(i) and name != "step"
            if is_whole:
                found[i, name] = value
    return found
