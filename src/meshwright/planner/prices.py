"""The price of plans in money, and the numbers of devices within a budget, by a scenario's prices (`spec.scenario`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from meshwright.simulator.scenarios import price_per_hour
from meshwright.spec import Cluster, Plan, PlanError, format_money
from meshwright.spec.scenario import Scenario

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """The price of a plan's devices and nodes, in ``currency``: per hour, per step and per million samples."""

    currency: str
    per_hour: float
    per_step: float
    per_million_samples: float

    def at(self, step_time_s: float) -> PlanPrice:
        """Return the price of the same devices with another step time."""
        per_step = self.per_hour * step_time_s / _SECONDS_PER_HOUR
        samples = self.per_step / self.per_million_samples if self.per_million_samples else 0.0
        return replace(self, per_step=per_step, per_million_samples=per_step / samples if samples else 0.0)

    def row(self) -> dict[str, Any]:
        """Return the prices as a dict, with the same keys as in the results of scenarios."""
        return {
            "currency": self.currency,
            "price_per_hour": self.per_hour,
            "price_per_step": self.per_step,
            "price_per_million_samples": self.per_million_samples,
        }

    def explain(self) -> str:
        """Return the price as one sentence."""
        return (
            f"Price: {format_money(self.per_hour)} {self.currency} per hour, {format_money(self.per_step)} per step, "
            f"{format_money(self.per_million_samples)} per million samples."
        )


def price_plan(plan: Plan, step_time_s: float, cluster: Cluster, prices: Scenario) -> PlanPrice | None:
    """Return the price of a plan with this step time; None if the scenario has no prices."""
    priced = price_per_hour(plan.num_devices, cluster, prices, plan.idle)
    if priced is None:
        return None
    per_step = priced[0] * step_time_s / _SECONDS_PER_HOUR
    return PlanPrice(
        currency=priced[1],
        per_hour=priced[0],
        per_step=per_step,
        per_million_samples=1e6 * per_step / (plan.workload.global_batch * plan.used_share),
    )


def within_budget(
    counts: Sequence[int], cluster: Cluster, prices: Scenario, max_price_per_hour: float
) -> tuple[int, ...]:
    """Return the numbers of devices that are within a budget of ``max_price_per_hour``, the largest first.

    ``counts`` are the numbers to choose from. If empty: powers of two, the devices of the first nodes, and the largest
    number within the budget. Raises PlanError if the scenario has no prices, or if no number is within the budget.
    """
    if not (max_price_per_hour > 0 and math.isfinite(max_price_per_hour)):
        raise PlanError(
            f"A budget of {max_price_per_hour:g} per hour was given; expected a positive amount. Give another budget."
        )

    def price(count: int) -> float:
        priced = price_per_hour(count, cluster, prices)
        if priced is None:
            raise PlanError("A budget was given, but no prices. Add --prices with the price of a device per hour.")
        return priced[0]

    # More devices never cost less.
    wanted = sorted(set(counts)) or range(1, cluster.num_ranks + 1)
    paid = wanted[: bisect_right(wanted, max_price_per_hour, key=price)]
    if not paid:
        raise PlanError(
            f"The fewest devices that may be used, {wanted[0]}, cost {format_money(price(wanted[0]))} per hour, more "
            f"than the {format_money(max_price_per_hour)} that may be spent (devices are taken in the order of the "
            "cluster). Give a larger budget, or list cheaper devices first."
        )
    if counts:
        return tuple(paid[::-1])
    usual = {1 << power for power in range(cluster.num_ranks.bit_length())}
    usual.update(accumulate(node.num_devices for node in cluster.nodes))
    return tuple(count for count in paid[::-1] if count == paid[-1] or count in usual)
