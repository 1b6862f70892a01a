"""A user's functions around a model: ``preprocess`` and ``postprocess``, each given as ``file.py:function``.

preprocess(inputs)     takes a dict of tensors (batch, ...) by name, and returns the model's arguments: a tensor, a
                       tuple, or a dict of keyword arguments
postprocess(outputs)   takes the model's result, and returns tensors of the same batch: one, a tuple, or a dict by name

They run in the worker, on its device. Their exceptions are reported with the line in the user's file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.spec import ServingError, own_code
from meshwright.spec.own_code import folder_at

Hook = Callable[[Any], Any]


def load_hook(reference: str | None, expected: str) -> Hook | None:
    """Load a function ``file.py:function``; return None without a reference.

    ``expected`` describes for error messages what the function does. Raises ServingError.
    """
    if reference is None:
        return None
    split = own_code.split_reference(reference)
    if split is None:
        raise ServingError(f"{reference!r} is not a reference to a function. Give file.py:function, which {expected}.")
    path, name = split
    function = own_code.load_function(path, name, expected=expected, error=ServingError)
    folder = folder_at(path.parent)

    def call(value: Any) -> Any:
        with folder.importable(), own_code.reported(path, f"{name}() raised", ServingError):
            return function(value)

    return call
