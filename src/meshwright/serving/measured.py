"""Latencies of a deployment's models from a measurement table (`meshwright measure MODEL --batches`).

Models that have a latency keep it. The others take the medians of all measured batch sizes of their model, found by
name (`spec.name_model`): the reference as it was typed, or another path to the same file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.spec import Deployment, Latency, Measurements, ServedModel, ServingError, name_model


def take_latencies(deployment: Deployment, table: Measurements) -> Deployment:
    """Return the deployment with latencies for the models that lack one.

    Raises ServingError if the table lacks one of them, and if all models have a latency already.
    """
    if all(model.latency is not None for model in deployment.models):
        raise ServingError("All models of the deployment have a latency already; the measurements are not needed.")
    return replace(deployment, models=tuple(_with_latency(model, table) for model in deployment.models))


def _with_latency(model: ServedModel, table: Measurements) -> ServedModel:
    if model.latency is not None:
        return model
    name = name_model(model.model or model.name, model.sizes.items())
    key = _key(name)
    measured = {row.batch_size: row.seconds for row in table.batches if _key(row.model) == key}
    if not measured:
        known = ", ".join(sorted({row.model for row in table.batches})) or "none"
        raise ServingError(
            f"Model {model.name!r}: the measurements have no batches of {name}; they have those of: {known}. Measure "
            f"it: meshwright measure {model.model or 'MODEL'} --batches 1..64:7log"
        )
    return replace(model, latency=Latency.through(measured.items()))


def _key(name: str) -> str:
    """Return a key that is the same for two paths to one file."""
    return str(Path(name).expanduser().resolve()) if "/" in name or Path(name).suffix else name
