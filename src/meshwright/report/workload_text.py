"""The workload of a plan, printed before its speed: model, cluster, batch, precision, optimizer."""

from __future__ import annotations

from typing import Any

from meshwright.spec import Graph, Placement, Plan, format_count


def workload_row(plan: Plan | Placement, graph: Graph) -> dict[str, Any]:
    """Return the workload of a plan as plain data. ``graph`` is that of the whole model, not that of one rank.

    Keys: ``model``, ``num_parameters`` (None for a rewritten model), ``cluster``, ``num_devices``, ``kind``,
    ``samples_per_step``, ``tokens_per_step`` and ``sequence_length`` (None for models without tokens), ``precision``,
    ``optimizer`` (None for inference).
    """
    work, length = plan.workload, graph.sequence_length
    return {
        "model": plan.model,
        "num_parameters": _num_parameters(plan, graph),
        "cluster": plan.cluster,
        "num_devices": plan.num_devices,
        "kind": work.kind,
        "samples_per_step": work.global_batch,
        "tokens_per_step": None if length is None else length * work.global_batch,
        "sequence_length": length,
        "precision": work.precision,
        "optimizer": work.optimizer.name if work.kind == "training" else None,
    }


def describe_workload(plan: Plan | Placement, graph: Graph | None = None) -> str:
    """Return ``gpt-tiny (11,776 parameters) on 2 devices of 2xcpu: training, 8 samples per step, mixed, adamw``.

    Parameters and tokens are named only if the model's ``graph`` is given.
    """
    work = plan.workload
    parameters, tokens = "", ""
    if graph is not None:
        if (count := _num_parameters(plan, graph)) is not None:
            parameters = f" ({format_count(count, 'parameter')})"
        if (length := graph.sequence_length) is not None:
            tokens = f" ({length * work.global_batch:,} tokens in sequences of {length:,})"
    optimizer = f", {work.optimizer.name}" if work.kind == "training" else ""
    samples = format_count(work.global_batch, "sample")
    facts = f"{work.kind}, {samples} per step{tokens}, {work.precision}{optimizer}"
    devices = format_count(plan.num_devices, "device")
    return f"{plan.model}{parameters} on {devices} of {plan.cluster}: {facts}"


def _num_parameters(plan: Plan | Placement, graph: Graph) -> int | None:
    """Parameters of the model; None for a rewritten graph, which holds values derived from them."""
    return None if isinstance(plan, Plan) and plan.rewritten else graph.num_parameters()
