"""Output of ``meshwright plan``: plan, script, page and tables; placements (``--method place``); found orders."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import graphs_of
from meshwright.cli.output import print_tables
from meshwright.cli.placements import placement_tables, rank_rows
from meshwright.cli.planning import choose_batch, choose_precision, make_cost_model
from meshwright.cli.written_pages import provenance, put_page
from meshwright.spec import (
    Cluster,
    DocumentError,
    Graph,
    NoFeasiblePlanError,
    Optimizer,
    Plan,
    PlanError,
    Workload,
    format_bytes,
    format_count,
    format_money,
    format_seconds,
    write_document,
    write_text,
)
from meshwright.spec.files import refuse_replacing
from meshwright.spec.made_with import note_making
from meshwright.spec.model_files import is_stored_graph

if TYPE_CHECKING:
    from meshwright.cli.plan.plan_command import Strategy
    from meshwright.cli.plan.plan_request import PlanRequest
    from meshwright.cost import CostModel
    from meshwright.planner import Plans, Shares
    from meshwright.simulator import OwnOrder
    from meshwright.spec import GradientExchange


def place_ops(request: PlanRequest) -> None:
    """Place every op of a model, compare the placement with one device, print and write it."""
    from meshwright.planner import Constraints, place, seconds_on_one_device
    from meshwright.report import describe_workload, workload_row
    from meshwright.simulator import simulate_plan

    microbatch_sizes, ranks = request.microbatch_size or [], request.ranks or []
    for name, values in (("--microbatch-size", microbatch_sizes), ("--ranks", ranks)):
        if len(values) > 1:
            raise PlanError(f"--method place takes one {name}; {len(values)} were given. Give only one.")
    if request.out is not None:
        if request.out.suffix != ".json":
            raise PlanError(
                f"--out {request.out}: a placement is written to a file that ends in .json. Give a name that does."
            )
        refuse_replacing(request.out)
    machine = request.machine
    batch = choose_batch(request.batch, request.tokens, request.model, machine, graphs_of(request.model, request.sizes))
    precision = choose_precision(request.precision, machine, gradients=request.grad_dtype, tf32=request.tf32)
    size = microbatch_sizes[0] if microbatch_sizes else batch
    if size < 1 or batch % size:
        raise PlanError(
            f"Microbatches of {size} do not divide a batch of {batch}. Choose a --microbatch-size that does."
        )
    graph = graphs_of(request.model, request.sizes)(size)
    workload = Workload(
        kind=graph.mode, global_batch=batch, precision=precision, optimizer=Optimizer.named(request.optimizer)
    )
    cost = make_cost_model(machine, request.measurements, precision, request.software)
    devices = range(min(machine.num_ranks, *(ranks or [machine.num_ranks])))
    if ranks and ranks[0] > machine.num_ranks:
        raise PlanError(
            f"--ranks {ranks[0]} was given for a cluster of {machine.num_ranks} devices. Give that number, or less."
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
    beside = (
        "The model fits on no single device." if alone_s is None else f"On one device alone: {format_seconds(alone_s)}."
    )
    heading = Text(describe_workload(placement, graph))
    print_tables(heading, *placement_tables(placement, rows, result), beside, basis, Text(written))


def _read_fixed(text: str) -> tuple[str, int]:
    name, separator, rank = text.rpartition("=")
    if not separator or not name or not rank.isascii() or not rank.isdigit() or len(rank) > 9:
        raise PlanError(
            f"--fix {text!r}: expected NAME=RANK: a layer, module or op, and the number of a device, such as head=1."
        )
    return name, int(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """Paths of the plan and its script; None if not written. ``slurm``: the script is for sbatch."""

    plan: Path | None
    script: Path | None
    slurm: bool


def files_to_write(model: str, out: Path | None, launch: Path | None, slurm: bool) -> PlanFiles:
    """Turn the options into paths of the plan and its script, before anything is computed.

    Raises PlanError for options that conflict.
    """
    if out is not None and out.suffix and slurm and launch is None:
        raise PlanError(
            f"--slurm was given, but --out {out} names the plan's file alone. Add --launch launch.sbatch, or give "
            "--out a folder."
        )
    if out is not None and not out.suffix:
        if out.exists() and not out.is_dir():
            raise DocumentError(f"{out} is a file, not a folder. Give --out a folder, or a file that ends in .json.")
        name = "launch.sbatch" if slurm else "launch.sh"
        files = PlanFiles(plan=out / "plan.json", script=launch or out / name, slurm=slurm)
    else:
        files = PlanFiles(plan=out, script=launch, slurm=slurm)
    for place in (files.plan, files.script):
        if place is not None:
            refuse_replacing(place)
    if files.script is not None and is_stored_graph(model):
        raise PlanError(
            f"A plan made from the stored graph {model!r} cannot be started: it has no code and no weights to run. "
            "Plan from the model itself (a shipped name or path/to/file.py:function), or write the plan alone "
            "with --out plan.json."
        )
    return files


def no_files(model: str) -> str:
    """Return a hint for a user who asked for no file."""
    if is_stored_graph(model):
        return "No file was asked for: --out plan.json writes the plan."
    return "No file was asked for: --out FOLDER writes the plan and the script that starts it."


def write_plan_files(files: PlanFiles, plan: Plan, cluster: Cluster) -> list[str]:
    """Write the plan and its script; return one line per file for the user."""
    from meshwright.report.settings import launch_script, slurm_script

    if files.plan is None:
        return []
    text = None
    if files.script is not None and plan.is_runnable:
        make = slurm_script if files.slurm else launch_script
        text = make(plan, cluster, script=files.script, plan_file=files.plan)
    write_document(plan, files.plan)
    lines = [f"plan written to {files.plan}"]
    if files.script is not None and not plan.is_runnable:
        lines.append(f"no script: the plan {plan.only_simulated}, which can only be simulated")
    if files.script is not None and text is not None:
        write_text(text, files.script)
        mode = files.script.stat().st_mode
        files.script.chmod(mode | (mode & 0o444) >> 2)  # executable by everyone who may read it
        starter = "sbatch" if files.slurm else "bash"
        lines += [f"script written to {files.script}", f"start it with: {starter} {shlex.quote(str(files.script))}"]
    return lines


class PlanPlaces(NamedTuple):
    """Paths of the plan, its script and the page; None if not written."""

    files: PlanFiles
    page: Path | None


def order_best(
    plans: Plans, graph_for: Callable[[int], Graph], cost: CostModel, request: PlanRequest
) -> tuple[Plans, list[str]]:
    """Search the fastest order of computations for the best plan; return the plans, this plan first, and remarks."""
    from meshwright.planner import find_order
    from meshwright.planner.search import find_front
    from meshwright.program import unlower_plan
    from meshwright.simulator import form_teams

    assert request.find_orders is not None
    best = plans.best.plan
    seen = form_teams(best, graph_for(best.microbatch_size), cost.cluster, cost)
    sought = find_order(
        seen.plan,
        seen.graph,
        seen.cluster,
        request.find_orders,
        cost=seen.cost,
        whole=request.whole_backwards,
        memory=request.memory,
    )
    price = plans.best.price and plans.best.price.at(sought.best.step_time_s)
    followed = unlower_plan(sought.best.plan, best)
    first = replace(sought.best, plan=followed, price=price, interval=plans.predict_interval(followed))
    ranked = (first, *(item for item in plans.ranked if item.plan != first.plan))
    front = find_front((first, *plans.front))
    return replace(plans, ranked=ranked[: max(len(plans.ranked), 2)], front=front), [sought.explain()]


def exchange_best(
    plans: Plans, graph_for: Callable[[int], Graph], cost: CostModel, request: PlanRequest, order: OwnOrder
) -> tuple[Plans, list[str]]:
    """Let the best plan send its gradients in the user's ``order``; return the plans, this plan first, and remarks."""
    from meshwright.planner import follow_own_order

    best = plans.best
    graph = graph_for(best.plan.microbatch_size)
    found = follow_own_order(best.plan, graph, cost.cluster, order, cost=cost, memory=request.memory)
    price = best.price and best.price.at(found.step_time_s)
    first = replace(found, price=price, interval=plans.predict_interval(found.plan))
    exchange = found.plan.exchange
    said = (
        f"Gradients leave as {request.exchange} says, in {format_count(len(exchange.sequence), 'part')} of at most "
        f"{format_bytes(exchange.partition_bytes)}: a step of {format_seconds(found.step_time_s)}, instead of "
        f"{format_seconds(best.step_time_s)} in buckets."
    )
    return replace(plans, ranked=(first, *plans.ranked[1:])), [said]


