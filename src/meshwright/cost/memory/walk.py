"""A walk through the ops of a stage that records all allocations (`StageWalk`), and the memory of each op (`OpMemory`).

`stage_memory` describes which allocations are recorded, and when they are freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.autocast import cast_inputs, compute_type, kept_copies
from meshwright.cost.memory.away import follow_away
from meshwright.cost.memory.kept import (
    Backend,
    OtherSizes,
    as_kept,
    backward_workspace_bytes,
    casts_within,
    forward_workspace_bytes,
    library_workspaces,
    measure_tensors,
    passes_on,
)
from meshwright.cost.memory.ledger import Ledger, LedgerStretch, find_lifetimes
from meshwright.cost.memory.shared_units import NOTHING_SHARED, SharedUnit, SharedUnits, UnitMemory
from meshwright.cost.optimizers import STEP_COUNTER_BYTES, OptimizerLoop
from meshwright.spec import DTYPE_BYTES, Channel, Graph, Op, StageSlice, Workload, passed_again
from meshwright.spec.memory import (
    BUCKETS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    RECEIVED,
    SAVED,
    SENT,
    WORKSPACE,
)
from meshwright.spec.recompute import kept_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from meshwright.spec.precision import Numbers


class OpMemory(NamedTuple):
    """The tensors and bytes that an op allocates, which are equal each time that it runs.

    ``made``: outputs with storages of their own. ``kept``: saved values with storages of their own; ``copies``: those
    of them that are cast copies of inputs. ``cast``: bytes of the inputs that autocast casts, in the new type, by
    input; ``cast_bytes``: their sum. ``narrows``: whether the op casts inside, not its inputs. ``forward_workspace``,
    ``backward_workspace``: additional bytes during the computation. ``differentiated``: inputs that require a gradient,
    each once. ``passing``: pairs (input, output) whose gradients share memory.
    """

    made: tuple[int, ...]
    kept: tuple[int, ...]
    copies: tuple[int, ...]
    cast: Mapping[int, int]
    cast_bytes: int
    narrows: bool
    forward_workspace: int
    backward_workspace: int
    differentiated: tuple[int, ...]
    passing: frozenset[tuple[int, int]]


class OpMemories:
    """The `OpMemory` of each op of a graph for one batch size, by the op's index; each is computed at first use."""

    def __init__(
        self, graph: Graph, batch_size: int, numbers: Numbers, float_bytes: int | None, device: Backend
    ) -> None:
        self._graph, self._numbers, self._device = graph, numbers, device
        self.sizes, self.elements = measure_tensors(graph, batch_size, float_bytes, device)
        self._found: dict[int, OpMemory] = {}

    def __getitem__(self, index: int) -> OpMemory:
        found = self._found.get(index)
        if found is None:
            op = self._graph.ops[index]
            found = _measure_op(self._graph, op, self.sizes, self.elements, self._numbers, self._device)
            self._found[index] = found
        return found


@lru_cache(maxsize=16)
def op_memories(
    graph: Graph, batch_size: int, numbers: Numbers, float_bytes: int | None, device: Backend
) -> OpMemories:
    """Return the memory of the ops of a graph that is a result of `as_kept`. Raises as `measure_tensors`."""
    return OpMemories(graph, batch_size, numbers, float_bytes, device)


def _measure_op(
    graph: Graph, op: Op, sizes: Sequence[int], elements: Sequence[int], numbers: Numbers, device: Backend
) -> OpMemory:
    tensors, lower = graph.tensors, numbers.autocast
    cast = {}
    if lower:
        width = DTYPE_BYTES[compute_type(graph, op, lower)]
        cast = {i: elements[i] * width for i in cast_inputs(graph, op, lower)}
    copies = tuple(kept_copies(graph, op))
    there = OtherSizes(sizes, cast) if cast else sizes
    differentiated = tuple(i for i in dict.fromkeys(op.inputs) if tensors[i].requires_grad)
    return OpMemory(
        made=tuple(i for i in op.outputs if tensors[i].storage == i),
        kept=tuple(i for i in op.saved if tensors[i].role == "saved" and tensors[i].storage == i),
        copies=copies,
        cast=cast,
        cast_bytes=sum(cast.values()),
        narrows=device == "cuda" and casts_within(op) and bool(copies),
        forward_workspace=forward_workspace_bytes(graph, op, there, device),
        backward_workspace=backward_workspace_bytes(graph, op, there, device),
        differentiated=differentiated,
        passing=frozenset(
            (i, output)
            for i in differentiated
            for output in op.outputs
            if passes_on(graph, op, i, elements[i], elements[output])
        ),
    )


