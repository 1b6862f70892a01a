"""Models of a deployment that depend on each other: the deadline of a query, split over its calls; shared trunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwright.spec.joint_models import MOST_RATE
from meshwright.spec.units import format_count, format_percent

if TYPE_CHECKING:
    from meshwright.spec.deployment import Deployment
    from meshwright.spec.joint_models import Trunk


def joint_rows(deployment: Deployment, scale: float = 1.0) -> dict[str, list[dict[str, Any]]]:
    """Rows of ``queries`` and of ``trunks`` at a scale of their rates, if there are any.

    None for devices where no number suffices.
    """
    rows = {"queries": _split_rows(deployment, scale), "trunks": _trunk_rows(deployment.trunks, scale)}
    return {name: found for name, found in rows.items() if found}


def describe_joint(rows: Mapping[str, Sequence[dict[str, Any]]]) -> list[Any]:
    """A table of all calls, and a sentence for each query and trunk."""
    from meshwright.report import make_table

    queries, trunks = rows.get("queries", ()), rows.get("trunks", ())
    calls = [call for row in queries for call in row["calls"]]
    return [*((make_table(calls),) if calls else ()), *map(_tell_split, queries), *map(_tell_trunk, trunks)]


def _split_rows(deployment: Deployment, scale: float) -> list[dict[str, Any]]:
    """The split of each query, and the devices that it and the even split need."""
    from meshwright.serving import call_rates, devices_of, split_evenly, split_time

    rows, overhead_s = [], deployment.delay + deployment.slack
    for query in deployment.queries:
        times = split_time(query, scale=scale, overhead_s=overhead_s)
        even, rates = split_evenly(query), call_rates(query)
        needed, even_devices = (devices_of(query, split, scale=scale, overhead_s=overhead_s) for split in (times, even))
        rows.append(
            {
                "query": query.name,
                "slo_s": float(query.slo),
                "staggered_devices": needed,
                "even_devices": even_devices if math.isfinite(even_devices) else None,
                "calls": [
                    {
                        "call": f"{query.name}.{call.name}",
                        "requests_per_s": rates[call.name] * scale,
                        "time_s": times[call.name],
                        "even_time_s": even[call.name],
                    }
                    for call in query.calls
                ],
            }
        )
    return rows


def _tell_split(row: dict[str, Any]) -> str:
    needed, even = row["staggered_devices"], row["even_devices"]
    said = f"Query {row['query']}: {needed:.2f} devices suffice with its time split so"
    if even is None:
        return f"{said}; split evenly, some call would have less time than a batch of one takes."
    saved = f" ({format_percent(1 - needed / even)} saved)" if even else ""
    return f"{said}, {even:.2f} with an even split{saved}."


def _trunk_rows(trunks: Sequence[Trunk], scale: float) -> list[dict[str, Any]]:
    from meshwright.serving import devices_shared

    rows = []
    for trunk in trunks:
        heads = tuple(replace(head, rate=min(head.rate * scale, MOST_RATE)) for head in trunk.heads)
        shared, apart = devices_shared(replace(trunk, heads=heads))
        rows.append(
            {
                "trunk": trunk.name,
                "num_heads": len(trunk.heads),
                "staggered_devices": shared,
                "apart_devices": apart if math.isfinite(apart) else None,
            }
        )
    return rows


def _tell_trunk(row: dict[str, Any]) -> str:
    apart = row["apart_devices"]
    return (
        f"Trunk {row['trunk']}: {row['staggered_devices']:.2f} devices suffice for its "
        f"{format_count(row['num_heads'], 'head')} together, "
        + (f"{apart:.2f} with a trunk for each head." if apart is not None else "no number with a trunk for each head.")
    )
