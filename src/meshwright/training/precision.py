"""A model in the precision of its plan: cast where the plan keeps weights in two bytes, and captured once more.

A plan is bound to the graph of the model as it is given. The cast model is another graph, of the same layers and mostly
of the same ops: its parts are what runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from meshwright.runtime.held import replace_held
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan

AnyPlan = TypeVar("AnyPlan", bound=Plan | Placement)


def cast_type(plan: Plan | Placement) -> torch.dtype | None:
    """The type that the plan casts the model to; None where it runs in its own types."""
    values = plan.workload.numbers.values
    return getattr(torch, values) if values in ("bfloat16", "float16") else None


def is_cast(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether all that a model holds is of the type already."""
    return all(item.dtype is dtype for item in (*model.parameters(), *model.buffers()) if item.is_floating_point())


def cast_model(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers in place, as ``model.to(dtype)`` does; in place of fake ones come others."""
    if any(isinstance(item, FakeTensor) for item in model.parameters()):
        replace_held([model], lambda item: item.detach().to(dtype) if item.is_floating_point() else item)
    else:
        model.to(dtype)


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors cast."""
    return pytree.tree_map_only(torch.Tensor, lambda item: item.to(dtype) if item.is_floating_point() else item, batch)


def bind_plan(plan: AnyPlan, given: Graph, cast: Graph) -> AnyPlan:
    """The plan, which fits the ``given`` graph, as one of the graph of the ``cast`` model.

    Raises PlanError if it says something of ops that the cast model does not have.
    """
    names_ops = isinstance(plan, Placement) or bool(plan.recompute)
    is_same = [layer.name for layer in given.layers] == [layer.name for layer in cast.layers]
    if not is_same or (names_ops and [op.kind for op in given.ops] != [op.kind for op in cast.ops]):
        raise PlanError(
            f"Cast to {plan.workload.numbers.values} the model computes other ops than as it was planned, and the plan "
            "names some of them. Plan the cast model (model.to(torch.bfloat16)), or with --precision amp."
        )
    return replace(plan, graph_hash=cast.content_hash)
