"""Trace repeated blocks only once: find modules of equal structure, and skip all but the first two in the export.

Modules of one list (such as the layers of a transformer) have equal structure if their classes, flags, plain
attributes, parameters (shape, dtype, trainable) and buffers agree, submodule by submodule, and if they share no tensor
with the rest of the model. An attribute that only holds the module's number in the list (`layer_idx` of transformers)
may differ, unless the model reads it.

During the export, the first two modules of such a group run, between marks in the graph. Each later call becomes one
`meshwright::repeat` node, whose outputs have the shapes of the second call's. Code around the blocks runs as usual.
Afterwards `flatten` checks, node by node, that the two traced blocks are equal, and copies the second for each repeat.
If anything differs (arguments, values read from outside, the blocks themselves), NotRepeatableError is raised, and the
model is traced in full.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Below this number of equal modules a full trace is as quick.
MIN_REPEATS = 4

_LIBRARY = torch.library.Library("meshwright", "DEF")
_LIBRARY.define("enter(Tensor[] inputs, str block) -> ()")
_LIBRARY.define("leave(Tensor[] outputs, str block) -> ()")
_LIBRARY.define("repeat(Tensor[] inputs, Tensor[] like, str block, str template) -> Tensor[]")


def _mark(_tensors: list[torch.Tensor], _block: str) -> None:
    """A mark computes nothing."""


def _look_like(
    _inputs: list[torch.Tensor], like: list[torch.Tensor], _block: str, _template: str
) -> list[torch.Tensor]:
    return [torch.empty_like(item) for item in like]


_LIBRARY.impl("enter", _mark, "CompositeExplicitAutograd")
_LIBRARY.impl("leave", _mark, "CompositeExplicitAutograd")
_LIBRARY.impl("repeat", _look_like, "CompositeExplicitAutograd")
ENTER = torch.ops.meshwright.enter.default
LEAVE = torch.ops.meshwright.leave.default
REPEAT = torch.ops.meshwright.repeat.default
# Marks have no results; without this, export would remove them as dead.
fx.node.has_side_effect(ENTER)
fx.node.has_side_effect(LEAVE)

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_HOOKS = tuple(key for key in vars(nn.Module()) if key.endswith("_hooks") and "state_dict" not in key)
_SKIPPED = frozenset({*vars(nn.Module()), "forward"}) - {"training"}


class NotRepeatableError(Exception):
    """Copies of a traced block would not compute the same as the blocks; the whole model must be traced."""


@dataclass(frozen=True, slots=True)
class _Call:
    """How a block was called and what it returned, without the tensors' own identity."""

    structure: Any
    leaves: tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class Repeats:
    """A group of modules of equal structure, by module path.

    ``traced``: the paths of the modules (at most two) that the export ran; the second is copied for the others.
    ``numbered``: (module, attribute, number) of attributes that hold a module's number in its list. ``was_read``: True
    if the model read one of these attributes (`watch_numbers`). ``num_skipped``: calls that became `repeat` nodes.
    """

    modules: dict[str, nn.Module]
    numbered: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    call: _Call | None = None
    result: _Call | None = None
    like: list[torch.Tensor] = field(default_factory=list)
    num_skipped: int = 0
    was_read: bool = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the ``forward`` of each module by one that traces or skips the call, until the context ends."""
        try:
            for name, module in self.modules.items():
                vars(module)["forward"] = self._forward(name, module)
            yield
        finally:
            for module in self.modules.values():
                vars(module).pop("forward", None)
            self.like = []

    def _forward(self, name: str, module: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors, call = _describe((args, kwargs), [])
            if not tensors or name in self.traced:
                raise NotRepeatableError(name)
            if len(self.traced) < 2:
                return self._trace(name, module, args, kwargs, tensors, call)
            if call != self.call or self.result is None or not self.like:
                raise NotRepeatableError(name)
            self.num_skipped += 1
            fresh = REPEAT(tensors, self.like, name, self.traced[1])
            leaves = [
                tensors[leaf[1]] if kind == "input" else fresh[leaf[1]] if kind == "output" else leaf[1]
                for kind, *leaf in ((item[0], *item) for item in self.result.leaves)
            ]
            return pytree.tree_unflatten(leaves, self.result.structure)

        return forward

    def _trace(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, tensors: list[torch.Tensor], call: _Call
    ) -> Any:
        ENTER(tensors, name)
        output = type(module).forward(module, *args, **kwargs)
        self.like, result = _describe(output, tensors)
        LEAVE(self.like, name)
        if self.traced and result != self.result:
            raise NotRepeatableError(name)
        self.traced.append(name)
        self.call, self.result = call, result
        return output


def _describe(value: Any, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], _Call]:
    """Tensors of a nested value that are not among ``inputs``, and the value's description."""
    leaves, structure = pytree.tree_flatten(value)
    fresh: list[torch.Tensor] = []
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            known = next((i for i, item in enumerate(inputs) if item is leaf), None)
            if known is not None:
                described.append(("input", known))
                continue
            looks = (str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype, str(leaf.device))
            described.append(("output", len(fresh), *looks))
            fresh.append(leaf)
        elif isinstance(leaf, _PLAIN):
            described.append(("plain", leaf))
        else:
            raise NotRepeatableError(type(leaf).__name__)
    return fresh, _Call(structure, tuple(described))


