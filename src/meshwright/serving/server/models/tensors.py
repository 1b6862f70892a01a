"""Tensors of a sample: a model's inputs and outputs as named tensors, their specs, and conversion to and from numpy."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.spec import ServingError, TensorSpec

_DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}


def to_tensor(array: NDArray[Any], datatype: str) -> torch.Tensor:
    """Return a tensor that shares an array's memory; arrays of ``datatype`` BF16 are uint16, with the same bits."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16 becomes uint16 with the same bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of one sample of a batch tensor. Raises ServingError for a dtype that requests cannot carry."""
    if tensor.dtype not in _DATATYPES:
        raise ServingError(
            f"Tensor {name!r} is of {tensor.dtype}, which the protocol cannot carry; expected one of "
            f"{', '.join(_DATATYPES.values())}. Convert it in the model, or with preprocess or postprocess."
        )
    return TensorSpec(name=name, datatype=_DATATYPES[tensor.dtype], shape=tuple(tensor.shape[1:]))


class Arguments:
    """Arguments of a model's call. Their tensors that have dims have a batch dim, and can be replaced (`fill`).

    ``examples`` are these tensors. ``names`` are their names: forward's parameters, ``parameter.key`` if nested.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[str]) -> None:
        paths, self._structure = pytree.tree_flatten_with_path((args, kwargs))
        self._leaves = [leaf for _, leaf in paths]
        self._places = [place for place, leaf in enumerate(self._leaves) if _is_batch(leaf)]
        self.names = [_name(paths[place][0], parameters) for place in self._places]
        self.examples: list[torch.Tensor] = [self._leaves[place] for place in self._places]

    def reorder(self, order: Sequence[int]) -> None:
        """Change the order of the tensors: tensor number ``order[i]`` becomes number i."""
        self._places = [self._places[place] for place in order]
        self.names = [self.names[place] for place in order]
        self.examples = [self.examples[place] for place in order]

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments that contain these tensors, given in the order of ``names``."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a model.

    ``inputs``, from the zoo or a user's function, is a tensor, a tuple or list, or a mapping of keyword arguments.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def parameters_of(module: nn.Module, count: int) -> list[str]:
    """Return the names of the first ``count`` positional arguments of forward."""
    try:
        known = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # the signature is not available
        known = []
    names = [item.name for item in known if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    rest = next((item.name for item in known if item.kind is item.VAR_POSITIONAL), "input")
    if count == 1 and not names:
        return ["input"]
    return (names + [f"{rest}{place}" for place in range(count - len(names))])[:count]


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all tensors in a model's result, also nested ones; other values are skipped."""
    items: Any = ()
    if isinstance(value, torch.Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        items = ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        items = ((str(place) if name else f"output{place}", item) for place, item in enumerate(value))
    elif dataclasses.is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    for key, item in items:
        yield from named_tensors(item, f"{name}.{key}" if name else key)


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    kind, first, *deeper = (getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path)
    return ".".join([parameters[first] if kind == 0 else str(first), *map(str, deeper)])
