"""The counted time of a simulation, and the request rates in it. Results are about requests of the counted time only.

The counted time starts at the end of the warm-up. If all requests come from traces, it ends with the last request of
these traces, and a warm-up of more than nine tenths of that time is reduced to one tenth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from meshwright.serving.arrivals import mean_rate, trace_moments
from meshwright.spec import Arrivals, Diurnal, Gamma, Poisson, ServedModel, ServingError, Trace

# A trace that ends within this share of the run has only a gap after its last request.
_WHOLE = 0.99


def counted_time(
    models: Sequence[ServedModel], seconds: float, warm_up_s: float = 0.0, scale: float = 1.0
) -> tuple[float, float]:
    """Return start and end (s) of the counted time of a simulation of ``seconds`` after a warm-up."""
    whole = warm_up_s + seconds
    coming = [model.arrivals for model in models if scale > 0 and mean_rate(model.arrivals) > 0]
    ends = [
        float(trace_moments(arrivals)[-1]) / (arrivals.speed * scale) if isinstance(arrivals, Trace) else math.inf
        for arrivals in coming
    ]
    end = max(ends, default=math.inf)
    if end >= whole:
        return warm_up_s, whole
    return (warm_up_s if warm_up_s <= 0.9 * end else end / 10), end


def rates_within(models: Sequence[ServedModel], begin: float, end: float, scale: float = 1.0) -> list[float]:
    """Return the mean requests per second of one copy of each model from ``begin`` to ``end`` (s), times ``scale``."""
    return [_rate_within(model.arrivals, begin, end, scale) if scale > 0 else 0.0 for model in models]


def _rate_within(arrivals: Arrivals, begin: float, end: float, scale: float) -> float:
    match arrivals:
        case Poisson() | Gamma():
            return arrivals.rate * scale
        case Diurnal():
            turn = 2 * math.pi / arrivals.period
            cosine = (math.sin(turn * end) - math.sin(turn * begin)) / (turn * (end - begin))
            return scale * (arrivals.low + (arrivals.high - arrivals.low) * (1 - cosine) / 2)
        case Trace():
            moments, speed = trace_moments(arrivals), arrivals.speed * scale
            last = moments.searchsorted(end * speed * (1 + 1e-12), "right")
            return float((last - moments.searchsorted(begin * speed)) / (end - begin))
        case _:
            assert_never(arrivals)


def describe_traces(models: Sequence[ServedModel], seconds: float, scale: float = 1.0) -> list[str]:
    """Return a sentence for each trace that ends before ``seconds``, or starts after it."""
    end = counted_time(models, seconds, 0.0, scale)[1]
    told = []
    for model in models:
        if not isinstance(model.arrivals, Trace) or scale == 0:
            continue
        moments, speed = trace_moments(model.arrivals), model.arrivals.speed * scale
        first, last, file = float(moments[0]) / speed, float(moments[-1]) / speed, model.arrivals.file
        if first >= seconds:
            told.append(
                f"{file}: its first moment is {first:.6g} s, after the {seconds:g} simulated seconds, so none of its "
                "requests arrives. Moments are seconds since the start of the trace: subtract the first one from "
                "all of them."
            )
        elif last < _WHOLE * seconds:
            what = "the results are for this time" if last == end else "no request for its model arrives afterwards"
            told.append(f"{file}: it ends at {last:.4g} s, and {seconds:g} s are simulated; {what}.")
    return list(dict.fromkeys(told))


def check_counted(
    num_requests: int, models: Sequence[ServedModel], seconds: float, warm_up_s: float = 0.0, scale: float = 1.0
) -> None:
    """Raise ServingError if no request is counted although the arrivals have a positive rate."""
    if num_requests or not scale or not any(mean_rate(model.arrivals) for model in models):
        return
    why = describe_traces(models, warm_up_s + seconds, scale)
    raise ServingError(
        f"No request is counted in {seconds:g} s, so there are no results. "
        + (" ".join(why) if why else "Simulate more seconds, or higher rates.")
    )


def refuse_part_of_wave(models: Sequence[ServedModel], seconds: float) -> None:
    """Raise ServingError for less than a period of diurnal arrivals, which start at the lowest rate."""
    for model in models:
        wave = model.arrivals
        if isinstance(wave, Diurnal) and wave.high > wave.low and seconds < wave.period:
            raise ServingError(
                f"Model {model.name!r}: its rate varies with a period of {wave.period:g} s, but only {seconds:g} s, "
                "starting at the lowest rate, would be simulated. The result would hold for these seconds alone. "
                f"Simulate a whole period (--seconds {math.ceil(wave.period)}), or shorten the period."
            )
