"""Placements by simulation, as in AlpaServe (OSDI 2023, section 4.2): add models one by one where they help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from meshwright.serving.placement.groups import Groups, has_room, join_alike, with_model
from meshwright.serving.simulation import ServingResult
from meshwright.spec import Deployment, Group

Simulate = Callable[[Groups], ServingResult]
Score = tuple[float, float]


def search_placement(deployment: Deployment, simulate: Simulate, beam: int) -> Groups:
    """Return the best placement by simulation over several group sizes; ties go to the largest size.

    Groups that hold the same models are merged at the end if that is not worse.
    """
    sizes = [2**power for power in range(deployment.devices.bit_length()) if 2**power < deployment.devices]
    found = []
    for size in (deployment.devices, *reversed(sizes)):
        whole, rest = divmod(deployment.devices, size)
        empty = tuple(Group(devices=each, models=()) for each in [size] * whole + [rest] * (rest > 0))
        found.append(
            _search_beam(deployment, empty, simulate, beam) if beam else _follow_unserved(deployment, empty, simulate)
        )
    score, groups = max(found, key=lambda each: each[0])
    joined = join_alike(groups)
    return joined if score_of(simulate(joined)) >= score else groups


def score_of(result: ServingResult) -> tuple[float, float]:
    """Return the share of requests in time, and that of the worst model, which breaks ties."""
    return result.in_time_share, min(model.in_time_share for model in result.models)


def _follow_unserved(deployment: Deployment, groups: Groups, simulate: Simulate) -> tuple[Score, Groups]:
    """Return the best of a chain of placements, each with one more model in one group, and its score."""
    best: tuple[Score, Groups] | None = None
    while True:
        result = simulate(groups)
        if best is None or score_of(result) > best[0]:
            best = score_of(result), groups
        first = np.cumsum([0, *(group.devices for group in groups)])
        busy = [float(result.busy_s[low:high].mean()) for low, high in pairwise(first)]
        unserved = {served.model: served.num_requests - served.num_in_time for served in result.models}
        for name in sorted((name for name in unserved if unserved[name]), key=unserved.__getitem__, reverse=True):
            with_room = [place for place, group in enumerate(groups) if has_room(deployment, group, name)]
            if with_room:
                groups = _put(groups, min(with_room, key=busy.__getitem__), name)
                break
        else:
            return best


def _search_beam(deployment: Deployment, groups: Groups, simulate: Simulate, beam: int) -> tuple[Score, Groups]:
    """Return the best placement of a beam search that adds one model per step to the ``beam`` best, and its score."""
    kept = [(score_of(simulate(groups)), groups)]
    best = kept[0]
    while best[0] < (1.0, 1.0):
        larger = {_signature(further): further for _, each in kept for further in _further(deployment, each)}
        if not larger:
            break
        scored = [(score_of(simulate(each)), each) for each in larger.values()]
        kept = sorted(scored, key=lambda each: each[0], reverse=True)[:beam]
        best = max(best, kept[0], key=lambda each: each[0])
    return best


def _further(deployment: Deployment, groups: Groups) -> Iterator[Groups]:
    for place, group in enumerate(groups):
        for model in deployment.models:
            if has_room(deployment, group, model.name):
                yield _put(groups, place, model.name)


def _signature(groups: Groups) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return a key that ignores the order of the groups."""
    return tuple(sorted((group.devices, tuple(sorted(group.models))) for group in groups))


def _put(groups: Groups, place: int, name: str) -> Groups:
    return (*groups[:place], with_model(groups[place], name), *groups[place + 1 :])
