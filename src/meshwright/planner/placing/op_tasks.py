"""Ops of a graph that must stay together (`find_tasks`), and a user's constraints on their devices (`find_choices`).

A task is a set of ops that `place` puts on one device and runs together. Ops depend on each other in three ways:

- **one task**: ops that touch memory that is written in place, from its first maker to its last write (all its users,
if
  it is state), because a value must not be sent before its last write; and ops on a path between two ops of a task,
  since the task would otherwise wait for itself. They are found as strongly connected components.
- **one device**: ops that share a trained parameter, so that its gradient needs no reduction.
- **order**: ops that draw random numbers run in the graph's order, since they share one generator.

Replicable ops are not tasks: every device computes those that it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.cost.traits import operator_name
from meshwright.solving import strong_components
from meshwright.spec import Graph, NoFeasiblePlanError, Op, PlanError, suggest

# Stands for the state of the generator, in place of a tensor in an edge.
GENERATOR = -1
# Operators that return a view of the first argument or a copy, depending on its strides, which may vary with the batch
# size.
_MAY_SHARE = ("contiguous", "flatten", "ravel", "reshape", "reshape_as")
_HELD = ("input", "parameter", "buffer", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """A partition of the ops to place into tasks.

    ``ops[t]`` are the ops of task t, ascending. ``reads[t]`` are the pairs (other task, tensor) that task t reads, each
    once; the tensor `GENERATOR` stands for the state of the random generator.
    """

    ops: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def task_of(self) -> dict[int, int]:
        """A dict from each placed op to its task."""
        return {op: task for task, ops in enumerate(self.ops) for op in ops}

    def readers(self) -> list[list[int]]:
        """Return, for each task, the tasks that read from it, ascending."""
        found: list[list[int]] = [[] for _ in self.ops]
        for task, reads in enumerate(self.reads):
            for source in sorted({source for source, _ in reads}):
                found[source].append(task)
        return found


class UnionFind:
    """Disjoint sets of numbers that can be merged; the smallest number represents its set."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, item: int) -> int:
        """Return the representative of the item's set."""
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def merge(self, items: Iterable[int]) -> None:
        """Merge all sets of the items."""
        roots = sorted({self.find(item) for item in items})
        for root in roots[1:]:
            self._parent[root] = roots[0]


def find_tasks(graph: Graph) -> Tasks:
    """Return the tasks of a graph: the smallest sets of ops that may be placed separately."""
    sets = UnionFind(len(graph.ops))
    for ops in _written_together(graph):
        sets.merge(ops)
    successors: dict[int, set[int]] = defaultdict(set)
    for op, source, _ in _op_edges(graph):
        successors[sets.find(source)].add(sets.find(op))
    placed = [op for op in range(len(graph.ops)) if not graph.ops[op].replicable]
    for component in strong_components(sorted({sets.find(op) for op in placed}), successors):
        sets.merge(component)
    return group_tasks(graph, [(sets.find(op), op) for op in placed])


def merge_chains(graph: Graph, tasks: Tasks, classes: Sequence[object]) -> tuple[Tasks, tuple[int, ...]]:
    """Merge the tasks of each chain; return the new tasks, and for each old task its new task.

    In a chain, each task reads only the task before and is read only by the next one. All tasks of a chain must have
    equal entries in ``classes``, shape (tasks,).
    """
    sets = UnionFind(len(tasks.ops))
    readers = tasks.readers()
    for task, reads in enumerate(tasks.reads):
        sources = {source for source, _ in reads}
        if len(sources) == 1:
            (source,) = sources
            if len(readers[source]) == 1 and classes[source] == classes[task]:
                sets.merge((source, task))
    merged = group_tasks(graph, [(sets.find(task), op) for task, ops in enumerate(tasks.ops) for op in ops])
    home = merged.task_of
    return merged, tuple(home[ops[0]] for ops in tasks.ops)


def group_tasks(graph: Graph, grouped: Iterable[tuple[int, int]]) -> Tasks:
    """Return the tasks that pairs (group, op) define: one task per group."""
    groups: dict[int, list[int]] = defaultdict(list)
    for group, op in grouped:
        groups[group].append(op)
    ops = tuple(sorted(tuple(sorted(members)) for members in groups.values()))
    home = {op: task for task, members in enumerate(ops) for op in members}
    reads: list[dict[tuple[int, int], None]] = [{} for _ in ops]
    for op, source, tensor in _op_edges(graph):
        if home[op] != home[source]:
            reads[home[op]][home[source], tensor] = None
    return Tasks(ops=ops, reads=tuple(map(tuple, reads)))


def parameter_sharers(graph: Graph) -> list[list[int]]:
    """Return, for every trained parameter that several ops read, these ops; nothing for inference."""
    if graph.mode != "training":
        return []
    users: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(graph.ops):
        for tensor in dict.fromkeys(op.inputs):
            if graph.tensors[tensor].role == "parameter" and graph.tensors[tensor].requires_grad:
                users[tensor].append(index)
    return [ops for ops in users.values() if len(ops) > 1]


