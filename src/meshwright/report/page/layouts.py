"""A cluster and a plan as parts of a page: what runs where, and the traffic between stages.

Flows are the bytes of the timeline's sends and reductions in one step; a flow's link is inside a node or between
nodes, depending on its ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.report.rows import plan_rows
from meshwright.spec import Cluster, Graph, Link, Opcode, Plan, Timeline
from meshwright.spec.instructions import COLLECTIVES, SENDS

Row = dict[str, Any]

# More nodes and devices are counted, not drawn: each device is a tile.
MAX_NODES = 64
MAX_DEVICES = 1024


def cluster_part(cluster: Cluster) -> Row:
    """Nodes with their devices by rank, links, and the kinds of devices."""
    nodes, rank = [], 0
    for node in cluster.nodes[:MAX_NODES]:
        room = max(MAX_DEVICES - rank, 0)
        devices = [group.kind for group in node.devices for _ in range(min(group.count, room))][:room]
        nodes.append(
            {
                "name": node.name,
                "first_rank": rank,
                "num_devices": node.num_devices,
                "devices": devices,
                "device_link": _link_row(node.device_link),
                "nic": _link_row(node.nic),
                "num_nics": node.num_nics,
            }
        )
        rank += node.num_devices
    return {
        "name": cluster.name,
        "num_ranks": cluster.num_ranks,
        "num_nodes": len(cluster.nodes),
        "nodes": nodes,
        "kinds": [
            {
                "kind": kind.name,
                "memory_bytes": kind.memory_bytes,
                "memory_bytes_per_s": kind.memory_bandwidth_bytes_per_s,
                **{f"{dtype}_flops_per_s": peak for dtype, peak in kind.peak_flops_per_s.items()},
            }
            for kind in cluster.device_kinds
        ],
    }


def plan_part(
    plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, timeline: Timeline | None = None
) -> Row:
    """Stages of a plan with layers (named if the graph is given), ranks and, with a timeline, the traffic per step."""
    work = plan.workload
    return {
        "words": plan.describe(),
        "model": plan.model,
        "cluster": plan.cluster,
        "workload": f"{work.kind}, {work.global_batch} samples per step, {work.precision}"
        + (f", {work.optimizer.name}" if work.kind == "training" else ""),
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "stages": [
            {key: row[key] for key in ("stage", "first_layer", "last_layer", "num_layers", "ranks", "replicas")}
            for row in plan_rows(plan, graph)
        ],
        "flows": [] if timeline is None else _flow_rows(plan, cluster, timeline),
    }


def _link_row(link: Link) -> Row:
    return {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}


def _flow_rows(plan: Plan, cluster: Cluster | None, timeline: Timeline) -> list[Row]:
    """One row per pair of stages and payload, and one per stage whose replicas sum their gradients; first step."""
    moves = (*SENDS, *COLLECTIVES)
    chosen = np.flatnonzero(np.isin(timeline.opcode, moves) & (timeline.step == timeline.step.min(initial=0)))
    reduces = np.isin(timeline.opcode[chosen], COLLECTIVES)
    # The peer of a reduction is its bucket: a stage's buckets are one flow.
    ends = np.where(reduces, timeline.stage[chosen], timeline.peer[chosen])
    keys = np.stack([timeline.opcode[chosen].astype(np.int64), timeline.stage[chosen], ends], axis=1)
    known, group = np.unique(keys, axis=0, return_inverse=True)
    totals = np.bincount(group.ravel(), timeline.num_bytes[chosen], len(known))
    rows = []
    for (opcode, stage, peer), num_bytes in zip(known.tolist(), totals.tolist(), strict=True):
        # Every member of a reduction has its own span.
        members = len(plan.stages[stage].ranks) if opcode in COLLECTIVES and stage < len(plan.stages) else 1
        rows.append(
            {
                "payload": Opcode(opcode).name.lower().replace("send_", "").replace("_", " "),
                "stage": stage,
                "peer": peer,
                "moved_bytes": int(num_bytes) // members,
                "link": _link_words(plan, cluster, stage, peer),
            }
        )
    return rows


def _link_words(plan: Plan, cluster: Cluster | None, stage: int, peer: int) -> str:
    if cluster is None or max(stage, peer) >= len(plan.stages) or cluster.num_ranks < plan.num_ranks:
        return ""
    nodes = [{cluster.node_index(rank) for rank in plan.stages[end].ranks} for end in (stage, peer)]
    if len(nodes[0] | nodes[1]) == 1:
        return "inside a node"
    return "between nodes" if nodes[0].isdisjoint(nodes[1]) else "inside and between nodes"
