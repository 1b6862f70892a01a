"""Which models get requests, when, and with which deadlines.

Moments are those of `meshwright.serving.arrivals`: with the same models, seconds and seed, a server gets requests at
the moments of the simulator's. Copies of a model are separate models on a server; those of ``cat`` are called
``cat-0``, ``cat-1``, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.arrivals import draw_arrivals
from meshwright.spec import Arrivals, Deployment, ServedModel, ServingError
from meshwright.spec.quantities import Seconds

# Each request takes about thirty bytes of memory until the end: 1.5 GB.
MOST_REQUESTS = 50_000_000
_NS = 1e9
# Arrivals are drawn for served models, which need an SLO; it does not influence them.
_ANY = Seconds(86_400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStream:
    """Requests for a model, or for each of its copies; with ``deadline_s``, answers after it are late.

    Each request carries the rest of the deadline, and ``priority``. Without a deadline, every answer is in time.
    """

    model: str
    arrivals: Arrivals
    copies: int = 1
    deadline_s: float | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not 1e-6 <= self.deadline_s <= _ANY:
            raise ServingError(
                f"Model {self.model!r}: the deadline is {self.deadline_s:g} s; expected 1 us to {_ANY:g} s."
            )

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of each request."""
        said = {} if self.deadline_s is None else {"timeout": max(round(self.deadline_s * 1e6), 1)}
        return said if self.priority is None else {**said, "priority": self.priority}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, or of its copies, on the server."""
        if self.copies == 1:
            return (self.model,)
        return tuple(f"{self.model}-{copy}" for copy in range(self.copies))


def deployment_streams(deployment: Deployment, deadline_s: float | None = None) -> tuple[RequestStream, ...]:
    """Return the requests of a deployment; due within the SLO of each model, or within ``deadline_s``."""
    return tuple(
        RequestStream(
            model=model.name,
            arrivals=model.arrivals,
            copies=model.copies,
            deadline_s=float(model.slo) if deadline_s is None else deadline_s,
        )
        for model in deployment.models
    )


def draw_moments(
    streams: Sequence[RequestStream], seconds: float, *, seed: int, scale: float, ramp_s: float
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return moments (ns, ascending) and the model index of each request; copies have an index each.

    During a ramp before the ``seconds``, a request at a moment t is kept with probability t / ramp. Raises
    ServingError for too many requests.
    """
    models = [
        ServedModel(name=stream.model, slo=_ANY, arrivals=stream.arrivals, copies=stream.copies) for stream in streams
    ]
    moments, whose = draw_arrivals(models, ramp_s + seconds, seed=seed, scale=scale)
    if ramp_s:
        chance = np.random.default_rng([seed, 2**30]).random(len(moments))
        kept = chance * ramp_s * _NS <= moments
        moments, whose = moments[kept], whose[kept]
    if len(moments) > MOST_REQUESTS:
        raise ServingError(
            f"{len(moments):,} requests come in {ramp_s + seconds:g} s; at most {MOST_REQUESTS:,} are sent in one run. "
            "Ask for fewer seconds."
        )
    return moments, whose


def most_at_once(moments: NDArray[np.int64], seconds: float) -> int:
    """Return the most requests within ``seconds`` of each other."""
    if not len(moments):
        return 0
    ends = np.searchsorted(moments, moments + int(seconds * _NS), side="right")
    return int((ends - np.arange(len(moments))).max())
