"""Plans, clusters, programs and measurements as plain rows: dicts that are JSON as they are.

A key ends with its unit (``_s``, ``_bytes``, ``_flops``, ``_bytes_per_s``, ``_share``), from which tables choose the
format. The α and β of measured transfers are those of t = α + n/β with the least sum of squared *relative* errors, so
that small messages count as much as large ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.report.batches import latency_rows
from meshwright.spec import (
    Cluster,
    Graph,
    Measurements,
    Opcode,
    Placement,
    Plan,
    PlanError,
    Program,
    Section,
    TransferMeasurement,
)
from meshwright.spec.instructions import SENDS, SUMS

Row = dict[str, Any]

# The keys of `measurement_rows` that are printed as separate tables, and their titles.
MEASURED_PARTS = {
    "transfers": "transfers: t = latency + bytes / bandwidth",
    "batches": "batches of whole models: l(b) = alpha · b + beta",
}


def plan_rows(plan: Plan, graph: Graph | None = None) -> list[Row]:
    """One row per stage; with the graph, layers have their names, else their numbers.

    Keys: ``stage``, ``first_layer``, ``last_layer``, ``num_layers``, ``ranks``, ``replicas``, ``shares`` (microbatches
    of each, if the plan says them), ``num_microbatches`` (per
    step, of all replicas), ``microbatch_size``, ``schedule``. Raises PlanError if the plan has layers that the graph
    lacks.
    """
    if graph is not None and plan.stages[-1].stop > len(graph.layers):
        raise PlanError(
            f"The plan has {plan.stages[-1].stop} layers, but graph {graph.name!r} has {len(graph.layers)}; "
            "give the graph that the plan was made for."
        )

    def name(layer: int) -> str:
        return str(layer) if graph is None else graph.layers[layer].name

    return [
        {
            "stage": index,
            "first_layer": name(stage.start),
            "last_layer": name(stage.stop - 1),
            "num_layers": stage.stop - stage.start,
            "ranks": list(stage.ranks),
            "replicas": len(stage.ranks),
            **({"shares": list(stage.counts(plan.num_microbatches))} if plan.has_shares else {}),
            "num_microbatches": plan.num_microbatches,
            "microbatch_size": plan.microbatch_size,
            "schedule": plan.schedule,
        }
        for index, stage in enumerate(plan.stages)
    ]


def cluster_rows(cluster: Cluster) -> list[Row]:
    """One row per group of equal devices of a node.

    Keys: ``node``, ``num_devices``, ``kind``, ``memory_bytes`` (per device), ``memory_bytes_per_s``,
    ``peak_flops_per_s`` (dtype → FLOP/s), ``device_link_latency_s``, ``device_link_bytes_per_s``, ``nic_latency_s``,
    ``nic_bytes_per_s``, ``num_nics``.
    """
    kinds = {kind.name: kind for kind in cluster.device_kinds}
    return [
        {
            "node": node.name,
            "num_devices": group.count,
            "kind": group.kind,
            "memory_bytes": kinds[group.kind].memory_bytes,
            "memory_bytes_per_s": kinds[group.kind].memory_bandwidth_bytes_per_s,
            "peak_flops_per_s": dict(kinds[group.kind].peak_flops_per_s),
            "device_link_latency_s": node.device_link.latency_s,
            "device_link_bytes_per_s": node.device_link.bandwidth_bytes_per_s,
            "nic_latency_s": node.nic.latency_s,
            "nic_bytes_per_s": node.nic.bandwidth_bytes_per_s,
            "num_nics": node.num_nics,
        }
        for node in cluster.nodes
        for group in node.devices
    ]


def placement_rows(placement: Placement) -> list[Row]:
    """One row per rank of a placement: ``rank``, ``num_stages``, ``num_ops``."""
    of_ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    return [
        {"rank": rank, "num_stages": len(mine), "num_ops": sum(len(placement.stages[index].ops) for index in mine)}
        for rank, mine in enumerate(of_ranks)
    ]


def program_rows(program: Program) -> list[Row]:
    """One row per section and rank with instructions: the number of each opcode, and the bytes that they move.

    Keys: ``section``, ``rank``, each opcode's name in lower case, ``sent_bytes``, ``reduced_bytes``.
    """
    return [
        row
        for name, section in program.sections()
        for rank in range(program.num_ranks)
        if (row := _rank_counts(program, name, section, rank)) is not None
    ]


def measurement_rows(measurements: Measurements) -> Row:
    """What was measured: device, conditions, counts, and under ``transfers`` the fitted links.

    Keys: ``device``, ``software``, ``date``, ``conditions``, ``num_ops``, ``op_spread_share`` (median over the ops,
    None without any), ``num_optimizers``, ``overhead_s``, ``transfers``: ``kind``, ``num_ranks``, ``num_sizes``,
    ``smallest_bytes``, ``largest_bytes``, ``latency_s``, ``bandwidth_bytes_per_s`` (None if time does not grow with
    size); ``batches``: `latency_rows`.
    """
    spreads = [row.spread for row in measurements.ops]
    groups: dict[tuple[str, int], list[TransferMeasurement]] = {}
    for row in measurements.transfers:
        groups.setdefault((row.kind, row.num_ranks), []).append(row)
    return {
        "device": measurements.device,
        "software": measurements.software,
        "date": measurements.date,
        "conditions": measurements.conditions,
        "num_ops": len(measurements.ops),
        "op_spread_share": float(np.median(spreads)) if spreads else None,
        "num_optimizers": len(measurements.optimizers),
        "overhead_s": measurements.overhead_s,
        "transfers": [_transfer_row(*key, rows) for key, rows in sorted(groups.items())],
        "batches": latency_rows(measurements.batches),
    }


def fit_transfers(rows: Sequence[TransferMeasurement]) -> tuple[float, float | None]:
    """Latency α (s) and bandwidth β (bytes/s) of t = α + n/β; β is None if time does not grow with size.

    Neither is negative: where the best line would start below 0, α is 0.
    """
    sizes = np.array([row.num_bytes for row in rows], np.float64)
    seconds = np.array([row.seconds for row in rows])
    if len(set(sizes.tolist())) > 1:
        columns = np.stack([1 / seconds, sizes / seconds], axis=1)
        # Bytes are scaled to at most 1; otherwise the two columns differ by many orders of magnitude.
        scale = sizes.max()
        columns[:, 1] /= scale
        latency, slope = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0].tolist()
        if latency >= 0 and slope > 0:
            return latency, scale / slope
        if latency < 0:
            ratios = columns[:, 1]
            return 0.0, float(scale * (ratios @ ratios) / ratios.sum())
    weights = 1 / seconds
    return float(weights.sum() / (weights @ weights)), None


def _rank_counts(program: Program, name: str, section: Section, rank: int) -> Row | None:
    ids = np.concatenate([[], *(np.array(section.stream_range(stream)) for stream in program.streams_of(rank))])
    mine = ids.astype(np.int64)
    if not len(mine):
        return None
    opcodes, num_bytes = section.opcode[mine], section.num_bytes[mine]
    counts = Counter(opcodes.tolist())
    sends = np.isin(opcodes, SENDS)
    return {
        "section": name,
        "rank": rank,
        **{opcode.name.lower(): counts[opcode] for opcode in Opcode},
        "sent_bytes": int(num_bytes[sends].sum()),
        "reduced_bytes": int(num_bytes[np.isin(opcodes, SUMS)].sum()),
    }


def _transfer_row(kind: str, num_ranks: int, rows: Sequence[TransferMeasurement]) -> Row:
    latency, bandwidth = fit_transfers(rows)
    return {
        "kind": kind,
        "num_ranks": num_ranks,
        "num_sizes": len({row.num_bytes for row in rows}),
        "smallest_bytes": min(row.num_bytes for row in rows),
        "largest_bytes": max(row.num_bytes for row in rows),
        "latency_s": latency,
        "bandwidth_bytes_per_s": bandwidth,
    }
