"""Updates of one stage after the other on a rank that has several, with the one optimizer that the user gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshwright.spec.slices import StageSlice


class StageSteps:
    """Called with a stage, updates its parameters and clears their gradients.

    Optimizers pass over parameters without a gradient; those of other stages are taken away meanwhile. What several
    stages of the rank hold is updated with the first of them that is: its gradient has the parts of all by then.
    ``stepping`` are the stages that the program has a step for; the last one takes what no other holds.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[int, torch.nn.Parameter],
        stages: Sequence[StageSlice],
        stepping: Sequence[int],
    ) -> None:
        self._optimizer = optimizer
        self._trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        held = {stage.index: [i for i in stage.parameters if parameters[i].requires_grad] for stage in stages}
        left = {i for stage, owned in held.items() if stage not in stepping for i in owned}
        self._of_stage = {
            stage: [parameters[i] for i in dict.fromkeys((*held[stage], *(left if stage == stepping[-1] else ())))]
            for stage in stepping
        }

    def __call__(self, stage: int) -> None:
        """Update one stage."""
        own = self._of_stage[stage]
        chosen = {id(parameter) for parameter in own}
        others = [(item, item.grad) for item in self._trained if id(item) not in chosen and item.grad is not None]
        for parameter, _ in others:
            parameter.grad = None
        if self._optimizer is not None and any(parameter.grad is not None for parameter in own):
            self._optimizer.step()
        for parameter in own:
            parameter.grad = None
        for parameter, gradient in others:
            parameter.grad = gradient
