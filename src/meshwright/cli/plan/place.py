"""``meshwright plan --method place``, and what the other verbs print of the placement that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.models import graphs_of
from meshwright.cli.output import print_tables
from meshwright.cli.placements import placement_tables, rank_rows
from meshwright.cli.planning import choose_batch, choose_precision, make_cost_model
from meshwright.spec.codec import write_document
from meshwright.spec.errors import NoFeasiblePlanError, PlanError
from meshwright.spec.files import refuse_replacing
from meshwright.spec.made_with import note_making
from meshwright.spec.units import format_seconds
from meshwright.spec.workload import Optimizer, Workload

if TYPE_CHECKING:
    from meshwright.cli.plan.request import PlanRequest


def place_ops(request: PlanRequest) -> None:
    """Place every op of a model, compare the placement with one device, print and write it."""
    from meshwright.planner import Constraints, place, seconds_on_one_device
    from meshwright.report import describe_workload, workload_row
    from meshwright.simulator import simulate_plan

    microbatch_sizes, ranks = request.microbatch_size or [], request.ranks or []
    for name, values in (("--microbatch-size", microbatch_sizes), ("--ranks", ranks)):
        if len(values) > 1:
            raise PlanError(f"--method place takes one {name}; {len(values)} were given. Leave one of them.")
    if request.out is not None:
        if request.out.suffix != ".json":
            raise PlanError(f"--out {request.out}: a placement is written to a file that ends in .json. Give one.")
        refuse_replacing(request.out)
    machine = request.machine
    batch = choose_batch(request.batch, request.tokens, request.model, machine, graphs_of(request.model, request.sizes))
    precision = choose_precision(request.precision, machine, gradients=request.grad_dtype, tf32=request.tf32)
    size = microbatch_sizes[0] if microbatch_sizes else batch
    if size < 1 or batch % size:
        raise PlanError(f"Microbatches of {size} do not divide a batch of {batch}. Choose a divisor.")
    graph = graphs_of(request.model, request.sizes)(size)
    workload = Workload(
        kind=graph.mode, global_batch=batch, precision=precision, optimizer=Optimizer.named(request.optimizer)
    )
    cost = make_cost_model(machine, request.measurements, precision, request.software)
    devices = range(min(machine.num_ranks, *(ranks or [machine.num_ranks])))
    if ranks and ranks[0] > machine.num_ranks:
        raise PlanError(
            f"--ranks {ranks[0]} was given for a cluster of {machine.num_ranks} devices. Give at most that."
        )
    try:
        found = place(
            graph,
            machine,
            workload,
            devices=devices,
            constraints=Constraints(fixed=dict(map(_read_fixed, request.fix or ()))),
            num_microbatches=batch // size,
            cost=cost,
            memory=request.memory,
            model=request.model,
            model_sizes=request.sizes,
        )
    except NoFeasiblePlanError as error:
        if request.as_json:
            print_json("misfit", {"plans": [], "nearest": None, "ranks": [], "error": str(error)})
        raise
    made_with = note_making(request.measurements, request.out or Path("placement.json"), request.software)
    placement = replace(found, cluster=request.cluster, made_with=made_with)
    result = simulate_plan(placement, graph, machine, cost=cost)
    if request.out is not None:
        write_document(placement, request.out)
    alone_s = seconds_on_one_device(placement, graph, machine, devices=devices, cost=cost, memory=request.memory)
    basis = cost.explain_basis(graph, size)
    rows = rank_rows(placement, graph, result, machine)
    written = f"placement written to {request.out}" if request.out else "No file was asked for: --out placement.json."
    if request.as_json:
        file = str(request.out) if request.out else None
        seconds = {"duration_s": result.timeline.duration_s, "one_device_s": alone_s}
        facts = {"workload": workload_row(placement, graph), "ranks": rows}
        print_json("op-placement", {**facts, **seconds, "basis": basis, "file": file})
        return
    beside = "It fits on no single device." if alone_s is None else f"On one device alone: {format_seconds(alone_s)}."
    heading = Text(describe_workload(placement, graph))
    print_tables(heading, *placement_tables(placement, rows, result), beside, basis, Text(written))


def _read_fixed(text: str) -> tuple[str, int]:
    name, separator, rank = text.rpartition("=")
    if not separator or not name or not rank.isascii() or not rank.isdigit() or len(rank) > 9:
        raise PlanError(f"--fix {text!r}: expected NAME=RANK, a layer, module or op and a device, such as head=1.")
    return name, int(rank)
