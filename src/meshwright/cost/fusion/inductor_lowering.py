"""Inductor's lowering: which values of a pass are stored in memory, and the loop that computes each of them.

An element-wise value is computed inside every loop that reads it (inlined), with these exceptions, which are stored:
inputs of extern (library) kernels, outputs of the unit, and values with several readers that are made from many tensors
or by many operations (torch 2.13, torch/_inductor/graph.py, run_node; ir.py, should_realize_on_reuse). Reductions are
always stored. The gradient of a part of a tensor is stored into that part of the tensor's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.cost.fusion.written_values import EXTERNS, IMAGE_DIMS, ORDERED, REDUCTIONS, VIEWS, Device, FusedValue

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


# A read: a buffer, and the views through which it is read (`FusedValue.turn`s, outermost last).
Read = tuple[int, tuple[object, ...]]

# torch/_inductor/config.py: realize_reads_threshold; by device realize_acc_reads_threshold, realize_opcount_threshold.
_READS = 4
_ALL_READS = {"cuda": 8, "cpu": 12}
_OPS = {"cuda": 30, "cpu": 50}
# unroll_reductions_threshold: shorter sums are unrolled, element by element.
_UNROLLED = 8
# A product has two factors; further inputs are added.
_FACTORS = 2
# Sums over the last elements of memory, whose rows a kernel processes one after the other.
_IN_ROWS = frozenset({"rows", "groups", "pixels", "all"})


@dataclass(slots=True, kw_only=True, eq=False)
class Stored:
    """One loop that stores values in memory: it makes ``numel`` elements, each reduced over ``rnumel`` elements.

    ``values``: values computed in the loop. ``reads``, ``writes``: bytes by buffer and view. ``extern``: whether it is
    a library's kernel. ``in_rows``: whether it sums elements that are adjacent in memory. ``scatters``: whether it adds
    elements at computed positions. ``counts``: the numbers of elements of its inputs.
    """

    values: set[int]
    numel: int
    rnumel: int = 1
    reads: dict[Read, int] = field(default_factory=dict)
    writes: dict[Read, int] = field(default_factory=dict)
    extern: bool = False
    in_rows: bool = False
    scatters: bool = False
    counts: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Storage:
    """A value in a buffer, or not stored yet: then the reads and the values needed to compute it."""

    value: int
    buffer: int = -1
    reads: dict[Read, int] = field(default_factory=dict)
    values: set[int] = field(default_factory=set)


def lower(
    values: Sequence[FusedValue],
    order: Sequence[int],
    given: Collection[int],
    yielded: Sequence[int],
    device: Device,
    outputs: Collection[int] = (),
) -> tuple[list[Stored], set[int]]:
    """Return the loops of a pass (forward or backward), and the buffers of the values that are needed after it.

    The pass makes the values ``order``, in this order, from the ``given`` values in memory. ``yielded``: values that
    are needed after the pass. ``outputs``: those of ``yielded`` whose memory order inductor may not choose.
    """
    lowering = _Lowering(values, order, yielded, device, outputs)
    for index in given:
        lowering.hold(index)
    for index in order:
        lowering.make(index)
    for index in yielded:
        lowering.store(lowering.of[index][0])
    return lowering.loops, {lowering.of[index][0].buffer for index in yielded}


class _Lowering:
    def __init__(
        self,
        values: Sequence[FusedValue],
        order: Sequence[int],
        yielded: Sequence[int],
        device: Device,
        outputs: Collection[int],
    ) -> None:
        self.values, self.device = values, device
        self.loops: list[Stored] = []
        self.of: dict[int, tuple[_Storage, tuple[object, ...]]] = {}
        self.users: dict[int, set[int]] = {}
        self.yielded = frozenset(yielded)
        images = any(values[index].sort == ORDERED for index in order)
        self.turned = {index for index in outputs if images and len(values[index].shape) == IMAGE_DIMS}
        for index in order:
            for source in values[index].inputs:
                self.users.setdefault(source, set()).add(index)

    def hold(self, index: int) -> None:
        """Register a value that is in memory when the pass starts."""
        self.of[index] = (_Storage(index, buffer=index), ())

    def make(self, index: int) -> None:
        value = self.values[index]
        if value.sort in VIEWS:
            storage, turns = self.of[value.inputs[0]]
            self.of[index] = (storage, _turned(turns, value))
        elif value.sort == "part":
            self.of[index] = (_Storage(index, buffer=index), ())
            loop = next(item for item in self.loops if value.inputs[0] in item.values)
            loop.writes[index, ()] = value.num_bytes
        elif value.sort in EXTERNS or (value.sort == "adding" and self.device == "cpu"):
            loop = Stored(values={index}, numel=value.elements, extern=True)
            for source in dict.fromkeys(self._read_by(index, value)):
                self._read(loop.reads, source)
            if value.sort not in ("several", "random"):
                loop.writes[index, ()] = value.num_bytes
            self.loops.append(loop)
            self.of[index] = (_Storage(index, buffer=index), ())
        elif value.sort == "cat":
            self._join(index, value)
        elif value.sort in ("scatter", "adding"):
            self._scatter(index, value)
        elif value.sort in REDUCTIONS and self._over(value) >= _UNROLLED:
            storage = self._inline(index, value.inputs)
            self.of[index] = (storage, ())
            self.store(storage)
        else:
            self.of[index] = (self._inline(index, value.inputs), ())
            if value.sort == "window":
                self.store(self.of[index][0])
        self._store_if_reused(index)

    def _read_by(self, index: int, value: FusedValue) -> tuple[int, ...]:
        """Return the inputs of an extern kernel.

        On GPUs a bias is left to the consumers of the product if all of them are element-wise
        (torch/_inductor/fx_passes/post_grad.py, unfuse_bias_add_to_pointwise); its few bytes are not counted there.
        """
        has_bias = value.sort == "extern" and not value.backward and len(value.inputs) > _FACTORS
        if self.device == "cpu" or not has_bias or not self._is_read_by_elements(index):
            return value.inputs
        return value.inputs[:_FACTORS]

    def _is_read_by_elements(self, index: int) -> bool:
        users = [self.values[user].sort for user in self.users.get(index, ())]
        return index not in self.yielded and all(sort in ("point", "copy") or sort in REDUCTIONS for sort in users)

    def store(self, storage: _Storage) -> None:
        """Give a value a buffer, if it has none."""
        if storage.buffer >= 0:
            return
        value = self.values[storage.value]
        loop = Stored(values=set(storage.values), numel=value.elements, reads=dict(storage.reads))
        if value.sort in REDUCTIONS and self._over(value) >= _UNROLLED:
            loop.rnumel = self._over(value)
            loop.in_rows = _sums_rows(value.sort, self.values[value.inputs[0]].shape, value.shape)
        storage.buffer = storage.value
        loop.counts = {size // self.values[buffer].width for (buffer, _), size in loop.reads.items()}
        loop.writes[storage.buffer, ()] = value.num_bytes
        self.loops.append(loop)

    def _over(self, value: FusedValue) -> int:
        """Return the number of elements that a reduction reduces to one."""
        return max(self.values[value.inputs[0]].elements // max(value.elements, 1), 1)

    def _store_if_reused(self, index: int) -> None:
        storage, _ = self.of[index]
        if storage.buffer >= 0 or not storage.reads:
            return
        users = self.users.get(index, set())
        if len(users) + (index in self.yielded) > 1:
            needed = any(self.values[user].sort in EXTERNS for user in users) and len(storage.reads) > 1
            heavy = self.device == "cpu" and any(self.values[i].heavy for i in storage.values)
            if needed or heavy or index in self.yielded or len(storage.reads) > _READS or self._is_large(storage):
                self.store(storage)
                return
        if self.values[storage.value].sort not in REDUCTIONS and (
            len(storage.reads) > _ALL_READS[self.device] or (self._is_large(storage) and len(storage.reads) > 1)
        ):
            self.store(storage)

    def _is_large(self, storage: _Storage) -> bool:
        return sum(self.values[i].ops for i in storage.values) + len(storage.reads) > _OPS[self.device]

    def _inline(self, index: int, inputs: Sequence[int]) -> _Storage:
        made = _Storage(index, values={index})
        value = self.values[index]
        for source in inputs:
            if value.sort in ("window", "lookup"):
                self.store(self.of[source][0])
            storage, turns = self.of[source]
            if storage.buffer < 0:
                made.values |= storage.values
                for (buffer, inner), num_bytes in storage.reads.items():
                    key = (buffer, _joined(inner, turns))
                    made.reads[key] = max(made.reads.get(key, 0), num_bytes)
                continue
            num_bytes = self._seen(storage, source)
            if storage.buffer in self.turned:
                turns = (ORDERED, *turns)
            if value.sort in ("lookup", "gather"):
                # Elements at places that depend on values.
                num_bytes = min(num_bytes, value.elements * self.values[source].width)
                turns = (*turns, index)
            elif value.sort == "window" or (value.sort in REDUCTIONS and self._over(value) < _UNROLLED):
                turns = (*turns, index)
            made.reads[storage.buffer, turns] = num_bytes
        return made

    def _read(self, reads: dict[Read, int], source: int) -> None:
        storage, turns = self.of[source]
        self.store(storage)
        reads[storage.buffer, turns] = self._seen(storage, source)

    def _seen(self, storage: _Storage, source: int) -> int:
        return min(self.values[storage.buffer].num_bytes, self.values[source].num_bytes)

    def _join(self, index: int, value: FusedValue) -> None:
        whole = _Storage(index, buffer=index)
        for place, source in enumerate(value.inputs):
            storage, turns = self.of[source]
            loop = Stored(values={index}, numel=self.values[source].elements)
            if storage.buffer < 0:
                loop.values = set(storage.values)
                loop.reads = {(buffer, _joined(inner, turns)): size for (buffer, inner), size in storage.reads.items()}
            else:
                self._read(loop.reads, source)
            loop.writes[index, (place,)] = self.values[source].elements * value.width
            self.loops.append(loop)
        self.of[index] = (whole, ())

    def _scatter(self, index: int, value: FusedValue) -> None:
        """Add elements into zeros or a copy."""
        target = self.of[value.inputs[0]][0]
        self.store(target)
        source = self._inline(index, value.inputs[1:])
        loop = Stored(
            values=source.values,
            numel=max((self.values[i].elements for i in value.inputs[1:]), default=1),
            reads=source.reads,
            scatters=True,
        )
        # Only the affected elements are read and written.
        put = min(value.num_bytes, loop.numel * value.width)
        loop.reads[target.buffer, (index,)] = loop.writes[index, ()] = put
        self.loops.append(loop)
        self.of[index] = (_Storage(index, buffer=index), ())


def _turned(turns: tuple[object, ...], value: FusedValue) -> tuple[object, ...]:
    """Return the turns of a view of a view; a gradient's view that inverts its op's view restores the order."""
    if not value.turn:
        return turns
    if value.backward and turns and turns[-1] == value.turn:
        return turns[:-1]
    return (*turns, value.turn)


def _joined(inner: tuple[object, ...], outer: tuple[object, ...]) -> tuple[object, ...]:
    if inner and outer and inner[-1] == outer[0]:
        return _joined(inner[:-1], outer[1:])
    return inner + outer


def _sums_rows(sort: str, shape: Sequence[int], left: Sequence[int]) -> bool:
    """Return whether the last dims are summed."""
    if sort == "to":
        left = (*(1 for _ in range(len(shape) - len(left))), *left)
        summed = [place for place, size in enumerate(shape) if left[place] != size]
        return summed == list(range(len(shape) - len(summed), len(shape)))
    return sort in _IN_ROWS or (sort == "reduced" and tuple(shape[: len(left)]) == tuple(left))