def follow_policy(
    plans: Plans,
    _graph_for: Callable[[int], Graph],
    cost: CostModel,
    request: PlanRequest,
    exchange: GradientExchange,
) -> tuple[Plans, list[str]]:
    """Let the replicas of the best plan follow an exchange policy; return this plan alone, and remarks.

    The controller is simulated, so that one that never finishes or breaks a rule is refused here. Raises PlanError if
    the plan exceeds a device's memory or the budget.
    """
    from meshwright.cost.memory import backend_of

    best = plans.best
    found = plans.evaluate(replace(best.plan, exchange=exchange))
    first = replace(found, interval=plans.predict_interval(found.plan))
    if not found.fits:
        rank = found.fullest_rank
        raise PlanError(
            f"Under the exchange policy {exchange.policy}, rank {rank} needs "
            f"{format_bytes(found.reserved_bytes[rank])} of the {format_bytes(found.memory_limit_bytes[rank])} that it "
            "may reserve. Plan with a smaller --batch, or without --exchange."
        )
    if request.max_price is not None and found.price is not None and found.price.per_hour > request.max_price:
        raise PlanError(
            f"The plan uses {found.plan.num_devices} devices for {format_money(found.price.per_hour)} per hour, more "
            f"than the {format_money(request.max_price)} that may be spent. Give fewer --ranks."
        )
    servers = f" Rank {exchange.servers[0]} holds the parameters." if exchange.servers else ""
    if backend_of(cost.cluster.device_kind(0)) != "cpu":
        servers += " Runs under a policy compute on processors only: give `run` --device cpu."
    said = (
        f"Under the exchange policy {exchange.policy}, a step takes {format_seconds(found.step_time_s)}, with sums of "
        f"all gradients of the same {format_count(best.plan.num_ranks, 'replica')} {format_seconds(best.step_time_s)}: "
        f"{found.samples_per_s:,.1f} and {best.samples_per_s:,.1f} samples per second whose gradients are "
        f"used.{servers} Policies gain where replicas are occasionally slow: compare them with `meshwright simulate "
        "--scenario`."
    )
    return replace(plans, ranked=(first,), front=(first,), bound_s=0.0, notes=()), [said]


