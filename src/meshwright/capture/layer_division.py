"""Divide a model's ops into layers (`divide`), by the modules of the model (`find_units`).

A layer is a contiguous range of ops, named after a module path, between two legal cuts. Each element of the model's
lists of blocks is a layer. Ops before, between and after the blocks become separate layers (embedding or stem, head) if
they use parameters; other ops are added to the layers beside them, divided where the fewest bytes cross. Layers are
merged if the boundary between them is not a legal cut. A model without lists of blocks is divided at legal cuts into
ranges of about equal work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


# The tree is opened from the root: lists (ModuleList, Sequential, ModuleDict) always, other modules if they hold a list
# and are not themselves elements. A **unit** is where opening ends. It is an **element** if a list holds it. It is also
# one if modules of the same class are beside it (a list written by hand) and it holds no list of blocks itself, as the
# encoder and the decoder of a T5 do.
def find_units(model: nn.Module) -> dict[str, bool]:
    """Return the units (modules that become layers): by path, True if the unit is an element of a list of blocks."""
    units: dict[str, bool] = {}
    _open(model, "", units)
    return units


def unit_of(path: str, units: dict[str, bool]) -> str | None:
    """Return the path of the unit that contains a module path; None if no unit contains it."""
    while path:
        if path in units:
            return path
        path = path.rpartition(".")[0]
    return None


def _open(module: nn.Module, prefix: str, units: dict[str, bool]) -> None:
    in_list = isinstance(module, _LISTS)
    # Not named_children(): it leaves out modules that occur twice.
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    kinds = Counter(type(child) for _, child in children if any(True for _ in child.children()))
    for name, child in children:
        path = f"{prefix}{name}"
        element = in_list or (kinds[type(child)] > 1 and not _holds_blocks(child))
        if isinstance(child, _LISTS) or (not element and _holds_list(child)):
            _open(child, f"{path}.", units)
        else:
            units[path] = element


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(child, _LISTS) and len(child) > 1 for child in module.modules())


def _holds_blocks(module: nn.Module) -> bool:
    """Whether it holds a list of two or more modules of one class that have parts themselves."""
    for held in module.modules():
        if isinstance(held, _LISTS):
            kinds = Counter(type(item) for item in held.children() if any(True for _ in item.children()))
            if max(kinds.values(), default=0) > 1:
                return True
    return False


# A model with fewer layers than this is divided at legal cuts, into at most MAX_PIECES pieces, so that plans have a
# choice.
MIN_LAYERS = 4
MAX_PIECES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLine:
    """The facts about one op on which the division into layers depends.

    ``module``: the path of the op's module. ``replicable``: several stages may each compute the op. ``work``: FLOPs of
    the forward pass plus bytes of inputs and outputs.
    """

    module: str
    kind: str
    has_parameters: bool
    replicable: bool
    work: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A layer: the ops ``start:stop``.

    ``element``: True for an element of a list of blocks, False for other ops with parameters, None for ops without
    parameters.
    """

    name: str
    start: int
    stop: int
    element: bool | None = None


def divide(
    lines: Sequence[OpLine], cuts: frozenset[int], crossing: Sequence[int], units: dict[str, bool]
) -> tuple[Range, ...]:
    """Divide the ops into layers with unique names.

    ``cuts``: the legal cuts; cut c is in front of op c. ``crossing[c]``: bytes that would be sent across a cut at c.
    ``units``: the result of `find_units`.
    """
    if not lines:
        return ()
    ranges = _runs(lines, units)
    if any(item.element for item in ranges):
        ranges = _gather_surroundings(ranges, lines, units)
    ranges = _share_glue(ranges, cuts, crossing)
    ranges = _merge(ranges, lines, cuts)
    if len(ranges) < MIN_LAYERS:
        ranges = _pieces(ranges, lines, cuts)
    return tuple(number_names(ranges))


def _runs(lines: Sequence[OpLine], units: dict[str, bool]) -> list[Range]:
    runs: list[Range] = []
    for position, line in enumerate(lines):
        unit = unit_of(line.module, units)
        element = units[unit] if unit is not None else (False if line.has_parameters else None)
        name = unit if unit is not None else line.module
        if runs and runs[-1].name == name and runs[-1].element == element:
            runs[-1] = replace(runs[-1], stop=position + 1)
        else:
            runs.append(Range(name=name, start=position, stop=position + 1, element=element))
    return runs


