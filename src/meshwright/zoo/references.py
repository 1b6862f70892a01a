"""Model references: from the text that a user types to a module with its batch and loss (`load_model`).

A reference is the name of a shipped shape (``gpt2-small``), a shape file (``my-model.toml``), the configuration of a
Hugging Face model (its ``config.json``, or the folder that holds it), or a function in the user's own file
(``path/to/file.py:function``) that returns ``(module, batch)`` or ``(module, (inputs, targets), loss)``.

Everything is seeded: the same reference gives the same weights and batch in every process. With ``fake=True`` module
and batch are built under torch's FakeTensorMode on the CPU: they have shapes and dtypes, but take no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from meshwright.spec import Graph, ModelReferenceError, own_code
from meshwright.spec.model_files import read_model_file
from meshwright.zoo.gpt import GPTShape
from meshwright.zoo.huggingface import Task, load_huggingface, make_huggingface
from meshwright.zoo.llama import RotaryShape
from meshwright.zoo.model_files_of_zoo import (
    call_function,
    check_result,
    describe,
    importable,
    load_function,
    refuse_unallocated,
    reported,
)
from meshwright.zoo.shape_files import Shape, load_shape, zoo_names
from meshwright.zoo.source import LossOrigin, ModelSource, is_floating_tensor, mean_square_loss

# A vocabulary of this size is taken for bytes.
NUM_BYTES = 256


def load_model(
    reference: str,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    image_size: int | None = None,
    seed: int = 0,
    fake: bool = False,
) -> ModelSource:
    """Build the model that a reference names, with an example batch and its loss.

    Sizes that are None are those of the shape file, the configuration or the defaults of the user's function; given
    sizes are passed to it. Raises ModelReferenceError if the reference names no model or a size is impossible,
    DocumentError for a damaged file.
    """
    options = {"batch_size": batch_size, "sequence_length": sequence_length, "image_size": image_size}
    for name, value in options.items():
        if value is not None and value < 1:
            raise ModelReferenceError(f"{name}={value} was given; expected at least 1.")
    path, separator, function = reference.rpartition(":")
    if separator and path.endswith(".py"):
        return _load_from_file(reference, Path(path).expanduser(), function, options, seed=seed, fake=fake)
    if reference.endswith(".py"):
        raise ModelReferenceError(
            f"{reference!r} names a file but no function in it. Give {reference}:function, where function() returns "
            "(module, batch) or (module, (inputs, targets), loss)."
        )
    held = None if reference in zoo_names() else read_model_file(reference)
    if held is not None:
        return _load_from_data(reference, held, options, seed=seed, fake=fake)
    shape = resize(load_shape(reference), reference, options)
    with seeded(seed), building(fake=fake), _sizes_reported(reference):
        inputs, targets = shape.batch()
        return ModelSource(
            name=reference,
            model=shape.build(),
            inputs=inputs,
            targets=targets,
            loss=shape.loss,
            reads_bytes=isinstance(shape, GPTShape | RotaryShape) and shape.vocabulary == NUM_BYTES,
        )


_Sized = TypeVar("_Sized", bound=Shape | Task)


def resize(shape: _Sized, reference: str, options: dict[str, int | None]) -> _Sized:
    """Return a shape or task with the sizes of ``options`` that are not None.

    Raises ModelReferenceError, which names ``reference``, for a size that the model does not have.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if not hasattr(shape, name):
            raise ModelReferenceError(
                f"{reference!r} was asked for with {name}={value}, but a {type(shape).__name__.removesuffix('Shape')} "
                f"has no {name.replace('_', ' ')}. Leave the option out."
            )
    return replace(shape, **given)


