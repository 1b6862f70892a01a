"""Methods that place models on groups of devices (`place_models`); an upper bound for any placement (`bound_share`).

    packing       squishy bin packing of models by load and memory (`policies.packing`); a model's requests are divided
                  among its devices as in the packing; if not all models fit, those that take most memory per request
                  are left out
    replication   each model, by descending load, on the least loaded device with room; then further copies of the model
                  with most load per copy, until no further copy fits
    simulated     AlpaServe's greedy method (OSDI 2023, section 4.2), for groups of 1, 2, 4, … and all devices: start
                  with empty groups, simulate, add the model with most unserved requests to the least busy group with
                  room, repeat; keep the best placement that was simulated
    simulated:beam=K   AlpaServe's algorithm 1: simulate every model on every group with room, keep the K best, repeat
    best          among packing, replication and simulated, the placement that answers most requests in time

A model's load is the number of devices that it needs by the staggered equation, r l(b) / b (`batching.devices_for`).
Groups that hold the same models are merged, after a search only if the result is not worse. All methods choose by
requests of another seed than the requests that are simulated afterwards; a trace, though, is the same for every seed.
AlpaServe's models that are split over the devices of a group are not implemented.

`bound_share` bounds every placement: a request for model m takes at least cₘ = min l(b) / b of device time, over all
batches with l(b) ≤ L, so that at most Σ xₘ rₘ of all requests are in time, where Σ xₘ rₘ cₘ ≤ N. For a simulation
(`bound_placed`), r are the counted requests, and N is the time in which they can be computed, until the longest SLO
after the last one, times the speeds of the devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise

import numpy as np

from meshwright.serving.arrivals import mean_rate
from meshwright.serving.batching import best_batch, devices_for, largest_batch
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.packing import DEVICE_OF, MODEL_OF, SHARE, Floats, pack_all
from meshwright.serving.policies.pool import NEVER
from meshwright.serving.simulation import ServingResult, latency_table, simulate_deployment
from meshwright.spec import Deployment, Group, ServedModel, ServingError, Straggler, suggest

Groups = tuple[Group, ...]


def has_room(deployment: Deployment, group: Group, name: str) -> bool:
    """Return whether a group can hold the model ``name`` in addition to its models, and does not hold it yet."""
    return name not in group.models and deployment.has_room((*group.models, name))


def with_model(group: Group, name: str) -> Group:
    """Return the group with the model ``name`` added."""
    return replace(group, models=(*group.models, name))


def join_alike(groups: Iterable[Group]) -> Groups:
    """Merge groups that hold the same models, and sum their weights; groups without models are left out.

    If all groups are empty, a group of one device without models is returned.
    """
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
    """Return the deployment with a separate model for each copy of a model."""
    names_of = _names_of_copies(deployment)
    models = [replace(model, name=name, copies=1) for model in deployment.models for name in names_of[model.name]]
    return replace(deployment, models=tuple(models))


def put_together(deployment: Deployment, apart: Deployment, groups: Groups) -> Deployment:
    """Return the deployment with ``groups``, which were found for the separate copies in ``apart`` (`take_apart`).

    A model stays one entry if all its copies are in the same groups with the same weights; otherwise each copy becomes
    a model.
    """
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


Simulate = Callable[[Groups], ServingResult]
Score = tuple[float, float]


# As in AlpaServe (OSDI 2023, section 4.2), models are added one by one where they help.
def search_placement(deployment: Deployment, simulate: Simulate, beam: int) -> Groups:
    """Return the best placement by simulation over several group sizes; ties go to the largest size.

    ``beam`` is the number of placements that are kept at each step, 0 for the greedy method. Groups that hold the same
    models are merged at the end if that is not worse.
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
    """Return the share of requests in time (0..1), and the share of the worst model, which breaks ties."""
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


