"""Update the stages of a rank one by one, with the one optimizer that the user gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.optimizer_steps import LossScale
from meshwright.runtime.precisions import Masters
from meshwright.spec import PlanError, StageSlice

OptimizerArgument = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer | None]


class StageSteps:
    """Updates the parameters of one stage when called with its number, and clears their gradients.

    Optimizers skip parameters without a gradient, so the gradients of other stages are hidden during the step. A
    parameter of several stages of the rank is updated with the first of them, when its gradient is complete.

    ``stepping``: the stages with an optimizer step in the program; the last one also updates parameters of the
    rank's other stages. ``scales``: by stage, a factor for its gradients. ``rate(stage, updates)``: a factor for the
    learning rates after that number of updates. ``sum_parts(stage)`` sums gradients of which the processes of a team
    hold partial sums. ``clip()``: the factor for all gradients. ``masters``: the tensors that the optimizer updates.
    ``scale``: the loss scale, which may skip a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[int, torch.nn.Parameter],
        stages: Sequence[StageSlice],
        stepping: Sequence[int],
        scales: Mapping[int, float],
        *,
        rate: Callable[[int, int], float] = lambda _stage, _updates: 1.0,
        sum_parts: Callable[[int], None] = lambda _stage: None,
        clip: Callable[[], torch.Tensor] | None = None,
        masters: Masters,
        scale: LossScale | None = None,
    ) -> None:
        self._optimizer, self._masters, self._scale = optimizer, masters, scale
        self._rate, self._sum_parts, self._clip = rate, sum_parts, clip
        self._num_updates = dict.fromkeys(stepping, 0)
        self._scales = scales
        self._trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        held = {
            stage.index: [i for i in stage.parameters if i in parameters and parameters[i].requires_grad]
            for stage in stages
        }
        left = {i for stage, owned in held.items() if stage not in stepping for i in owned}
        self._of_stage = {
            stage: [parameters[i] for i in dict.fromkeys((*held[stage], *(left if stage == stepping[-1] else ())))]
            for stage in stepping
        }

    def __call__(self, stage: int) -> None:
        """Update the parameters of one stage."""
        own = self._of_stage[stage]
        self._sum_parts(stage)
        chosen = {id(parameter) for parameter in own}
        others = [(item, item.grad) for item in self._trained if id(item) not in chosen and item.grad is not None]
        for parameter, _ in others:
            parameter.grad = None
        found = [parameter.grad for parameter in own if parameter.grad is not None]
        if found and self._scales.get(stage, 1.0) != 1.0:
            torch._foreach_mul_(found, self._scales[stage])
        is_left_out = self._scale is not None and self._scale.skips()
        if found and self._clip is not None and not is_left_out:
            coefficient = self._clip()
            for gradient in found:
                own_part(gradient).mul_(coefficient.to(gradient.dtype))
        if self._optimizer is not None and found and not is_left_out:
            rate = self._rate(stage, self._num_updates[stage])
            with self._masters.stepping(own), _scaled_rates(self._optimizer, rate):
                self._optimizer.step()
        self._num_updates[stage] += not is_left_out
        for parameter in own:
            parameter.grad = None
        for parameter, gradient in others:
            parameter.grad = gradient

    @property
    def masters(self) -> list[torch.Tensor]:
        """The master weights that the optimizer updates instead of parameters."""
        return [*self._masters.masters.values()]

    @property
    def optimizer_name(self) -> str:
        """The class of the optimizer; "" on a rank without one."""
        return type(self._optimizer).__name__ if self._optimizer is not None else ""

    @property
    def optimized(self) -> list[int]:
        """The tensor ids of the optimizer's parameters, in the order of its ``state_dict``."""
        ids = {id(item): tensor for tensor, item in self._masters.updated.items()}
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [ids[id(item)] for group in groups for item in group["params"]]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with the keys optimizer, num_updates (by stage), masters and scale.

        Tensors are shards if parameters are sharded.
        """
        found = self._optimizer.state_dict() if self._optimizer is not None else {}
        return {
            "optimizer": tree_map_only(torch.Tensor, own_part, found),
            "num_updates": {str(stage): count for stage, count in self._num_updates.items()},
            "masters": self._masters.state(),
            "scale": self._scale.state() if self._scale is not None else {},
        }

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] = rate

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._num_updates = {stage: state["num_updates"][str(stage)] for stage in self._num_updates}
        self._masters.take_state(state.get("masters", {}))
        if self._scale is not None:
            self._scale.take_state(state["scale"])
        if self._optimizer is None:
            return
        self._optimizer.load_state_dict(state["optimizer"])
        for parameter, held in self._optimizer.state.items():
            for name, value in held.items():
                held[name] = _like(parameter, value)


def _like(parameter: torch.Tensor, value: Any) -> Any:
    """A state of a sharded parameter, in the form that its optimizer keeps."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


@contextmanager
def _scaled_rates(optimizer: torch.optim.Optimizer, scale: float) -> Iterator[None]:
    """Scale the learning rates for one step; afterwards the user's own, which a scheduler may change, are restored."""
    if scale == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _without_closure(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer. Raises PlanError for one whose steps recompute the loss, as L-BFGS's do."""
    closure = inspect.signature(optimizer.step).parameters.get("closure") if optimizer is not None else None
    if closure is not None and closure.default is closure.empty:
        raise PlanError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss once more, but a plan computes "
            "the loss once per step. Choose another optimizer, such as AdamW."
        )
    return optimizer


def own_optimizer(
    optimizer: OptimizerArgument, parameters: list[torch.nn.Parameter], replaced: Mapping[int, torch.Tensor | None]
) -> torch.optim.Optimizer | None:
    """Return the user's optimizer over this rank's ``parameters`` only; None if the rank has no parameters to train.

    ``replaced``: by ``id()`` of a user's parameter, the shard or master weights that replace it; None if other ranks
    update it. Raises PlanError if parameters are missing from the optimizer, if it has state already, or if its steps
    need a closure.
    """
    if not parameters:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        return _without_closure(optimizer(parameters))
    _without_closure(optimizer)
    if any(id(parameter) in replaced for parameter in optimizer.state):
        raise PlanError(
            "The optimizer already has state (it has stepped), but the plan replaces its parameters by shards or "
            "master weights. Make a new optimizer, or plan with --precision float32 and without tensor, context or "
            "expert parallelism."
        )
    own = {id(parameter) for parameter in parameters}
    groups = [
        [replaced.get(id(parameter), parameter) for parameter in group["params"]] for group in optimizer.param_groups
    ]
    known = {id(parameter) for group in groups for parameter in group if parameter is not None}
    if not own <= known:
        raise PlanError(
            f"The optimizer holds {len(known & own)} of this stage's {len(own)} trainable parameters. Make it over "
            "model.parameters(), or pass a function that makes an optimizer from a list of parameters."
        )
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameter for parameter in held if id(parameter) in own]
    return optimizer
