"""Load a policy by the reference that a user gives: ``symphony``, ``timeouts:wait=10``, or ``mine.py:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from meshwright.serving.policies.adaptive import Adaptive
from meshwright.serving.policies.clockwork import Clockwork
from meshwright.serving.policies.deferred import Deferred
from meshwright.serving.policies.fixed import Aimd, Timeouts
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.nexus import Nexus
from meshwright.serving.policies.plain import PlainPolicy
from meshwright.serving.policies.sharding.policy import Sharded
from meshwright.serving.policies.shepherd import Shepherd
from meshwright.spec import ServingError, suggest
from meshwright.spec.own_code import load_function, split_reference

_POLICIES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "adaptive": (Adaptive, {}),
    "symphony": (Deferred, {"spare": 101, "window": 100}),
    "sharded": (Sharded, {}),
    "eager": (Deferred, {"spare": 0, "window": 0}),
    "deferred": (Deferred, {}),
    "nexus": (Nexus, {}),
    "clockwork": (Clockwork, {}),
    "shepherd": (Shepherd, {}),
    "timeouts": (Timeouts, {}),
    "aimd": (Aimd, {}),
}
POLICY_NAMES = tuple(_POLICIES)
_LARGEST_SETTING = 10**9


def load_policy(reference: str) -> Policy:
    """Return the policy of a name with settings, or of a class in a user's file. Raises ServingError."""
    own = split_reference(reference)
    if own is not None:
        path, name = own
        made = load_function(path, name, expected="makes a policy", error=ServingError)
        return PlainPolicy(made, path)
    name, _, text = reference.partition(":")
    if name not in _POLICIES:
        raise ServingError(
            f"There is no policy {name!r}{suggest(name, _POLICIES)}. Give one of {', '.join(_POLICIES)}, or your own: "
            "path/to/file.py:Class."
        )
    kind, settings = _POLICIES[name]
    policy: Policy = kind(**settings | _read_settings(reference, kind, text))
    return policy


def _read_settings(reference: str, kind: Callable[..., Any], text: str) -> dict[str, int]:
    known = list(inspect.signature(kind).parameters)
    settings: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if key not in known:
            raise ServingError(
                f"Policy {reference!r} has no setting {key!r}{suggest(key, known)}. It has {', '.join(known)}."
            )
        if key in settings:
            raise ServingError(f"Policy {reference!r} has {key!r} twice. Give it once.")
        # Python refuses to parse integers of several thousand digits.
        if not separator or not value.isdecimal() or len(value) > 100 or int(value) > _LARGEST_SETTING:
            raise ServingError(
                f"Policy {reference!r}: {part!r} is not a setting; expected {key}=NUMBER, an integer from 0 to 10^9."
            )
        settings[key] = int(value)
    return settings
