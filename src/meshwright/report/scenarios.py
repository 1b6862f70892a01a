"""What a scenario does, in words."""

from __future__ import annotations

from typing import assert_never

from meshwright.spec import format_bytes, format_percent, format_seconds
from meshwright.spec.quantities import Seconds
from meshwright.spec.scenario import (
    Checkpoints,
    DeviceMemory,
    Effect,
    Failures,
    Jitter,
    LostDevice,
    NetworkCards,
    OtherDevice,
    Oversubscription,
    Price,
    Scenario,
    SlowDevice,
    SlowLink,
)


def describe_scenario(scenario: Scenario) -> str:
    """All effects of a scenario, in their order; empty if it has none."""
    return ", ".join(map(describe_effect, scenario.effects))


def describe_effect(effect: Effect) -> str:
    """An effect in a few words."""
    match effect:
        case Jitter() | LostDevice() | Failures() | Checkpoints() | Price():
            return _describe_run(effect)
        case SlowDevice():
            return (
                f"{_devices(effect.devices.text)} {describe_factor(effect.factor)}{_while(effect.since, effect.until)}"
            )
        case OtherDevice():
            return f"{_devices(effect.devices.text)} of kind {effect.device}"
        case DeviceMemory():
            of = "" if effect.devices.text == "all" else f" of {effect.devices.text}"
            return f"{format_bytes(effect.memory)} per device{of}"
        case SlowLink():
            return f"links {effect.links.text} {_link_words(effect)}"
        case NetworkCards():
            return f"{effect.num_nics} NIC{'s' if effect.num_nics > 1 else ''} per node"
        case Oversubscription():
            return f"racks of {effect.nodes_per_rack} nodes, oversubscribed {effect.ratio:g}:1"
        case _:
            assert_never(effect)


def _describe_run(effect: Jitter | LostDevice | Failures | Checkpoints | Price) -> str:
    match effect:
        case Jitter():
            return _jitter_words(effect)
        case LostDevice():
            return f"{_devices(effect.devices.text)} lost{_while(effect.since, effect.until)}"
        case Failures(mttf=None):
            return f"{len(effect.times)} failures at given moments"
        case Failures():
            law = "" if effect.shape == 1 else f" (Weibull, shape {effect.shape:g})"
            return f"every {effect.of} fails after {_long(effect.mttf or 0)} on average{law}"
        case Checkpoints():
            return (
                f"checkpoints every {_long(effect.interval)}" if effect.interval else "checkpoints at the best interval"
            )
        case Price():
            kind = f" of kind {effect.device}" if effect.device else ""
            return f"{effect.per_hour:g} {effect.currency} per {effect.of}{kind} and hour"
        case _:
            assert_never(effect)


def describe_factor(factor: float) -> str:
    """``2× slower``, ``4× faster``."""
    return f"{factor:g}× slower" if factor >= 1 else f"{1 / factor:.3g}× faster"


def _long(seconds: float) -> str:
    """Times of runs, which are hours rather than seconds."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return format_seconds(seconds)


def _devices(text: str) -> str:
    return "all devices" if text == "all" else f"devices of {text}" if text.startswith(("node", "kind")) else text


def _while(since: Seconds, until: Seconds | None) -> str:
    begin = f" from {_long(since)} on" if since else ""
    return begin if until is None else f"{begin} until {_long(until)}"


def _link_words(effect: SlowLink) -> str:
    parts = [] if effect.factor == 1 else [describe_factor(effect.factor)]
    if effect.bandwidth is not None:
        parts.append(f"of {effect.bandwidth / 1e9:.3g} GB/s")
    if effect.latency is not None:
        parts.append(f"with a latency of {format_seconds(effect.latency)}")
    return " ".join(parts)


def _jitter_words(effect: Jitter) -> str:
    what = {"computations": "computing", "transfers": "transferring", "all": "all they do"}[effect.of]
    parts = [f"spread of {format_percent(effect.spread, 0)} {what}"] if effect.spread else []
    if effect.straggler_probability:
        parts.append(
            f"{describe_factor(effect.straggler_factor)} {what} in {format_percent(effect.straggler_probability)} of "
            f"{effect.per}s"
        )
    return f"{_devices(effect.devices.text)}: {', '.join(parts)}" if parts else "no jitter"
