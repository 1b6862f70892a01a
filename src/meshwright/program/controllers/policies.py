"""The controller of a plan's exchange policy: one of this package, or the user's own class (`make_controller`).

A user's class is called with ``num_workers``, ``num_steps`` and ``num_bytes`` (of all parameters, float32) by name. Its
attribute ``num_ranks``, if it has one, counts the workers and the ranks after them, which hold parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.program.controllers.backup_workers import BackupWorkers, StoppedBackups
from meshwright.program.controllers.bounded_delay import BoundedDelay
from meshwright.program.controllers.partial_reduce import PartialReduce
from meshwright.spec import GradientExchange, PlanError, ScheduleReferenceError
from meshwright.spec.control import Controller, Decision, Event
from meshwright.spec.exchange import ExchangePolicy, read_policy
from meshwright.spec.own_code import importable, known_parts, load_function, read_source, reported, source_hash

_EXPECTED = "makes a controller: Class(num_workers=, num_steps=, num_bytes=)"


def make_controller(
    exchange: GradientExchange, num_workers: int, num_steps: int, num_bytes: int = 0
) -> Controller[Any]:
    """Return the controller of ``exchange.policy`` for ``num_steps`` steps of ``num_workers`` replicas.

    ``num_bytes``: bytes of all parameters together. Raises ScheduleReferenceError if the user's file is missing, has
    changed or fails, ProgramError for numbers outside their bounds.
    """
    policy = read_policy(exchange.policy)
    if policy is not None:
        return _named(policy, num_workers, num_steps, num_bytes)
    return _own(exchange.policy, exchange.policy_hash, num_workers, num_steps, num_bytes)


def with_policy(text: str, num_devices: int) -> GradientExchange:
    """Return the exchange of a policy on the first ``num_devices`` devices: the last of them are its servers, if any.

    ``text`` is as for `spec.exchange.read_policy`. Raises PlanError for an unknown policy or too few devices, and as
    `make_controller`.
    """
    policy, policy_hash = read_policy(text), ""
    if policy is not None:
        num_servers = policy.num_servers
    else:
        path, _ = known_parts(text)
        policy_hash = source_hash(read_source(path, _EXPECTED, ScheduleReferenceError))
        fitting = [
            count
            for count in (0, 1)
            if num_devices > count and _own(text, policy_hash, num_devices - count, 24, 4).num_ranks == num_devices
        ]
        if not fitting:
            raise PlanError(
                f"{text} uses other than {num_devices} ranks for {num_devices} workers and for {num_devices - 1}. "
                "Expected `num_ranks` to be the number of workers, or one more for the rank with the parameters."
            )
        num_servers = fitting[0]
    if num_devices - num_servers < 2:
        raise PlanError(
            f"The exchange policy {text} was given for {num_devices} devices, {num_servers} of them for parameters; "
            "expected at least two devices that compute. Give more devices."
        )
    servers = tuple(range(num_devices - num_servers, num_devices))
    return GradientExchange(policy=text, policy_hash=policy_hash, servers=servers)


def _named(policy: ExchangePolicy, num_workers: int, num_steps: int, num_bytes: int) -> Controller[Any]:
    match policy.kind:
        case "backup" | "stopped-backup":
            kind = BackupWorkers if policy.kind == "backup" else StoppedBackups
            return kind(num_workers=num_workers, num_backups=policy.number, num_versions=num_steps, num_bytes=num_bytes)
        case "delay":
            return BoundedDelay(
                num_workers=num_workers, max_delay=policy.number, num_clocks=num_steps, num_bytes=num_bytes
            )
        case "partial":
            return PartialReduce(
                num_workers=num_workers,
                group_size=policy.number,
                num_iterations=num_steps,
                num_bytes=num_bytes,
                bridge_after=policy.bridge_after or None,
            )


def _own(reference: str, known_hash: str, num_workers: int, num_steps: int, num_bytes: int) -> _Own:
    path, name = known_parts(reference)
    content = read_source(path, _EXPECTED, ScheduleReferenceError)
    if (found := source_hash(content)) != known_hash:
        raise ScheduleReferenceError(
            f"{path} changed since the plan was made: its hash was {known_hash} and is now {found}. Plan again with "
            f"--exchange {reference}, or restore the file."
        )
    kind = load_function(path, name, expected=_EXPECTED, error=ScheduleReferenceError, content=content)
    with reported(path, f"{reference} raised", ScheduleReferenceError):
        made = kind(num_workers=num_workers, num_steps=num_steps, num_bytes=num_bytes)
    num_ranks = getattr(made, "num_ranks", num_workers)
    if not (hasattr(made, "initial") and callable(getattr(made, "decide", None))):
        raise ScheduleReferenceError(
            f"{reference} returned {str(made)[:80]}; expected a controller, with `initial` and `decide`."
        )
    if not isinstance(num_ranks, int) or num_ranks < num_workers:
        raise ScheduleReferenceError(
            f"{reference} has num_ranks = {num_ranks!r} for {num_workers} workers; expected their number or more."
        )
    return _Own(made, num_ranks, path, reference)


class _Own:
    """A user's controller whose errors name the line of the user's file."""

    def __init__(self, made: Any, num_ranks: int, path: Path, reference: str) -> None:
        self._made, self._path, self._what = made, path, f"{reference} raised"
        self.num_ranks, self.initial = num_ranks, made.initial

    def decide(self, state: Any, event: Event, now_ps: int) -> tuple[Any, Decision]:
        """Return what the user's controller decides."""
        with importable(self._path.parent), reported(self._path, self._what, ScheduleReferenceError):
            return self._made.decide(state, event, now_ps)  # type: ignore[no-any-return]