@contextmanager
def watch_numbers(groups: list[Repeats]) -> Iterator[None]:
    """Set ``was_read`` of each group whose numbered attributes are read before the context ends.

    Until then, properties of the modules' classes replace these attributes.
    """
    watched: dict[tuple[type, str], dict[int, Repeats]] = {}
    for group in groups:
        for module, key, _ in group.numbered:
            watched.setdefault((type(module), key), {})[id(module)] = group
    # Of a class that has a default of its own.
    before = {(kind, key): vars(kind)[key] for kind, key in watched if key in vars(kind)}
    try:
        for (kind, key), owners in watched.items():
            setattr(kind, key, _noting(kind, key, owners))
        yield
    finally:
        for kind, key in watched:
            delattr(kind, key)
        for (kind, key), value in before.items():
            setattr(kind, key, value)


def _noting(kind: type, key: str, owners: dict[int, Repeats]) -> property:
    """An attribute that gives what the module or its class has, and notes that it was read."""
    default = vars(kind).get(key)

    def read(module: nn.Module) -> Any:
        if id(module) in owners:
            owners[id(module)].was_read = True
        if key not in vars(module) and default is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {key!r}")
        return vars(module).get(key, default)

    def write(module: nn.Module, value: Any) -> None:
        vars(module)[key] = value

    return property(read, write)


def check_repeats(module: fx.GraphModule, groups: list[Repeats]) -> None:
    """Raise NotRepeatableError if a module's number was read, or if marks are in a subgraph (as under no_grad)."""
    if any(group.was_read for group in groups):
        raise NotRepeatableError("a block's number was read")
    targets = [node.target for node in module.graph.nodes]
    if targets.count(REPEAT) != sum(group.num_skipped for group in groups):
        raise NotRepeatableError("a block was skipped in a subgraph")
    if targets.count(LEAVE) != sum(len(group.traced) for group in groups):
        raise NotRepeatableError("a block was traced in a subgraph")


def find_repeats(model: nn.Module) -> list[Repeats]:
    """Return the groups of at least `MIN_REPEATS` modules of equal structure in the model's lists.

    Groups are never nested: an outer list is preferred. Returns [] for a model in which a module has two names, because
    torch then records the path by which a module is called.
    """
    if len(list(model.modules())) < len(list(model.named_modules(remove_duplicate=False))):
        return []
    owners: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    groups: dict[Any, Repeats] = {}
    _collect(model, "", owners, groups)
    return [group for group in groups.values() if len(group.modules) >= MIN_REPEATS]


