"""Rows of what a deployment answered, as tables show them: latencies that are longer than can be told say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.spec.units import format_seconds


def shown_row(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """These figures of a row; "> 200 ms" for a latency of which only that is known."""
    shown = {}
    for name in names:
        over = row.get(f"{name.removesuffix('_s')}_over_s")
        shown[name] = f"> {format_seconds(over)}" if over is not None else row.get(name)
    return shown
