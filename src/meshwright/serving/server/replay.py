"""Replay a decision log: pass its events to the policy again, and compare the decisions.

A damaged log is refused before compiled code reads it: if no pool can be allocated by its header, or if it has events
of unknown kinds, models or devices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshwright.serving.policies.pool import (
    DELAY,
    GUARD,
    NEVER,
    NUM_DEVICES,
    NUM_MODELS,
    NUM_QUEUES,
    ROW,
    SLACK,
    WIDTH,
    Ints,
    columns,
)
from meshwright.serving.server.decision_log import ANEW, LOG_KIND
from meshwright.serving.server.live import (
    ADJUST,
    AGAIN,
    ARRIVE,
    CANCEL,
    DOWN,
    EVENT_WIDTH,
    FREE,
    SCALE,
    UP,
    Live,
    joined,
)
from meshwright.serving.server.served import LARGEST
from meshwright.spec import ServingError
from meshwright.spec.deployment import MOST_MODELS
from meshwright.spec.server import MOST_WORKERS

_LONGEST_HEADER, _MOST_IN_PART = 2**26, 2**28
_MOST = 2**62
# Requests that all queues together have room for; a larger pool takes over 4 GiB.
_MOST_WAITING = 2**28
_FACTS = {"latency", "slo", "num_devices", "capacity", "delay_ns", "slack_ns", "guard_ns"}
# Returned in place of events if another header follows.
_NO_EVENTS = np.zeros((0, EVENT_WIDTH), np.int64)


def replay_log(path: Path) -> tuple[int, int]:
    """Replay a log, and check that the policy makes the same decisions; return the numbers of events and decisions.

    Incomplete data at the end is ignored. Raises ServingError if a decision differs, if the log is damaged, and if the
    file is not a log.
    """
    with path.open("rb") as file:
        try:
            live = _read_header(file)
        except _DAMAGES as error:
            raise ServingError(
                f"{path} is not a log of decisions ({_told(error)}); expected one written by a server."
            ) from None
        num_events = num_decisions = 0
        while True:
            try:
                part = _read_part(file, live)
                if part is None:
                    return num_events, num_decisions
                events, decisions, chosen = part
                if events is _NO_EVENTS:
                    live = _read_header(file)
                    continue
            except _DAMAGES as error:
                raise ServingError(
                    f"{path} is damaged: after {num_events} events, {_told(error)}. The decisions before that are the "
                    "same. Use an intact copy of the log."
                ) from None
            found = joined(live.take(events))
            if not (np.array_equal(found[0], decisions) and np.array_equal(found[1], chosen)):
                raise ServingError(
                    f"{path}: after {num_events} events the policy decides differently. Is this log from another "
                    "version, or does your own policy keep state outside its pool?"
                )
            num_events, num_decisions = num_events + len(events), num_decisions + len(decisions)


class _Damaged(Exception):  # noqa: N818 - its text is part of a sentence
    """Describes damage of a log."""


_DAMAGES = (_Damaged, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, _Damaged) else "its content cannot be read"


def _read_header(file: BinaryIO) -> Live:
    """Return the policy in the state of a header: at the start of a log, or where it was restarted."""
    header = json.loads(file.readline(_LONGEST_HEADER))
    if header["kind"] != LOG_KIND:
        raise _Damaged("it has another kind")
    facts, scaling, measured = header["facts"], header["scaling"], header["measured"]
    _check_facts(facts)
    if scaling is not None:
        _check(0.5 <= scaling["target"] < 1, "its scaling has no target")
        _check_whole([scaling[name] for name in ("minimum", "maximum")], 1, MOST_WORKERS, "devices of its scaling")
        _check_whole([scaling[name] for name in ("calm_ns", "now")], 0, _MOST, "times of its scaling")
    live = Live(header["policy"], facts, scaling=scaling)
    _check_measured(measured, live)
    live.know(measured)
    return live


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise _Damaged(otherwise)


def _check_whole(values: Any, least: int, most: int, what: str) -> None:
    is_so = isinstance(values, list) and all(isinstance(value, int) and least <= value <= most for value in values)
    _check(is_so, f"{what} are not whole numbers from {least} to {most}")


def _check_facts(facts: dict[str, Any]) -> None:
    """Raise _Damaged for facts with which no pool can be allocated."""
    _check(_FACTS.issuperset(facts), "its header is of another version")
    latency = facts["latency"]
    _check(isinstance(latency, list) and 0 < len(latency) <= MOST_MODELS, "it has no latencies")
    rows = {len(row) for row in latency}
    _check(len(rows) == 1 and 2 <= min(rows) <= LARGEST + 1, "its latencies are not a table")
    for row in latency:
        _check_whole(row, 0, NEVER, "its latencies")
        _check(1 <= row[1] < NEVER, "a batch of one has no latency")
    _check_whole(facts["slo"], 1, _MOST, "its SLOs")
    _check(len(facts["slo"]) == len(latency), "its numbers of SLOs and models differ")
    _check_whole([facts["num_devices"]], 1, MOST_WORKERS, "its devices")
    _check_whole([facts["capacity"]], 1, _MOST_WAITING // len(latency), "its queues")
    _check_whole([facts.get(name, 0) for name in ("delay_ns", "slack_ns", "guard_ns")], 0, _MOST, "its times")


def _check_measured(measured: dict[str, list[int]], live: Live) -> None:
    known = columns(live.pool)
    sizes = {"numbers": 4, "scaler": live.scaler_size, **{name: len(column) for name, column in known.items()}}
    for name, values in measured.items():
        _check(name in sizes and len(values) == sizes[name], "its measurements are of other devices or models")
        _check_whole(values, -_MOST, _MOST, "its measurements")


def _read_part(file: BinaryIO, live: Live) -> tuple[Ints, Ints, Ints] | None:
    """Return events, decisions and chosen requests of the next call; None at the end, `_NO_EVENTS` before a header."""
    data = file.read(24)
    if data == ANEW:
        return _NO_EVENTS, _NO_EVENTS, _NO_EVENTS
    if len(data) < 24:
        return None
    sizes = np.frombuffer(data, np.int64)
    _check(sizes.min() >= 0 and sizes.max() <= _MOST_IN_PART, "the numbers of events and decisions are out of range")
    arrays: list[Ints] = []
    for count, width in zip(sizes.tolist(), (EVENT_WIDTH, WIDTH, 1), strict=True):
        data = file.read(8 * count * width)
        whole = len(data) // (8 * width)
        rows = np.frombuffer(data[: 8 * width * whole], np.int64).reshape(whole, width)
        if not arrays:
            _check_events(rows, live)
        if whole < count:
            return None
        arrays.append(rows)
    return arrays[0], arrays[1], arrays[2].ravel()


def _check_events(events: Ints, live: Live) -> None:
    """Raise _Damaged for events that a pool cannot take."""
    pool = live.pool
    num_models, num_queues, num_devices = (int(pool[number]) for number in (NUM_MODELS, NUM_QUEUES, NUM_DEVICES))
    kind, now, first, second, third, taken = events.T

    def check(kinds: Sequence[int], values: Ints, least: int, most: int) -> None:
        here = values[np.isin(kind, kinds)]
        _check(bool(((here >= least) & (here <= most)).all()), "an event is out of range")

    every = range(AGAIN + 1)
    _check(bool(np.isin(kind, every).all()), "an event is of an unknown kind")
    for values in (now, taken):
        check(every, values, 0, _MOST)
    check((ARRIVE, AGAIN), first, 0, num_models - 1)
    check((CANCEL,), first, -1, num_models - 1)
    check((ARRIVE, AGAIN, CANCEL), third, -_MOST, NEVER)
    check((FREE, UP, DOWN), first, 0, num_devices - 1)
    check((FREE,), second, 0, num_queues - 1)
    check((FREE,), third, 0, int(pool[ROW]) - 1)
    check((UP,), second, 0, 2)
    check((UP,), third, 0, _MOST)
    check((ADJUST,), second, 0, _MOST)
    _check(bool(np.isin(first[kind == ADJUST], (DELAY, SLACK, GUARD)).all()), "an event adjusts an unknown number")
    check((SCALE,), first, 0, MOST_WORKERS if live.scaler_size else -1)
