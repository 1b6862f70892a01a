"""The price of a plan: money per hour of the devices and nodes that it uses, per step, per sample, and per run.

The last price given for a kind of device holds, and likewise for nodes; both are added. A run is paid for its whole
time, including all losses.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from meshwright.spec import Cluster, Graph, Placement, Plan, ScenarioError, suggest
from meshwright.spec.scenario import Price, Scenario

_SECONDS_PER_HOUR = 3600.0


def price_per_hour(
    num_devices: int, cluster: Cluster, scenario: Scenario, idle: Collection[int] = ()
) -> tuple[float, str] | None:
    """Return money per hour of the first ``num_devices`` devices that are not ``idle`` and their nodes, and currency.

    Returns None without a price.

    Raises ScenarioError for prices in several currencies, and for a kind of device that the cluster does not have.
    """
    prices = scenario.effects_of(Price)
    if not prices:
        return None
    currencies = {price.currency for price in prices}
    there = islice((rank for rank in range(cluster.num_ranks) if rank not in idle), num_devices)
    used = [(cluster.device_kind(rank).usual_name, cluster.node_index(rank)) for rank in there]
    kinds = {kind.usual_name for kind in cluster.device_kinds}
    for place, price in enumerate(scenario.effects):
        if not isinstance(price, Price):
            continue
        if price.currency != prices[0].currency:
            with scenario.naming(place, "currency"):
                raise ScenarioError(f"{', '.join(sorted(currencies))} were given; expected one. Convert them.")
        if price.device and price.device not in kinds:
            with scenario.naming(place, "device"):
                raise ScenarioError(
                    f"the cluster has no devices of kind {price.device!r}{suggest(price.device, kinds)}."
                )
    devices: dict[int, float] = {}
    nodes: dict[int, float] = {}
    for price in prices:
        for rank, (kind, node) in enumerate(used):
            if price.device in ("", kind):
                (devices if price.of == "device" else nodes)[rank if price.of == "device" else node] = price.per_hour
    return sum(devices.values()) + sum(nodes.values()), prices[0].currency


def bill(
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    scenario: Scenario,
    step_s: float,
    run_s: float | None,
    num_steps: float | None,
) -> dict[str, Any]:
    """Return what steps of ``step_s`` seconds cost, and a run if there is one; empty without a price.

    With a run, steps and samples carry their share of all losses.
    """
    priced = price_per_hour(plan.num_devices, cluster, scenario, plan.idle if isinstance(plan, Plan) else ())
    if priced is None:
        return {}
    per_hour, currency = priced
    if run_s is not None and num_steps:
        step_s = run_s / num_steps
    step = per_hour * step_s / _SECONDS_PER_HOUR
    samples = plan.workload.global_batch
    figures: dict[str, Any] = {
        "currency": currency,
        "price_per_hour": per_hour,
        "price_per_step": step,
        "price_per_million_samples": 1e6 * step / samples,
    }
    if (tokens := graph.sequence_length) is not None:
        figures["price_per_million_tokens"] = 1e6 * step / (samples * tokens)
    if num_steps:
        figures["price_of_run"] = step * num_steps
    return figures
