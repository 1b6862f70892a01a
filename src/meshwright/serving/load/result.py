"""Outcomes of the requests of a load: records of the sending processes, and the figures computed from them (`sum_up`).

    in time       answered with 200 within the deadline, counted from the moment at which the request was due to be sent
    late          answered with 200 after the deadline
    rejected      answered with 503
    failed        the connection was lost, or could not be opened
    malformed     the answer is not an HTTP response, or does not follow the Open Inference Protocol
    wrong         the answer belongs to another request, or failed a check
    unanswered    no answer arrived by the end

Latencies are of answers with 200, from the moment at which the request was due to be sent. Lateness is how late the
sender itself sent requests that found an idle connection.
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
    """Outcome of a request that got no valid answer, stored in place of an HTTP status; UNSENT: it was not sent."""

    UNANSWERED = 0
    FAILED = -1
    MALFORMED = -2
    WRONG = -3
    UNSENT = -4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadJob:
    """The work of one sending process.

    ``moments``: when each request is due (ns from the start, ascending). ``whose``: the index of its model in ``names``
    and ``requests``, the requests' bytes. Request i has the number ``first + i * step`` among those of all processes.
    At most ``connections`` are opened, ``at_first`` of them before the start. Answers are waited for until ``grace_s``
    seconds after the last request.
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
    """What a sending process has recorded; the arrays have an entry for each request.

    ``status``: HTTP status or `UnansweredReason`. ``lateness`` and ``latency``: seconds from the request's moment until
    it was sent, and until its answer. ``waited``: whether it found no idle connection. ``bodies``: the first body of
    each status other than 200. ``cpu_s``: processor time of the loop; ``end_ns``: its end, from the start.
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
    """Outcomes of the requests for one model and its copies, or for all models.

    ``statuses`` counts answers by HTTP status. ``latency_s`` has percentiles of answers with 200, ``rejected_p99_s`` is
    the 99th percentile of the latency of answers with 503; both are None without such answers.
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
        """Number of requests whose sending was started."""
        return self.num_requests - self.num_unsent

    @property
    def num_rejected(self) -> int:
        """Number of answers with status 503."""
        return self.statuses.get(_REJECTED, 0)

    @property
    def in_time_share(self) -> float | None:
        """Share of all requests that were answered in time; None without requests."""
        return self.num_in_time / self.num_requests if self.num_requests else None

    def row(self, seconds: float) -> dict[str, Any]:
        """Return the figures as a row of a table; rates are per second of the counted time ``seconds``."""
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
    """The figures of a load: of each of the ``models``, in the order of the streams, copies together, and in ``total``.

    ``seconds`` is the counted time, shorter than requested if the run was ended early; ``began`` is the start (Unix
    time). ``lateness_s`` has percentiles of how late requests were sent that found an idle connection. ``num_waited``
    requests found no idle connection, and ``waited_p99_s`` is the 99th percentile of how late they were sent.
    ``reasons`` has the reason in one answer of each status but 200. ``cpu_s_per_request`` is the processor time of the
    sender. ``series`` has a row for each second.
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
        """Number of answers that belong to another request, or failed a check."""
        return self.total.num_wrong

    @property
    def goodput_per_s(self) -> float:
        """Answers in time per second."""
        return self.total.num_in_time / self.seconds

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of figures for each model."""
        return [model.row(self.seconds) for model in self.models]

    def row(self) -> dict[str, Any]:
        """Return a row of figures for all models together and for the sender."""
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
                f"{self.total.num_unsent:,} requests were not sent before the end. Ask for a lower rate or more "
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
    """Compute the figures of a load from the records of its requests; requests of the ramp are not counted.

    ``moments`` (ns) and ``whose`` are as in `LoadJob`. If the run was ended early, records are fewer than moments.
    """
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
