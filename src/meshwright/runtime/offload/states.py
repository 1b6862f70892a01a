"""Optimizer states in host memory or on drives (`PieceStates`), and optimizer updates on the host (`HostSteps`).

A state is a tensor that an optimizer keeps in the shape of a parameter; numbers, such as AdamW's counter, stay with the
optimizer. On drives each piece (`pieces`) has a region of one file, with its master weights and states in sequence. A
piece that is read, updated or written occupies one of `PIECES_AT_HAND` buffers in host memory; the program never uses
more pieces at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from meshwright.program import PIECES_AT_HAND
from meshwright.runtime.offload.pieces import HostedPiece
from meshwright.runtime.offload.pinned_memory import (
    ALIGNMENT,
    FOLDER_ADVICE,
    PAGE_BYTES,
    DriveFile,
    HostBuffer,
    HostMemory,
    explain_memory,
    round_up,
)
from meshwright.runtime.precisions import Masters
from meshwright.runtime.stage_steps import StageSteps

# A state by its parameter's tensor id and its name.
_Name = tuple[int, str]


class PieceStates(Protocol):
    """The storage of the pieces' optimizer states between steps: host memory or a file on a drive.

    ``remark``: a warning for the user about the storage; "" without one.
    """

    remark: str

    def read(self, piece: HostedPiece) -> int:
        """Read a piece's states into host memory; return the bytes."""

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """Call after the optimizer updated a piece and may have created states.

        ``replaced``: the states were replaced, as by a checkpoint.
        """

    def write(self, piece: HostedPiece) -> int:
        """Write a piece's states to the storage; return the bytes."""

    @contextmanager
    def at_hand(self, pieces: Sequence[HostedPiece]) -> Iterator[None]:
        """Make the states of these pieces readable in the block, as tensors of the optimizer."""

    def close(self) -> None:
        """Free the storage."""


class StatesOnHost:
    """Optimizer states in host memory."""

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
        """Move new states from ordinary to counted host memory (`HostMemory`)."""
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
        """Do nothing: states are always readable."""
        yield

    def close(self) -> None:
        """Do nothing: host memory is freed with its tensors."""


class _Region(NamedTuple):
    """A piece's region of the file: offset, size, and the offsets of its states; "" is the master weights."""

    start: int
    room: int
    offsets: dict[_Name, int]
    num_bytes: int


class StatesOnDrives:
    """Optimizer states and master weights in a file on a drive; master weights are written at the start.

    The file reserves ``bytes_per_element`` for each element of a piece at first, and more if needed.
    """

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
                f"{file.folder}: this file system has no direct reads and writes (O_DIRECT), so that optimizer states "
                f"pass through the system's cache, which takes host memory. {FOLDER_ADVICE}"
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
        """Read a piece's states from the file into its buffer, and point the optimizer to them; return the bytes."""
        region = self._regions[piece.facts.number]
        if not region.num_bytes:
            return 0
        slot = self._slot(piece)
        assert slot.memory is not None, "buffers of drives are mapped"
        self._file.read(region.start, memoryview(slot.memory)[: round_up(region.num_bytes, PAGE_BYTES)])
        self._bind(piece, region, slot)
        return self._held_bytes(piece)

    def stepped(self, piece: HostedPiece, *, replaced: bool = False) -> None:
        """Do nothing: a `WriteStates` instruction of the program writes the states."""

    def write(self, piece: HostedPiece) -> int:
        """Write a piece's states to the file, and release them in the optimizer; return the bytes."""
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
        """Map the states of these pieces from the file; tensors taken in the block stay readable after it."""
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
    """Return the states that an optimizer has for a piece, by (tensor id, name): tensors in the parameter's shape."""
    found: dict[_Name, torch.Tensor] = {}
    for i, parameter in piece.hosted.items():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for name, value in state.items():
            is_whole = isinstance(value, torch.Tensor) and value.shape == piece.shape_of(i) and name != "step"
            if is_whole:
                found[i, name] = value
    return found


# Optimizers that torch runs in one pass on processors (torch.optim: `fused`).
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class HostedValues(Masters):
    """The optimizer's tensors on the host; ``updated`` has them by tensor id."""

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter], pieces: Sequence[HostedPiece]) -> None:
        self._pieces = pieces
        hosted = {i: item for piece in pieces for i, item in piece.hosted.items()}
        trained = {i for piece in pieces for i in piece.facts.parameters}
        # A part without elements is not updated.
        self.updated = {i: hosted.get(i, item) for i, item in parameters.items() if i in hosted or i not in trained}
        self.masters = {}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the master weights by tensor id; empty if the plan has none."""
        return {
            str(i): item.detach() for piece in self._pieces if piece.has_masters for i, item in piece.hosted.items()
        }

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore master weights from a `state`; pieces without master weights copy the device's parameters."""
        for piece in self._pieces:
            if not piece.has_masters:
                piece.read_values()
                continue
            values = torch.zeros(piece.facts.size, dtype=piece.values.dtype)
            piece.place_values(values)
            for i, item in piece.hosted.items():
                item.data.copy_(state[str(i)])


