"""Offload of activations: tensors that autograd saves are copied to the host, and copied back for the backward.

torch passes saved tensors to a pack hook, and gets them back from an unpack hook (`saved_tensors_hooks` of
`torch.autograd.graph`, as in `save_on_cpu` and torchtune's `OffloadActivations`). Each storage is copied once, by the
instructions of the program. `SavedDown` copies the storages of a unit (one or several layers) to the host after the
unit's forward. `SavedUp` copies them back when the backward reaches the unit after it. `cost.memory.away` defines
which tensors stay on the device. Results that selective checkpointing keeps do not pass the hooks; recomputed ranges
pass them on (`checkpointing.RecomputedRange`).

The computing thread allocates and frees device memory, so that the allocator's order is that of the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.cost.memory import Away, Backend, as_kept, find_away
from meshwright.cost.memory.away import LEAST_BYTES
from meshwright.runtime.checkpointing import RecomputedRange
from meshwright.runtime.offload.copy_streams import HostStreams, HostWork
from meshwright.runtime.offload.pinned_memory import ALIGNMENT, HostBuffer, HostMemory, round_up
from meshwright.runtime.ranges import find_ops
from meshwright.spec import Graph, Placement, Plan, StageSlice
from meshwright.spec.offload_instructions import SavedDown, SavedUp


@dataclass(slots=True)
class _Held:
    """A host buffer for the saved values of a unit and microbatch; ``left``: values that are still to come up."""

    buffer: HostBuffer
    unit: int
    left: int


@dataclass(slots=True, eq=False)
class _Value:
    """A storage: ``flat``, all of its elements, while it is on the device, and ``away`` while it is on the host."""

    flat: torch.Tensor | None
    size: int
    dtype: torch.dtype
    down: int
    up: int
    away: torch.Tensor | None = None
    held: _Held | None = None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor that autograd saved, as a view of its storage."""

    value: _Value
    tape: _Tape
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False)
class _Tape:
    """A microbatch between its forward and its backward: the values to copy with each unit, in both directions.

    ``known`` are values on the device by their storage, ``staying`` storages that are not copied. ``begun`` and
    ``there``: units whose copies up have started, or have ended.
    """

    staying: set[int]
    unit: int = 0
    known: dict[int, _Value] = field(default_factory=dict)
    down: defaultdict[int, list[_Value]] = field(default_factory=lambda: defaultdict(list))
    up: defaultdict[int, list[_Value]] = field(default_factory=lambda: defaultdict(list))
    downs: dict[int, HostWork] = field(default_factory=dict)
    ups: dict[int, HostWork] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)


