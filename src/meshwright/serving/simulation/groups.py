"""Groups of devices as pools that know nothing of each other: which requests go to which group.

A request for a model goes to one of the groups that hold it, at random by their weights, before the simulation begins:
the split of whatever stands in front of the groups and does not know what waits in them. A front that knew would lose
less. Requests for a model that no group holds go nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Deployment, Group
from meshwright.spec.deployment import Trouble

# Tells the generator that deals out from those of arrivals (`serving.arrivals`), which have the seed first, too.
_DEALING = 2**32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubDeployment:
    """One group as a ``deployment`` of its own, whose devices are the ``first_device`` of all and those behind it.

    ``numbers`` are those of its models among all, and ``chosen`` the places of its requests among all, with the
    ``queue`` of each, copies counted one by one.
    """

    deployment: Deployment
    first_device: int
    numbers: NDArray[np.int64]
    chosen: NDArray[np.int64]
    queue: NDArray[np.int32]
    seed: int


def split_groups(deployment: Deployment, whose: NDArray[np.int32], seed: int) -> Iterator[SubDeployment]:
    """The groups with their requests; ``whose`` are the models of all requests, copies counted one by one."""
    copies = np.array([model.copies for model in deployment.models])
    lot = np.random.default_rng([seed, _DEALING]).random(len(whose))
    weight = np.array([[group.weight_of(model.name) for model in deployment.models] for group in deployment.groups])
    # Up to which lot a model's requests go to a group or one before it; to its last group go all that are left.
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
