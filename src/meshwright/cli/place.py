"""``meshwright plan --method place``, and what the other verbs say of the placement that it writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.models import graphs_of
from meshwright.cli.output import grid_width, print_json, print_tables
from meshwright.spec.cluster import load_cluster
from meshwright.spec.codec import write_document
from meshwright.spec.errors import PlanError
from meshwright.spec.files import refuse_replacing
from meshwright.spec.precision import Precision
from meshwright.spec.units import format_bytes, format_count, format_seconds
from meshwright.spec.workload import Workload

if TYPE_CHECKING:
    from meshwright.simulator import Contention, Simulation
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.graph import Graph
    from meshwright.spec.placement import Placement
    from meshwright.spec.workload import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """What `plan --method place` was asked."""

    model: str
    sizes: tuple[tuple[str, int], ...]
    cluster: str
    batch: int
    optimizer: Optimizer
    precision: Precision
    ranks: list[int]
    microbatch_sizes: list[int]
    measurements: Path | None
    memory_limit_bytes: int | None
    fixed: list[str]
    out: Path | None
    as_json: bool


def refuse_for_place(given: Sequence[str], known: Collection[str]) -> None:
    """Raise PlanError for an option that was given and is none of those that are known to placements of ops."""
    wrong = [name for name in given if name not in known]
    if wrong:
        raise PlanError(
            f"{wrong[0]} was given for a placement of every op, which it says nothing about. Leave it out, or plan by "
            "layers."
        )


def place_ops(request: PlaceRequest) -> None:
    """Place every op of a model, print what it is worth beside one device, and write it."""
    from meshwright.cost import load_cost_model
    from meshwright.planner import Constraints, place, seconds_on_one_device
    from meshwright.simulator import simulate_plan

    for name, values in (("--microbatch-size", request.microbatch_sizes), ("--ranks", request.ranks)):
        if len(values) > 1:
            raise PlanError(f"--method place takes one {name}; {len(values)} were given. Leave one of them.")
    if request.out is not None:
        if request.out.suffix != ".json":
            raise PlanError(f"--out {request.out}: a placement is written to a file that ends in .json. Give one.")
        refuse_replacing(request.out)
    machine = load_cluster(request.cluster)
    size = request.microbatch_sizes[0] if request.microbatch_sizes else request.batch
    if size < 1 or request.batch % size:
        raise PlanError(f"Microbatches of {size} do not divide a batch of {request.batch}. Choose a divisor.")
    graph = graphs_of(request.model, request.sizes)(size)
    workload = Workload(
        kind=graph.mode, global_batch=request.batch, precision=request.precision, optimizer=request.optimizer
    )
    cost = load_cost_model(machine, request.measurements, request.precision)
    devices = range(min(machine.num_ranks, *(request.ranks or [machine.num_ranks])))
    found = place(
        graph,
        machine,
        workload,
        devices=devices,
        constraints=Constraints(fixed=dict(map(_read_fixed, request.fixed))),
        num_microbatches=request.batch // size,
        cost=cost,
        memory_limit_bytes=request.memory_limit_bytes,
        model=request.model,
        model_sizes=request.sizes,
    )
    placement = replace(found, cluster=request.cluster)
    result = simulate_plan(placement, graph, machine, cost=cost)
    if request.out is not None:
        write_document(placement, request.out)
    limit = request.memory_limit_bytes
    alone_s = seconds_on_one_device(placement, graph, machine, devices=devices, cost=cost, memory_limit_bytes=limit)
    basis = cost.explain_basis(graph, size)
    rows = rank_rows(placement, graph, result, machine)
    written = f"placement written to {request.out}" if request.out else "No file was asked for: --out placement.json."
    if request.as_json:
        file = str(request.out) if request.out else None
        seconds = {"duration_s": result.timeline.duration_s, "one_device_s": alone_s}
        print_json({"ranks": rows, **seconds, "basis": basis, "file": file})
        return
    beside = "It fits on no single device." if alone_s is None else f"On one device alone: {format_seconds(alone_s)}."
    print_tables(*placement_tables(placement, rows, result), beside, basis, Text(written))


def simulate_placement(
    placement: Placement,
    graph: Graph,
    machine: Cluster,
    result: Simulation,
    contention: Contention,
    scenario: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print a simulated placement: its ranks, its timeline and a picture."""
    from meshwright.report import draw_grid, timeline_rows, timeline_table
    from meshwright.simulator import explain_overflows, find_overflows

    rows = rank_rows(placement, graph, result, machine)
    overflows = find_overflows(result, machine)
    if as_json:
        over = {"overflows": [item.row() for item in overflows]} if overflows else {}
        beside = {"scenario": scenario} if scenario else {}
        print_json({"ranks": rows, "contention": contention, **timeline_rows(result.timeline), **over, **beside})
        return
    print_tables(
        *placement_tables(placement, rows, result),
        *explain_overflows(overflows),
        timeline_table(result.timeline),
        draw_grid(result.timeline, width=grid_width(result.timeline.num_ranks)),
    )


def rank_rows(placement: Placement, graph: Graph, result: Simulation, machine: Cluster) -> list[dict[str, Any]]:
    """One plain row per rank.

    Keys: ``rank``, ``device``, ``num_stages``, ``num_ops``, ``busy_s`` (in the simulated steps), ``sent_bytes`` (values
    of one microbatch that other ranks read), ``peak_memory_bytes``.
    """
    from meshwright.spec.placed_slices import slice_placement

    busy, stages = result.timeline.busy_seconds(), slice_placement(graph, placement)
    width = placement.workload.float_bytes
    rows = []
    for rank in range(placement.num_ranks):
        mine = placement.stages_of(rank)
        leaving = [
            channel
            for index in mine
            for channel in stages[index].outgoing
            if placement.stages[channel.target].rank != rank
        ]
        rows.append(
            {
                "rank": rank,
                "device": machine.device_kind(rank).name,
                "num_stages": len(mine),
                "num_ops": sum(len(placement.stages[index].ops) for index in mine),
                "busy_s": float(busy[rank]),
                "sent_bytes": sum(item.forward_bytes(graph, placement.microbatch_size, width) for item in leaving),
                "peak_memory_bytes": result.peak_memory_bytes[rank],
            }
        )
    return rows


def placement_tables(placement: Placement, rows: list[dict[str, Any]], result: Simulation) -> list[Any]:
    """What people read: the placement in a line, its ranks, and how long a step takes."""
    from meshwright.report.narrow import NarrowTable

    headings = ("rank", "device", "stages", "ops", "busy", "sent", "memory")
    cells = [
        (
            str(row["rank"]),
            row["device"],
            str(row["num_stages"]),
            str(row["num_ops"]),
            format_seconds(row["busy_s"]),
            format_bytes(row["sent_bytes"]) if row["sent_bytes"] else "",
            format_bytes(row["peak_memory_bytes"]),
        )
        for row in rows
    ]
    numeric = (True, False, True, True, True, True, True)
    steps = int(result.timeline.step.max(initial=0)) + 1
    took = f"{format_count(steps, 'step')} from a cold start: {format_seconds(result.timeline.duration_s)}."
    return [Text(placement.describe()), NarrowTable(headings, cells, numeric=numeric), took]


def _read_fixed(text: str) -> tuple[str, int]:
    name, separator, rank = text.rpartition("=")
    if not separator or not name or not rank.isascii() or not rank.isdigit() or len(rank) > 9:
        raise PlanError(f"--fix {text!r}: expected NAME=RANK, a layer, module or op and a device, as head=1.")
    return name, int(rank)
