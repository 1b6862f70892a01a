"""Simulate a deployment under a policy (`simulate_deployment`): requests in time, latencies and use of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.arrivals import draw_arrivals, mean_rate
from meshwright.serving.batching import batch_nanoseconds
from meshwright.serving.counted import counted_time
from meshwright.serving.expansion import expand_deployment
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.plain import PlainPolicy
from meshwright.serving.policies.pool import NEVER, REASONS, Ints, pool_for
from meshwright.serving.policies.residency import Weights
from meshwright.serving.simulation.fleet_series import FleetSeries, Scaled, make_fleet, what_was_taken
from meshwright.serving.simulation.serving_engine import (
    NUM_ARRIVED,
    NUM_BATCHES,
    NUM_COUNTS,
    NUM_DROPPED,
    NUM_IN_TIME,
    NUM_LOST,
    NUM_TOO_LATE,
    PLACES,
    SLOS,
    ServingRun,
    Truth,
    simulate_events,
    simulate_plainly,
)
from meshwright.serving.simulation.weights import NO_WEIGHTS, find_weights
from meshwright.spec import Deployment, Gamma, Group, Outage, ServingError, Straggler, Trace
from meshwright.spec.deployment import Trouble

# Keeps this generator distinct from those of arrivals (`serving.arrivals`), whose seeds also start with the seed.
_DEALING = 2**32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubDeployment:
    """One group of a deployment as a separate ``deployment``.

    Its first device has the number ``first_device`` in the whole deployment. ``numbers`` are the indices of its models,
    and ``chosen`` those of its requests, in the whole deployment; ``queue`` is the index of each request's model in the
    group. Each copy of a model has its own index.
    """

    deployment: Deployment
    first_device: int
    numbers: NDArray[np.int64]
    chosen: NDArray[np.int64]
    queue: NDArray[np.int32]
    seed: int


# Groups of devices are independent pools. Each request for a model goes to one of the groups that hold it, at random by
# their weights, before the simulation starts: the split of a load balancer that does not know the groups' queues. One
# that knew them would lose fewer requests. Requests for a model that no group holds are not sent to any.
def split_groups(deployment: Deployment, whose: NDArray[np.int32], seed: int) -> Iterator[SubDeployment]:
    """Yield the groups with their requests; ``whose`` is the index of each request's model, counting each copy."""
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


