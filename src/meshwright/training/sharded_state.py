"""The state of a run as parts of whole tensors (`TensorParts`), so that any plan of the model can read it.

A checkpoint has tensors by name, whatever plan trained them:

    model.NAME              a parameter or buffer of the model
    master.NAME             master weights
    optimizer.NAME.STATE    a state of the optimizer in the shape of the parameter, such as exp_avg

A process has boxes of them: all of a tensor, the shards of tensor parallelism (for the sections of a fused weight: one
box for each), rows under ZeRO 2 and 3, or a range of elements under ZeRO 1, which is cut into boxes. Everything else is
numbers (`Facts`). torch.distributed.checkpoint copies between the boxes of a checkpoint and those of a process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.runtime import Session
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.optimizer_steps import ShardedBuckets
from meshwright.spec import Plan, RunError

# Options of optimizers that choose an implementation, which each process chooses for itself.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# Types of numbers that are written as they are.
_PLAIN = (bool, int, float, str, type(None))


class Box(NamedTuple):
    """A part of a tensor: its offset and its size in each dim. A tensor without dims counts as one of size (1,)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor ``name``, of shape ``shape``; ``value`` is a view of this process's memory, of its size."""

    name: str
    shape: tuple[int, ...]
    box: Box
    value: torch.Tensor


@dataclass(slots=True)
class Facts:
    """The numbers of a state.

    ``numbers``: states of the optimizer that are numbers, such as counters, by the name of a tensor; each with its type
    if it is a tensor. ``options``: the options of the optimizer, by parameter. ``num_updates``: by stage. ``scale``:
    the loss scale.
    """

    numbers: dict[str, tuple[Any, str]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_updates: dict[str, int] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the facts of another process, as `dataclasses.asdict` gives them."""
        self.numbers |= {name: (value, dtype) for name, (value, dtype) in other["numbers"].items()}
        self.options |= other["options"]
        self.num_updates |= other["num_updates"]
        self.scale |= other["scale"]


def cut_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the elements ``start`` to ``stop`` of a tensor in row-major order, in that order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # Less than a row, within one.
        yield from _in_row(shape, start // row, start % row, stop % row)
        return
    if start % row:
        yield from _in_row(shape, first - 1, start % row, row)
    if last > first:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if stop % row:
        yield from _in_row(shape, last, 0, stop % row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in cut_range(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def spread(box: Box, indices: Sequence[torch.Tensor]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a whole tensor, each with its box in the local tensor, of which ``box`` is a part.

    ``indices``: for each dim, the indices in the whole tensor of the local tensor's elements.
    """
    runs = [
        _runs(index[offset : offset + size])
        for index, offset, size in zip(indices, box.offsets, box.sizes, strict=True)
    ]
    for chosen in product(*runs):
        whole = Box(tuple(start for start, _, _ in chosen), tuple(size for _, size, _ in chosen))
        inside = tuple(offset + place for offset, (_, _, place) in zip(box.offsets, chosen, strict=True))
        yield whole, Box(inside, whole.sizes)


def _runs(index: torch.Tensor) -> list[tuple[int, int, int]]:
    """Runs of consecutive indices: the first index, their number, and their place."""
    if not len(index):
        return []
    starts = [0, *(torch.nonzero(index.diff() != 1).flatten() + 1).tolist()]
    ends = [*starts[1:], len(index)]
    return [(int(index[start]), end - start, start) for start, end in zip(starts, ends, strict=True)]


class TensorParts:
    """Finds the parts of a session's tensors."""

    def __init__(self, session: Session) -> None:
        self._session = session
        tensors = session.model.whole.tensors
        self.names = {i: tensors[i].name for i in session.parameters}
        self._buffers = {tensors[i].name: i for stage in session.stages for i in stage.buffers}
        exchange = session.exchange
        self._starts = exchange.starts if isinstance(exchange, ShardedBuckets) else {}
        # By tensor: its boxes, each with its box in the process's tensor; and the same for ranges of elements.
        self._boxes: dict[int, list[tuple[Box, Box]]] = {}
        self._ranges: dict[int, list[tuple[Box, Box, slice, tuple[int, ...]]]] = {}

    def of_parameter(self, tensor: int, value: torch.Tensor, name: str) -> list[Part]:
        """Return the parts of a parameter, or of a tensor that is sharded as it is, which this process has.

        ``value``: the process's whole tensor, shard or DTensor. ``name``: that of the parts.
        """
        local = own_part(value.detach())
        local = local if local.ndim else local.reshape(1)
        if not local.numel():
            return []
        if tensor not in self._boxes:
            begin = self._rows(tensor) or (0,) * local.ndim
            self._boxes[tensor] = [
                (whole, _inside(near, begin))
                for whole, near in spread(Box(begin, tuple(local.shape)), self._indices(tensor))
            ]
        shape = _shape(self._session, tensor)
        return [Part(name, shape, whole, _view(local, within)) for whole, within in self._boxes[tensor]]

    def of_updated(self, tensor: int, value: torch.Tensor, name: str) -> list[Part]:
        """Return the parts of a tensor of the optimizer; under ZeRO 1 it is a range of the parameter's elements."""
        if tensor not in self._starts:
            return self.of_parameter(tensor, value, name)
        flat, shape = own_part(value.detach()).reshape(-1), _shape(self._session, tensor)
        if tensor not in self._ranges:
            self._ranges[tensor] = list(self._boxes_of_range(tensor, len(flat)))
        return [
            Part(name, shape, whole, _view(flat[place].view(sizes), within))
            for whole, within, place, sizes in self._ranges[tensor]
        ]

    def _boxes_of_range(self, tensor: int, length: int) -> Iterator[tuple[Box, Box, slice, tuple[int, ...]]]:
        indices, start, place = self._indices(tensor), self._starts[tensor], 0
        for box in cut_range([len(index) for index in indices], start, start + length):
            count = math.prod(box.sizes)
            for whole, near in spread(box, indices):
                yield whole, _inside(near, box.offsets), slice(place, place + count), box.sizes
            place += count

    def of_buffer(self, name: str, value: torch.Tensor) -> list[Part]:
        """Return the parts of a buffer."""
        if name in self._buffers:
            return self.of_parameter(self._buffers[name], value, f"model.{name}")
        return whole_part(f"model.{name}", value)

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Return the shape of the process's tensor that the optimizer updates."""
        if tensor in self._starts:
            exchange = self._session.exchange
            assert isinstance(exchange, ShardedBuckets), "it has starts"
            return tuple(next(b.pieces[tensor].shape for b in exchange.sharded.values() if tensor in b.pieces))
        return tuple(own_part(self._session.parameters[tensor].detach()).shape)

    def is_whole(self, tensor: int) -> bool:
        """Return whether the optimizer's tensor is the whole parameter."""
        return self.local_shape(tensor) == _shape(self._session, tensor, as_it_is=True)

    def _indices(self, tensor: int) -> list[torch.Tensor]:
        return self._session.model.own_indices(tensor) or [torch.zeros(1, dtype=torch.int64)]

    def _rows(self, tensor: int) -> tuple[int, ...] | None:
        """The offsets of a DTensor's shard; None for other tensors."""
        held = self._session.parameters.get(tensor)
        if not isinstance(held, DTensor):
            return None
        return tuple(compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)[1])