def _collect(module: nn.Module, prefix: str, owners: dict[int, int], groups: dict[Any, Repeats]) -> None:
    structures, numbered = _structures(module, owners)
    counts = Counter(structures.values())
    for name, child in module._modules.items():
        if child is None:
            continue
        structure = structures[name]
        path = f"{prefix}{name}"
        if structure is not None and counts[structure] >= MIN_REPEATS:
            group = groups.setdefault((prefix, structure), Repeats(modules={}))
            group.modules[path] = child
            group.numbered += numbered.get(name, ())
        else:
            _collect(child, f"{path}.", owners, groups)


_Numbered = list[tuple[nn.Module, str, int]]


def _structures(module: nn.Module, owners: dict[int, int]) -> tuple[dict[str, Any], dict[str, _Numbered]]:
    """Structures of a module's elements, and the attributes that were left out for their numbers, both by name."""
    elements = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    children = {name: child for name, child in module._modules.items() if child is not None}
    some = {name: child for name, child in children.items() if elements and _has_children(child)}
    found: dict[str, Any] = dict.fromkeys(children)
    plain = {name: _structure(child, owners) for name, child in some.items()}
    counts = Counter(structure for structure in plain.values() if structure is not None)
    if len(some) < MIN_REPEATS or max(counts.values(), default=0) >= MIN_REPEATS:
        return found | plain, {}
    numbers = {name: number for number, name in enumerate(children)}
    places = [
        {
            (path, key)
            for path, below in child.named_modules()
            for key, value in vars(below).items()
            if type(value) is int and value == numbers[name] and key not in _SKIPPED
        }
        for name, child in some.items()
    ]
    everywhere = sorted(set.intersection(*places))
    numbered: dict[str, _Numbered] = {
        name: [(child.get_submodule(path), key, numbers[name]) for path, key in everywhere]
        for name, child in some.items()
    }
    return found | {name: _structure(child, owners, numbered[name]) for name, child in some.items()}, numbered


def _has_children(module: nn.Module) -> bool:
    # Leaves (a Linear, a ReLU) are as quick to trace as to repeat; a list has no forward of its own.
    return any(True for _ in module.children()) and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _structure(module: nn.Module, owners: dict[int, int], numbered: Sequence[tuple[nn.Module, str, int]] = ()) -> Any:
    """Hashable structure of a module, or None if equality with another module cannot be decided.

    Of attributes that are ``numbered`` it has the name alone.
    """
    own: list[Any] = [type(module)]
    if any(vars(module)[key] for key in _HOOKS if isinstance(vars(module)[key], dict)) or "forward" in vars(module):
        return None
    for key, value in vars(module).items():
        if key not in _SKIPPED:
            is_number = any(owner is module and name == key for owner, name, _ in numbered)
            plain = ("number",) if is_number else _plain(value)
            if plain is None:
                return None
            own.append((key, plain))
    for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in table.items():
            if tensor is not None and owners[id(tensor)] > 1:
                return None
            looks = tensor is not None and (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
            own.append((kind, name, looks, name in module._non_persistent_buffers_set))
    for name, child in module._modules.items():
        below = None if child is None else _structure(child, owners, numbered)
        if child is not None and below is None:
            return None
        own.append((name, below))
    return tuple(own)


def _plain(value: Any) -> Any:
    """Hashable form of an attribute: by value if plain, else by identity; None if it may hold a tensor or change."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        items = tuple(_plain(item) for item in value)
        return None if None in items else (type(value).__name__, items)
    if isinstance(value, dict):
        items = tuple((key, _plain(item)) for key, item in value.items())
        return None if any(item is None for _, item in items) else ("dict", items)
    if isinstance(value, torch.Tensor | nn.Module | set):
        return None
    if type(value) is partial:
        held = _plain((value.func, value.args, value.keywords))
        return None if held is None else ("partial", held)
    return "same", id(value)