def put_plans(
    plans: Plans,
    graph_for: Callable[[int], Graph],
    cost: CostModel,
    places: PlanPlaces,
    request: PlanRequest,
    remarks: Sequence[str],
    shares: Shares | None = None,
    strategy: Strategy | str | None = None,
) -> None:
    """Write the best plan, its script and the page, and print the plans, with ``--json`` as one document."""
    from meshwright.planner import explain_step_interval, plans_document
    from meshwright.report import describe_workload, fit_table, front_table, plans_table, shares_table, workload_row
    from meshwright.simulator import allocate_rank, explain_nodes, form_teams

    best, machine = plans.best.plan, cost.cluster
    written = write_plan_files(places.files, best, machine)
    written += [f"orders written to {request.find_orders}"] if request.find_orders is not None else []
    whole = graph_for(best.microbatch_size)
    seen = form_teams(best, whole, machine, cost)
    allocation = allocate_rank(seen.plan, seen.graph, seen.cluster, plans.best.fullest_rank)
    held = allocation.explain() if allocation else ""
    kind = machine.device_kind(plans.best.fullest_rank * best.sharding.width)
    held = "\n".join(filter(None, (request.memory.explain(kind), held)))
    teams = list(filter(None, (best.sharding.describe_teams(),)))
    if places.page is not None:
        remark = "\n".join((*teams, held, *([shares.explain()] if shares else [])))
        document = plans_document(plans, graph_for, machine, cost, remark=remark, provenance=provenance())
        written = [*written, put_page(document, places.page, request.open_browser)]
    basis = seen.cost.explain_basis(seen.graph, best.microbatch_size)
    interval = plans.interval()
    if request.as_json:
        files = {
            "file": places.files.plan,
            "script": places.files.script,
            "orders": request.find_orders,
            "page": places.page,
        }
        print_json(
            "plans",
            {
                "workload": workload_row(best, whole),
                "plans": plans.rows(),
                "ranks": plans.best.memory_rows(),
                "allocation": allocation.row() if allocation else None,
                "basis": basis,
                "step_interval_s": [interval.low_s, interval.high_s],
                "step_interval_measured": interval.measured,
                "search": plans.search_row(),
                **({"shares": shares.row()} if shares else {}),
                **({"teams": teams[0]} if teams else {}),
                **_strategy_row(strategy),
                **({"nodes": [asdict(node) for node in plans.best.nodes]} if plans.best.nodes else {}),
                **{name: str(path) if path else None for name, path in files.items()},
            },
        )
        return
    front = (front_table(plans.search_row()["front"]), "") if request.pareto else ()
    sure = (basis, explain_step_interval(interval))
    hosts = explain_nodes(plans.best.nodes)
    counts = seen.cost.count_bases(seen.graph, best.microbatch_size)
    rest_on = ", ".join(f"{count} {basis}" for basis, count in counts.most_common())
    print_tables(Text(f"{describe_workload(best, whole)}; op costs: {rest_on}"))
    print_tables(plans_table(plans.rows()), "", *front, plans.explain(best), *teams, *hosts, *remarks, *sure, "")
    if shares is not None:
        told = [shares_table(shares.row())] if shares.choices else []
        print_tables(*told, shares.explain(with_parts=False), "")
    # Names of files may hold square brackets, which rich would read as markup.
    files_of_strategy = not isinstance(strategy, str | None) and request.out is not None
    said = written or ([] if files_of_strategy else [no_files(request.model)])
    print_tables(fit_table(plans.best.memory_rows(), held), *map(Text, said))
    if strategy is not None:
        print_tables("", *([Text(strategy)] if isinstance(strategy, str) else strategy.tables()))


def _strategy_row(strategy: Strategy | str | None) -> dict[str, Any]:
    if strategy is None or isinstance(strategy, str):
        return {} if strategy is None else {"strategy": {"refusal": strategy}}
    return {"strategy": strategy.row()}
