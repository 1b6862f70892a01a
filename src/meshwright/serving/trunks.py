"""Models that share their first layers: the trunk runs once for all requests, then each head for its own.

With r_i the rate of head i, w_i = r_i / Σ r and l_p, l_i the latencies of trunk and heads, a batch of b requests takes

    l(b) = l_p(b) + Σ l_i(w_i b) = (α_p + Σ w_i α_i) b + β_p + Σ β_i

The heads become one model with the sum of their rates and their common SLO (prefix batching: Nexus, SOSP 2019,
section 6.3). Latencies given as points are summed size by size. l(b) is the mean time of a batch with requests for each
head. A batch without any for head i takes β_i less; this happens to (1 - w_i)^b of all batches, so that small batches
are modelled as slower than they are.

Served separately, a batch of head i takes l_p(b) + l_i(b) and consists of its own requests only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.serving.batching import Equation, devices_for
from meshwright.spec import Deployment, Head, Latency, Poisson, ServedModel, Trunk
from meshwright.spec.quantities import Bytes, Seconds


def share_trunk(trunk: Trunk) -> ServedModel:
    """Return trunk and heads as one model. Raises ServingError if a batch of one takes longer than the SLO."""
    return ServedModel(
        name=trunk.name,
        slo=trunk.slo,
        latency=shared_latency(trunk),
        arrivals=Poisson(rate=_total_rate(trunk)),
        memory=_sum_memory(trunk, *trunk.heads),
        load=_sum_load(trunk, *trunk.heads),
    )


def devices_shared(trunk: Trunk, equation: Equation = "staggered") -> tuple[float, float]:
    """Return the devices that the heads need together, and with separate trunks; infinite if no number suffices."""
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
