"""The work of one sending process, and its record of each request."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.load.answers import Response
from meshwright.serving.load.bodies import RequestBytes

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
    """The requests of one process: moments (ns from the start, ascending), and the model of each.

    ``first`` and ``step`` number its requests among those of all processes. ``names`` and ``requests`` are those of
    the models. At most ``connections`` are opened, ``at_first`` of them before the start.
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
