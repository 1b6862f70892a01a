"""Groups of devices in a deployment: the models that each group holds, and checks that these fit into memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshwright.spec.bounds import check_bounds
from meshwright.spec.errors import ServingError, suggest
from meshwright.spec.units import format_bytes

if TYPE_CHECKING:
    from meshwright.spec.deployment import Deployment

MOST_DEVICES = 1_000_000

_check = partial(check_bounds, ServingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of devices: each of its ``devices`` devices holds ``models``, with all copies, and serves only these.

    The requests of a model are divided among the groups that hold it, in proportion to their weights for the model.
    ``weights`` has one for each of ``models``; by default each is the group's number of devices.
    """

    devices: int
    models: tuple[str, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check("A group", devices=(1, self.devices, MOST_DEVICES))
        if len(set(self.models)) < len(self.models):
            raise ServingError(f"A group names a model twice: {', '.join(self.models)}. Name each once.")
        if self.weights and len(self.weights) != len(self.models):
            raise ServingError(
                f"A group has {len(self.models)} models and {len(self.weights)} weights; expected a weight for each."
            )
        for weight in self.weights:
            _check("A group", weight=(1e-9, weight, 1e9))

    def weight_of(self, model: str) -> float:
        """Return the group's weight for requests of a model; 0 if the group does not hold it."""
        if model not in self.models:
            return 0.0
        return self.weights[self.models.index(model)] if self.weights else float(self.devices)


def check_groups(deployment: Deployment, names: list[str]) -> None:
    """Raise ServingError if the groups have more devices than the deployment, or name an unknown model."""
    taken = sum(group.devices for group in deployment.groups)
    if taken > deployment.devices:
        raise ServingError(
            f"The groups have {taken} devices in all, but the deployment has {deployment.devices}. Raise the "
            "deployment's `devices`, or make groups smaller."
        )
    known = set(names)
    for group in deployment.groups:
        for name in group.models:
            if name not in known:
                raise ServingError(
                    f"A group holds {name!r}, but the deployment has no such model{suggest(name, names)}."
                )


def check_memory(deployment: Deployment) -> None:
    """Raise ServingError if a model, or all models of a group, take more than ``device_memory``."""
    limit = deployment.device_memory
    if limit is None:
        return
    _check("A deployment", device_memory=(1.0, limit, 1e18))
    for model in deployment.models:
        if model.memory is None:
            raise ServingError(
                f"Model {model.name!r} has no `memory`, but the deployment has device_memory, into which all models "
                'have to fit. Add for example memory = "2 GiB" to the model, or leave device_memory out.'
            )
        if model.memory > limit:
            raise ServingError(
                f"Model {model.name!r} takes {format_bytes(model.memory)}, but a device has {format_bytes(limit)}. "
                "Raise device_memory, or serve a smaller model."
            )
    for place, group in enumerate(deployment.groups):
        if not deployment.has_room(group.models):
            raise ServingError(
                f"The models of group {place} ({', '.join(group.models[:9])}) take "
                f"{format_bytes(deployment.memory_of(group.models))}, but a device has {format_bytes(limit)}. Put some "
                "of them into another group, or let `simulate --place best` do so."
            )
