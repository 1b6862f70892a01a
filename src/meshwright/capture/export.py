"""nn.Module + example batch → `Trace`: torch.export's training form, flattened over the user's own names.

Steps: wrap model and loss in one module of flat tensors; swap weights that were never allocated (meta or fake) for fake
CPU tensors, because losses on device "meta" lose their backward pass; export with dim 0 of the batch symbolic, repeated
blocks traced once (`repeats`); rewrite the result as one flat graph. The training form keeps in-place writes and the
user's own Parameter objects; decomposed forms break the backward pass of batch norm (own experiments, torch 2.13).
"""

from __future__ import annotations

from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.capture.flatten import flatten_export
from meshwright.capture.inputs import BatchLayout, describe_batch
from meshwright.capture.refusals import (
    StateWatch,
    explain_failure,
    note_checkpoints,
    note_data_access,
    refuse_backward_hooks,
    refuse_custom_gradients,
    refuse_data_access,
)
from meshwright.capture.repeats import NotRepeatableError, Repeats, check_repeats, find_repeats
from meshwright.capture.surroundings import allocated, as_untraced, kept_buffers, training_flags
from meshwright.capture.trace import Trace
from meshwright.capture.values import Value
from meshwright.spec import CaptureError
from meshwright.spec.own_code import own_loss

if TYPE_CHECKING:
    from collections.abc import Callable


class Whole(nn.Module):
    """Model and loss as one module over the batch's flat tensors; notes what forward changes in Python."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, layout: BatchLayout, *, training: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.plan = _WholePlan(model, loss, layout, training, [])

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The loss; where there is none, in training the model's own, else its output."""
        plan = self.plan
        args, kwargs, targets = plan.layout.rebuild(tensors)
        # Made here, because export has exchanged the parameters and some modules (LSTM) keep references to them.
        watch = StateWatch(plan.model)
        bound = [(name, module, dict(module._buffers)) for name, module in plan.model.named_modules()]
        with as_untraced(tensors):
            output = self.model(*args, **kwargs)
        plan.changes.extend(watch.changes())
        for name, module, buffers in bound:
            _write_back(name, module, buffers)
        if plan.loss is not None:
            return plan.loss(output, *targets)
        return own_loss(output) if plan.training else output


@dataclass(frozen=True, slots=True)
class _WholePlan:
    """What `Whole` needs beside its submodule (kept apart, so that the loss is no submodule)."""

    model: nn.Module
    loss: Callable[..., Any] | None
    layout: BatchLayout
    training: bool
    changes: list[tuple[str, str]]


def _write_back(name: str, module: nn.Module, before: dict[str, torch.Tensor | None]) -> None:
    """Turn a re-bound buffer into a write: export notices re-binding in the outermost module only."""
    for key, value in module._buffers.items():
        old = before.get(key)
        if value is old:
            continue
        if value is None or old is None or value.shape != old.shape or value.dtype != old.dtype:
            raise CaptureError(
                f"Forward binds the buffer {key!r} of module {name or 'the model itself'!r} to a value of another "
                "shape or dtype; a buffer must keep its looks. Register it in __init__ with the shape and dtype that "
                "it has later."
            )
        old.copy_(value.detach())
        module._buffers[key] = old


def trace_model(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Callable[..., Any] | None,
    *,
    training: bool,
    symbolic: bool = True,
    shorten: bool = True,
) -> Trace:
    """Trace the model; ``symbolic`` leaves the batch open, ``shorten`` traces each distinct block once.

    Raises CaptureError for everything that would not be captured faithfully.
    """
    if training:
        refuse_backward_hooks(model)
        _refuse_loss_weights(loss)
    layout, tensors = describe_batch(model.forward, inputs, targets)
    tensors, batched = _example(tensors, symbolic)
    first_name = _first_names(model)
    with training_flags(model, training):
        try:
            repeats = find_repeats(model) if shorten else []
            module, pairs, checkpoints = _export(model, loss, layout, tensors, batched, repeats, training=training)
            flat = flatten_export(module, first_name, pairs)
        except NotRepeatableError:
            module, pairs, checkpoints = _export(model, loss, layout, tensors, batched, [], training=training)
            flat = flatten_export(module, first_name, pairs)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return Trace(
        graph=flat.graph,
        layout=layout,
        state=state,
        aliases=_aliases(first_name),
        persistent=frozenset(model.state_dict(keep_vars=True)),
        constants=flat.constants,
        branches=flat.branches,
        values=tuple(Value.of(tensor.detach()) for tensor in tensors),
        batched=_open_dimensions(module),
        batch_size=_batch_size(tensors),
        training=training,
        has_loss=_has_loss(module, loss),
        returned=flat.returned if loss is None else None,
        checkpoints=tuple(dict.fromkeys(checkpoints)),
    )


