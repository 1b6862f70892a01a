"""Bring a model into the precision of its plan: cast it if weights have two bytes, and capture it again.

    mixed, bfloat16     parameters and persistent buffers are cast. Other buffers are tables that the model computed,
                        such as the frequencies of rotary embeddings; they are not cast, unless an op would get inputs
                        of two floating types
    amp, amp-float16    the model is captured under autocast, if it reads types of tensors

A plan is for the graph of the original model. In the plan's precision the model has another graph, of mostly the same
ops. That graph gets the layers of the original graph, so that the plan's stages stay the same although tensors have
other sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from meshwright.capture import Captured
from meshwright.cost.traits import family_of
from meshwright.runtime.local_models import replace_held
from meshwright.spec import FLOAT_DTYPES, CaptureError, Graph, Placement, Plan, PlanError

AnyPlan = TypeVar("AnyPlan", bound=Plan | Placement)
# A pair of inputs and targets, as `capture_model` takes them.
Batch = tuple[Any, Any]
Capture = Callable[..., Captured]
# Families of ops whose floating inputs must have one type in torch.
OF_ONE_TYPE = ("product", "convolution", "attention", "recurrent", "norm")


def cast_type(plan: Plan | Placement) -> torch.dtype | None:
    """Return the type to which the plan casts the model; None if the model keeps its own types."""
    values = plan.workload.numbers.values
    return getattr(torch, values) if values in ("bfloat16", "float16") else None


def recaptures(plan: Plan | Placement, model: torch.nn.Module, graph: Graph) -> bool:
    """Return whether a model has to be captured again, because its graph changes in the precision of its plan.

    ``graph`` is the graph of the model as it is.
    """
    if (dtype := cast_type(plan)) is not None:
        return any(item.dtype is not dtype for item in _castable(model) if item.is_floating_point())
    # Without such an argument no op has its own type.
    return bool(plan.workload.numbers.autocast) and any("dtype" in dict(op.attributes) for op in graph.ops)


def capture_in_precision(
    plan: Plan | Placement, model: torch.nn.Module, batch: Batch, given: Captured, capture: Capture
) -> tuple[Captured, Batch]:
    """Cast the model in place if its plan requires that, and capture it again; for a model that `recaptures`.

    ``batch``: an example (inputs, targets). ``given``: the capture of the original model. ``capture(inputs, targets=,
    autocast=)`` captures the model. Returns the new capture, and the batch in the types that the model takes. Raises
    CaptureError as ``capture`` does.
    """
    dtype = cast_type(plan)
    if dtype is None:
        autocast = getattr(torch, plan.workload.numbers.autocast)
        made = capture(batch[0], targets=batch[1], autocast=autocast)
    else:
        _cast(model, dtype, _castable(model))
        inputs, targets = batch = cast_batch(batch, dtype)
        try:
            made = capture(inputs, targets=targets)
            is_whole = not _mixes_types(made.graph)
        except CaptureError:
            is_whole = False
        if not is_whole:
            _cast(model, dtype, [*model.parameters(), *model.buffers()])
            made = capture(inputs, targets=targets)
    if _first_difference(given.graph, made.graph) is None:
        made = replace(made, graph=replace(made.graph, layers=given.graph.layers))
    return made, batch


def _mixes_types(graph: Graph) -> bool:
    """Whether some op mixes floating types where torch needs one; tracing does not check it."""
    for op in graph.ops:
        if family_of(op) in OF_ONE_TYPE:
            types = {graph.tensors[i].dtype for i in op.inputs} & FLOAT_DTYPES
            if len(types) > 1:
                return True
    return False


def _castable(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and persistent buffers."""
    kept = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    return [*model.parameters(), *(item for item in model.buffers() if id(item) in kept)]


def _cast(model: torch.nn.Module, dtype: torch.dtype, items: list[torch.Tensor]) -> None:
    """Cast some tensors of a model in place."""
    floating = {id(item) for item in items if item.is_floating_point()}
    if any(isinstance(item, FakeTensor) for item in model.parameters()):
        # The data of a fake tensor cannot change its type.
        replace_held([model], lambda item: item.detach().to(dtype) if id(item) in floating else item)
        return
    for item in items:
        if id(item) in floating:
            item.data = item.data.to(dtype)


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch (any nested structure) with its floating-point tensors cast."""
    return pytree.tree_map_only(torch.Tensor, lambda item: item.to(dtype) if item.is_floating_point() else item, batch)


def bind_plan(plan: AnyPlan, given: Graph, made: Graph) -> AnyPlan:
    """Return the plan for the graph ``given``, changed to a plan for the graph ``made`` in the plan's precision.

    Raises PlanError if the graph ``made`` has other layers, or other ops where the plan refers to ops.
    """
    different = _first_difference(given, made)
    has_layers = [layer.name for layer in given.layers] == [layer.name for layer in made.layers]
    if different is not None and (isinstance(plan, Placement) or plan.recompute or not has_layers):
        what = "layers" if not has_layers else "ops of the model"
        raise PlanError(
            f"In {plan.workload.precision} the {what} differ from those of the plan: {different}. Plan with "
            f"--precision float32, or {'another' if plan.workload.numbers.autocast else 'amp'}."
        )
    return replace(plan, graph_hash=made.content_hash)


def _first_difference(given: Graph, made: Graph) -> str | None:
    """The first op of another kind; None if all are equal."""
    for one, other in zip_longest(given.ops, made.ops):
        if one is None or other is None or one.kind != other.kind:
            kinds = [f"{op.kind} ({op.name})" if op is not None else "nothing" for op in (one, other)]
            return f"it computes {kinds[1]} in place of {kinds[0]}"
    return None
