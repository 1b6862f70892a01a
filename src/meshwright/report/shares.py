"""Table of the gain of each choice of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from meshwright.report.narrow import NarrowTable
from meshwright.spec import format_percent, format_seconds

_HEADINGS = ("choice", "plain", "best plan", "without it", "gains", "share")


_NUMERIC = (False, False, False, True, True, True)


def shares_table(row: Mapping[str, Any]) -> RenderableType:
    """Return a table of the choices of `planner.Shares.row`: values, seconds gained, share of the whole gain."""
    cells = [
        [
            item["choice"],
            item["plain"],
            item["taken"],
            "nothing fits" if item["without_s"] is None else format_seconds(item["without_s"]),
            format_seconds(item["gain_s"]),
            format_percent(item["share"]),
        ]
        for item in row["choices"]
    ]
    return NarrowTable(_HEADINGS, cells, numeric=_NUMERIC)
