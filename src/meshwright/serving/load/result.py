"""Outcomes of the requests of a load, as figures (`sum_up`), from the records of sending processes (`LoadJob`).

    in time       answered with 200 within the deadline, counted from the moment at which the request was due to be sent
    late          answered with 200 after it
    rejected      answered with 503
    failed        the connection was lost, or could not be opened
    malformed     the answer is not an HTTP response, or not one of the protocol
    wrong         the answer to another request, or one that failed a check
    unanswered    no answer arrived by the end

Latencies are those of answers with 200. Lateness is that of the sender itself, for requests that found a connection.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.load.bodies import RequestBytes
from meshwright.serving.load.responses import Response, reason_of
from meshwright.serving.load.target import RequestStream
from meshwright.spec import format_seconds

Check = Callable[[str, int, Response], bool]


class UnansweredReason(enum.IntEnum):
    """Outcome of a request without an HTTP status; stored in place of the status."""

    UNANSWERED = 0
    FAILED = -1
    MALFORMED = -2
    WRONG = -3
    UNSENT = -4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadJob:
    """The work of one sending process: its requests' moments (ns from the start, ascending), and the model of each.

    ``first`` and ``step`` number its requests among those of all processes. ``names`` and ``requests`` are those of the
    models. At most ``connections`` are opened, ``at_first`` of them before the start.
    """

    family: int
    address: tuple[Any, ...]
    moments: NDArray[np.int64]
    whose: NDArray[np.int32]
    names: Sequence[str]
    requests: Sequence[Sequence[RequestBytes]] = field(repr=False)
    first: int
    step: int
    connections: int
    at_first: int
    grace_s: float
    check: Check | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestRecords:
    """For each request: status (or `UnansweredReason`), seconds from its moment to its sending and to its answer.

    ``waited`` is whether it found no idle connection. ``bodies`` has the first body of each status other than 200.
    ``cpu_s`` is the processor time of the loop, ``end_ns`` the last moment that it reached (from the start).
    """

    status: NDArray[np.int16]
    lateness: NDArray[np.float32]
    latency: NDArray[np.float32]
    waited: NDArray[np.bool_]
    bodies: dict[int, bytes]
    cpu_s: float
    end_ns: int
    num_connections: int


_NS = 1e9
_OK, _REJECTED = 200, 503
_SHARES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99, "p999_s": 0.999, "max_s": 1.0}
# A sender whose 99th percentile of lateness exceeds this measures itself.
_LATE_S = 1e-3
# Points of a series in time.
_MOST_POINTS = 3600
_COUNTED = {
    "num_failed": UnansweredReason.FAILED,
    "num_malformed": UnansweredReason.MALFORMED,
    "num_wrong": UnansweredReason.WRONG,
    "num_unanswered": UnansweredReason.UNANSWERED,
    "num_unsent": UnansweredReason.UNSENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Outcomes of the requests for one model and its copies, or for all.

    ``statuses`` counts answers by HTTP status, ``latency_s`` has percentiles (None without answers of 200) and
    ``rejected_p99_s`` is the 99th percentile for answers of 503.
    """

    model: str
    deadline_s: float | None
    num_requests: int
    num_in_time: int
    num_late: int
    statuses: dict[int, int]
    num_failed: int
    num_malformed: int
    num_wrong: int
    num_unanswered: int
    num_unsent: int
    latency_s: dict[str, float | None] = field(repr=False)
    rejected_p99_s: float | None

    @property
    def num_sent(self) -> int:
        """Requests whose sending was started."""
        return self.num_requests - self.num_unsent

    @property
    def num_rejected(self) -> int:
        """Answers of 503."""
        return self.statuses.get(_REJECTED, 0)

    @property
    def in_time_share(self) -> float | None:
        """Share of all requests that were answered in time; None without requests."""
        return self.num_in_time / self.num_requests if self.num_requests else None

    def row(self, seconds: float) -> dict[str, Any]:
        """Return figures for a table."""
        return {
            "model": self.model,
            "requests_per_s": self.num_requests / seconds,
            "goodput_per_s": self.num_in_time / seconds,
            "in_time_share": self.in_time_share,
            **self.latency_s,
            "rejected_p99_s": self.rejected_p99_s,
            "deadline_s": self.deadline_s,
            "num_requests": self.num_requests,
            "num_sent": self.num_sent,
            "num_in_time": self.num_in_time,
            "num_late": self.num_late,
            "statuses": {str(status): count for status, count in self.statuses.items()},
            **{name: getattr(self, name) for name in _COUNTED},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """``models`` in the order of the streams, copies together; ``total`` is all of them.

    ``seconds`` is the counted time, shorter than requested if the run was ended early. ``lateness_s`` has percentiles
    of how late requests were sent that found an idle connection; ``num_waited`` requests found none, and were sent
    ``waited_p99_s`` later at the 99th percentile. ``reasons`` has the reason of one answer of each status but 200.
    ``cpu_s_per_request`` is the sender's own. ``series`` has a row for each second.
    """

    seconds: float
    began: float
    models: tuple[Loaded, ...]
    total: Loaded
    lateness_s: dict[str, float | None]
    num_waited: int
    waited_p99_s: float | None
    cpu_s_per_request: float | None
    num_connections: int
    reasons: dict[int, str] = field(repr=False)
    series: tuple[dict[str, Any], ...] = field(repr=False)

    @property
    def num_wrong(self) -> int:
        """Answers to another request, and answers that failed a check."""
        return self.total.num_wrong

    @property
    def goodput_per_s(self) -> float:
        """Answers in time per second."""
        return self.total.num_in_time / self.seconds

    def rows(self) -> list[dict[str, Any]]:
        """Return figures of each model."""
        return [model.row(self.seconds) for model in self.models]

    def row(self) -> dict[str, Any]:
        """Return figures of all models together, and of the sender."""
        return {
            **self.total.row(self.seconds),
            "seconds": self.seconds,
            "began": self.began,
            **{f"lateness_{name}": value for name, value in self.lateness_s.items()},
            "num_waited": self.num_waited,
            "waited_p99_s": self.waited_p99_s,
            "cpu_s_per_request": self.cpu_s_per_request,
            "num_connections": self.num_connections,
            "reasons": {str(status): reason for status, reason in self.reasons.items()},
        }

    def warnings(self) -> list[str]:
        """Return reasons to doubt these figures, one paragraph each."""
        found = []
        lateness = self.lateness_s["p99_s"]
        if lateness is not None and lateness > _LATE_S:
            found.append(
                f"The sender itself was late: 1 % of the requests were sent more than {format_seconds(lateness)} after "
                "their moment, and latencies include this. Ask for a lower rate or more --processes, or run it on "
                "another machine than the server."
            )
        if self.num_waited:
            found.append(
                f"{self.num_waited:,} requests found no idle connection and waited for one, 1 % of them for more than "
                f"{format_seconds(self.waited_p99_s or 0)}, and latencies include this. If the server is not the "
                "cause, allow more --connections."
            )
        if self.total.num_unsent:
            found.append(
                f"{self.total.num_unsent:,} requests could not even be sent by the end. Ask for a lower rate or more "
                "--connections."
            )
        return found


def sum_up(
    streams: Sequence[RequestStream],
    moments: NDArray[np.int64],
    whose: NDArray[np.int32],
    records: RequestRecords,
    *,
    ramp_s: float,
    seconds: float,
    began: float,
) -> LoadResult:
    """Compute figures of the requests after a ramp. Fewer records than moments come from a run that was ended early."""
    count = len(records.status)
    if count < len(moments):
        seconds = min(max(records.end_ns / _NS - ramp_s, 1e-3), seconds)
    counted = slice(int(np.searchsorted(moments, ramp_s * _NS)), count)
    status, latency, at = records.status[counted], records.latency[counted], moments[counted] / _NS - ramp_s
    deadline = np.array(
        [np.inf if s.deadline_s is None else s.deadline_s for s in streams for _ in s.names], np.float32
    )[whose[counted]]
    in_time = (status == _OK) & (latency <= deadline)
    owners = np.repeat(np.arange(len(streams)), [stream.copies for stream in streams])[whose[counted]]
    models = []
    for place, stream in enumerate(streams):
        mine = owners == place
        models.append(_count(stream.model, stream.deadline_s, status[mine], latency[mine], in_time[mine]))
    total = _count("total", None, status, latency, in_time)
    lateness, waited = records.lateness[counted], records.waited[counted]
    sent = (status != UnansweredReason.UNSENT) & ~waited
    return LoadResult(
        seconds=seconds,
        began=began,
        models=tuple(models),
        total=total,
        lateness_s=_percentiles(lateness[sent], ("p50_s", "p99_s", "max_s")),
        num_waited=int(waited.sum()),
        waited_p99_s=_percentiles(lateness[waited], ("p99_s",))["p99_s"],
        cpu_s_per_request=records.cpu_s / count if count else None,
        num_connections=records.num_connections,
        reasons={
            status: reason_of(body) for status, body in sorted(records.bodies.items()) if status in total.statuses
        },
        series=_series(at, status, latency, in_time, seconds),
    )


def _count(
    model: str,
    deadline_s: float | None,
    status: NDArray[np.int16],
    latency: NDArray[np.float32],
    in_time: NDArray[np.bool_],
) -> Loaded:
    kinds, counts = np.unique(status, return_counts=True)
    number = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    num_in_time = int(in_time.sum())
    return Loaded(
        model=model,
        deadline_s=deadline_s,
        num_requests=len(status),
        num_in_time=num_in_time,
        num_late=number.get(_OK, 0) - num_in_time,
        statuses={kind: count for kind, count in number.items() if kind > 0},
        **{name: number.get(int(outcome), 0) for name, outcome in _COUNTED.items()},
        latency_s=_percentiles(latency[status == _OK], tuple(_SHARES)),
        rejected_p99_s=_percentiles(latency[status == _REJECTED], ("p99_s",))["p99_s"],
    )


def _percentiles(values: NDArray[np.float32], names: Sequence[str]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(names)
    # The least value that this share of the values does not exceed: a measured one.
    found = np.quantile(values, [_SHARES[name] for name in names], method="inverted_cdf")
    return dict(zip(names, found.tolist(), strict=True))


def _series(
    at: NDArray[np.float64],
    status: NDArray[np.int16],
    latency: NDArray[np.float32],
    in_time: NDArray[np.bool_],
    seconds: float,
) -> tuple[dict[str, Any], ...]:
    """Return one row per second by the moments of requests; in long runs, one for several seconds."""
    width = max(1, int(np.ceil(seconds / _MOST_POINTS)))
    starts = np.arange(0, seconds, width)
    ends = np.searchsorted(at, [*starts, np.inf])
    rows = []
    for place, start in enumerate(starts.tolist()):
        part = slice(ends[place], ends[place + 1])
        states, good = status[part], in_time[part]
        num_ok, num_rejected = int((states == _OK).sum()), int((states == _REJECTED).sum())
        num_in_time = int(good.sum())
        rows.append(
            {
                "at_s": start,
                "num_requests": len(states),
                "num_in_time": num_in_time,
                "num_late": num_ok - num_in_time,
                "num_rejected": num_rejected,
                "num_other": len(states) - num_ok - num_rejected,
                **_percentiles(latency[part][states == _OK], ("p50_s", "p99_s")),
            }
        )
    return tuple(rows)