def _inside(box: Box, origin: Sequence[int]) -> Box:
    """A box, relative to an offset."""
    return Box(tuple(offset - begin for offset, begin in zip(box.offsets, origin, strict=True)), box.sizes)


def whole_part(name: str, value: torch.Tensor) -> list[Part]:
    """Return a tensor that is not sharded as its one part."""
    value = value.detach()
    local = value if value.ndim else value.reshape(1)
    shape = tuple(local.shape)
    return [Part(name, shape, Box((0,) * len(shape), shape), local)] if local.numel() else []


def _shape(session: Session, tensor: int, *, as_it_is: bool = False) -> tuple[int, ...]:
    shape = tuple(extent.at(0) for extent in session.model.whole.tensors[tensor].shape)
    return shape if as_it_is else shape or (1,)


def _view(value: torch.Tensor, box: Box) -> torch.Tensor:
    return value[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]


def take_apart(session: Session, found: TensorParts) -> tuple[list[Part], Facts]:
    """Return the state of this process as parts and facts. The parts are views: copy them before the next step.

    ``found`` is of the session; it is quicker the next time.
    """
    parts, facts = [], Facts()
    mark = _mark(session)
    for i, parameter in session.parameters.items():
        parts += found.of_parameter(i, parameter, f"model.{found.names[i]}")
    for stage, module in zip(session.stages, session.modules, strict=True):
        # The buffers of replicas differ until the first one's are broadcast before the next step.
        if mark or session.plan.stages[stage.index].ranks[0] == session.grid.rank:
            for name, value in module.named_buffers():
                parts += found.of_buffer(name, value)
    state = session.updates.state()
    for text, value in state["masters"].items():
        parts += found.of_updated(int(text), value, f"master.{found.names[int(text)]}")
    optimizer = state["optimizer"]
    for place, i in enumerate(session.updates.optimized):
        for key, value in optimizer["state"].get(place, {}).items():
            parts += _part_of_state(found, facts, i, key, value)
    places = [(i, group) for group in optimizer.get("param_groups", ()) for i in group["params"]]
    for place, group in places:
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", *_IMPLEMENTATION)}
        facts.options[found.names[session.updates.optimized[place]]] = {
            key: value for key, value in options.items() if isinstance(value, (*_PLAIN, list))
        }
    facts.num_updates = {f"{stage}{mark}": count for stage, count in state["num_updates"].items()}
    facts.scale = {key: _plain(value) for key, value in state["scale"].items()}
    if mark:
        parts = [Part(f"{part.name}{mark}", part.shape, part.box, part.value) for part in parts]
        facts.numbers = {f"{name}{mark}": number for name, number in facts.numbers.items()}
    return parts, facts


