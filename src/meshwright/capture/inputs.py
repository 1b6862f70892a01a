"""How a user's batch becomes a flat list of tensors, and back.

A batch is what the model is called with (a tensor, a tuple of positional arguments or a dict of keyword arguments) and
the targets of the loss. Its tensors, in `torch.utils._pytree` order, are the graph's inputs; everything else in it
(flags, None) is part of the capture and must be the same in every later batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the tensors stand in (args, kwargs, targets). ``fixed`` holds the other leaves as (position, value)."""

    spec: pytree.TreeSpec
    names: tuple[str, ...]
    positions: tuple[int, ...]
    fixed: tuple[tuple[int, Any], ...]

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Put the tensors back into (args, kwargs, targets)."""
        leaves: list[Any] = [None] * (len(self.positions) + len(self.fixed))
        for position, value in (*self.fixed, *zip(self.positions, tensors, strict=True)):
            leaves[position] = value
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, targets

    def flatten(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, ...]:
        """The batch's tensors in the graph's order; CaptureError if the batch is built unlike the captured one."""
        leaves, spec = pytree.tree_flatten(split_batch(inputs, targets))
        if spec != self.spec:
            raise CaptureError(
                f"A batch of structure {spec} was given; the model was captured with {self.spec}. Give batches of the "
                "captured structure, or capture the model with an example like this one."
            )
        for position, value in self.fixed:
            if isinstance(leaves[position], torch.Tensor) or leaves[position] != value:
                raise CaptureError(
                    f"The batch holds {leaves[position]!r} where the model was captured with {value!r}; such values "
                    "are part of the captured graph. Capture the model with this value."
                )
        return tuple(_tensor(leaves[position], name) for position, name in zip(self.positions, self.names, strict=True))


def split_batch(inputs: Any, targets: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(args, kwargs, targets) of what a user calls inputs and targets."""
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
    return args, kwargs, tuple(targets) if isinstance(targets, tuple | list) else (targets,)


def describe_batch(
    forward: Callable[..., Any], inputs: Any, targets: Any
) -> tuple[BatchLayout, tuple[torch.Tensor, ...]]:
    """Layout and tensors of an example batch; raises CaptureError if it holds no tensor or does not fit ``forward``."""
    args, kwargs, targets = split_batch(inputs, targets)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs, targets))
    arguments = _argument_names(forward, args, kwargs)
    tensors = [(i, path, leaf) for i, (path, leaf) in enumerate(paths) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise CaptureError("The example batch holds no tensor; give the tensors that the model is called with.")
    layout = BatchLayout(
        spec=spec,
        names=tuple(_leaf_name(path, arguments, len(targets)) for _, path, _ in tensors),
        positions=tuple(i for i, _, _ in tensors),
        fixed=tuple((i, leaf) for i, (_, leaf) in enumerate(paths) if not isinstance(leaf, torch.Tensor)),
    )
    return layout, tuple(leaf for _, _, leaf in tensors)


def _argument_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    try:
        signature = inspect.signature(forward)
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"The model cannot be called with the example batch: {error}. Give a tensor, a tuple of positional "
            "arguments or a dict of keyword arguments that fit the model's forward."
        ) from None
    names = [name for name, item in signature.parameters.items() if item.kind != inspect.Parameter.VAR_POSITIONAL]
    return [names[i] if i < len(names) else f"input_{i}" for i in range(len(args))]


def _leaf_name(path: tuple[Any, ...], arguments: list[str], num_targets: int) -> str:
    keys: list[Any] = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", None))) for key in path]
    part, first, *rest = keys
    if part == 0:
        head = arguments[first]
    elif part == 1:
        head = str(first)
    else:
        head = "target" if num_targets == 1 else f"target_{first}"
    return ".".join([head, *map(str, rest)])


def _tensor(leaf: Any, name: str) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"The batch has {type(leaf).__name__} for {name!r}; the model was captured with a tensor there. Give a "
            "tensor."
        )
    return leaf
