"""Replace the queries and trunks of a deployment by plain models (`expand_deployment`), which other modules handle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.serving.batching import Equation, devices_for, largest_batch
from meshwright.spec import Deployment, Head, Latency, ModelCall, Poisson, Query, ServedModel, ServingError, Trunk
from meshwright.spec.units import Bytes, Seconds


# Models that share their first layers: the trunk runs once for all requests, then each head for its own. With r_i the
# rate of head i, w_i = r_i / Σ r and l_p, l_i the latencies of trunk and heads, a batch of b requests takes
#
#     l(b) = l_p(b) + Σ l_i(w_i b) = (α_p + Σ w_i α_i) b + β_p + Σ β_i
#
# The heads become one model with the sum of their rates and their common SLO (prefix batching: Nexus, SOSP 2019,
# section 6.3). Latencies given as points are summed size by size. l(b) is the mean time of a batch with requests for
# each head. A batch without any for head i takes β_i less; this happens to (1 - w_i)^b of all batches, so that small
# batches are modelled as slower than they are.
#
# Served separately, a batch of head i takes l_p(b) + l_i(b) and consists of its own requests only.
def share_trunk(trunk: Trunk) -> ServedModel:
    """Return a trunk and its heads as one model. Raises ServingError if a batch of one takes longer than the SLO."""
    return ServedModel(
        name=trunk.name,
        slo=trunk.slo,
        latency=shared_latency(trunk),
        arrivals=Poisson(rate=_total_rate(trunk)),
        memory=_sum_memory(trunk, *trunk.heads),
        load=_sum_load(trunk, *trunk.heads),
    )


def devices_shared(trunk: Trunk, equation: Equation = "staggered") -> tuple[float, float]:
    """Return the devices that the heads need with one shared trunk, and with a separate trunk for each head.

    The numbers are not rounded; they are infinite if no number of devices suffices.
    """
    return (
        devices_for(shared_latency(trunk), trunk.slo, _total_rate(trunk), equation),
        math.fsum(
            devices_for(_sum_latencies([(1.0, trunk.latency), (1.0, head.latency)]), trunk.slo, head.rate, equation)
            for head in trunk.heads
        ),
    )


def shared_latency(trunk: Trunk) -> Latency:
    """Return the latency of a batch for all heads, weighted by their rates; a head with rate 0 takes no time."""
    total = _total_rate(trunk)
    asked = [(head.rate / total, head.latency) for head in trunk.heads if head.rate] if total else []
    return _sum_latencies([(1.0, trunk.latency), *asked])


def expand_trunks(deployment: Deployment) -> Deployment:
    """Return the deployment with one model in place of each trunk."""
    if not deployment.trunks:
        return deployment
    models = (*deployment.models, *(share_trunk(trunk) for trunk in deployment.trunks))
    return replace(deployment, models=models, trunks=())


def _sum_latencies(parts: Sequence[tuple[float, Latency]]) -> Latency:
    """Sum the latencies of parts that run in turn, each on its share of the batch; limited by each part's largest."""
    largest = int(min(latency.largest / share for share, latency in parts))
    if any(latency.points for _, latency in parts):
        sums = ((size, math.fsum(each.of(share * size) for share, each in parts)) for size in range(1, largest + 1))
        return Latency.through(sums)
    return Latency(
        alpha=Seconds(math.fsum(share * latency.alpha for share, latency in parts)),
        beta=Seconds(math.fsum(latency.beta for _, latency in parts)),
        largest=largest,
    )


def _total_rate(trunk: Trunk) -> float:
    return math.fsum(head.rate for head in trunk.heads)


def _sum_memory(*parts: Trunk | Head) -> Bytes | None:
    """Return the sum, or None if the memory of a part is not given."""
    known = [part.memory for part in parts if part.memory is not None]
    return Bytes(math.fsum(known)) if len(known) == len(parts) else None


def _sum_load(*parts: Trunk | Head) -> Seconds | None:
    """Return the sum, or None if the load time of a part is not given: parts are copied one after the other."""
    known = [part.load for part in parts if part.load is not None]
    return Seconds(math.fsum(known)) if len(known) == len(parts) else None


# One segment is a hundredth of the SLO: finer than latencies are known.
SEGMENTS = 100


# A query is a tree of calls: the first one sees every query, each of the others ``fan_out`` requests for each request
# of the call before it (a detector, then a classifier for each car that it found). If the times of the calls on every
# path from the root sum to the query's SLO, a query whose calls are all in time is in time. Among all such splits, this
# finds the one that needs the fewest devices (Nexus, SOSP 2019, section 6.2), with the time in S segments:
#
#     devices(u, t) = min over k ≤ t of  need(u, k) + Σ over calls v after u of devices(v, t − k)
#
# Here need is `batching.devices_for` in the time of k segments less delay and slack: for high rates r l(B) / B with the
# largest batch B that an equation allows in that time, as in the paper; for low rates the time to fill a batch counts,
# too.
def split_time(
    query: Query,
    *,
    segments: int = SEGMENTS,
    equation: Equation = "staggered",
    scale: float = 1.0,
    overhead_s: float = 0.0,
) -> dict[str, float]:
    """Divide a query's SLO among its calls so that it needs the fewest devices; return the seconds by name of call.

    The query's rate is multiplied by ``scale``. ``overhead_s`` is the part of each call's time without computation:
    delay and slack. ``segments`` is the resolution of the split. Spare time is spread over the calls in proportion to
    the time that they need. Raises ServingError if no split leaves each call enough time for a batch of one.
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
    """Divide a query's SLO evenly, as in the baseline of Nexus; return the seconds by name of call.

    A call gets the SLO less the time of the calls before it, divided by the number of calls on the longest path from it
    on.
    """
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
    """Return the devices that the calls of a query need; infinite if a time cannot be met.

    ``times`` are the seconds of each call, of which ``overhead_s`` are without computation. The number is not rounded.
    """
    rates = call_rates(query)
    return math.fsum(
        _need(call, times[call.name] - overhead_s, rates[call.name] * scale, equation) for call in query.calls
    )


def call_rates(query: Query) -> dict[str, float]:
    """Return the requests per second of each call of a query, by name of call."""
    rates = dict[str, float]()
    for call in query.calls:
        rates[call.name] = query.rate if call.after is None else rates[call.after] * call.fan_out
    return rates


def expand_queries(deployment: Deployment, scale: float = 1.0) -> Deployment:
    """Return the deployment with a model QUERY.CALL for each call of its queries; the model's SLO is the call's time.

    Each query's SLO is divided among its calls as is best for ``scale`` times its rate (`split_time`); the rates of the
    models are not scaled. Requests for each model arrive independently. In reality, requests of one query arrive
    together when the call before them ends, which gives larger batches and more bursts.
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


def expand_deployment(deployment: Deployment, scale: float = 1.0) -> Deployment:
    """Return the deployment with models in place of queries and trunks (`expand_queries`, `expand_trunks`).

    The SLO of a query is divided as is best for ``scale`` times its rate; the rates of the models are not scaled.
    """
    return expand_trunks(expand_queries(deployment, scale))
