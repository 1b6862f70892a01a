"""Batches of whole models: the time of each, and the line fitted over the sizes of each model.

samples/s = b / median        l(b) = αb + β (`meshwright.spec.fit_latency`)        error = l(b) / median - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.report.cells import format_cell
from meshwright.spec import BatchMeasurement, fit_latency, format_seconds

Row = dict[str, Any]


def batch_rows(batches: Sequence[BatchMeasurement]) -> list[Row]:
    """One row per measured batch, models in the order of the table, sizes ascending.

    Keys: ``model``, ``batch_size``, ``median_s``, ``p90_s``, ``p99_s``, ``samples_per_s``, ``num_measured``.
    """
    return [
        {
            "model": row.model,
            "batch_size": row.batch_size,
            "median_s": row.seconds,
            "p90_s": row.p90_s,
            "p99_s": row.p99_s,
            "samples_per_s": row.batch_size / row.seconds,
            "num_measured": row.num_samples,
        }
        for rows in _by_model(batches).values()
        for row in rows
    ]


def latency_rows(batches: Sequence[BatchMeasurement]) -> list[Row]:
    """One row per model: the line through its medians.

    Keys: ``model``, ``num_sizes``, ``smallest_batch``, ``largest_batch``, ``alpha_s``, ``beta_s``, ``largest_error``
    (of the line relative to the median, with its sign) and ``largest_error_at`` (its batch size); the last four are
    None for one size.
    """
    return [_latency_row(model, rows) for model, rows in _by_model(batches).items()]


def describe_latency(row: Row) -> str:
    """A row of `latency_rows` as a sentence; "" if the row has no line."""
    if row["alpha_s"] is None:
        return ""
    return (
        f"l(b) = {format_seconds(row['alpha_s'])} · b + {format_seconds(row['beta_s'])}; largest relative error "
        f"{format_cell('largest_error', row['largest_error'])}, at a batch size of {row['largest_error_at']}"
    )


def _by_model(batches: Sequence[BatchMeasurement]) -> dict[str, list[BatchMeasurement]]:
    models: dict[str, list[BatchMeasurement]] = {}
    for row in batches:
        models.setdefault(row.model, []).append(row)
    return {model: sorted(rows, key=lambda row: row.batch_size) for model, rows in models.items()}


def _latency_row(model: str, rows: list[BatchMeasurement]) -> Row:
    sizes = [row.batch_size for row in rows]
    known = {"model": model, "num_sizes": len(rows), "smallest_batch": sizes[0], "largest_batch": sizes[-1]}
    if len(set(sizes)) < 2:
        return {**known, "alpha_s": None, "beta_s": None, "largest_error": None, "largest_error_at": None}
    alpha_s, beta_s = fit_latency(sizes, [row.seconds for row in rows])
    errors = {row.batch_size: (alpha_s * row.batch_size + beta_s) / row.seconds - 1 for row in rows}
    worst = max(errors, key=lambda size: abs(errors[size]))
    return {
        **known,
        "alpha_s": alpha_s,
        "beta_s": beta_s,
        "largest_error": errors[worst],
        "largest_error_at": worst,
    }
