"""``meshwright plan``: search the space of plans.

With ``--rewrite`` the graph is also rewritten, and the plan for the faster of both graphs is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cli.exchanges import load_order
from meshwright.cli.models import Mode, graphs_of, planned_target, refuse_experts
from meshwright.cli.output import note, terminal_sink
from meshwright.cli.pages import page_path
from meshwright.cli.plan.choices import closes_space, read_choices, remark_on_schedules
from meshwright.cli.plan.files import PlanFiles, files_to_write
from meshwright.cli.plan.output import PlanPlaces, exchange_best, order_best, put_plans
from meshwright.cli.plan.request import PlanRequest
from meshwright.cli.plan.strategy import find_strategy, strategy_file
from meshwright.cli.planning import (
    as_written,
    choose_batch,
    choose_precision,
    make_cost_model,
    print_misfit,
    read_prices,
)
from meshwright.cli.recalling import recall_measurements, recall_software
from meshwright.cli.requests import as_command
from meshwright.cli.schedules import check_orders
from meshwright.spec.exchange import GradientExchange
from meshwright.spec.made_with import note_making
from meshwright.spec.model_files import is_stored_graph
from meshwright.spec.workload import Optimizer, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.cost import CostModel
    from meshwright.planner import Plans, Problem, Shares
    from meshwright.spec import Cluster, EventSink, Graph, Plan

GraphFor = Callable[[int], "Graph"]


def run_plan(request: PlanRequest) -> None:
    """Search for the fastest layout that fits and explain it. Needs no GPU and allocates no weight."""
    # A wrong cluster raises before a model is fetched or captured.
    _ = request.machine
    if request.form() == "place":
        from meshwright.cli.plan.place import place_ops

        place_ops(request)
        return
    from meshwright.planner import NothingFitsError

    files = files_to_write(request.model, request.out, request.launch, request.slurm)
    of_strategy = strategy_file(request.out) if request.method == "flexflow" else None
    if of_strategy is not None and of_strategy == files.plan:
        files = PlanFiles(plan=None, script=None, slurm=request.slurm)
    page = page_path(request.html, request.open_browser, "plan")
    check_orders(request.find_orders)
    own_exchange = None if request.exchange is None else load_order(request.exchange)
    try:
        with terminal_sink(request.as_json) as events, _rare_collections():
            found = _replan(request, events) if request.form() == "from" else find_plans(request, events)
            strategy = find_strategy(found, request, of_strategy) if request.method == "flexflow" else None
    except NothingFitsError as error:
        if request.form() != "from" and closes_space(request):
            note(remark_on_schedules())
        print_misfit(error, request.as_json)
        raise
    except KeyboardInterrupt:
        note("Interrupted before a plan that fits was found.")
        raise
    plans, remarks = found.plans, list(found.remarks)
    if request.find_orders is not None:
        plans, said = order_best(plans, found.graph_for, found.cost, request)
        remarks += said
    if own_exchange is not None:
        plans, said = exchange_best(plans, found.graph_for, found.cost, request, own_exchange)
        remarks += said
    if request.compiled:
        remarks += _why_eager(plans, found.graph_for)
    # The reference as it was given, so that `simulate` and `run` find the same cluster.
    place = files.plan or page or Path("plan.json")
    made_with = note_making(found.measurements, place, found.predicted_for)
    named = replace(plans, ranked=tuple(as_written(item, request.cluster, made_with) for item in plans.ranked))
    put_plans(named, found.graph_for, found.cost, PlanPlaces(files, page), request, remarks, found.shares, strategy)


plan = as_command(PlanRequest, run_plan)
plan.__name__ = "plan"


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: usual collections take a tenth of a search, which keeps millions of objects."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class CommandPlans(NamedTuple):
    """Plans, with what they were made from and remarks on them."""

    plans: Plans
    graph_for: GraphFor
    cost: CostModel
    measurements: Path | None
    remarks: Sequence[str] = ()
    predicted_for: str | None = None
    shares: Shares | None = None


def find_plans(request: PlanRequest, events: EventSink | None) -> CommandPlans:
    """Search the layouts that the request allows."""
    from meshwright.planner import Limits, find_shares, search_plans

    refuse_experts(request.model, request.expert or ())
    graph_for = graphs_of(request.model, request.sizes, mode="inference" if request.inference else "training")
    problem = make_problem(request, graph_for)
    deadline_s = request.deadline
    if request.method == "flexflow" and deadline_s is not None:
        # The other half is for strategies of single layers.
        deadline_s /= 2
    limits = Limits(max_plans=request.top, deadline_s=deadline_s, seed=request.seed, events=events)
    plans = search_plans(problem, request.method, limits)
    remarks = [remark_on_schedules()] if closes_space(request) else []
    if request.rewrite:

        def again(graph_for: GraphFor, sizes: Sequence[int]) -> Plans:
            choices = replace(problem.choices, microbatch_sizes=tuple(sizes))
            return search_plans(replace(problem, graph_for=graph_for, choices=choices), request.method, limits)

        graphs = partial(graphs_of, request.model, request.sizes, mode=problem.workload.kind)
        plans, graph_for, said = plan_rewritten(plans, graph_for, again, graphs, request.machine)
        remarks += said
    shares = None
    if request.shares:
        try:
            shares = find_shares(problem, plans, events)
        except KeyboardInterrupt:
            remarks.append("An interrupt ended the comparison of choices: their shares are unknown.")
    return CommandPlans(plans, graph_for, problem.cost, request.measurements, remarks, request.software, shares)


def _why_eager(plans: Plans, graph_for: GraphFor) -> list[str]:
    """Why the layers of the best plan are not compiled; nothing if they are."""
    from meshwright.program import STAYS_EAGER, build_program

    best = plans.best.plan
    return [STAYS_EAGER] if build_program(best, graph_for(best.microbatch_size)).splits_backwards else []


def make_problem(request: PlanRequest, graph_for: GraphFor) -> Problem:
    """The problem that a request describes. Raises for an invalid request, before anything is searched."""
    from meshwright.planner import Problem, within_budget

    machine = request.machine
    mode: Mode = "inference" if request.inference else "training"
    if is_stored_graph(request.model) and not request.inference:
        mode = graph_for(1).mode
    precision = choose_precision(
        request.precision,
        machine,
        mode,
        gradients=request.grad_dtype,
        tf32=request.tf32,
        schedules=request.schedule or (),
    )
    prices = read_prices(request.prices)
    counts = tuple(request.ranks or ())
    if request.max_price is not None:
        counts = within_budget(counts, machine, prices, request.max_price)
    workload = Workload(
        kind=mode,
        global_batch=choose_batch(request.batch, request.tokens, request.model, machine, graph_for),
        precision=precision,
        optimizer=Optimizer.named(request.optimizer),
    )
    return Problem(
        graph_for=graph_for,
        cluster=machine,
        workload=workload,
        cost=make_cost_model(machine, request.measurements, precision, request.software),
        choices=read_choices(request, graph_for(min(request.microbatch_size or (1,))), workload, counts),
        exchange=GradientExchange(staleness=request.staleness),
        memory=request.memory,
        aim=request.aim,
        max_latency_s=request.max_latency,
        prices=prices,
        model=request.model,
        model_sizes=request.sizes,
        compiled=request.compiled,
    )


def _replan(request: PlanRequest, events: EventSink | None) -> CommandPlans:
    """Find a plan for the machines as they are now, starting from a plan for the machines as they were."""
    from meshwright.planner import Limits, replan
    from meshwright.planner.replanning import DEADLINE_S
    from meshwright.spec import Plan, read_document

    start = request.start_from
    assert start is not None
    earlier: Plan = read_document(Plan, start)
    measurements = recall_measurements(earlier, start, request.measurements, request.cluster)
    moved = replace(earlier, model=request.model, cluster=request.cluster)
    graph_for = graphs_of(request.model, request.sizes, mode=earlier.workload.kind, target=planned_target(moved))
    software = recall_software(earlier, request.software)
    cost = make_cost_model(request.machine, measurements, earlier.workload.precision, software)
    deadline_s = DEADLINE_S if request.deadline is None else request.deadline
    limits = Limits(max_plans=request.top, deadline_s=deadline_s, seed=request.seed, events=events)
    plans = replan(moved, graph_for, cost, memory=request.memory, prices=read_prices(request.prices), limits=limits)
    return CommandPlans(mark_rewritten(plans, moved.rewritten), graph_for, cost, measurements, predicted_for=software)


def plan_rewritten(
    plans: Plans,
    graph_for: Callable[[int], Graph],
    search: Callable[[Callable[[int], Graph], Sequence[int]], Plans],
    graphs: Callable[..., Callable[[int], Graph]],
    machine: Cluster,
) -> tuple[Plans, Callable[[int], Graph], list[str]]:
    """The better plans of both graphs, their graph, and a sentence about the comparison.

    ``graphs`` returns the graph by microbatch size; with ``target``, that of the rewritten model.
    """
    from meshwright.rewrite.planned import RewriteTarget
    from meshwright.spec.units import format_seconds

    kind = machine.device_kind(0)
    size = plans.best.plan.microbatch_size
    rewritten = graphs(target=RewriteTarget(machine, kind))
    before_s = plans.best.step_time_s
    if rewritten(size).content_hash == graph_for(size).content_hash:
        return plans, graph_for, [f"No rule leads to a cheaper graph on {kind.name}."]
    others = search(rewritten, [size])
    after_s = others.best.step_time_s
    times = f"{format_seconds(after_s)} instead of {format_seconds(before_s)}"
    if after_s >= before_s:
        told = f"Rewritten for {kind.name}, the step would take {times}"
        return plans, graph_for, [f"{told}; the graph stays as it is."]
    told = f"The graph is rewritten for {kind.name}: the step takes {times}."
    return mark_rewritten(others, kind.name), rewritten, [told]


def mark_rewritten(plans: Plans, kind: str) -> Plans:
    """The plans of a graph that was rewritten for a kind of device, each marked so."""
    ranked = tuple(replace(item, plan=replace(item.plan, rewritten=kind)) for item in plans.ranked)
    return replace(plans, ranked=ranked)