PLACE_METHODS = ("best", "packing", "replication", "simulated")
# Offset of the seeds that placements are chosen with; users' seeds are below it.
_OTHER_REQUESTS = 2**31 + 1
_BEAM = re.compile(r"simulated:beam=([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModels:
    """A placement that ``method`` has found: the ``deployment`` with its groups.

    ``planned_share`` is the share of requests in time (0..1) in the simulation by which it was chosen. A model whose
    copies are not all in the same groups is replaced by one model per copy: NAME-1, NAME-2, …
    """

    deployment: Deployment
    method: str
    planned_share: float


def place_models(
    deployment: Deployment,
    policy: Policy,
    seconds: float,
    *,
    method: str = "best",
    seed: int = 0,
    scale: float = 1.0,
    warm_up_s: float = 0.0,
) -> PlacedModels:
    """Find groups for the devices of a deployment under a policy; they replace the deployment's own groups.

    ``method`` is one of `PLACE_METHODS`, or ``simulated:beam=K``. ``seconds``, ``seed``, ``scale`` and ``warm_up_s``
    are as in `simulate_deployment`. Raises ServingError for an unknown method.
    """
    beam = _read_beam(method)
    deployment = expand_deployment(replace(deployment, groups=()), scale)
    apart = take_apart(deployment)

    def simulate(groups: Groups) -> ServingResult:
        return simulate_deployment(
            replace(apart, groups=groups),
            policy,
            seconds,
            seed=seed + _OTHER_REQUESTS,
            scale=scale,
            warm_up_s=warm_up_s,
        )

    found = []
    for name in PLACE_METHODS[1:] if method == "best" else [method]:
        if name == "packing":
            groups = pack_models(apart, scale)
        elif name == "replication":
            groups = replicate_models(apart, scale)
        else:
            groups = search_placement(apart, simulate, beam)
        found.append((simulate(groups), name, groups))
    result, name, groups = max(found, key=lambda each: score_of(each[0]))
    return PlacedModels(
        deployment=put_together(deployment, apart, groups), method=name, planned_share=result.in_time_share
    )


def _read_beam(method: str) -> int:
    """Return how many placements the method keeps at each step; 0 for methods other than beam search."""
    found = _BEAM.fullmatch(method)
    if found:
        return int(found[1])
    if method not in PLACE_METHODS:
        raise ServingError(
            f"There is no placement method called {method!r}{suggest(method, PLACE_METHODS)}. Give one of "
            f"{', '.join(PLACE_METHODS)}, or simulated:beam=K with K from 1 to 9999."
        )
    return 0


def bound_placed(deployment: Deployment, result: ServingResult) -> float:
    """Return the largest share of the requests of a simulation that any placement could have answered in time.

    Outages are ignored, and batches take their expected time (no jitter).
    """
    slow = {trouble.device: 1.0 for trouble in deployment.troubles}
    for trouble in deployment.troubles:
        if isinstance(trouble, Straggler):
            slow[trouble.device] *= trouble.factor
    speeds = deployment.devices - len(slow) + math.fsum(1 / factor for factor in slow.values())
    requests = [
        served.num_requests / model.copies for model, served in zip(deployment.models, result.models, strict=True)
    ]
    return bound_share(deployment.models, requests, speeds * (result.seconds + max(m.slo for m in deployment.models)))


def bound_share(models: Sequence[ServedModel], rates: Sequence[float], num_devices: float) -> float:
    """Return the largest share of requests (0..1) that any placement can answer in time (see the module's docstring).

    ``rates``: mean requests per second of one copy of each model.
    """
    costs = []
    for model, rate in zip(models, rates, strict=True):
        most = best_batch(model.line, largest_batch(model.line, model.slo))
        costs.append((model.line.of(most) / most, rate * model.copies))
    left, served = float(num_devices), 0.0
    for cost, rate in sorted(costs):
        answered = min(rate, left / cost)
        served, left = served + answered, left - answered * cost
    total = sum(rate for _, rate in costs)
    return served / total if total else 1.0


_NS = 1e9


def pack_models(deployment: Deployment, scale: float = 1.0) -> Groups:
    """Return groups by squishy bin packing, at ``scale`` times all rates; models without requests are in no group."""
    models = [model for model in deployment.models if mean_rate(model.arrivals) * scale > 0]
    while models:
        table = _pack(replace(deployment, models=tuple(models)), scale)
        devices = [table[table[:, DEVICE_OF] == device] for device in np.unique(table[:, DEVICE_OF])]
        if devices:
            return join_alike(
                Group(
                    devices=1,
                    models=tuple(models[int(row[MODEL_OF])].name for row in rows),
                    weights=tuple(float(row[SHARE]) * _NS for row in rows),
                )
                for rows in devices
            )
        models.remove(max(models, key=lambda model: (model.memory or 0.0) / mean_rate(model.arrivals)))
    return join_alike(())


def _pack(deployment: Deployment, scale: float) -> Floats:
    latency, limit, models = latency_table(deployment), deployment.device_memory, deployment.models
    memory = np.array([(model.memory or 0.0) / limit if limit else 0.0 for model in models])
    rates = np.array([mean_rate(model.arrivals) * scale / _NS for model in models])
    most = (latency[:, 1:] < NEVER).sum(axis=1)
    slo = np.array([round(model.slo * _NS) for model in models], np.int64)
    table = np.zeros((len(models) + deployment.devices, 6))
    count = pack_all(latency.ravel(), latency.shape[1], most, slo, rates, memory, deployment.devices, table)
    return table[:count]


def replicate_models(deployment: Deployment, scale: float = 1.0) -> Groups:
    """Return groups by the method replication, at ``scale`` times all rates: a copy of each model, then further copies.

    The model with most load per copy is copied next.
    """
    load = {
        model.name: devices_for(model.line, model.slo, mean_rate(model.arrivals) * scale) for model in deployment.models
    }
    devices: list[Group] = [Group(devices=1, models=())] * deployment.devices
    copies = dict.fromkeys(load, 0)

    def add(name: str) -> bool:
        """Put a model on the least loaded device with room; return False if no device has room."""
        with_room = [place for place in range(len(devices)) if has_room(deployment, devices[place], name)]
        if not with_room:
            return False
        loads = {place: sum(load[each] / copies[each] for each in devices[place].models) for place in with_room}
        place = min(with_room, key=loads.__getitem__)
        devices[place] = with_model(devices[place], name)
        copies[name] += 1
        return True

    for name in sorted(load, key=load.__getitem__, reverse=True):
        add(name)
    placed = [name for name in load if copies[name]]
    while any(add(name) for name in sorted(placed, key=lambda name: load[name] / copies[name], reverse=True)):
        pass
    return join_alike(devices)