def _gather_surroundings(ranges: list[Range], lines: Sequence[OpLine], units: dict[str, bool]) -> list[Range]:
    """Join the ops between two elements into one range, a layer of its own if it has parameters."""
    joined: list[Range] = []
    for item in ranges:
        if joined and not item.element and not joined[-1].element:
            joined[-1] = replace(joined[-1], stop=item.stop, name=joined[-1].name or item.name)
        else:
            joined.append(item)
    named: list[Range] = []
    for index, item in enumerate(joined):
        if item.element:
            named.append(item)
        else:
            named += _surrounding(item, lines, units, first=index == 0, last=index == len(joined) - 1)
    return named


def _surrounding(
    item: Range, lines: Sequence[OpLine], units: dict[str, bool], *, first: bool, last: bool
) -> list[Range]:
    """Ops around blocks as ranges: glue, a layer from the first to the last op with parameters, glue."""
    holders = [i for i in range(item.start, item.stop) if lines[i].has_parameters]
    if not holders:
        return [replace(item, element=None)]
    name = next((unit_of(lines[i].module, units) or lines[i].module for i in holders), "") or "body"
    if first:
        name = "embedding" if any("embedding" in lines[i].kind for i in holders) else "stem"
    elif last:
        name = "head"
    edges = [(item.start, holders[0], None), (holders[0], holders[-1] + 1, False), (holders[-1] + 1, item.stop, None)]
    return [Range(name=name, start=a, stop=b, element=element) for a, b, element in edges if a < b]


def _share_glue(ranges: list[Range], cuts: frozenset[int], crossing: Sequence[int]) -> list[Range]:
    """Give glue to its neighbours, cut where the fewest bytes cross."""
    shared: list[Range] = []
    start = 0
    for index, item in enumerate(ranges):
        if item.element is None and len(ranges) > 1:
            if index == len(ranges) - 1:
                # Where there is nothing but glue, it is one layer.
                last = shared.pop() if shared else ranges[0]
                shared.append(replace(last, stop=item.stop))
            elif shared:
                choices = [c for c in range(item.start, item.stop + 1) if c in cuts] or [item.start]
                # Of equal places the last, so that repeated blocks stay alike.
                start = min(reversed(choices), key=crossing.__getitem__)
                shared[-1] = replace(shared[-1], stop=start)
            continue
        shared.append(replace(item, start=start))
        start = item.stop
    return shared


def _merge(ranges: list[Range], lines: Sequence[OpLine], cuts: frozenset[int]) -> list[Range]:
    """Merge layers whose boundary is not a legal cut, and layers that a stage could not consist of."""
    merged: list[Range] = []
    for item in ranges:
        idle = merged and all(line.replicable for line in lines[merged[-1].start : merged[-1].stop])
        if merged and (item.start not in cuts or idle):
            name = item.name if idle else _joint_name(merged[-1].name, item.name)
            merged[-1] = replace(merged[-1], stop=item.stop, name=name, element=merged[-1].element or item.element)
        else:
            merged.append(item)
    if len(merged) > 1 and all(line.replicable for line in lines[merged[-1].start :]):
        merged[-2:] = [replace(merged[-2], stop=merged[-1].stop)]
    return merged


def _joint_name(first: str, second: str) -> str:
    head = first.split("..")[0]
    return head if not second or second == head else f"{head}..{second.split('..')[-1]}"


def _pieces(ranges: list[Range], lines: Sequence[OpLine], cuts: frozenset[int]) -> list[Range]:
    """Divide at legal cuts into pieces of about equal work."""
    total = sum(line.work for line in lines)
    pieces: list[Range] = []
    for item in ranges:
        start, work = item.start, 0
        for position in range(item.start, item.stop):
            ready = position in cuts and not all(line.replicable for line in lines[start:position])
            if ready and work * MAX_PIECES >= total:
                pieces.append(replace(item, start=start, stop=position))
                start, work = position, 0
            work += lines[position].work
        pieces.append(replace(item, start=start))
    return _merge(pieces, lines, cuts)


def number_names(ranges: list[Range]) -> list[Range]:
    """Return the ranges with unique names: of equal names, the second becomes ``name#2`` and so on."""
    seen: dict[str, int] = {}
    numbered = []
    for item in ranges:
        name = item.name or "body"
        seen[name] = seen.get(name, 0) + 1
        numbered.append(replace(item, name=name if seen[name] == 1 else f"{name}#{seen[name]}"))
    return numbered
