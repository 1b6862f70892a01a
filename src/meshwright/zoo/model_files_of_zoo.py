"""Models from a user's own file: call ``function`` of ``path/to/file.py`` and check its result.

`spec.own_code` describes how the file is run. Any exception of the user's code becomes a ModelReferenceError whose
message is one paragraph with the exception's message and line.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.spec import ModelReferenceError, own_code
from meshwright.spec.own_code import importable

EXPECTED = "(module, batch) or (module, (inputs, targets), loss)"


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Run the Python file at ``path`` and return its callable ``name``. Raises ModelReferenceError if that fails."""
    return own_code.load_function(path, name, expected=f"returns {EXPECTED}", error=ModelReferenceError)


def call_function(function: Callable[..., Any], path: Path, options: dict[str, int | None]) -> Any:
    """Call a user's function with the ``options`` that are not None, and return its result.

    Raises ModelReferenceError if the function does not take such an argument, or raises an exception.
    """
    name = getattr(function, "__name__", str(function))
    given = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(function).parameters
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    refused = [key for key in given if key not in parameters and not takes_all]
    if refused:
        raise ModelReferenceError(
            f"{path}:{name} is to be called with {refused[0]}={given[refused[0]]}, but it takes no argument "
            f"{refused[0]!r}. Add the argument (def {name}({refused[0]}=...):), or leave the option out."
        )
    with importable(path.parent), reported(path, f"{name}() raised"):
        return function(**given)


def check_result(result: Any, where: str) -> tuple[nn.Module, Any, tuple[Any, ...], Callable[..., Any] | None]:
    """Return the parts of a function's result: (module, inputs as a tuple or dict, targets, loss or None).

    Raises ModelReferenceError, which names the function as ``where``, if the result has another form.
    """
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        raise _wrong_result(where, f"returned {describe(result)}")
    module, batch = parts[0], parts[1]
    _refuse_compiled(module, where)
    if len(parts) == 2:
        inputs = _check_inputs(batch, where)
        _check_arguments(module, inputs, where)
        return module, inputs, (), None
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise _wrong_result(where, f"returned {describe(batch)} instead of (inputs, targets)")
    if not callable(parts[2]):
        raise _wrong_result(where, f"returned {describe(parts[2])} instead of a loss function loss(outputs, *targets)")
    targets = tuple(batch[1]) if isinstance(batch[1], tuple | list) else (batch[1],)
    return module, _check_inputs(batch[0], where), targets, parts[2]


@contextmanager
def reported(path: Path, what: str, *, otherwise: str = "") -> Iterator[None]:
    """Turn exceptions of a user's code into a ModelReferenceError with their message and line, and log nothing.

    The arguments are those of `own_code.reported`.
    """
    with (
        # Fake tensors log a trace of every shape that does not fit, which the error says in a line.
        patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", new=True),
        own_code.reported(path, what, ModelReferenceError, otherwise=otherwise),
    ):
        try:
            yield
        except Exception as error:
            # Torch has one class of error per way to ask a fake tensor for its values; all are named so.
            if "DataDependent" in type(error).__name__:
                raise ModelReferenceError(
                    f"{own_code.own_line(error, path)} — the forward depends on the values of a tensor here, which are "
                    "not known while a model is captured. Use torch.where or torch.cond, or decide before the model is "
                    "called."
                ) from error
            raise


def refuse_unallocated(module: nn.Module, inputs: Any, where: str) -> None:
    """Raise ModelReferenceError if weights are on device "meta", but a tensor of the batch is not."""
    state = (*module.named_parameters(), *module.named_buffers())
    name = next((name for name, tensor in state if tensor.device.type == "meta"), None)
    batch = [item for item in pytree.tree_leaves(inputs) if isinstance(item, torch.Tensor)]
    if name is not None and any(tensor.device.type != "meta" for tensor in batch):
        raise ModelReferenceError(
            f"{where} returned a module whose {name!r} is on device meta, which holds no data, with a batch that is "
            'not. Build the module without torch.device("meta") (to plan allocates nothing in any case), or call '
            'to_empty(device="cpu") and initialise it.'
        )


def _check_arguments(module: nn.Module, inputs: Any, where: str) -> None:
    """Raise ModelReferenceError for more positional arguments than forward takes: most often targets without a loss."""
    if isinstance(inputs, dict):
        return
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # no signature to be had
        return
    takes = sum(item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters)
    if len(inputs) > takes and not any(item.kind is item.VAR_POSITIONAL for item in parameters):
        raise ModelReferenceError(
            f"{where} returned (module, batch) with a batch of {len(inputs)}, but forward of {type(module).__name__} "
            f"takes {takes}. If the rest are targets, the loss is missing: return (module, (inputs, targets), loss), "
            "where loss(outputs, targets) gives a scalar; else leave the rest out."
        )


def _refuse_compiled(module: nn.Module, where: str) -> None:
    for name, part in module.named_modules():
        # By name, because importing torch's compiler takes seconds.
        if type(part).__name__ == "OptimizedModule":
            raise ModelReferenceError(
                f"{where} returned a model that torch.compile has compiled ({name or 'the whole of it'}); expected "
                "plain modules, which are cut into stages. Leave torch.compile out."
            )


def _check_inputs(batch: Any, where: str) -> Any:
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    elif isinstance(batch, list):
        batch = tuple(batch)
    elif isinstance(batch, Mapping):
        # The tokenizers of transformers return a mapping that is not a dict.
        batch = dict(batch)
    if not (isinstance(batch, tuple) or (isinstance(batch, dict) and all(isinstance(key, str) for key in batch))):
        raise _wrong_result(where, f"returned {describe(batch)} as the batch instead of a tensor, a tuple or a dict")
    if not any(isinstance(item, torch.Tensor) and item.ndim for item in pytree.tree_leaves(batch)):
        raise _wrong_result(where, "returned a batch without any tensor that has a batch dim")
    return batch


def _wrong_result(where: str, what: str) -> ModelReferenceError:
    return ModelReferenceError(
        f"{where} {what}; expected {EXPECTED}, where a batch or the inputs are what the module's forward takes: "
        "a tensor, a tuple of arguments or a dict of keyword arguments. Change what the function returns."
    )


def describe(value: Any) -> str:
    """Return the type of a value in a few words, with dtype and shape of a tensor, for messages."""
    if value is None:
        return "None"
    text = type(value).__name__
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype} tensor of shape {tuple(value.shape)}".removeprefix("torch.")
    elif isinstance(value, tuple | list):
        text += f" of ({', '.join(type(item).__name__ for item in value)})"
    return f"{'an' if text[0].lower() in 'aeiou' else 'a'} {text}"