@contextmanager
def _sizes_reported(reference: str) -> Iterator[None]:
    """Turn what torch raises for sizes that no tensor can have, or this memory cannot hold, into one paragraph."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError, ArithmeticError) as problem:
        first = (str(problem).splitlines() or [type(problem).__name__])[0][:200]
        raise ModelReferenceError(
            f"{reference!r} describes a model or a batch that torch cannot build ({first}). Check the sizes of the "
            "model and of the batch, and choose smaller ones."
        ) from None


def _load_from_data(
    reference: str, held: Graph | dict[str, Any], options: dict[str, int | None], *, seed: int, fake: bool
) -> ModelSource:
    if isinstance(held, Graph):
        raise ModelReferenceError(
            f"{reference} is a stored graph, which has no code and no weights. Give the model's own reference."
        )
    task = resize(load_huggingface(held, reference), reference, options)
    with seeded(seed), building(fake=fake):
        model, inputs, targets = make_huggingface(task, reference, fake=fake)
    return ModelSource(name=reference, model=model, inputs=inputs, targets=targets, loss=task.loss)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator for the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def building(*, fake: bool) -> Any:
    """Return a context manager for building a model: a FakeTensorMode with torch.export's settings if ``fake``."""
    if not fake:
        return nullcontext()
    return FakeTensorMode(
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True),
        static_shapes=True,
    )


def _load_from_file(
    reference: str, path: Path, name: str, options: dict[str, int | None], *, seed: int, fake: bool
) -> ModelSource:
    with seeded(seed):
        # Outside of the fake mode: what a file imports may keep tensors, which must stay real for the next user.
        function = load_function(path, name)
        mode = building(fake=fake)
        with mode:
            result = call_function(function, path, options)
        line = own_code.first_line(function, path)
        model, inputs, targets, loss = check_result(result, f"{path}:{name}")
        refuse_unallocated(model, inputs, line)
        if fake:
            make_fake(model, mode)
            inputs, targets = as_fake((inputs, targets), mode)
        probe = mode if fake else building(fake=True)
        told = f"The model of {path}:{name} raised, on its own batch,"
        with importable(path.parent), reported(path, told, otherwise=line):
            outputs = run_fake(model, inputs, probe)
            with probe:
                value = None if loss is None else loss(outputs, *as_fake(targets, probe))
        loss, origin = _choose_loss(loss, value, outputs, f"{path}:{name}")
    return ModelSource(name=reference, model=model, inputs=inputs, targets=targets, loss=loss, loss_origin=origin)


def as_fake(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a batch (any nesting) with its tensors replaced by fake tensors of ``mode``."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    return pytree.tree_map_only(torch.Tensor, convert, batch)


def run_fake(model: nn.Module, inputs: Any, mode: FakeTensorMode) -> Any:
    """Run a model on fake tensors, with gradients enabled, and return its outputs.

    The model and the state of the random number generator do not change.
    """
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    arguments, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with mode, torch.enable_grad(), warnings.catch_warnings():
        # A trial run; whatever the model warns of, it does again when it is trained.
        warnings.simplefilter("ignore")
        return functional_call(model, as_fake(state, mode), as_fake(arguments, mode), as_fake(keywords, mode))


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace real parameters and buffers of a model by fake tensors, in place; tied parameters stay tied."""
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in holders:
            tensors.update(as_fake(dict(tensors), mode))


def _choose_loss(
    loss: Callable[..., torch.Tensor] | None, value: Any, outputs: Any, where: str
) -> tuple[Callable[..., torch.Tensor] | None, LossOrigin]:
    """The given loss if its ``value`` is a scalar, the module's own if it computes one, or the stand-in."""
    if loss is not None:
        if not (is_floating_tensor(value) and value.ndim == 0):
            raise ModelReferenceError(
                f"The loss of {where} returned {describe(value)}; expected a floating tensor without dims (a scalar). "
                "Reduce it, for instance to its mean."
            )
        return loss, "given"
    computed = own_code.own_loss(outputs)
    if is_floating_tensor(computed) and computed.ndim == 0:
        return None, "module"
    if not any(is_floating_tensor(item) for item in pytree.tree_leaves(outputs)):
        raise ModelReferenceError(
            f"{where} gives no loss, and its module returns {describe(outputs)}, from which no loss can be computed. "
            "Return (module, (inputs, targets), loss)."
        )
    return mean_square_loss, "stand-in"
