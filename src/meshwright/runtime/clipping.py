"""Gradient clipping by the global norm: every parameter counts once, wherever its gradient is.

A rank sums the squares of its gradients, each divided by the number of processes that hold a copy; the program's
all-reduce over all ranks (`program.exchange`) sums them before the first update. All updates of the step are then
multiplied by max_norm / (norm + 1e-6), at most 1, as in torch's clip_grad_norm_.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from meshwright.runtime.agreed import AgreedNumber
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.teams import TeamPosition
from meshwright.runtime.transport import Transport
from meshwright.spec.errors import PlanError
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.slices import StageSlice

# torch.nn.utils.clip_grad_norm_ adds this to the norm.
_EPSILON = 1e-6


def with_clipping(plan: Plan | Placement, max_norm: float | None) -> Plan | Placement:
    """The plan in which ranks agree on the norm of all gradients, if these are to be clipped.

    Raises PlanError for a norm that is not positive, for a missing norm, and for a plan that cannot clip.
    """
    if max_norm is None:
        if isinstance(plan, Plan) and plan.exchange.clip_norm:
            raise PlanError("The plan clips gradients, but no norm was given. Give one: --clip-norm 1.0.")
        return plan
    if not max_norm > 0:
        raise PlanError(f"A norm of {max_norm} to clip gradients was given; expected more than 0.")
    if isinstance(plan, Placement):
        raise PlanError("Gradients cannot be clipped under a placement yet. Leave the norm out, or plan by layers.")
    return replace(plan, exchange=replace(plan.exchange, clip_norm=True))


def count_holders(
    stages: Sequence[StageSlice], plan: Plan | Placement, alike: Callable[[int], int], shared_out: Collection[int]
) -> dict[int, int]:
    """By parameter, the number of processes that hold a copy of it, or of the same shard; ``alike`` counts in a team.

    Each replica of a group has its own shard of those in ``shared_out``.
    """
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for stage in stages:
        for parameter in stage.parameters:
            ranks[parameter].update(plan.stages[stage.index].ranks)
    return {
        parameter: (_num_groups(plan, len(found)) if parameter in shared_out else len(found)) * alike(parameter)
        for parameter, found in ranks.items()
    }


def _num_groups(plan: Plan | Placement, num_replicas: int) -> int:
    return num_replicas // plan.exchange.num_parts(num_replicas) if isinstance(plan, Plan) else 1


class NormClip(AgreedNumber):
    """The squared norm of a step's gradients; other arguments as in `AgreedNumber`.

    ``holders``: by tensor id, the number of processes that hold a copy of a parameter (or of the same shard).
    ``inverse()`` is the factor by which gradients are still to be multiplied before they are clipped.
    """

    def __init__(
        self,
        index: int,
        max_norm: float,
        parameters: Mapping[int, torch.nn.Parameter],
        holders: Mapping[int, int],
        complete: Callable[[], None],
        grid: TeamPosition,
        transport: Transport,
        device: torch.device,
        inverse: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(index, complete, grid, transport, torch.float64, device)
        self._max_norm, self._inverse = max_norm, inverse
        self._parameters = [(item, 1.0 / holders[i]) for i, item in parameters.items() if item.requires_grad]

    def _add_own(self) -> None:
        for parameter, share in self._parameters:
            if parameter.grad is not None:
                self._total += share * own_part(parameter.grad).double().square().sum()

    def coefficient(self) -> torch.Tensor:
        """The factor for gradients, available after `begin` and its works."""
        norm = self._total[0].sqrt() * self._inverse()
        return (self._max_norm / (norm + _EPSILON)).clamp(max=1.0)
