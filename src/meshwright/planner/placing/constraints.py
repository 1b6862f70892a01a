"""A user's constraints on the placement of ops by name: fixed devices, forbidden ones, ops that stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.placing.op_tasks import Tasks, UnionFind, parameter_sharers
from meshwright.spec import Graph, NoFeasiblePlanError, PlanError, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Constraints on the devices of ops. A name is that of an op, of a layer, or of a module with all ops inside it.

    ``fixed``: name → device. ``forbidden``: name → devices. ``together``: groups of names that share a device.
    """

    fixed: Mapping[str, int] = field(default_factory=dict)
    forbidden: Mapping[str, Sequence[int]] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedDevices:
    """Per task: the allowed devices, as indices of the given devices, and its group, which shares one device.

    Groups are numbered by their first task.
    """

    allowed: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]


def find_choices(graph: Graph, tasks: Tasks, devices: Sequence[int], constraints: Constraints) -> AllowedDevices:
    """Return the devices that the constraints allow.

    Raises PlanError for unknown names and devices, NoFeasiblePlanError if no device is left.
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
                    f"The constraint on {name!r} leaves no device for op {first.name!r}, which has to stay with it or "
                    "is constrained elsewhere (ops stay together that share a trained parameter, write to the same "
                    f"memory, or were put together). The devices are {', '.join(map(str, devices))}. Loosen one."
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
