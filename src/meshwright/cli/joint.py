"""What models of a deployment have to do with each other: the time of queries, split over their calls; trunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.spec.units import format_count, format_percent

if TYPE_CHECKING:
    from meshwright.spec.deployment import Deployment
    from meshwright.spec.joint_models import Query, Trunk


def joint_rows(deployment: Deployment) -> dict[str, list[dict[str, Any]]]:
    """Rows of ``queries`` and of ``trunks``, where there are some; None for devices where no number suffices."""
    rows = {"queries": _split_rows(deployment.queries), "trunks": _trunk_rows(deployment.trunks)}
    return {name: found for name, found in rows.items() if found}


def describe_joint(rows: Mapping[str, Sequence[dict[str, Any]]]) -> list[Any]:
    """A table of all calls, and a sentence for each query and trunk."""
    from meshwright.report import make_table

    queries, trunks = rows.get("queries", ()), rows.get("trunks", ())
    calls = [call for row in queries for call in row["calls"]]
    return [*((make_table(calls),) if calls else ()), *map(_tell_split, queries), *map(_tell_trunk, trunks)]


def _split_rows(queries: Sequence[Query]) -> list[dict[str, Any]]:
    """The split of each query, and the devices that it and the even one need."""
    from meshwright.serving import call_rates, devices_of, split_evenly, split_time

    rows = []
    for query in queries:
        times, even, rates = split_time(query), split_evenly(query), call_rates(query)
        even_devices = devices_of(query, even)
        rows.append(
            {
                "query": query.name,
                "slo_s": float(query.slo),
                "staggered_devices": devices_of(query, times),
                "even_devices": even_devices if math.isfinite(even_devices) else None,
                "calls": [
                    {
                        "call": f"{query.name}.{call.name}",
                        "requests_per_s": rates[call.name],
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
    said = f"Query {row['query']}: {needed:.2f} devices would do with its time split so"
    if even is None:
        return f"{said}; split evenly, some call would have less time than a batch of one takes."
    saved = f" ({format_percent(1 - needed / even)} saved)" if even else ""
    return f"{said}, {even:.2f} with an even split{saved}."


def _trunk_rows(trunks: Sequence[Trunk]) -> list[dict[str, Any]]:
    from meshwright.serving import devices_shared

    rows = []
    for trunk in trunks:
        shared, apart = devices_shared(trunk)
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
        f"Trunk {row['trunk']}: {row['staggered_devices']:.2f} devices would do for its "
        f"{format_count(row['num_heads'], 'head')} together, "
        + (f"{apart:.2f} with a trunk for each head." if apart is not None else "no number with a trunk for each head.")
    )
