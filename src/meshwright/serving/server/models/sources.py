"""Load a model reference: `load_source` returns what is called for a batch.

Zoo names, shape files and configurations of Hugging Face models are loaded by `zoo.load_model`. A function of a user's
file returns what capture accepts, (module, batch) or (module, (inputs, targets), loss), or a module alone; then the
deployment names its inputs. Weights are seeded like the zoo's; a function loads its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.server.models.programs import load_program
from meshwright.serving.server.models.runnable import Arrays
from meshwright.serving.server.models.tensors import Arguments, as_arguments, parameters_of, to_tensor
from meshwright.spec import ServedModel, ServingError, TensorSpec, own_code
from meshwright.zoo import load_model
from meshwright.zoo.model_files_of_zoo import call_function, check_result, load_function, refuse_unallocated
from meshwright.zoo.references import seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A loaded model: a callable for batches, with example ``arguments``, or None if there is no example.

    ``fixed`` is the only batch size that it runs, or 0 if it runs all sizes up to ``largest``.
    """

    call: Callable[..., Any]
    arguments: Arguments | None
    platform: str
    fixed: int = 0
    largest: float = math.inf


def load_source(model: ServedModel, device: torch.device) -> Source:
    """Load a deployment's model onto a device, in evaluation mode.

    Raises ServingError, and the zoo's errors for its references.
    """
    reference = model.model or ""
    if reference.endswith(".pt2"):
        if model.sizes:
            raise ServingError(
                f"Model {model.name!r}: {reference} has its own sizes. Remove {' and '.join(model.sizes)} from the "
                "deployment."
            )
        program = load_program(Path(reference), device)
        return Source(
            call=program.call,
            arguments=program.arguments,
            platform="torch_export",
            fixed=program.fixed,
            largest=program.largest,
        )
    module, inputs = _load_module(model, reference)
    module.to(device).eval()
    if inputs is None:
        return Source(call=module, arguments=None, platform="torch")
    args, kwargs = as_arguments(inputs)
    arguments = Arguments(args, kwargs, parameters_of(module, len(args)))
    return Source(call=module, arguments=arguments, platform="torch")


def zeros_of(specs: tuple[TensorSpec, ...], count: int) -> list[torch.Tensor]:
    """Return a batch of ``count`` samples of zeros, one tensor per spec."""
    arrays: Arrays = [np.zeros((count, *item.shape), NUMPY_TYPES[item.datatype]) for item in specs]
    return [to_tensor(array, item.datatype) for array, item in zip(arrays, specs, strict=True)]


def _load_module(model: ServedModel, reference: str) -> tuple[nn.Module, Any]:
    """Return a module and example inputs; None if a function returned none."""
    own = own_code.split_reference(reference)
    if own is None:
        sizes: dict[str, Any] = dict(model.sizes)
        source = load_model(reference, **sizes)
        return source.model, source.inputs
    path, name = own
    with seeded(0):
        function = load_function(path, name)
        result = call_function(function, path, dict(model.sizes))
    if isinstance(result, nn.Module):
        if not model.inputs:
            raise ServingError(
                f"Model {model.name!r}: {reference} returned a module alone, so its inputs are unknown. Give "
                "the deployment's `inputs`, or return (module, batch)."
            )
        module, inputs = result, None
    else:
        module, inputs, _, _ = check_result(result, reference)
    refuse_unallocated(module, inputs, own_code.first_line(function, path))
    return module, inputs
