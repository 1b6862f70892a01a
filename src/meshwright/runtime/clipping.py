"""Clipping by the norm of all gradients, wherever they lie: every parameter counts once.

A rank adds up the squares of its gradients, each over the number of processes that hold it alike; the program's own
all-reduce over all ranks (`program.exchange`) sums that up before the first update. All updates of the step are then
multiplied with max_norm / (norm + 1e-6), at most 1, as torch's clip_grad_norm_ does it.
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

# What torch.nn.utils.clip_grad_norm_ adds to the norm.
_EPSILON = 1e-6


def with_clipping(plan: Plan | Placement, max_norm: float | None) -> Plan | Placement:
    """The plan in which ranks agree on the norm of all gradients, if these are to be clipped.

    Raises PlanError for a norm that is none, a plan that asks for one where none is given, or one that cannot clip.
    """
    if max_norm is None:
        if isinstance(plan, Plan) and plan.exchange.clip_norm:
            raise PlanError("The plan clips gradients, but no norm was given. Give one: --clip-norm 1.0.")
        return plan
    if not max_norm > 0:
        raise PlanError(f"Gradients were to be clipped to a norm of {max_norm}; expected more than 0.")
    if isinstance(plan, Placement):
        raise PlanError("Gradients cannot be clipped under a placement yet. Leave the norm out, or plan by layers.")
    return replace(plan, exchange=replace(plan.exchange, clip_norm=True))


def count_holders(
    stages: Sequence[StageSlice], plan: Plan | Placement, alike: Callable[[int], int], shared_out: Collection[int]
) -> dict[int, int]:
    """By parameter, how many processes hold it, or the same share of it; of a team, ``alike(parameter)`` do.

    Of those that are ``shared_out`` among replicas, each of a group of these has a part of its own.
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
    """The square of the norm of a step; other arguments as of `AgreedNumber`.

    ``holders``: by tensor id, how many processes hold a parameter (or the same share) alike. ``inverse()`` is what
    gradients are still to be multiplied with before they are clipped.
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
        """What to multiply gradients with, behind `begin` and its works."""
        norm = self._total[0].sqrt() * self._inverse()
        return (self._max_norm / (norm + _EPSILON)).clamp(max=1.0)
