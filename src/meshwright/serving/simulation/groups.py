"""Groups of devices as independent pools: which requests go to which group.

Each request for a model goes to one of the groups that hold it, at random by their weights, before the simulation
starts: the split of a load balancer that does not know the groups' queues. One that knew them would lose fewer
requests. Requests for a model that no group holds are not sent to any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Deployment, Group
from meshwright.spec.deployment import Trouble

# Keeps this generator distinct from those of arrivals (`serving.arrivals`), whose seeds also start with the seed.
_DEALING = 2**32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubDeployment:
    """One group as a ``deployment`` of its own; its devices start at ``first_device`` of the whole deployment.

    ``numbers`` are the indices of its models in the whole deployment, ``chosen`` those of its requests, with the
    ``queue`` of each; copies have an index each.
    """

    deployment: Deployment
    first_device: int
    numbers: NDArray[np.int64]
    chosen: NDArray[np.int64]
    queue: NDArray[np.int32]
    seed: int


def split_groups(deployment: Deployment, whose: NDArray[np.int32], seed: int) -> Iterator[SubDeployment]:
    """Yield the groups with their requests; ``whose`` is the model of each request, with an index for each copy."""
    copies = np.array([model.copies for model in deployment.models])
    lot = np.random.default_rng([seed, _DEALING]).random(len(whose))
    weight = np.array([[group.weight_of(model.name) for model in deployment.models] for group in deployment.groups])
    # Upper limit of a group's random numbers for each model; the last group that holds a model gets the rest.
    upto = np.cumsum(weight, axis=0) / np.maximum(weight.sum(axis=0), 1e-300)
    upto[np.cumsum(weight[::-1], axis=0)[::-1] == weight] = 1.0
    before, device = np.zeros(len(copies)), 0
    for place, group in enumerate(deployment.groups):
        held = np.flatnonzero(weight[place])
        after = np.where(weight[place] > 0, upto[place], before)
        low, high = np.repeat(before, copies), np.repeat(after, copies)
        chosen = np.flatnonzero((low[whose] <= lot) & (lot < high[whose]))
        number_of = np.zeros(int(copies.sum()), np.int32)
        numbers = np.flatnonzero(np.repeat(weight[place] > 0, copies))
        number_of[numbers] = np.arange(len(numbers))
        if len(held):
            yield SubDeployment(
                deployment=_alone(deployment, group, [int(at) for at in held], device),
                first_device=device,
                numbers=numbers,
                chosen=chosen,
                queue=number_of[whose[chosen]],
                seed=int(np.random.SeedSequence([seed, place]).generate_state(1)[0]),
            )
        before, device = after, device + group.devices


def _alone(deployment: Deployment, group: Group, held: list[int], first_device: int) -> Deployment:
    def within(trouble: Trouble) -> bool:
        return first_device <= trouble.device < first_device + group.devices

    return replace(
        deployment,
        models=tuple(deployment.models[at] for at in held),
        devices=group.devices,
        groups=(),
        troubles=tuple(
            replace(trouble, device=trouble.device - first_device) for trouble in deployment.troubles if within(trouble)
        ),
    )
