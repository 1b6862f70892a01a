"""`trace_model`: trace a module on an example batch as a `FlatTrace`; `BatchLayout`: how batches are flattened.

Steps:

1. Wrap model and loss in one module whose arguments are the batch's tensors.
2. Replace weights without data (meta or fake) by fake CPU tensors, because losses on device "meta" lose their backward
   pass.
3. Export with dim 0 of the batch symbolic; trace repeated blocks once (`repeats`).
4. Rewrite the result as one flat graph, with the model's own names of parameters and buffers.

The training form of torch.export is used: it keeps in-place writes and the model's own Parameter objects. Decomposed
forms break the backward pass of batch norm (own experiments, torch 2.13).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from meshwright.capture.flatten import flatten_export
from meshwright.capture.graph_walk import FlatTrace
from meshwright.capture.refusals import (
    StateWatch,
    explain_failure,
    note_checkpoints,
    note_data_access,
    refuse_backward_hooks,
    refuse_custom_gradients,
    refuse_data_access,
)
from meshwright.capture.repeats import NotRepeatableError, Repeats, check_repeats, find_repeats, watch_numbers
from meshwright.capture.surroundings import allocated, as_untraced, kept_buffers, training_flags
from meshwright.capture.value_looks import ValueLooks
from meshwright.spec import CaptureError
from meshwright.spec.own_code import own_loss


# A batch is what the model is called with (a tensor, a tuple of positional arguments or a dict of keyword arguments)
# and the targets of the loss. Its tensors, in `torch.utils._pytree` order, are the graph's inputs. Everything else in
# it (flags, None) is part of the capture and must be the same in every later batch.
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The nested structure of a batch: (args, kwargs, targets) as flattened by `torch.utils._pytree`.

    ``names`` and ``positions``: the name of each tensor, and its position among the leaves. ``fixed``: (position,
    value) of each leaf that is not a tensor; every batch must have the same values.
    """

    spec: pytree.TreeSpec
    names: tuple[str, ...]
    positions: tuple[int, ...]
    fixed: tuple[tuple[int, Any], ...]

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Return (args, kwargs, targets) with ``tensors``, in the order of ``names``, at their positions."""
        leaves: list[Any] = [None] * (len(self.positions) + len(self.fixed))
        for position, value in (*self.fixed, *zip(self.positions, tensors, strict=True)):
            leaves[position] = value
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, targets

    def flatten(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, ...]:
        """Return the batch's tensors in the order of ``names``, which is that of the graph's inputs.

        Raises CaptureError if the batch has another structure, or other values beside tensors, than the captured one.
        """
        leaves, spec = pytree.tree_flatten(split_batch(inputs, targets))
        if spec != self.spec:
            raise CaptureError(
                f"A batch of the structure {spec} was given, but the model was captured with {self.spec}. Give batches "
                "of the captured structure, or capture the model with an example batch like this one."
            )
        for position, value in self.fixed:
            if isinstance(leaves[position], torch.Tensor) or leaves[position] != value:
                raise CaptureError(
                    f"The batch holds {leaves[position]!r} where the model was captured with {value!r}; such values "
                    "are part of the captured graph. Capture the model with this value."
                )
        return tuple(_tensor(leaves[position], name) for position, name in zip(self.positions, self.names, strict=True))


def split_batch(inputs: Any, targets: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return (args, kwargs, targets) for inputs and targets as a user passes them.

    Inputs in a dict become kwargs, those in a tuple or list become args, anything else becomes a single argument.
    Targets become a tuple.
    """
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
    return args, kwargs, tuple(targets) if isinstance(targets, tuple | list) else (targets,)


def describe_batch(
    forward: Callable[..., Any], inputs: Any, targets: Any
) -> tuple[BatchLayout, tuple[torch.Tensor, ...]]:
    """Return the layout of an example batch, and its tensors.

    Raises CaptureError if the batch holds no tensor, or if ``forward`` cannot be called with it.
    """
    args, kwargs, targets = split_batch(inputs, targets)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs, targets))
    arguments = _argument_names(forward, args, kwargs)
    tensors = [(i, path, leaf) for i, (path, leaf) in enumerate(paths) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise CaptureError("The example batch holds no tensor; give the tensors with which the model is called.")
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
            "arguments or a dict of keyword arguments that the model's forward accepts."
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


class ModelWithLoss(nn.Module):
    """Model and loss as one module whose arguments are the batch's tensors.

    ``forward`` also records the Python attributes of the model that it changes.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, layout: BatchLayout, *, takes_own_loss: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.plan = _WholePlan(model, loss, layout, takes_own_loss, [])

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the loss; without a loss function, the model's own loss if ``takes_own_loss``, else its output."""
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
        return own_loss(output) if plan.takes_own_loss else output


@dataclass(frozen=True, slots=True)
class _WholePlan:
    """What `ModelWithLoss` needs besides its submodule (kept separately, so that the loss is not a submodule)."""

    model: nn.Module
    loss: Callable[..., Any] | None
    layout: BatchLayout
    takes_own_loss: bool
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
                "shape or dtype; a buffer must keep both. Register it in __init__ with the shape and dtype that "
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
    takes_own_loss: bool = False,
    symbolic: bool = True,
    shorten: bool = True,
) -> FlatTrace:
    """Trace a model and its loss on an example batch.

    ``takes_own_loss``: if no loss is given and the model's outputs have a scalar ``loss``, the graph returns that loss
    alone (`own_loss`). ``symbolic``: leave the batch size open. ``shorten``: trace only two of a group of equal blocks.
    Raises CaptureError for a model whose graph would not compute the same as the model.
    """
    if training:
        refuse_backward_hooks(model)
        _refuse_loss_weights(loss)
    layout, tensors = describe_batch(model.forward, inputs, targets)
    tensors, batched = _example(tensors, symbolic)
    first_name = _first_names(model)
    with training_flags(model, training):
        try:
            found = _export(model, loss, layout, tensors, batched, takes_own_loss=takes_own_loss, shorten=shorten)
            flat = flatten_export(found.module, first_name, found.pairs)
        except NotRepeatableError:
            found = _export(model, loss, layout, tensors, batched, takes_own_loss=takes_own_loss, shorten=False)
            flat = flatten_export(found.module, first_name, found.pairs)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return FlatTrace(
        graph=flat.graph,
        layout=layout,
        state=state,
        aliases=_aliases(first_name),
        persistent=frozenset(model.state_dict(keep_vars=True)),
        constants=flat.constants,
        branches=flat.branches,
        values=tuple(ValueLooks.of(tensor.detach()) for tensor in tensors),
        batched=_open_dimensions(found.module),
        batch_size=_batch_size(tensors),
        training=training,
        has_loss=_has_loss(found.module, loss),
        returned=flat.returned if loss is None else None,
        checkpoint=found.checkpoints[0] if found.checkpoints else "",
    )


