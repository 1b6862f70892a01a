"""Queries that call several models: how to divide a query's time among its calls.

A query is a tree of calls: the first one sees every query, each of the others ``fan_out`` requests for each request of
the call before it (a detector, then a classifier for each car that it found). If the times of the calls on every path
from the root sum to the query's SLO, a query whose calls are all in time is in time. Among all such splits,
`split_time` finds the one that needs the fewest devices (Nexus, SOSP 2019, section 6.2), with the time in S segments:

    devices(u, t) = min over k ≤ t of  need(u, k) + Σ over calls v after u of devices(v, t − k)

Here need is `batching.devices_for` in the time of k segments less delay and slack: for high rates r l(B) / B with the
largest batch B that an equation allows in that time, as in the paper; for low rates the time to fill a batch counts,
too. `split_evenly`, the baseline of Nexus, divides the remaining time among the calls of the longest remaining path.

`expand_queries` makes a model of each call, whose requests arrive independently of each other. In reality, those of
one query arrive together when the call before them ends, which gives larger batches and more bursts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.serving.batching import Equation, devices_for, largest_batch
from meshwright.spec import Deployment, ModelCall, Poisson, Query, ServedModel, ServingError
from meshwright.spec.quantities import Seconds

# One segment is a hundredth of the SLO: finer than latencies are known.
SEGMENTS = 100


def split_time(
    query: Query,
    *,
    segments: int = SEGMENTS,
    equation: Equation = "staggered",
    scale: float = 1.0,
    overhead_s: float = 0.0,
) -> dict[str, float]:
    """Return the seconds of each call such that ``scale`` times the query's rate needs the fewest devices.

    ``overhead_s`` is the part of each call's time without computation: delay and slack. Spare time is spread over the
    calls in proportion to their needs. Raises ServingError if no split leaves each call enough time for a batch of one.
    """
    rates, after = call_rates(query), _calls_after(query)
    fewest: dict[str, list[float]] = {}
    chosen: dict[str, list[int]] = {}
    # Calls are in topological order: later calls first.
    for call in reversed(query.calls):
        needs = [math.inf]
        needs += [
            _need(call, query.slo * count / segments - overhead_s, rates[call.name] * scale, equation)
            for count in range(1, segments + 1)
        ]
        rest = [math.fsum(fewest[later.name][left] for later in after[call.name]) for left in range(segments + 1)]
        fewest[call.name], chosen[call.name] = [], []
        for available in range(segments + 1):
            best, count = min((needs[count] + rest[available - count], count) for count in range(available + 1))
            fewest[call.name].append(best)
            chosen[call.name].append(count)
    if not math.isfinite(fewest[query.calls[0].name][segments]):
        beside = f", besides {overhead_s:g} s of delay and slack for each" if overhead_s else ""
        raise ServingError(
            f"Query {query.name!r}: no split of {query.slo:g} s in {segments} parts leaves each of its calls enough "
            f"time for a batch of one{beside}. Increase its SLO (slo)."
        )
    left, needed = {query.calls[0].name: segments}, dict[str, int]()
    for call in query.calls:
        needed[call.name] = chosen[call.name][left[call.name]]
        left |= {later.name: left[call.name] - needed[call.name] for later in after[call.name]}
    return {name: query.slo * count / segments for name, count in _spread(query, needed, segments).items()}


def _spread(query: Query, needed: Mapping[str, int], segments: int) -> dict[str, float]:
    """Divide all segments: a call gets the part of what is left that it has of the needs of its longest path down."""
    after, longest = _calls_after(query), dict[str, int]()
    for call in reversed(query.calls):
        longest[call.name] = needed[call.name] + max((longest[later.name] for later in after[call.name]), default=0)
    left, given = {query.calls[0].name: float(segments)}, dict[str, float]()
    for call in query.calls:
        # Exactly what is needed, without rounding: a batch may just fit.
        part = left[call.name] * needed[call.name] / longest[call.name]
        given[call.name] = max(part, float(needed[call.name]))
        left |= {later.name: left[call.name] - given[call.name] for later in after[call.name]}
    return given


def split_evenly(query: Query) -> dict[str, float]:
    """Return the seconds of each call: the rest of the SLO, divided by the number of calls on its longest path down."""
    after, longest = _calls_after(query), dict[str, int]()
    for call in reversed(query.calls):
        longest[call.name] = 1 + max((longest[later.name] for later in after[call.name]), default=0)
    left, times = {query.calls[0].name: float(query.slo)}, dict[str, float]()
    for call in query.calls:
        times[call.name] = left[call.name] / longest[call.name]
        left |= {later.name: left[call.name] - times[call.name] for later in after[call.name]}
    return times


def devices_of(
    query: Query,
    times: Mapping[str, float],
    equation: Equation = "staggered",
    *,
    scale: float = 1.0,
    overhead_s: float = 0.0,
) -> float:
    """Return the devices that the calls of a query need with these times; infinite if a time cannot be met."""
    rates = call_rates(query)
    return math.fsum(
        _need(call, times[call.name] - overhead_s, rates[call.name] * scale, equation) for call in query.calls
    )


def call_rates(query: Query) -> dict[str, float]:
    """Return the requests per second of each call."""
    rates = dict[str, float]()
    for call in query.calls:
        rates[call.name] = query.rate if call.after is None else rates[call.after] * call.fan_out
    return rates


def expand_queries(deployment: Deployment, scale: float = 1.0) -> Deployment:
    """Return the deployment with a model query.call for each call of its queries; its SLO is the call's time.

    The time is divided for ``scale`` times the rates; the models' rates are not scaled.
    """
    if not deployment.queries:
        return deployment
    models = list(deployment.models)
    for query in deployment.queries:
        times = split_time(query, scale=scale, overhead_s=deployment.delay + deployment.slack)
        rates = call_rates(query)
        models += [
            ServedModel(
                name=f"{query.name}.{call.name}",
                slo=Seconds(times[call.name]),
                latency=call.latency,
                arrivals=Poisson(rate=rates[call.name]),
                memory=call.memory,
                load=call.load,
            )
            for call in query.calls
        ]
    return replace(deployment, models=tuple(models), queries=())


def _need(call: ModelCall, seconds: float, rate: float, equation: Equation) -> float:
    return devices_for(call.latency, seconds, rate, equation) if largest_batch(call.latency, seconds) else math.inf


def _calls_after(query: Query) -> dict[str, Sequence[ModelCall]]:
    return {call.name: [later for later in query.calls if later.after == call.name] for call in query.calls}