def _mark(session: Session) -> str:
    """What tells the states of the replicas of an asynchronous schedule apart, which differ; "" for the first one."""
    plan = session.plan
    if not isinstance(plan, Plan) or not plan.is_asynchronous:
        return ""
    places = {plan.stages[stage.index].ranks.index(session.grid.rank) for stage in session.stages}
    return f"@{min(places)}" if min(places, default=0) else ""


def _part_of_state(found: TensorParts, facts: Facts, tensor: int, key: str, value: Any) -> list[Part]:
    name = f"optimizer.{found.names[tensor]}.{key}"
    if isinstance(value, torch.Tensor) and value.ndim:
        if tuple(value.shape) == found.local_shape(tensor):
            return found.of_updated(tensor, value, name)
        # States of another shape than their parameter's shard, such as Adafactor's, cannot be sharded otherwise.
        return whole_part(name if found.is_whole(tensor) else f"{name}{_own_mark(found, tensor)}", value)
    plain = _plain(value)
    if not isinstance(plain, (*_PLAIN, list)):
        raise RunError(
            f"The optimizer keeps {key!r} of {found.names[tensor]} as {type(value).__name__}; a checkpoint can hold "
            "tensors and numbers. Choose an optimizer with such states."
        )
    facts.numbers[name] = plain, str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
    return []


def _own_mark(found: TensorParts, tensor: int) -> str:
    shape = found.local_shape(tensor)
    offsets = [part.box for part in found.of_updated(tensor, torch.empty(shape, device="meta"), "")]
    return "#" + ",".join(map(str, offsets[0].offsets)) if offsets else "#"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.ndim:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


