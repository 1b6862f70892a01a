"""How the time of a deployment's queries is split over their calls, for people and as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.spec.units import format_percent

if TYPE_CHECKING:
    from meshwright.spec.deployment import Query


def split_rows(queries: Sequence[Query]) -> list[dict[str, Any]]:
    """The split of each query, and the devices that it and the even one need; None where no number suffices."""
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


def describe_splits(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """A table of all calls and a sentence for each query."""
    from meshwright.report import make_table

    if not rows:
        return []
    return [make_table([call for row in rows for call in row["calls"]]), *map(_sentence, rows)]


def _sentence(row: dict[str, Any]) -> str:
    needed, even = row["staggered_devices"], row["even_devices"]
    said = f"Query {row['query']}: {needed:.2f} devices would do with its time split so"
    if even is None:
        return f"{said}; split evenly, some call would have less time than a batch of one takes."
    saved = f" ({format_percent(1 - needed / even)} saved)" if even else ""
    return f"{said}, {even:.2f} with an even split{saved}."
