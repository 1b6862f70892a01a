"""Rows of a deployment's answers as tables show them, with ``> LIMIT`` for latencies beyond the measured range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.spec.units import format_seconds


def shown_row(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return these figures of a row, with "> 200 ms" for a latency known only to exceed that."""
    shown = {}
    for name in names:
        over = row.get(f"{name.removesuffix('_s')}_over_s")
        shown[name] = f"> {format_seconds(over)}" if over is not None else row.get(name)
    return shown
