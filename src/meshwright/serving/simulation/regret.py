"""How much worse is a policy than the best of others, for the same requests? Its **regret**, in answers in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.serving.policies.hooks import Policy
from meshwright.serving.simulation.simulate import ServingResult, simulate_deployment
from meshwright.spec import Deployment


def compare_policies(
    deployment: Deployment, policies: Mapping[str, Policy], seconds: float, **options: Any
) -> tuple[dict[str, ServingResult], list[dict[str, Any]]]:
    """Results by name, and a row for each with its ``regret_share``: what it lacks of the best other policy's goodput.

    Nothing is lacking where it is the best itself: its regret is then 0, and ``ahead_share`` says by how much it is
    ahead of the best other. ``options`` are those of `simulate_deployment`.
    """
    results = {name: simulate_deployment(deployment, policy, seconds, **options) for name, policy in policies.items()}
    rows = []
    for name, result in results.items():
        others = [other.goodput_per_s for key, other in results.items() if key != name]
        ratio = result.goodput_per_s / max(others) if others and max(others) > 0 else 1.0
        rows.append(
            {"policy": name, **result.row(), "regret_share": max(1 - ratio, 0.0), "ahead_share": max(ratio - 1, 0.0)}
        )
    return results, rows