class SavedLayers:
    """The offloaded activations of one stage; ``away`` lists its units of layers and their bytes.

    ``widening``: bytes per floating-point element divided by those that the plan assumes.
    """

    def __init__(
        self, away: Away, memory: HostMemory, streams: HostStreams, device: torch.device, widening: float = 1.0
    ) -> None:
        self._units = {unit.layer: number for number, unit in enumerate(away.units)}
        self._final = len(away.units) - 1
        self._memory, self._streams, self._device, self._widening = memory, streams, device, widening
        self._works: dict[int, tuple[dict[int, HostWork], dict[int, HostWork]]] = {}
        self._tapes: dict[int, _Tape] = {}
        self._running: _Tape | None = None
        self._spare: defaultdict[int, list[HostBuffer]] = defaultdict(list)

    # --- copies, in threads of their own
    # --------------------------------------------------------------------------------

    def begin(self, works: Sequence[HostWork]) -> None:
        """Start a section of the program whose copies are ``works``."""
        self._works = defaultdict(lambda: ({}, {}))
        for work in works:
            instruction = work.item.instruction
            assert isinstance(instruction, SavedDown | SavedUp), "copies of layers"
            unit = self._units[instruction.layer]
            self._works[instruction.microbatch][isinstance(instruction, SavedUp)][unit] = work

    def copy_down(self, instruction: SavedDown) -> int:
        """Copy the saved tensors of a unit to the host; return the copied bytes."""
        unit = self._units[instruction.layer]
        values = self._tapes[instruction.microbatch].down[unit]
        starts, end = list[int](), 0
        for value in values:
            starts.append(end)
            end += round_up(value.size * value.dtype.itemsize, ALIGNMENT)
        spare = next((buffer for buffer in self._spare[unit] if buffer.num_bytes >= end), None)
        if spare is not None:
            self._spare[unit].remove(spare)
        held = _Held(spare or self._memory.new(end, copied=True), unit, len(values))
        for value, start in zip(values, starts, strict=True):
            assert value.flat is not None, "it is given up when it is there"
            value.away, value.held = held.buffer.view(start, (value.size,), value.dtype), held
            value.away.copy_(value.flat, non_blocking=True)
        return sum(value.away.nbytes for value in values if value.away is not None)

    def copy_up(self, instruction: SavedUp) -> int:
        """Copy the tensors that a unit's backward reads to the device; return the copied bytes.

        Their device memory is allocated before.
        """
        values = self._tapes[instruction.microbatch].up[self._units[instruction.layer]]
        for value in values:
            assert value.flat is not None, "there is room"
            assert value.away is not None, "it is on the host"
            value.flat.copy_(value.away, non_blocking=True)
        return sum(value.away.nbytes for value in values if value.away is not None)

    # --- forward
    # --------------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self, microbatch: int, part: torch.nn.Module, fed: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run the block as the forward of a microbatch of the module ``part``, whose arguments are ``fed``."""
        state = (*part.parameters(), *part.buffers(), *_constants(part), *fed)
        tape = _Tape(staying={_storage(value) for value in state if _has_storage(value)})
        tape.downs, tape.ups = self._works[microbatch]
        self._tapes[microbatch] = self._running = tape
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        while tape.unit <= self._final:
            self.end_unit(())
        tape.known.clear()
        self._running = None

    def end_unit(self, outputs: Sequence[torch.Tensor]) -> None:
        """End the forward of the current unit; ``outputs`` are the stage outputs that it made.

        Waits for the copies of the unit before, and frees their device memory.
        """
        tape = self._running
        if tape is None or tape.unit > self._final:
            return
        ended, tape.unit = tape.unit, tape.unit + 1
        for storage in (_storage(output) for output in outputs if _has_storage(output)):
            tape.staying.add(storage)
            value = tape.known.get(storage)
            if value is not None and value.down == ended:
                tape.down[ended].remove(tape.known.pop(storage))
        if ended in tape.downs:
            self._streams.happened(tape.downs[ended].item.marks[0])
        if ended - 1 in tape.downs:
            tape.downs[ended - 1].wait()
        for value in tape.down[ended - 1]:
            value.flat = None
        tape.known = {storage: value for storage, value in tape.known.items() if value.flat is not None}

    def pack(self, tensor: Any) -> Any:
        """Return the placeholder of a saved tensor that is offloaded; the tensor itself if it stays on the device."""
        tape = self._running
        if tape is None or tape.unit >= self._final or not self._leaves(tensor, tape):
            return tensor
        storage = _storage(tensor)
        if (value := tape.known.get(storage)) is None:
            if tape.unit not in tape.downs:
                return tensor
            size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            with torch.no_grad():
                flat = tensor.detach().as_strided((size,), (1,), 0)
            value = tape.known[storage] = _Value(flat, size, tensor.dtype, tape.unit, tape.unit)
            tape.down[tape.unit].append(value)
        value.up = tape.unit
        offset = int(tensor.storage_offset())
        return _Packed(value, tape, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _leaves(self, tensor: Any, tape: _Tape) -> bool:
        if (
            not isinstance(tensor, torch.Tensor)
            or not _has_storage(tensor)
            or tensor.device.type != self._device.type
            or _storage(tensor) in tape.staying
        ):
            return False
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return False
        widening = self._widening if tensor.is_floating_point() else 1.0
        return tensor.untyped_storage().nbytes() >= LEAST_BYTES * widening

    # --- backward
    # --------------------------------------------------------------------------------------------------------

    @contextmanager
    def replaying(self, microbatch: int) -> Iterator[None]:
        """Run the block as the backward of a microbatch."""
        tape = self._tapes[microbatch]
        _turn_round(tape)
        self._begin_up(tape, max(tape.ups, default=-1))
        yield
        for unit in sorted(tape.ups, reverse=True):
            self._reach(tape, unit)
        del self._tapes[microbatch]

    def unpack(self, packed: Any) -> Any:
        """Return the tensor of a placeholder on the device; waits for its copy."""
        if not isinstance(packed, _Packed):
            return packed
        value = packed.value
        # Outputs of the stage were on the device all the time.
        if value.away is not None:
            self._reach(packed.tape, value.up)
        assert value.flat is not None, "what a unit reads came up"
        with torch.no_grad():
            flat = value.flat if packed.dtype is value.dtype else value.flat.view(packed.dtype)
            return flat.as_strided(packed.shape, packed.stride, packed.offset)

    def _reach(self, tape: _Tape, unit: int) -> None:
        """Start the backward of a unit: wait for the values that it reads, and start the copies of the next unit."""
        if unit in tape.there or unit not in tape.ups:
            return
        ahead = sorted(tape.ups, reverse=True)
        for other in ahead[: ahead.index(unit) + 2]:
            self._begin_up(tape, other)
        tape.there.add(unit)
        tape.ups[unit].wait()
        for value in tape.up.pop(unit, ()):
            held, value.away, value.held = value.held, None, None
            assert held is not None, "it was on the host"
            held.left -= 1
            if not held.left:
                self._spare[held.unit].append(held.buffer)

    def _begin_up(self, tape: _Tape, unit: int) -> None:
        if unit in tape.begun or unit not in tape.ups:
            return
        tape.begun.add(unit)
        for value in tape.up[unit]:
            value.flat = torch.empty(value.size, dtype=value.dtype, device=self._device)
        self._streams.happened(tape.ups[unit].item.marks[0])


def _turn_round(tape: _Tape) -> None:
    """Turn from forward to backward: values that went down come up, and each stays while autograd may read it."""
    while tape.down:
        for value in tape.down.popitem()[1]:
            value.up = min((unit for unit in tape.ups if unit >= value.up), default=max(tape.ups))
            tape.up[value.up].append(value)


def backend_on(device: torch.device) -> Backend:
    """Return ``cuda`` for a GPU, ``cpu`` for any other device."""
    return "cuda" if device.type == "cuda" else "cpu"


def find_stages_away(
    plan: Plan | Placement, graph: Graph, stages: Sequence[StageSlice], device: torch.device
) -> dict[int, Away]:
    """Return the offloaded activations of a rank's stages, by stage; empty if activations stay on the device."""
    if not isinstance(plan, Plan) or plan.offload.activations == "device":
        return {}
    workload = plan.workload
    kept = as_kept(graph, workload.numbers, backend_on(device))
    size = plan.microbatch_size
    return {stage.index: find_away(kept, stage, size, workload.float_bytes, backend_on(device)) for stage in stages}


class _UnitEnd(torch.nn.Module):
    """Follows a unit in a stage's module, is called with the unit's outputs of the stage, and notifies ``layers``."""

    layers: SavedLayers | None = None

    def forward(self, *outputs: torch.Tensor) -> None:
        """Notify that the unit has ended."""
        if self.layers is not None:
            self.layers.end_unit(outputs)


def mark_units(module: torch.nn.Module, away: Away) -> None:
    """Insert a call at the end of each unit except the last into a stage's module.

    The nodes of the module have to be marked with their ops (`ranges.note_ops`).
    """
    assert isinstance(module, fx.GraphModule), "parts are cut as graphs"
    graph = module.graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    leaving = list(output.all_input_nodes)
    nodes = [(node, ops) for node in graph.nodes if (ops := find_ops(node)) is not None]
    for number, unit in enumerate(away.units[1:]):
        made = [node for node, ops in nodes if ops[1] < unit.start and node in leaving]
        leaving = [node for node in leaving if node not in made]
        behind = next((node for node, ops in nodes if ops[0] >= unit.start), output)
        name = f"unit_end_{number}"
        module.add_submodule(name, _UnitEnd())
        with graph.inserting_before(behind):
            graph.call_module(name, tuple(made))
    graph.lint()
    module.recompile()


def tell_layers(module: torch.nn.Module, layers: SavedLayers) -> None:
    """Make a module call ``layers`` at the ends of its units, and offload the kept results of its recomputed ranges."""
    for item in module.modules():
        if isinstance(item, _UnitEnd):
            item.layers = layers
        elif isinstance(item, RecomputedRange):
            item.copy_kept(layers.pack, layers.unpack)


def _constants(part: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of modules besides parameters and buffers."""
    for module in part.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _has_storage(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and not is_traceable_wrapper_subclass(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
