"""Describe scenarios and their effects in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from meshwright.spec import (
    Cluster,
    format_bytes,
    format_count,
    format_flops,
    format_money,
    format_percent,
    format_seconds,
)
from meshwright.spec.precision import numbers_of
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
from meshwright.spec.units import Seconds


def describe_scenario(scenario: Scenario) -> str:
    """Return all effects of a scenario in words, in their order; "" if the scenario has no effects."""
    return ", ".join(map(describe_effect, scenario.effects))


def describe_missing_rates(cluster: Cluster, num_devices: int, precision: str) -> str:
    """Return sentences on devices without a rate for a precision, and the rates used instead; "" if all have one."""
    kinds = {cluster.device_kind(rank).usual_name: cluster.device_kind(rank) for rank in range(num_devices)}
    numbers, sentences = numbers_of(precision), []
    dtype = numbers.compute
    for name, kind in kinds.items():
        if numbers.products and numbers.products not in kind.peak_flops_per_s:
            sentences.append(f"{name} has no rate for {numbers.products}, so products there are estimated in {dtype}.")
        if dtype in kind.peak_flops_per_s:
            continue
        rates = sorted((rate, other) for other, rate in kind.peak_flops_per_s.items())
        (slowest, slow), (fastest, fast) = rates[0], rates[-1]
        sentences.append(
            f"{name} has no rate for {dtype}, so its computations are estimated at its slowest rate, "
            f"{format_flops(slowest)}/s of {slow}. A plan in {fast} would have {format_flops(fastest)}/s there."
        )
    return " ".join(sentences)


def describe_effect(effect: Effect) -> str:
    """Return an effect of a scenario in a few words."""
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
            return f"links {effect.links.text} {_link_words(effect)}{_while(effect.since, effect.until)}"
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
            then = ", planned again without" if effect.then == "replan" else ""
            return f"{_devices(effect.devices.text)} lost{_while(effect.since, effect.until)}{then}"
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
    """Return a factor of a time in words: 2 is ``2× slower``, 0.25 is ``4× faster``."""
    return f"{factor:g}× slower" if factor >= 1 else f"{1 / factor:.3g}× faster"


def _long(seconds: float) -> str:
    """Format the times of runs, which are hours rather than seconds."""
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
    parts = [] if effect.factor is None else [describe_factor(effect.factor)]
    if effect.bandwidth is not None:
        parts.append(f"of {effect.bandwidth / 1e9:.3g} GB/s")
    if effect.latency is not None:
        parts.append(f"with a latency of {format_seconds(effect.latency)}")
    return " ".join(parts)


def _jitter_words(effect: Jitter) -> str:
    what = {"computations": "computing", "transfers": "transferring", "all": "in all work"}[effect.of]
    parts = [f"spread of {format_percent(effect.spread, 0)} {what}"] if effect.spread else []
    if effect.straggler_probability:
        parts.append(
            f"{describe_factor(effect.straggler_factor)} {what} in {format_percent(effect.straggler_probability)} of "
            f"{effect.per}s"
        )
    return f"{_devices(effect.devices.text)}: {', '.join(parts)}" if parts else "no jitter"


def describe_run(figures: Mapping[str, Any], num_seeds: int) -> str:
    """Return sentences on a run of many steps: its time by kind, failures, and how often checkpoints are saved.

    ``figures`` is the row of a forecast (`simulator.scenarios`), a mean over ``num_seeds`` seeds.
    """
    shares = ", ".join(
        f"{format_percent(figures[f'run_{name}_share'])} {words}"
        for name, words in (
            ("computing", "computing"),
            ("lost", "lost"),
            ("saving", "saving"),
            ("restarting", "restarting"),
            ("waiting", "waiting for devices"),
        )
        if figures[f"run_{name}_share"] or name == "computing"
    )
    spread = f" ± {_long(figures['run_seed_spread_s'])}" if figures["run_seed_spread_s"] else ""
    text = f"A run of {figures['run_steps']:,.0f} steps takes {_long(figures['run_s'])}{spread}: {shares}."
    if figures["run_failures"]:
        text += f" {figures['run_failures']:.4g} failures, mean of {format_count(num_seeds, 'seed')}."
    if "interval_s" in figures:
        text += f" Saved every {_long(figures['interval_s'])} of work, {_long(figures['save_s'])} each"
        if "young_interval_s" in figures:
            young, daly = _long(figures["young_interval_s"]), _long(figures["daly_interval_s"])
            text += f" (by Young's formula every {young}, by Daly's {daly})"
        text += "."
    return text


def describe_price(figures: Mapping[str, Any]) -> str:
    """Return a sentence on the price of a step, of samples, of a run. ``figures``: keys ``currency``, ``price_*``."""
    currency = figures["currency"]
    words = {
        "price_per_step": "per step",
        "price_per_million_samples": "per million samples",
        "price_per_million_tokens": "per million tokens",
        "price_of_run": "for the run",
    }
    parts = [f"{format_money(figures[name])} {currency} {text}" for name, text in words.items() if name in figures]
    return f"At {format_money(figures['price_per_hour'])} {currency} per hour: {', '.join(parts)}."
