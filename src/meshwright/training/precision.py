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

from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph
from meshwright.spec.placement import Placement, check_placement
from meshwright.spec.plan import Plan, check_plan

AnyPlan = TypeVar("AnyPlan", Plan, Placement, Plan | Placement)


def cast_type(plan: Plan | Placement) -> torch.dtype | None:
    """The type that the plan casts the model to; None where it runs in its own types."""
    values = plan.workload.numbers.values
    return getattr(torch, values) if values in ("bfloat16", "float16") else None


def cast_model(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Cast parameters and buffers in place, as ``model.to(dtype)`` does; whether any was of another type."""
    held = [*model.parameters(), *model.buffers()]
    if all(item.dtype is dtype for item in held if item.is_floating_point()):
        return False
    if any(isinstance(item, FakeTensor) for item in held):
        _replace_fakes(model, dtype)
    else:
        model.to(dtype)
    return True


def _replace_fakes(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Put cast tensors in place of fake ones, which torch cannot cast where they are."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None and value.is_floating_point():
                    if id(value) not in made:
                        cast = value.detach().to(dtype)
                        is_parameter = isinstance(value, torch.nn.Parameter)
                        made[id(value)] = torch.nn.Parameter(cast, value.requires_grad) if is_parameter else cast
                    table[name] = made[id(value)]  # type: ignore[assignment]


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors cast."""
    return pytree.tree_map_only(torch.Tensor, lambda item: item.to(dtype) if item.is_floating_point() else item, batch)


def bind_plan(plan: AnyPlan, given: Graph, cast: Graph) -> AnyPlan:
    """The plan of the ``given`` graph as one of the graph of the ``cast`` model.

    Raises PlanError (or GraphMismatchError) if it is not of the given one, or says something of ops that the cast one
    does not have.
    """
    if isinstance(plan, Plan):
        check_plan(plan, given)
        names_ops = bool(plan.recompute)
    else:
        check_placement(plan, given)
        names_ops = True
    is_same = [layer.name for layer in given.layers] == [layer.name for layer in cast.layers]
    if not is_same or (names_ops and [op.kind for op in given.ops] != [op.kind for op in cast.ops]):
        raise PlanError(
            f"Cast to {plan.workload.numbers.values} the model computes other ops than as it was planned, and the plan "
            "names some of them. Plan the cast model (model.to(torch.bfloat16)), or with --precision amp."
        )
    return replace(plan, graph_hash=cast.content_hash)