@dataclass(slots=True)
class _Gradient:
    """A gradient's storage and the number of values that share it."""

    block: int
    holders: int = 1


class StageWalk:
    """A walk through the steps of one rank's stage, which records its allocations and frees in ``ledger``.

    The methods `forward` and `backward` run a microbatch, in any valid order; `optimize` runs the optimizer step.
    ``bucketed``: parameters whose gradients the first backward of a step copies into buckets, one by one, and frees;
    later backwards add to the buckets (runtime/gradient_reduction.py). ``shared``: FSDP units. ``activations_away``:
    whether activations are offloaded (`away`). ``state_parts``: number of replicas over which the optimizer step and
    its states are sharded. Raises GraphError for a graph with its own backward or an invalid batch size.
    """

    def __init__(
        self,
        graph: Graph,
        stage: StageSlice,
        workload: Workload,
        batch_size: int,
        device: Backend,
        loop: OptimizerLoop,
        bucketed: Set[int] = frozenset(),
        shared: SharedUnits | None = None,
        activations_away: bool = False,
        state_parts: int = 1,
    ) -> None:
        self.ledger, self._state_parts = Ledger(), state_parts
        self._units = UnitMemory(shared or NOTHING_SHARED, self.ledger, device)
        graph = as_kept(graph, workload.numbers, device)
        self._graph, self._stage, self._workload = graph, stage, workload
        self._device, self._loop = device, loop
        self._ops = op_memories(graph, batch_size, workload.numbers, workload.float_bytes, device)
        self._sizes, self._elements = self._ops.sizes, self._ops.elements
        self.trains = stage.has_backward and workload.kind == "training"
        # Whether gradients are accumulated in a wider type than backwards make them in.
        self._widens = workload.numbers.gradient_bytes > workload.numbers.value_bytes
        self._lives = find_lifetimes(graph, stage, trains=self.trains)
        sizes, leaves = self._sizes, activations_away
        self._away = follow_away(graph, stage, batch_size, workload, self._lives, sizes, device, leaves=leaves)
        self._bucketed = frozenset(bucketed)
        self._first_use: dict[int, int] = {}
        for index in stage.ops if bucketed else ():
            for i in self._bucketed.intersection(graph.ops[index].inputs):
                self._first_use.setdefault(i, index)
        self._returned = frozenset(_gradients(stage.incoming))
        # Blocks of values by storage: of the microbatches in flight, and of recomputed values.
        self._values: dict[int, dict[int, int]] = {}
        self._again: dict[int, int] = {}
        # Gradients by tensor.
        self._gradients: dict[int, _Gradient] = {}
        self._parameter_gradients: dict[int, int] = {}
        self._in_buckets: set[int] = set()
        # The first forward: its events, and the values that it left.
        self._forward: tuple[LedgerStretch, dict[int, int]] | None = None
        # Backwards of the step so far; the first later one of a step: its events, and the values at its start.
        self._num_backwards = 0
        self._later: tuple[LedgerStretch, dict[int, int]] | None = None
        # The first step up to its optimizer: its events, and blocks of gradients by parameter and by unit.
        self._passes: tuple[LedgerStretch, dict[int, int], dict[tuple[int, ...], int]] | None = None

    def build(self, bucket_bytes: int, num_microbatches: int) -> None:
        """Allocate static memory: parameters, buffers, library workspaces, buckets, and the inputs of a step."""
        for part, tensors in ((PARAMETERS, self._stage.parameters), (BUFFERS, self._stage.buffers)):
            for i in tensors:
                if self._graph.tensors[i].storage == i:
                    self.ledger.take(self._sizes[i], part)
        for num_bytes in library_workspaces(self._device, trains=self._workload.kind == "training"):
            self.ledger.take(num_bytes, BUFFERS)
        if bucket_bytes:
            self.ledger.take(bucket_bytes, BUCKETS)
        for _ in range(num_microbatches):
            for i in self._stage.inputs:
                self.ledger.take(self._sizes[i], INPUTS)

    def forward(self, microbatch: int) -> None:
        """Run the forward of a microbatch; values that no backward needs are freed after their last use."""
        if self._forward is None:
            mark = self.ledger.mark()
            values = self._values[microbatch] = self._walk_forward()
            self._forward = self.ledger.since(mark), values.copy()
        else:
            # A forward's events do not depend on other microbatches in flight.
            stretch, values = self._forward
            shift = self.ledger.repeat(stretch)
            self._values[microbatch] = {storage: block + shift for storage, block in values.items()}
        if not self.trains:
            self._end(self._values.pop(microbatch))

    def _walk_forward(self) -> dict[int, int]:
        values: dict[int, int] = {}
        self.ledger.begin("values received")
        for i in _tensors(self._stage.incoming):
            values[self._graph.tensors[i].storage] = self.ledger.take(self._sizes[i], RECEIVED)
        kept = self._away.begin_forward()
        for index in self._stage.ops:
            op = self._graph.ops[index]
            self.ledger.begin(f"forward of {op.name}")
            self._units.before_forward(index)
            self._away.forward(index, values, self.ledger)
            self._compute(index, values, kept, keeps_internals=index not in self._lives.recomputed)
            self._units.after_forward(index)
        self._away.end_forward(values, self.ledger)
        return values

    def backward(self, microbatch: int) -> None:
        """Run the backward of a microbatch, from the gradient of the loss or the gradients sent by later stages."""
        values = self._values.pop(microbatch)
        if self._num_backwards and self._later is not None:
            # Events of a later backward of a step do not depend on other microbatches in flight.
            stretch, blocks = self._later
            self.ledger.repeat(stretch, {block: values[storage] for storage, block in blocks.items()})
        else:
            mark, blocks = self.ledger.mark(), values.copy()
            self._walk_backward(values)
            if self._num_backwards:
                self._later = self.ledger.since(mark), blocks
        self._num_backwards += 1

    def _walk_backward(self, values: dict[int, int]) -> None:
        self.ledger.begin("gradient of the loss" if not self._stage.outgoing else "gradients received")
        self._away.begin_backward(self.ledger)
        for i in self._graph.outputs[:1] if self._stage.outputs else ():
            self._gradients[i] = _Gradient(self.ledger.take(self._sizes[i], WORKSPACE))
        arrived = [(i, self.ledger.take(self._sizes[i], RECEIVED)) for i in _gradients(self._stage.outgoing)]
        for i, block in arrived:
            # The receiver holds it until the backward is done.
            self._deliver(i, _Gradient(block, holders=2))
        self._units.begin_backward()
        for index in reversed(self._stage.ops):
            self._units.before_backward(index)
            self._away.backward(index, self.ledger)
            if index + 1 in self._lives.starts:
                self._recompute(self._lives.starts[index + 1], index + 1, values)
            op = self._graph.ops[index]
            self.ledger.begin(f"backward of {op.name}")
            made = self._differentiate(index, values)
            # A node of autograd frees what it saved before the next one, which may cast, starts.
            self._release(values, self._lives.released.get(index, ()))
            self._release(self._again, self._lives.released_again.get(index, ()))
            self._away.release(index, values, self.ledger)
            self._hand_on(index, made)
            if self._bucketed:
                self._fill_buckets(index)
            if unit := self._units.unit_done(index):
                self._scatter(unit)
        self._scatter(self._units.root)
        self._units.end_backward()
        for gradient in self._gradients.values():
            self._drop(gradient)
        self._gradients.clear()
        for _, block in arrived:
            self.ledger.free(block)
        self._end(values)

    def _end(self, values: dict[int, int]) -> None:
        for block in (*values.values(), *self._again.values()):
            self.ledger.free(block)
        self._again.clear()

    def compute(self, order: Sequence[tuple[bool, int]]) -> None:
        """Run the forwards and backwards of a step in ``order``: pairs (whether it is a backward, the microbatch).

        Every call must have the same order.
        """
        if self._passes is None:
            mark = self.ledger.mark()
            for is_backward, microbatch in order:
                if is_backward:
                    self.backward(microbatch)
                else:
                    self.forward(microbatch)
            self._passes = self.ledger.since(mark), self._parameter_gradients.copy(), self._units.own.copy()
        else:
            stretch, gradients, own = self._passes
            shift = self.ledger.repeat(stretch)
            self._parameter_gradients = {parameter: block + shift for parameter, block in gradients.items()}
            self._units.own = {unit: block + shift for unit, block in own.items()}

    def optimize(self, *, first: bool) -> None:
        """Run one optimizer step over all trained parameters, then free the gradients.

        ``first``: whether it is the first step, which allocates the optimizer states.
        """
        optimizer, numbers = self._workload.optimizer, self._workload.numbers
        trained = [i for i in self._stage.parameters if self._graph.tensors[i].requires_grad]
        counts = {i: -(-self._elements[i] // self._state_parts) for i in trained}
        sizes = {i: count * numbers.state_bytes for i, count in counts.items()}
        for parameter, size in sizes.items():
            self.ledger.begin(f"optimizer step of {self._graph.tensors[parameter].name}")
            if first:
                if numbers.master_bytes:
                    self.ledger.take(counts[parameter] * numbers.master_bytes, OPTIMIZER)
                for _ in range(optimizer.num_states):
                    self.ledger.take(size, OPTIMIZER)
                if optimizer.kind == "adamw":
                    self.ledger.take(STEP_COUNTER_BYTES, OPTIMIZER)
            if optimizer.kind == "adamw" and self._loop == "tensors":
                for copy in [self.ledger.take(size, WORKSPACE) for _ in range(2)]:
                    self.ledger.free(copy)
        # Copies of all of them at a time: of gradients in the type of the master weights (those of units have it since
        # they were scattered), and the temporaries of foreach.
        narrow = [size for i, size in sizes.items() if i not in self._units.parameters]
        for copies, is_made, moment in (
            (narrow, numbers.gradient_bytes < numbers.master_bytes, "gradients widened"),
            (sizes.values(), optimizer.kind == "adamw" and self._loop == "foreach", "optimizer step of all parameters"),
        ):
            if is_made:
                self.ledger.begin(moment)
                for copy in [self.ledger.take(size, WORKSPACE) for size in copies]:
                    self.ledger.free(copy)
        self._drop_gradients()
        self._num_backwards = 0

    def _drop_gradients(self) -> None:
        self.ledger.begin("gradients set to none")
        for block in self._parameter_gradients.values():
            self.ledger.free(block)
        self._parameter_gradients.clear()
        self._in_buckets.clear()
        self._units.end_step()

    def _compute(self, index: int, blocks: dict[int, int], kept: Set[int], *, keeps_internals: bool) -> None:
        """Allocate the outputs of an op; free values after their last use, unless they are kept."""
        memory, sizes, ledger = self._ops[index], self._sizes, self.ledger
        results = self._lives.results.get(index, frozenset())
        # They exist already when a range is recomputed.
        there = results if blocks is self._again else frozenset()
        for i in memory.made:
            if i not in there:
                part = WORKSPACE if i not in kept else SENT if i in self._lives.sent else SAVED
                blocks[i] = ledger.take(sizes[i], part)
        internal = [i for i in memory.kept if i not in there] if self.trains else []
        for i in internal:
            blocks[i] = ledger.take(sizes[i], SAVED if keeps_internals or i in results else WORKSPACE)
        # Copies that the backward keeps are among the internals.
        passing = memory.cast_bytes - sum(sizes[i] for i in memory.copies if i in internal)
        self._borrow(passing if there else passing + memory.forward_workspace)
        if not keeps_internals:
            for i in set(internal).difference(results):
                ledger.free(blocks.pop(i))
        for storage in self._lives.last_used.get(index, ()):
            if storage in blocks and storage not in kept:
                ledger.free(blocks.pop(storage))

    def _recompute(self, start: int, stop: int, values: dict[int, int]) -> None:
        """Recompute a range, up to the last value that its backward reads, with the results that were kept."""
        needed = {self._graph.tensors[i].storage for op in self._graph.ops[start:stop] for i in op.saved}
        self._away.hand_back(start, stop, values)
        for index in passed_again(self._graph, start, stop):
            op = self._graph.ops[index]
            self.ledger.begin(f"recomputation of {op.name}")
            for storage in self._lives.results.get(index, ()):
                self._again[storage] = values.pop(storage)
            self._compute(index, self._again, needed, keeps_internals=True)
        # Free kept results that the recomputation did not reach (`runtime.checkpointing`).
        for index in kept_within(self._graph, start, stop):
            self._release(values, self._lives.results[index])
        for storage in [storage for storage in self._again if storage not in needed]:
            self.ledger.free(self._again.pop(storage))

    def _differentiate(self, index: int, values: dict[int, int]) -> list[tuple[int, _Gradient]]:
        """Run the backward of one op: make or pass on gradients of its inputs, free those of its outputs.

        They have the type in which the op computes.
        """
        op, ledger = self._graph.ops[index], self.ledger
        arrived = {i: self._gradients.pop(i) for i in op.outputs if i in self._gradients}
        if not arrived:
            return []
        memory, sizes, first = self._ops[index], self._sizes, next(iter(arrived))
        between = self._narrow_loss(memory, op.inputs[0], values) if memory.narrows else None
        made: list[tuple[int, _Gradient]] = []
        for i in memory.differentiated:
            if len(arrived) == 1 and (i, first) in memory.passing:
                arrived[first].holders += 1
                made.append((i, arrived[first]))
            elif i in memory.cast and between is None:
                made.append((i, _Gradient(ledger.take(memory.cast[i], WORKSPACE))))
            else:
                made.append((i, _Gradient(ledger.take(sizes[i], self._part_of_gradient(i)))))
        if between is None:
            self._borrow(memory.backward_workspace)
        else:
            ledger.free(between)
        for gradient in arrived.values():
            self._drop(gradient)
        return made

    def _hand_on(self, index: int, made: Sequence[tuple[int, _Gradient]]) -> None:
        """Deliver the gradients of an op's inputs, each in the type of its input."""
        memory = self._ops[index]
        for i, gradient in made:
            if i in memory.cast and not memory.narrows and gradient.holders == 1:
                whole = _Gradient(self.ledger.take(self._sizes[i], self._part_of_gradient(i)))
                self._drop(gradient)
                self._deliver(i, whole)
            else:
                self._deliver(i, gradient)

    def _narrow_loss(self, memory: OpMemory, logits: int, values: dict[int, int]) -> int:
        """Return the gradient of a loss's input in its own type; the cast copy is freed meanwhile."""
        (copy,) = memory.copies
        wide = self.ledger.take(self._sizes[copy], WORKSPACE)
        self._release(self._again if copy in self._again else values, [copy])
        narrow = self.ledger.take(self._sizes[logits], WORKSPACE)
        self.ledger.free(wide)
        return narrow

    def _fill_buckets(self, index: int) -> None:
        """Copy gradients to which no earlier op adds into their buckets."""
        for i in self._bucketed.intersection(self._graph.ops[index].inputs):
            if self._first_use[i] == index and i in self._parameter_gradients:
                self.ledger.free(self._parameter_gradients.pop(i))
                self._in_buckets.add(i)

    def _scatter(self, unit: SharedUnit) -> None:
        """Copy and free the gradients of a unit; allocate a part of their sums."""
        self._units.copy_in(unit)
        for i in unit.parameters:
            if i in self._parameter_gradients:
                self.ledger.free(self._parameter_gradients.pop(i))
        self._units.scatter(unit)

    def _is_widened(self, parameter: int) -> bool:
        return self._widens and parameter not in self._units.parameters

    def _part_of_gradient(self, tensor: int) -> int:
        if self._graph.tensors[tensor].role == "parameter":
            return WORKSPACE if self._is_widened(tensor) or self._has_gradient(tensor) else GRADIENTS
        return SENT if tensor in self._returned else WORKSPACE

    def _has_gradient(self, parameter: int) -> bool:
        return parameter in self._parameter_gradients or parameter in self._in_buckets

    def _deliver(self, tensor: int, gradient: _Gradient) -> None:
        """Pass a gradient to the op that made the tensor, or to the parameter."""
        if self._graph.tensors[tensor].role == "parameter":
            if self._is_widened(tensor):
                # Autograd makes it in the gradient's own type before it accumulates it.
                wide = self._workload.gradient_bytes(self._graph.tensors[tensor])
                if self._has_gradient(tensor):
                    self._borrow(wide)
                else:
                    self._parameter_gradients[tensor] = self.ledger.take(wide, GRADIENTS)
                self._drop(gradient)
            elif self._has_gradient(tensor):
                self._drop(gradient)
            elif gradient.holders == 1:
                self._parameter_gradients[tensor] = gradient.block
            else:
                self._parameter_gradients[tensor] = self.ledger.take(self._sizes[tensor], GRADIENTS)
                self._drop(gradient)
            return
        there = self._gradients.get(tensor)
        if there is None:
            self._gradients[tensor] = gradient
        elif there.holders == 1:
            self._drop(gradient)
        else:
            self._gradients[tensor] = _Gradient(self.ledger.take(self._sizes[tensor], WORKSPACE))
            self._drop(there)
            self._drop(gradient)

    def _release(self, blocks: dict[int, int], storages: Iterable[int]) -> None:
        for storage in storages:
            if storage in blocks:
                self.ledger.free(blocks.pop(storage))

    def _borrow(self, num_bytes: int) -> None:
        if num_bytes:
            self.ledger.free(self.ledger.take(num_bytes, WORKSPACE))

    def _drop(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self.ledger.free(gradient.block)


def _tensors(channels: Sequence[Channel]) -> list[int]:
    return list(dict.fromkeys(i for channel in channels for i in channel.tensors))


def _gradients(channels: Sequence[Channel]) -> list[int]:
    return [i for channel in channels for i in channel.gradients]
