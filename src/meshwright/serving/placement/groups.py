"""Groups of a placement: free memory, merging groups that hold the same models, separating and merging copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count, islice

from meshwright.spec import Deployment, Group, ServedModel

Groups = tuple[Group, ...]


def has_room(deployment: Deployment, group: Group, name: str) -> bool:
    """Return whether a group can hold one more model."""
    return name not in group.models and deployment.has_room((*group.models, name))


def with_model(group: Group, name: str) -> Group:
    """Return the group with one more model."""
    return replace(group, models=(*group.models, name))


def join_alike(groups: Iterable[Group]) -> Groups:
    """Merge groups that hold the same models and sum their weights; return one without models if all are empty."""
    alike: dict[frozenset[str], list[Group]] = {}
    for group in groups:
        if group.models:
            alike.setdefault(frozenset(group.models), []).append(group)
    joined = []
    for members in alike.values():
        models = members[0].models
        weights = tuple(sum(group.weight_of(name) for group in members) for name in models)
        devices = sum(group.devices for group in members)
        joined.append(
            Group(
                devices=devices,
                models=models,
                weights=() if all(weight == devices for weight in weights) else weights,
            )
        )
    return tuple(joined) or (Group(devices=1, models=()),)


def take_apart(deployment: Deployment) -> Deployment:
    """Return the deployment with a model for each copy."""
    names_of = _names_of_copies(deployment)
    models = [replace(model, name=name, copies=1) for model in deployment.models for name in names_of[model.name]]
    return replace(deployment, models=tuple(models))


def put_together(deployment: Deployment, apart: Deployment, groups: Groups) -> Deployment:
    """Return the deployment with groups; merge copies that are in the same groups with the same weights."""
    models, name_of = list[ServedModel](), dict[str, str | None]()
    of_copy = {model.name: model for model in apart.models}
    names_of = _names_of_copies(deployment)
    for model in deployment.models:
        names = names_of[model.name]
        ways = {tuple(group.weight_of(name) for group in groups) for name in names}
        models += [model] if len(ways) == 1 else [of_copy[name] for name in names]
        # The first copy represents all.
        name_of |= {name: name if len(ways) > 1 else model.name if name == names[0] else None for name in names}
    named = []
    for group in groups:
        kept = [(name_of[name], group.weight_of(name)) for name in group.models]
        named.append(
            replace(
                group,
                models=tuple(name for name, _ in kept if name),
                weights=tuple(weight for name, weight in kept if name) if group.weights else (),
            )
        )
    return replace(deployment, models=tuple(models), groups=tuple(named))


def _names_of_copies(deployment: Deployment) -> dict[str, list[str]]:
    """Return names for the copies of each model: name-1, name-2, …, skipping names of other models."""
    taken, found = {model.name for model in deployment.models}, dict[str, list[str]]()
    for model in deployment.models:
        if model.copies == 1:
            found[model.name] = [model.name]
            continue
        free = (name for number in count(1) if (name := f"{model.name}-{number}") not in taken)
        found[model.name] = list(islice(free, model.copies))
        taken.update(found[model.name])
    return found