# The optimizer is the user's own, over the host's copies of the parameters or their master weights. If torch has one
# fused pass over the elements on a processor, that is used, unless the user chose otherwise. Gradients on the device
# stay as summed: the factors for clipping and for the loss scale are applied here.
class HostSteps(StageSteps):
    """Optimizer updates on the host, one piece at a time (`update`), after its gradients were copied to the host.

    Calling it with a stage counts the update and clears the stage's gradients. ``states`` is the storage of the
    optimizer states. Other arguments as in `StageSteps`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        *given: Any,
        pieces: Sequence[HostedPiece],
        make_states: Callable[[torch.optim.Optimizer | None], PieceStates],
        **named: Any,
    ) -> None:
        super().__init__(optimizer, *given, **named)
        use_fused(optimizer)
        self._pieces, self.states = pieces, make_states(optimizer)
        groups = optimizer.param_groups if optimizer is not None else []
        self._group_of = {id(item): place for place, group in enumerate(groups) for item in group["params"]}
        self._is_stepping = False

    def __call__(self, stage: int) -> None:
        """Count an update of a stage, and clear its gradients."""
        self._is_stepping = False
        self._num_updates[stage] += not (self._scale is not None and self._scale.skips())
        for parameter in self._of_stage[stage]:
            parameter.grad = None

    def update(self, piece: HostedPiece) -> int:
        """Run the optimizer on a piece; return the bytes of its gradients. Skips it if the loss scale overflowed."""
        inverse = self._scale.inverse if self._scale is not None else 1.0
        is_left_out = self._scale is not None and self._scale.skips()
        if not is_left_out and self._optimizer is not None:
            if piece.facts.is_resident:
                piece.find_present()
            if inverse != 1.0:
                piece.scale(inverse)
            if self._clip is not None:
                piece.scale(self._clip())
            chosen = piece.take_gradients()
            if chosen:
                self._step(self._optimizer, chosen)
            for parameter in chosen:
                parameter.grad = None
            self.states.stepped(piece)
        piece.narrow()
        return piece.num_bytes

    def _step(self, optimizer: torch.optim.Optimizer, chosen: Sequence[torch.nn.Parameter]) -> None:
        """A step over some parameters, which have gradients; the user's hooks run with the first call of a step.

        torch's own step visits all parameters and calls its profiler, which takes as long as a small piece does.
        """
        if not self._is_stepping or type(optimizer) not in _FUSED:
            optimizer.step()
            self._is_stepping = True
            return
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for item in chosen:
            by_group.setdefault(self._group_of[id(item)], []).append(item)
        left = {place: own for place, own in by_group.items() if not _step_at_once(optimizer, place, own)}
        if not left:
            return
        groups, every = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
        for place, group in enumerate(groups):
            group["params"] = left.get(place, [])
        try:
            inspect.unwrap(type(optimizer).step)(optimizer)
        finally:
            for group, params in zip(groups, every, strict=True):
                group["params"] = params

    def state(self) -> dict[str, Any]:
        """Return the state as in `StageSteps`. States on drives are mapped tensors, read from the file on access."""
        with self.states.at_hand(self._pieces):
            return super().state()

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; call it after the device's parameters were restored."""
        super().take_state(state)
        for piece in self._pieces:
            self.states.stepped(piece, replaced=True)
            self.states.write(piece)


def _step_at_once(optimizer: torch.optim.Optimizer, place: int, chosen: Sequence[torch.nn.Parameter]) -> bool:
    """Call Adam's kernel for some parameters of a group as `torch.optim.adam` does; return whether it was possible."""
    group, states = optimizer.param_groups[place], [optimizer.state.get(item, {}) for item in chosen]
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not all(states):
        return False
    if not group["fused"] or group["amsgrad"] or isinstance(group["lr"], torch.Tensor):
        return False
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    kernel(
        list(chosen),
        [item.grad for item in chosen if item.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
    return True


def use_fused(optimizer: torch.optim.Optimizer | None) -> None:
    """Set ``fused`` of the optimizer's groups, so that torch updates in one pass on a CPU.

    Only for optimizers that support it, if the user has not chosen an implementation, and not for elements of two
    bytes, which the fused CPU kernels round differently than the device.
    """
    if optimizer is None or type(optimizer) not in _FUSED:
        return
    for group in optimizer.param_groups:
        given = [group.get(name) for name in ("fused", "foreach", "differentiable", "capturable")]
        real = all(
            item.is_floating_point() and item.dtype.itemsize >= 4 and type(item.data) is torch.Tensor
            for item in group["params"]
        )
        if not any(given) and group.get("fused") is None and real:
            group["fused"] = True