# Room for requests in the queue of a model: 2^22 take 100 MB.
_SMALLEST_QUEUE, _LARGEST_QUEUE = 1024, 2**22
_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedCounts:
    """Counts of the outcomes of the requests for one model.

    ``dropped`` counts dropped requests by reason: the reasons of policies (`pool.REASONS`), ``unplaced`` if no group
    holds the model, and ``unanswered`` for requests that still waited when the simulation ended. Answers in time, late
    answers and drops sum to all requests. ``num_again`` counts requests that were lost with a device and resubmitted.
    ``histogram`` counts latencies in bins of SLO / `PLACES`.
    """

    model: str
    slo_s: float
    num_requests: int
    num_in_time: int
    num_late: int
    num_batches: int
    num_again: int
    dropped: dict[str, int]
    histogram: NDArray[np.int64] = field(repr=False)

    @property
    def in_time_share(self) -> float:
        """Share of all requests that were answered in time; 1 without requests."""
        return self.num_in_time / self.num_requests if self.num_requests else 1.0

    @property
    def mean_batch(self) -> float:
        """Mean number of requests of a batch; 0 without batches."""
        return (self.num_in_time + self.num_late) / self.num_batches if self.num_batches else 0.0

    @property
    def longest_s(self) -> float:
        """Longest latency (s) that the histogram can measure; longer ones are counted together."""
        return (PLACES * SLOS - 1) / PLACES * self.slo_s

    def latency_s(self, share: float) -> float | None:
        """Return a percentile of the latencies (s): the one that a ``share`` (0..1) of the answers did not exceed.

        It is exact to a thousandth of the SLO; None without answers, infinite if it is more than ``longest_s``.
        """
        total = int(self.histogram.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.histogram), share * total))
        return (place + 0.5) / PLACES * self.slo_s if place < PLACES * SLOS - 1 else math.inf

    def row(self, seconds: float) -> dict[str, Any]:
        """Return the figures as a row of a table; rates are per second of the counted time ``seconds``.

        For an infinite latency, the row has the value that it exceeds (``p99_over_s``).
        """
        return {
            "model": self.model,
            "requests_per_s": self.num_requests / seconds,
            "goodput_per_s": self.num_in_time / seconds,
            "in_time_share": self.in_time_share,
            **_told("p50", self.latency_s(0.5), self.longest_s),
            **_told("p99", self.latency_s(0.99), self.longest_s),
            "mean_batch": self.mean_batch,
            "num_answered_late": self.num_late,
            **{f"num_dropped_{reason}": count for reason, count in self.dropped.items() if count},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingResult:
    """The result of a simulation.

    ``seconds`` is the counted time, ``end_s`` the time at which the last request was done. ``models`` are in the order
    of the deployment, copies together. ``busy_s`` are the seconds in which each device computed, ``batches[b]`` is the
    number of batches of b requests. ``scaled`` is None without scaling, ``num_loads`` (number of loads of models) is
    None if devices hold all models.
    """

    seconds: float
    end_s: float
    models: tuple[ServedCounts, ...]
    busy_s: NDArray[np.float64] = field(repr=False)
    batches: NDArray[np.int64] = field(repr=False)
    scaled: Scaled | None = None
    num_loads: int | None = None

    @property
    def num_requests(self) -> int:
        """Number of requests for all models."""
        return sum(model.num_requests for model in self.models)

    @property
    def in_time_share(self) -> float:
        """Share of all requests that were answered in time (0..1); 1 without requests."""
        return sum(model.num_in_time for model in self.models) / self.num_requests if self.num_requests else 1.0

    @property
    def goodput_per_s(self) -> float:
        """Answers in time per second."""
        return sum(model.num_in_time for model in self.models) / self.seconds

    @property
    def busy_share(self) -> float:
        """Share of the time (0..1) in which devices computed; with scaling, of the time in which they were held."""
        held = self.scaled.device_s if self.scaled is not None else len(self.busy_s) * self.end_s
        return float(self.busy_s.sum() / held) if held else 0.0

    def row(self) -> dict[str, Any]:
        """Return a row of figures for all models together."""
        known = [(found, model) for model in self.models if (found := model.latency_s(0.99)) is not None]
        worst = max((found for found, _ in known), default=None)
        over = max((min(found, model.longest_s) for found, model in known), default=0.0)
        return {
            "requests_per_s": self.num_requests / self.seconds,
            "goodput_per_s": self.goodput_per_s,
            "in_time_share": self.in_time_share,
            **_told("worst_p99", worst, over),
            "busy_share": self.busy_share,
            "mean_batch": sum(m.num_in_time + m.num_late for m in self.models) / max(int(self.batches.sum()), 1),
            **(self.scaled.row() if self.scaled is not None else {}),
            **({"num_loads": self.num_loads} if self.num_loads is not None else {}),
        }


def _told(name: str, seconds: float | None, over: float) -> dict[str, float | None]:
    """Return a latency by name; if it is infinite, None and the value that it exceeds."""
    return {f"{name}_s": None, f"{name}_over_s": over} if seconds == math.inf else {f"{name}_s": seconds}


def simulate_deployment(
    deployment: Deployment,
    policy: Policy,
    seconds: float,
    *,
    seed: int = 0,
    scale: float = 1.0,
    warm_up_s: float = 0.0,
) -> ServingResult:
    """Simulate the requests that arrive in a warm-up and in ``seconds`` after it, until the last request is done.

    Requests of the warm-up (``warm_up_s``) are not counted. If traces end earlier, the counted time is shorter
    (`counted_time`). Calls of queries, and trunks, are simulated as models (`expansion`). ``scale`` multiplies all
    arrival rates. Raises ServingError if all models together do not fit onto a device, the deployment has no groups,
    and the policy cannot load models; if the deployment has scaling and the policy does not support it; and if the
    simulation does not fit into memory.
    """
    deployment = expand_deployment(deployment, scale)
    weights = find_weights(deployment, policy)
    arrival, whose = draw_arrivals(deployment.models, warm_up_s + seconds, seed=seed, scale=scale)
    begin_s, end_s = counted_time(deployment.models, seconds, warm_up_s, scale)
    counted_from = int(begin_s * _NS)
    fleet = make_fleet(deployment, policy, _number(deployment), round((warm_up_s + seconds) * _NS))
    try:
        if deployment.groups:
            outcome, end = _simulate_groups(deployment, policy, arrival, whose, counted_from, seed, scale)
        else:
            outcome, end = _simulate_pool(deployment, policy, arrival, whose, counted_from, seed, scale, fleet, weights)
    except MemoryError:
        raise ServingError(
            f"{len(arrival):,} requests and {deployment.devices:,} devices do not fit into memory. Simulate fewer "
            "seconds, or a smaller deployment."
        ) from None
    return ServingResult(
        seconds=end_s - begin_s,
        end_s=end / _NS,
        models=_collect(deployment, outcome),
        busy_s=outcome.busy / _NS,
        batches=outcome.batches,
        scaled=what_was_taken(fleet, end),
        num_loads=int(outcome.loads.sum()) if len(weights.load) else None,
    )


def _number(deployment: Deployment) -> int:
    """Return the number of models, counting each copy."""
    return sum(model.copies for model in deployment.models)


def _simulate_pool(
    deployment: Deployment,
    policy: Policy,
    arrival: Ints,
    whose: NDArray[np.int32],
    counted_from: int,
    seed: int,
    scale: float,
    fleet: FleetSeries,
    weights: Weights = NO_WEIGHTS,
) -> tuple[ServingRun, int]:
    """Simulate all requests on devices that hold or load all models; return the outcome and the last moment (ns)."""
    latency = latency_table(deployment)
    pool = make_pool(deployment, policy, latency, scale, weights, _most_waiting(deployment, arrival, whose))
    num_models, row = latency.shape
    outcome = _empty(num_models, deployment.devices, row)
    truth = _truth(deployment, latency, counted_from, weights)
    if isinstance(policy, PlainPolicy):
        policy.begin_again()
        run = simulate_plainly
    else:
        run = simulate_events
    return outcome, int(run(policy, pool, truth, arrival, whose, outcome, fleet, seed))


def _simulate_groups(
    deployment: Deployment,
    policy: Policy,
    arrival: Ints,
    whose: NDArray[np.int32],
    counted_from: int,
    seed: int,
    scale: float,
) -> tuple[ServingRun, int]:
    """Simulate each group as a pool; return the summed outcome. Requests that no group can serve only arrive."""
    whole = _empty(_number(deployment), deployment.devices, 0)
    end = 0
    for part in split_groups(deployment, whose, seed):
        fleet = make_fleet(part.deployment, policy, len(part.numbers), 0)
        outcome, ended = _simulate_pool(
            part.deployment, policy, arrival[part.chosen], part.queue, counted_from, part.seed, scale, fleet
        )
        whole.counts[part.numbers] += outcome.counts
        whole.histogram[part.numbers] += outcome.histogram
        whole.busy[part.first_device : part.first_device + part.deployment.devices] = outcome.busy
        sizes = np.zeros(max(len(whole.batches), len(outcome.batches)), np.int64)
        sizes[: len(whole.batches)] = whole.batches
        sizes[: len(outcome.batches)] += outcome.batches
        whole, end = whole._replace(batches=sizes), max(end, ended)
    came = np.bincount(whose[arrival >= counted_from], minlength=len(whole.counts))
    whole.counts[:, NUM_ARRIVED] = came
    return whole, end


def _empty(num_models: int, num_devices: int, row: int) -> ServingRun:
    return ServingRun(
        counts=np.zeros((num_models, NUM_COUNTS), np.int64),
        histogram=np.zeros((num_models, PLACES * SLOS), np.int32),
        busy=np.zeros(num_devices, np.int64),
        loads=np.zeros(num_devices, np.int64),
        batches=np.zeros(row + 1, np.int64),
    )


def latency_table(deployment: Deployment) -> Ints:
    """Return the time (ns) of batches, an array (models, counting each copy; sizes from 0); `NEVER` if over the SLO."""
    rows = []
    for model in deployment.models:
        row = batch_nanoseconds(model.line, model.slo)
        rows.extend([row] * model.copies)
    table = np.full((len(rows), max(map(len, rows))), NEVER, np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def make_pool(
    deployment: Deployment,
    policy: Policy,
    latency: Ints,
    scale: float = 1.0,
    weights: Weights = NO_WEIGHTS,
    waiting: Ints | None = None,
) -> Ints:
    """Return the pool (queues and devices) of a deployment for a policy.

    Each queue has room for eight times the requests that arrive within the SLO of its model. ``latency``: the table of
    `latency_table`. ``scale``: factor on all rates of arrivals. ``waiting``: the most requests that can wait in each
    queue, if known.
    """
    slo, room = [], []
    for model in deployment.models:
        slo += [round(model.slo * _NS)] * model.copies
        room += [max(8.0 * mean_rate(model.arrivals) * scale * model.slo, _SMALLEST_QUEUE)] * model.copies
    capacity = np.array(room) if waiting is None else np.maximum(room, waiting)
    facts: dict[str, Any] = {
        "latency": latency,
        "slo": np.array(slo, np.int64),
        "num_devices": deployment.devices,
        "capacity": np.minimum(capacity, _LARGEST_QUEUE).astype(np.int64),
        "delay_ns": round(deployment.delay * _NS),
        "slack_ns": round(deployment.slack * _NS),
        "guard_ns": round(deployment.guard * _NS),
    }
    if len(weights.load):
        facts["weights"] = weights
    return pool_for(policy, facts)


def _most_waiting(deployment: Deployment, arrival: Ints, whose: NDArray[np.int32]) -> Ints:
    """Return the most requests of each model (each copy) within one of its SLOs, if its arrivals are uneven."""
    owners = [model for model in deployment.models for _ in range(model.copies)]
    most = np.zeros(len(owners), np.int64)
    # Poisson and diurnal arrivals stay well below the default capacity.
    is_uneven = [isinstance(model.arrivals, Gamma | Trace) for model in owners]
    if not any(is_uneven):
        return most
    order = np.argsort(whose, kind="stable")
    ends = np.cumsum(np.bincount(whose, minlength=len(owners)))
    for number, (first, end) in enumerate(pairwise([0, *ends.tolist()])):
        # Models whose requests fit in any case need no count.
        if is_uneven[number] and end - first > _SMALLEST_QUEUE:
            moments = arrival[order[first:end]]
            upto = np.searchsorted(moments, moments + round(owners[number].slo * _NS), "right")
            most[number] = (upto - np.arange(len(moments))).max()
    return most


def _truth(deployment: Deployment, latency: Ints, counted_from: int, weights: Weights) -> Truth:
    speed = np.ones(deployment.devices)
    away: dict[int, list[tuple[int, int]]] = {}
    for trouble in deployment.troubles:
        match trouble:
            case Straggler():
                speed[trouble.device] /= trouble.factor
            case Outage():
                until = NEVER if trouble.until is None else round(trouble.until * _NS)
                away.setdefault(trouble.device, []).append((round(trouble.since * _NS), until))
    changes = []
    for number, outages in away.items():
        for since, until in _joined(outages):
            changes += [(since, number, 0)] + ([(until, number, 1)] if until < NEVER else [])
    table = np.array([*sorted(changes), (NEVER, 0, 0)], np.int64)
    at, device, up = (np.ascontiguousarray(column) for column in table.T)
    return Truth(latency.ravel(), speed, deployment.jitter, at, device, up, counted_from, weights)


def _joined(outages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge outages of one device that overlap or touch: it returns when the last of them ends."""
    joined: list[tuple[int, int]] = []
    for since, until in sorted(outages):
        if joined and since <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], until))
        else:
            joined.append((since, until))
    return joined


def _collect(deployment: Deployment, outcome: ServingRun) -> tuple[ServedCounts, ...]:
    served, first = [], 0
    for model in deployment.models:
        counts = outcome.counts[first : first + model.copies].sum(axis=0)
        dropped = dict(zip(REASONS, counts[NUM_DROPPED:].tolist(), strict=True))
        if deployment.groups and not any(model.name in group.models for group in deployment.groups):
            dropped["unplaced"] = int(counts[NUM_ARRIVED])
        done = int(counts[NUM_IN_TIME] + counts[NUM_TOO_LATE]) + sum(dropped.values())
        dropped["unanswered"] = int(counts[NUM_ARRIVED]) - done
        served.append(
            ServedCounts(
                model=model.name,
                slo_s=float(model.slo),
                num_requests=int(counts[NUM_ARRIVED]),
                num_in_time=int(counts[NUM_IN_TIME]),
                num_late=int(counts[NUM_TOO_LATE]),
                num_batches=int(counts[NUM_BATCHES]),
                num_again=int(counts[NUM_LOST]),
                dropped=dropped,
                histogram=outcome.histogram[first : first + model.copies].sum(axis=0, dtype=np.int64),
            )
        )
        first += model.copies
    return tuple(served)