def _export(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    layout: BatchLayout,
    tensors: tuple[torch.Tensor, ...],
    batched: tuple[bool, ...],
    repeats: list[Repeats],
    *,
    training: bool,
) -> tuple[Any, list[tuple[str, str]], list[str]]:
    """Export model and loss.

    Returns the exported module, the two traced blocks of every repeated group, and who calls torch.utils.checkpoint.
    """
    dynamic = tuple({0: torch.export.Dim.AUTO} if grows else None for grows in batched)
    whole = Whole(model, loss, layout, training=training)
    watch = StateWatch(model)
    with ExitStack() as stack:
        fake_tensors = stack.enter_context(allocated(model, tensors))
        if model.training:
            stack.enter_context(refuse_custom_gradients(model))
        places = stack.enter_context(note_data_access(model))
        checkpoints = stack.enter_context(note_checkpoints(model))
        for group in repeats:
            stack.enter_context(group.installed())

        def attempt() -> Any:
            return torch.export.export(
                whole, fake_tensors, strict=False, dynamic_shapes={"tensors": dynamic} if any(batched) else None
            )

        try:
            # Where a model depends on data, export prints all that it has traced so far.
            stack.enter_context(redirect_stderr(StringIO()))
            program = attempt()
            if whole.plan.changes:
                # What the first forward sets, as tables that are made when they are needed, may stay from then on.
                watch.restore()
                whole.plan.changes.clear()
                _run_once(model, layout, fake_tensors)
                program = attempt()
            module = program.module(check_guards=False)
        except (CaptureError, NotRepeatableError):
            raise
        except Exception as error:
            if places and "constant's list" in str(error):
                raise refuse_data_access(places[0]) from error
            raise explain_failure(error, model) from error
        finally:
            watch.restore()
    watch.refuse(whole.plan.changes)
    if places and any(isinstance(value, FakeTensor) for value in program.constants.values()):
        raise refuse_data_access(places[0])
    check_repeats(module, repeats)
    return module, [(group.traced[0], group.traced[1]) for group in repeats if group.num_skipped], checkpoints


def _run_once(model: nn.Module, layout: BatchLayout, tensors: tuple[torch.Tensor, ...]) -> None:
    """One forward, after which buffers and random numbers are as before; attributes are what it made them."""
    args, kwargs, _ = layout.rebuild(tensors)
    with torch.no_grad(), kept_buffers(model), as_untraced(tensors):
        model(*args, **kwargs)


def _example(tensors: tuple[torch.Tensor, ...], symbolic: bool) -> tuple[tuple[torch.Tensor, ...], tuple[bool, ...]]:
    """The batch to export with, and which of its tensors are left open in dim 0."""
    batch_size = _batch_size(tensors)
    batched = tuple(symbolic and tensor.ndim > 0 and tensor.shape[0] == batch_size for tensor in tensors)
    if batch_size == 1:
        # Export bakes a size of 1; two copies of the sample leave it open.
        tensors = tuple(torch.cat([t, t]) if grows else t for t, grows in zip(tensors, batched, strict=True))
    return _distinct(tensors), batched


def _distinct(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Export takes one tensor that is given twice for one input: give copies."""
    seen: set[int] = set()
    made = []
    for tensor in tensors:
        made.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return tuple(made)


def _batch_size(tensors: tuple[torch.Tensor, ...]) -> int:
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)


def _refuse_loss_weights(loss: Callable[..., Any] | None) -> None:
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise CaptureError(
            f"The loss {type(loss).__name__} has parameters of its own, which no optimizer would reach; make it part "
            "of the model."
        )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer → the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _aliases(first_name: dict[str, str]) -> dict[str, tuple[str, ...]]:
    aliases: dict[str, tuple[str, ...]] = {}
    for name, first in first_name.items():
        if name != first:
            aliases[first] = (*aliases.get(first, ()), name)
    return aliases


def _open_dimensions(module: Any) -> tuple[bool, ...]:
    """Which inputs the export left open in dim 0."""
    looks = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(look.ndim > 0 and isinstance(look.shape[0], torch.SymInt) for look in looks)


def _has_loss(module: Any, loss: Callable[..., Any] | None) -> bool:
    """A model that returns one scalar computes its loss itself."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    looks = [leaf.meta.get("val") for leaf in output.all_input_nodes]
    scalar = len(looks) == 1 and isinstance(looks[0], torch.Tensor) and looks[0].ndim == 0
    if loss is not None and not (scalar and looks[0].dtype.is_floating_point):
        raise CaptureError("The loss must return one floating-point scalar; reduce it with mean() or sum().")
    return scalar and looks[0].dtype.is_floating_point