class Wanted:
    """The state that this process needs from a checkpoint: memory to read into, then `put_together`.

    ``kept``: the shape and type of each tensor of the checkpoint. ``device``: where the state is read to. Raises
    RunError if the checkpoint is of another model.
    """

    def __init__(
        self,
        session: Session,
        kept: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        facts: Facts,
        device: torch.device | str,
    ) -> None:
        self._session, self._kept, self._facts, self._device = session, kept, facts, device
        self._found, self._mark = TensorParts(session), _mark(session)
        self.parts: list[Part] = []
        self._masters: dict[str, torch.Tensor] = {}
        self._states: dict[int, dict[str, Any]] = {}
        self._parameters = {i: self._weights(i, item) for i, item in session.parameters.items()}
        self._buffers = [
            (value, self._read_buffer(name, value))
            for module in session.modules
            for name, value in module.named_buffers()
        ]
        for text, value in session.updates.state()["masters"].items():
            self._masters[text] = self._read_master(int(text), value)
        for place, i in enumerate(session.updates.optimized):
            self._states[place] = dict(self._states_of(i))

    def put_together(self) -> None:
        """Set the session's state to what was read."""
        session, facts = self._session, self._facts
        with torch.no_grad():
            for i, value in self._parameters.items():
                own_part(session.parameters[i].detach()).copy_(value)
            for held, value in self._buffers:
                held.copy_(value)
        now = session.updates.state()
        optimizer = now["optimizer"]
        if optimizer:
            optimizer["state"] = {place: states for place, states in self._states.items() if states}
            for group in optimizer["param_groups"]:
                names = [self._found.names[session.updates.optimized[place]] for place in group["params"]]
                group.update(self._options_of([name for name in names if name in facts.options], group))
        last = max(facts.num_updates.values(), default=0)
        updates = {
            stage: facts.num_updates.get(f"{stage}{self._mark}", facts.num_updates.get(stage, last))
            for stage in now["num_updates"]
        }
        session.updates.take_state(
            {
                "optimizer": optimizer,
                "num_updates": updates,
                "masters": self._masters,
                "scale": now["scale"] | facts.scale if now["scale"] else {},
            }
        )
        if session.exchange is not None:
            session.exchange.restart()

    def _options_of(self, names: Sequence[str], group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the checkpoint for a group of these parameters: those of the first one."""
        if not names:
            return {}
        every = self._facts.options
        other = next((name for name in names if every[name] != every[names[0]]), None)
        if other is not None:
            warnings.warn(
                f"{names[0]} and {other} have different options of the optimizer in the checkpoint, and are in one "
                f"group now; the group continues with those of {names[0]}. Make the same groups under all plans, from "
                "model.parameters().",
                stacklevel=2,
            )
        return {key: _like(group[key], value) for key, value in every[names[0]].items() if key in group}

    def _named(self, name: str) -> str:
        """The name of a tensor of this process's replica, if the checkpoint has one for it."""
        return f"{name}{self._mark}" if f"{name}{self._mark}" in self._kept else name

    def _weights(self, tensor: int, held: torch.Tensor) -> torch.Tensor:
        name = self._found.names[tensor]
        # Master weights are exact; where the checkpoint has them, parameters are their cast.
        source = self._named(f"master.{name}")
        source = source if source in self._kept else self._named(f"model.{name}")
        value = torch.empty_like(own_part(held.detach()), device=self._device)
        return self._read(value, self._found.of_parameter(tensor, value, source))

    def _read_master(self, tensor: int, held: torch.Tensor) -> torch.Tensor:
        name = self._found.names[tensor]
        source = self._named(f"master.{name}")
        source = source if source in self._kept else self._named(f"model.{name}")
        value = torch.empty(self._found.local_shape(tensor), dtype=held.dtype, device=self._device)
        return self._read(value, self._found.of_updated(tensor, value, source))

    def _read_buffer(self, name: str, held: torch.Tensor) -> torch.Tensor:
        value = torch.empty_like(held, device=self._device)
        parts = self._found.of_buffer(name, value)
        return self._read(value, [Part(self._named(p.name), p.shape, p.box, p.value) for p in parts])

    def _states_of(self, tensor: int) -> Iterator[tuple[str, Any]]:
        stem, shape = f"optimizer.{self._found.names[tensor]}.", self._found.local_shape(tensor)
        for name in [name for name in self._kept if name.startswith(stem) and "@" not in name]:
            state, _, mark = name.removeprefix(stem).partition("#")
            source = self._named(name)
            kept_shape, dtype = self._kept[source]
            if not mark and kept_shape == _shape(self._session, tensor):
                value = torch.empty(shape, dtype=dtype, device=self._device)
                yield state, self._read(value, self._found.of_updated(tensor, value, source))
            elif f"#{mark}" == _own_mark(self._found, tensor) or (not mark and self._found.is_whole(tensor)):
                value = torch.empty(kept_shape, dtype=dtype, device=self._device)
                yield state, self._read(value, whole_part(source, value))
            elif not mark or self._found.is_whole(tensor):
                raise RunError(
                    f"The checkpoint has {name} of shape {list(kept_shape)}, another one than its parameter's, which "
                    "cannot be sharded otherwise. Continue with the plan of the checkpoint."
                )
        numbers = self._facts.numbers
        for name in [name for name in numbers if name.startswith(stem) and "@" not in name]:
            plain, dtype_name = numbers.get(f"{name}{self._mark}", numbers[name])
            number = torch.tensor(plain, dtype=getattr(torch, dtype_name)) if dtype_name else plain
            yield name.removeprefix(stem), number

    def _read(self, value: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        for part in parts:
            if part.name not in self._kept:
                raise RunError(
                    f"The checkpoint has no {part.name}, which the model has; it is of another model. Continue with "
                    "the model of the checkpoint."
                )
            shape, _ = self._kept[part.name]
            if shape != part.shape:
                raise RunError(
                    f"{part.name} has the shape {list(shape)} in the checkpoint and {list(part.shape)} in the model; "
                    "the checkpoint is of another model. Continue with the model of the checkpoint."
                )
        self.parts += parts
        return value


def _like(given: Any, value: Any) -> Any:
    """A number of a checkpoint in the form that an optimizer's option has."""
    if isinstance(given, torch.Tensor):
        return torch.full_like(given, value)
    return tuple(value) if isinstance(given, tuple) else value