class _Exported(NamedTuple):
    """What an export gave: the module, the two traced blocks of every repeated group, and what was noted meanwhile.

    ``changes`` are the attributes that forward changed, ``checkpoints`` the places that call torch.utils.checkpoint.
    """

    module: Any
    pairs: list[tuple[str, str]]
    changes: list[tuple[str, str]]
    checkpoints: list[str]


def _export(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    layout: BatchLayout,
    tensors: tuple[torch.Tensor, ...],
    batched: tuple[bool, ...],
    *,
    takes_own_loss: bool,
    shorten: bool,
) -> _Exported:
    """Export model and loss, and once more if what the first forward sets may stay; the model is as before."""
    watch = StateWatch(model)

    def attempt() -> _Exported:
        whole = ModelWithLoss(model, loss, layout, takes_own_loss=takes_own_loss)
        return _attempt(whole, tensors, batched, find_repeats(model) if shorten else [])

    try:
        found = attempt()
        if found.changes:
            watch.restore()
            if _sets_tables_alone(model, layout, tensors, watch):
                found = attempt()
    finally:
        watch.restore()
    watch.refuse(found.changes)
    return found


def _attempt(
    whole: ModelWithLoss, tensors: tuple[torch.Tensor, ...], batched: tuple[bool, ...], repeats: list[Repeats]
) -> _Exported:
    dynamic = tuple({0: torch.export.Dim.AUTO} if grows else None for grows in batched)
    model = whole.model
    with ExitStack() as stack:
        fake_tensors = stack.enter_context(allocated(model, tensors))
        if model.training:
            stack.enter_context(refuse_custom_gradients(model))
        places = stack.enter_context(note_data_access(model))
        checkpoints = stack.enter_context(note_checkpoints(model))
        stack.enter_context(watch_numbers(repeats))
        for group in repeats:
            stack.enter_context(group.installed())
        try:
            # Where a model depends on data, export prints all that it has traced so far.
            stack.enter_context(redirect_stderr(StringIO()))
            program = torch.export.export(
                whole, fake_tensors, strict=False, dynamic_shapes={"tensors": dynamic} if any(batched) else None
            )
            module = program.module(check_guards=False)
        except (CaptureError, NotRepeatableError):
            raise
        except Exception as error:
            if places and "constant's list" in str(error):
                raise refuse_data_access(places[0]) from error
            raise explain_failure(error, model) from error
    if places and any(isinstance(value, FakeTensor) for value in program.constants.values()):
        raise refuse_data_access(places[0])
    check_repeats(module, repeats)
    pairs = [(group.traced[0], group.traced[1]) for group in repeats if group.num_skipped]
    return _Exported(module, pairs, whole.plan.changes, checkpoints)


def _sets_tables_alone(
    model: nn.Module, layout: BatchLayout, tensors: tuple[torch.Tensor, ...], watch: StateWatch
) -> bool:
    """Run a forward, which sets attributes; whether none of them was computed from weights or the batch.

    These are fake meanwhile, so what comes from them is, too; a table that is made of numbers is real.
    """
    try:
        with allocated(model, tensors, always=True) as fakes, torch.no_grad(), kept_buffers(model), as_untraced(fakes):
            args, kwargs, _ = layout.rebuild(fakes)
            model(*args, **kwargs)
    except Exception:
        # A forward that asks for values; what it sets depends on them.
        return False
    modules = dict(model.named_modules())
    made = [getattr(modules[name], key, None) for name, key in watch.changes()]
    return not any(isinstance(item, FakeTensor) for item in pytree.tree_leaves(made))


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
        raise CaptureError(
            "The loss does not return one floating-point scalar (a tensor without dims); reduce it with mean() or "
            "sum()."
        )
    return scalar and looks[0].dtype.is_floating_point