def _op_edges(graph: Graph) -> Iterator[tuple[int, int, int]]:
    """Yield (op, the placed op whose result it reads, tensor), and (op, the op that drew before it, `GENERATOR`)."""
    maker: dict[int, int] = {}
    drew: int | None = None
    for index, op in enumerate(graph.ops):
        if op.replicable:
            continue
        yield from ((index, maker[tensor], tensor) for tensor in dict.fromkeys(op.inputs) if tensor in maker)
        if op.random:
            if drew is not None:
                yield index, drew, GENERATOR
            drew = index
        maker.update(dict.fromkeys(op.outputs, index))


def _written_together(graph: Graph) -> list[list[int]]:
    """Return ops around each piece of written memory, from its first user to its last write."""
    memory = UnionFind(len(graph.tensors))
    for op in graph.ops:
        if operator_name(op) in _MAY_SHARE:
            memory.merge(graph.tensors[i].storage for i in (*op.inputs[:1], *op.outputs))
    touching: dict[int, list[int]] = defaultdict(list)
    last_write: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        if op.replicable:
            continue
        for piece in dict.fromkeys(memory.find(graph.tensors[i].storage) for i in (*op.inputs, *op.outputs)):
            touching[piece].append(index)
        last_write.update((memory.find(storage), index) for storage in _written_storages(graph, op))
    held = {memory.find(tensor.storage) for tensor in graph.tensors if tensor.role in _HELD}
    return [[op for op in touching[piece] if op <= last or piece in held] for piece, last in last_write.items()]


def _written_storages(graph: Graph, op: Op) -> set[int]:
    """Return the storages that an op writes besides its results, by torch's naming rule (see `Op.is_in_place`).

    Batch norm writes its statistics without a sign in its name; an op without results only writes.
    """
    read = [graph.tensors[i].storage for i in op.inputs]
    if op.is_in_place:
        made = {graph.tensors[i].storage for i in op.outputs} & set(read)
        return made or set(read[:1])
    if not op.outputs:
        return {storage for storage in read if graph.tensors[storage].role in ("activation", "buffer")}
    if op.writes_buffers:
        return {storage for storage in read if graph.tensors[storage].role == "buffer"}
    return set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """A user's constraints on the devices of ops.

    A name is that of an op, of a layer, or of a module with all ops inside it. ``fixed`` maps a name to its device,
    ``forbidden`` a name to the devices that it must not use. ``together``: groups of names that share one device.
    """

    fixed: Mapping[str, int] = field(default_factory=dict)
    forbidden: Mapping[str, Sequence[int]] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedDevices:
    """The devices that constraints allow for each task.

    ``allowed`` are indexes into the given devices. ``groups`` has the group of each task, by the number of its first
    task; the tasks of a group share one device.
    """

    allowed: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]


def find_choices(graph: Graph, tasks: Tasks, devices: Sequence[int], constraints: Constraints) -> AllowedDevices:
    """Return the devices that the constraints allow for each task.

    Raises PlanError for unknown names and devices, NoFeasiblePlanError if a task has no allowed device.
    """
    task_of, sets = tasks.task_of, UnionFind(len(tasks.ops))
    for sharing in parameter_sharers(graph):
        sets.merge(task_of[op] for op in sharing if op in task_of)
    for names in constraints.together:
        sets.merge(task_of[op] for name in names for op in _named_ops(graph, name) if op in task_of)
    left = {group: set(devices) for group in {sets.find(task) for task in range(len(tasks.ops))}}
    rules = [(name, {device}) for name, device in constraints.fixed.items()]
    rules += [(name, set(devices).difference(others)) for name, others in constraints.forbidden.items()]
    _check_devices(devices, constraints)
    for name, kept in rules:
        for group in sorted({sets.find(task_of[op]) for op in _named_ops(graph, name) if op in task_of}):
            left[group] &= kept
            if not left[group]:
                first = graph.ops[tasks.ops[group][0]]
                raise NoFeasiblePlanError(
                    f"The constraint on {name!r} leaves no device for op {first.name!r}, which must be on the same "
                    "device or has another constraint (ops stay together if they share a trained parameter, write to "
                    "the same memory, or you put them together). The devices are "
                    f"{', '.join(map(str, devices))}. Loosen one constraint."
                )
    places = {device: index for index, device in enumerate(devices)}
    groups = tuple(sets.find(task) for task in range(len(tasks.ops)))
    return AllowedDevices(
        allowed=tuple(tuple(sorted(places[d] for d in left[group])) for group in groups), groups=groups
    )


def _named_ops(graph: Graph, name: str) -> list[int]:
    layers = [layer for layer in graph.layers if layer.name == name]
    if layers:
        return [op for layer in layers for op in range(layer.start, layer.stop)]
    found = [
        index
        for index, op in enumerate(graph.ops)
        if name and (op.name == name or op.module == name or op.module.startswith(name + "."))
    ]
    if not found:
        known = {layer.name for layer in graph.layers} | {op.module for op in graph.ops} - {""}
        raise PlanError(
            f"A constraint names {name!r}, but graph {graph.name!r} has no such layer, module or "
            f"op{suggest(name, known)}. `meshwright show` lists the layers."
        )
    return found


def _check_devices(devices: Sequence[int], constraints: Constraints) -> None:
    asked = [*constraints.fixed.values(), *(device for some in constraints.forbidden.values() for device in some)]
    strange = [device for device in asked if device not in devices]
    if strange:
        raise PlanError(
            f"A constraint names device {strange[0]}; the devices are {', '.join(map(str, devices))}. Choose one of "
            "them."
        )
