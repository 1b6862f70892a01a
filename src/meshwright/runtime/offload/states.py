"""The places of the optimizer states of pieces: host memory, or a file on its drives.

A state is a tensor that an optimizer keeps in the shape of a parameter; numbers, such as AdamW's counter, stay with the
optimizer. On drives each piece has a region of one file, with its master weights and states in sequence. The data of a
piece that is read or written is in one of `PIECES_AT_HAND` buffers meanwhile; the program has no more pieces in use at
a time.
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
    """The place of the states of pieces between steps."""

    remark: str

    def read(self, piece: HostedPiece) -> int:
        """Bring a piece's states to host memory; return the bytes."""

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """Note that the optimizer updated a piece and may have new states; ``replaced``: it received others."""

    def write(self, piece: HostedPiece) -> int:
        """Put a piece's states back; return the bytes."""

    @contextmanager
    def at_hand(self, pieces: Sequence[HostedPiece]) -> Iterator[None]:
        """Make the tensors of all states readable in the block."""

    def close(self) -> None:
        """Release the place."""


class StatesOnHost:
    """States in host memory."""

    remark = ""

    def __init__(self, optimizer: torch.optim.Optimizer | None, memory: HostMemory) -> None:
        self._optimizer, self._memory = optimizer, memory
        self._own: dict[tuple[int, _Name], torch.Tensor] = {}
        # Pieces whose parameters have all had a gradient: no new state can appear.
        self._settled: set[int] = set()

    def read(self, piece: HostedPiece) -> int:  # noqa: ARG002 - nothing is elsewhere
        """Do nothing: states are in host memory."""
        return 0

    def write(self, piece: HostedPiece) -> int:  # noqa: ARG002 - as above
        """Do nothing: states are in host memory."""
        return 0

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """Move new states to host memory."""
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
        """Do nothing: they always are."""
        yield

    def close(self) -> None:
        """Do nothing: memory is freed with its tensors."""


class _Region(NamedTuple):
    """A piece's region of the file: offset, size, and the offsets of its states; "" is the master weights."""

    start: int
    room: int
    offsets: dict[_Name, int]
    num_bytes: int


class StatesOnDrives:
    """States in a file with initial room for ``bytes_per_element``. Master weights are written at the start."""

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
                f"{file.folder}: does not support direct reads and writes, so that optimizer states go through the "
                f"system's cache, which takes host memory. {FOLDER_ADVICE}"
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
        """Read states from the file to the piece's buffer, where the optimizer finds them."""
        region = self._regions[piece.facts.number]
        if not region.num_bytes:
            return 0
        slot = self._slot(piece)
        assert slot.memory is not None, "buffers of drives are mapped"
        self._file.read(region.start, memoryview(slot.memory)[: round_up(region.num_bytes, PAGE_BYTES)])
        self._bind(piece, region, slot)
        return self._held_bytes(piece)

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """Do nothing: states go to the file by an instruction of the program."""

    def write(self, piece: HostedPiece) -> int:
        """Write states to the file; the optimizer keeps none of them."""
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
        """Map tensors from the file; they stay readable after the block."""
        for piece in pieces:
            region = self._regions[piece.facts.number]
            if region.num_bytes:
                self._bind(piece, region, self._file.map(region.start, round_up(region.num_bytes, PAGE_BYTES)))
        yield
        for piece in pieces:
            self._put_away(piece, self._held(piece))

    def close(self) -> None:
        """Close the file."""
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
        # An optimizer creates most of its states in its first step.
        room = max(round_up(end, PAGE_BYTES), self._room_of(piece))
        if before is not None and room <= before.room:
            return _Region(before.start, before.room, offsets, end)
        return _Region(self._file.reserve(room), room, offsets, end)

    def _room_of(self, piece: HostedPiece) -> int:
        return round_up(piece.facts.size * self._bytes_per_element, PAGE_BYTES)

    def _slot(self, piece: HostedPiece) -> HostBuffer:
        """The buffer of a piece; enlarged if its optimizer keeps more than the plan assumes."""
        number = piece.facts.number
        place = self._places[number] % PIECES_AT_HAND
        room = self._regions[number].room if number in self._regions else self._room_of(piece)
        if place not in self._slots or self._slots[place].num_bytes < room:
            if place in self._slots:
                self._memory.free(self._slots[place])
            self._slots[place] = self._memory.new(room)
        return self._slots[place]

    def _bind(self, piece: HostedPiece, region: _Region, buffer: HostBuffer) -> None:
        """Point the optimizer to states in a buffer."""
        for (i, name), offset in region.offsets.items():
            if not name:
                piece.place_values(buffer.view(offset, (piece.facts.size,), piece.values.dtype))
                continue
            state = self._state(piece, i)
            state[name] = buffer.view(offset, piece.shape_of(i), state[name].dtype)

    def _put_away(self, piece: HostedPiece, held: Iterable[_Name]) -> None:
        """Remove references to memory that will be overwritten."""
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
    """An optimizer's existing states of a piece's parameters in their shapes."""
    found: dict[_Name, torch.Tensor] = {}
    for i, parameter in piece.hosted.items():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for name, value in state.items():
            is_whole = isinstance(value, torch.Tensor) and value.shape == piece.shape_of(i) and name != "step"
            if is_whole:
                found[i, name] = value
    return found
