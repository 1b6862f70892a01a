"""Updates on the host: the optimizer over pieces whose gradients came down, with the states in host memory.

It is the user's own optimizer, over the host's copies of the parameters or their master weights. If torch has one fused
pass over the elements on a processor, that is used, unless the user chose otherwise. Gradients on the device stay as
summed: the factors for clipping and for the loss scale are applied here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.runtime.offload.pieces import HostedPiece
from meshwright.runtime.offload.states import PieceStates
from meshwright.runtime.precisions import Masters
from meshwright.runtime.stage_steps import StageSteps

# Optimizers that torch runs in one pass on processors (torch.optim: `fused`).
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class HostedValues(Masters):
    """The optimizer's tensors on the host: ``updated`` has them by tensor id, for trained parameters."""

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter], pieces: Sequence[HostedPiece]) -> None:
        self._pieces = pieces
        hosted = {i: item for piece in pieces for i, item in piece.hosted.items()}
        trained = {i for piece in pieces for i in piece.facts.parameters}
        # A part without elements is not updated.
        self.updated = {i: hosted.get(i, item) for i, item in parameters.items() if i in hosted or i not in trained}
        self.masters = {}

    def state(self) -> dict[str, torch.Tensor]:
        """Master weights by tensor id; empty if the plan has none."""
        return {
            str(i): item.detach() for piece in self._pieces if piece.has_masters for i, item in piece.hosted.items()
        }

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`, and from the parameters on the device if there are no masters."""
        for piece in self._pieces:
            if not piece.has_masters:
                piece.read_values()
                continue
            values = torch.zeros(piece.facts.size, dtype=piece.values.dtype)
            piece.place_values(values)
            for i, item in piece.hosted.items():
                item.data.copy_(state[str(i)])


class HostSteps(StageSteps):
    """Called with a stage, clears its gradients; `update` has already updated its pieces, one by one."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        *given: Any,
        pieces: Sequence[HostedPiece],
        make_states: Callable[[torch.optim.Optimizer | None], PieceStates],
        **named: Any,
    ) -> None:
        super().__init__(optimizer, *given, **named)
        use_fused(optimizer)
        self._pieces, self.states = pieces, make_states(optimizer)
        groups = optimizer.param_groups if optimizer is not None else []
        self._group_of = {id(item): place for place, group in enumerate(groups) for item in group["params"]}
        self._is_stepping = False

    def __call__(self, stage: int) -> None:
        """Count an update of a stage, and clear its gradients."""
        self._is_stepping = False
        self._num_updates[stage] += not (self._scale is not None and self._scale.skips())
        for parameter in self._of_stage[stage]:
            parameter.grad = None

    def update(self, piece: HostedPiece) -> int:
        """Update a piece; return the bytes of its gradients."""
        inverse = self._scale.inverse if self._scale is not None else 1.0
        is_left_out = self._scale is not None and self._scale.skips()
        if not is_left_out and self._optimizer is not None:
            if piece.facts.is_resident:
                piece.find_present()
            if inverse != 1.0:
                piece.scale(inverse)
            if self._clip is not None:
                piece.scale(self._clip())
            chosen = piece.take_gradients()
            if chosen:
                self._step(self._optimizer, chosen)
            for parameter in chosen:
                parameter.grad = None
            self.states.stepped(piece)
        piece.narrow()
        return piece.num_bytes

    def _step(self, optimizer: torch.optim.Optimizer, chosen: Sequence[torch.nn.Parameter]) -> None:
        """A step over some parameters, which have gradients; the user's hooks run with the first call of a step.

        torch's own step visits all parameters and calls its profiler, which takes as long as a small piece does.
        """
        if not self._is_stepping or type(optimizer) not in _FUSED:
            optimizer.step()
            self._is_stepping = True
            return
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for item in chosen:
            by_group.setdefault(self._group_of[id(item)], []).append(item)
        left = {place: own for place, own in by_group.items() if not _step_at_once(optimizer, place, own)}
        if not left:
            return
        groups, every = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
        for place, group in enumerate(groups):
            group["params"] = left.get(place, [])
        try:
            inspect.unwrap(type(optimizer).step)(optimizer)
        finally:
            for group, params in zip(groups, every, strict=True):
                group["params"] = params

    def state(self) -> dict[str, Any]:
        """The state as in `StageSteps`; states on drives are tensors that are read from there on access."""
        with self.states.at_hand(self._pieces):
            return super().state()

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, after the device's parameters were restored."""
        super().take_state(state)
        for piece in self._pieces:
            self.states.stepped(piece, replaced=True)
            self.states.write(piece)


def _step_at_once(optimizer: torch.optim.Optimizer, place: int, chosen: Sequence[torch.nn.Parameter]) -> bool:
    """Call Adam's kernel for some parameters of a group as `torch.optim.adam` does; return whether it was possible."""
    group, states = optimizer.param_groups[place], [optimizer.state.get(item, {}) for item in chosen]
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not all(states):
        return False
    if not group["fused"] or group["amsgrad"] or isinstance(group["lr"], torch.Tensor):
        return False
    is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    kernel(
        list(chosen),
        [item.grad for item in chosen if item.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
    return True


def use_fused(optimizer: torch.optim.Optimizer | None) -> None:
    """Let an optimizer visit the elements on processors once, if it can and the user chose nothing else.

    Not for elements of two bytes, which torch rounds differently there than on the device.
    """
    if optimizer is None or type(optimizer) not in _FUSED:
        return
    for group in optimizer.param_groups:
        given = [group.get(name) for name in ("fused", "foreach", "differentiable", "capturable")]
        real = all(
            item.is_floating_point() and item.dtype.itemsize >= 4 and type(item.data) is torch.Tensor
            for item in group["params"]
        )
        if not any(given) and group.get("fused") is None and real:
            group["fused"] = True
