"""``meshwright simulate``: run a plan on the virtual clock."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.cli.exchanges import ExchangeOption, compare_ways
from meshwright.cli.models import JsonOption, MeasurementsOption, VirtualStagesOption, graph_of_plan
from meshwright.cli.output import grid_width, print_json, print_tables
from meshwright.cli.pages import HtmlOption, OpenOption, page_path, provenance, put_page
from meshwright.cli.placing import PlaceOption
from meshwright.cli.planning import given_options
from meshwright.cli.recalling import recall_measurements
from meshwright.cli.scenarios import RunStepsOption, ScenarioOption, SeedsOption, follow_scenario, load_scenarios
from meshwright.cli.schedules import FindOrdersOption, WholeOption, compare, compared_schedules, place_of_orders
from meshwright.cli.serving import (
    CapacityOption,
    GoodputOption,
    PolicyOption,
    ScaleOption,
    SecondsOption,
    SeedOption,
    ServingRequest,
    is_deployment,
    refuse_for_deployment,
    refuse_without_deployment,
    simulate_serving,
)
from meshwright.cli.sweeps import FigureOption, PlotOption, SweepOption, check_sweep, run_sweep
from meshwright.cli.traces import TraceOption, TraceRanksOption, put_timeline, traced_ranks
from meshwright.spec.cluster import load_cluster
from meshwright.spec.errors import DocumentError
from meshwright.spec.placement import Placement
from meshwright.spec.plan import SCHEDULE_NAMES
from meshwright.spec.plan_files import read_plan

if TYPE_CHECKING:
    from meshwright.simulator import Simulation
    from meshwright.spec.plan import Plan

NEVER_FLUSHES = (
    "The schedule never flushes: the first step above fills the pipeline and the last one empties it; the steady step "
    "is what lies between."
)

PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN",
        help="A plan or a placement (.json) that `meshwright plan` wrote, or a deployment (.toml) that serves.",
    ),
]


# What says something about a placement of every op.
_OF_PLACEMENTS = frozenset(
    {
        "--cluster",
        "--measurements",
        "--graph",
        "--scenario",
        "--seeds",
        "--run-steps",
        "--contention",
        "--steps",
        "--detail",
        "--out",
        "--trace",
        "--trace-ranks",
        "--json",
    }
)


def simulate(
    call: typer.Context,
    plan: PlanArgument,
    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's: a .toml file or a short form.")
    ] = None,
    measurements: MeasurementsOption = None,
    graph: Annotated[Path | None, typer.Option(help="The captured graph (.json); else the model is captured.")] = None,
    scenario: ScenarioOption = None,
    seeds: SeedsOption = 5,
    run_steps: RunStepsOption = None,
    sweep: SweepOption = None,
    plot: PlotOption = None,
    figure: FigureOption = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help=f"Another schedule than the plan's: {', '.join(SCHEDULE_NAMES)}, or your own: file.py:function or "
            "orders.csv."
        ),
    ] = None,
    virtual_stages: VirtualStagesOption = 2,
    find_orders: FindOrdersOption = None,
    whole_backwards: WholeOption = False,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare with this schedule for the same stages (of a deployment: policy); repeat. With your own "
            "schedule: gpipe and 1f1b."
        ),
    ] = None,
    exchange: ExchangeOption = None,
    contention: Annotated[
        Literal["queued", "fair"],
        typer.Option(help="How transfers get a link that others want too: one after the other, or in fair shares."),
    ] = "queued",
    steps: Annotated[int, typer.Option(help="Steps to simulate.", min=1)] = 2,
    detail: Annotated[
        Literal["instructions", "ops"],
        typer.Option(help="What the trace shows: instructions, or also the ops inside of them."),
    ] = "instructions",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the critical path of a step, and what would make it shorter.")
    ] = False,
    policy: PolicyOption = None,
    seconds: SecondsOption = 10.0,
    seed: SeedOption = 0,
    scale: ScaleOption = 1.0,
    goodput: GoodputOption = False,
    capacity: CapacityOption = False,
    place: PlaceOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the timeline to this file (.json).")] = None,
    trace: TraceOption = None,
    trace_ranks: TraceRanksOption = None,
    html: HtmlOption = None,
    open_browser: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict when every instruction of a plan runs, its step time and each rank's peak memory.

    Of a deployment: which requests are answered in time, how late answers are, and what devices do.
    """
    from meshwright.cli.explain import explain_bounds
    from meshwright.cli.place import refuse_for_place, simulate_placement
    from meshwright.cost import load_cost_model
    from meshwright.planner import (
        adopt_schedule,
        explain_step_interval,
        find_order,
        predict_step_interval,
        rank_simulation,
        simulation_document,
    )
    from meshwright.program import unlower_plan
    from meshwright.report import check_ranks, draw_grid, timeline_rows, timeline_table
    from meshwright.simulator import (
        allocate_rank,
        describe_steady_step,
        explain_nodes,
        explain_overflows,
        find_overflows,
        form_teams,
        simulate_plan,
        steady_rows,
    )
    from meshwright.simulator.scenarios import apply_scenario

    typed = given_options(call)
    if is_deployment(plan):
        refuse_for_deployment(typed)
        asked = ServingRequest(
            given=typed,
            measurements=measurements,
            policy=policy,
            against=against or (),
            seconds=seconds,
            seed=seed,
            scale=scale,
            goodput=goodput,
            capacity=capacity,
            place=place,
            sweep=sweep or (),
            out=out,
            plot=plot,
            figure=figure,
            as_json=as_json,
        )
        simulate_serving(plan, asked)
        return
    if detail == "ops" and trace is None:
        raise DocumentError(
            "`--detail ops` puts ops into the trace, but no trace was asked for; add --trace FILE.json."
        )
    check_sweep(
        sweep,
        out,
        plot,
        figure,
        {"--trace": trace is not None, "--html": html is not None, "--open": open_browser, "--explain": explain}
        | {"--against": bool(against), "--schedule": schedule is not None, "--find-orders": find_orders is not None}
        | {"--exchange": bool(exchange), "--steps": "--steps" in typed},
    )
    page = page_path(html, open_browser, "simulation")
    refuse_without_deployment(typed)
    chosen = traced_ranks(trace, trace_ranks)
    place_of_orders(find_orders, whole_backwards)
    document = read_plan(plan)
    check_ranks(chosen, document.num_ranks)
    measurements = recall_measurements(document, plan, measurements, cluster)
    usual = load_cost_model(load_cluster(cluster or document.cluster), measurements, document.workload.precision)
    happens = load_scenarios(scenario)
    settings: dict[str, Any] = {"num_seeds": seeds, "run_steps": run_steps}
    if sweep:
        run_sweep(
            sweep,
            document,
            graph_of_plan(document, graph),
            usual,
            happens,
            contention,
            settings,
            out,
            plot,
            figure,
            as_json=as_json,
        )
        return
    cost = apply_scenario(usual, happens)
    machine = cost.cluster
    captured = whole = graph_of_plan(document, graph)

    def follow(result: Simulation, document: Plan | Placement) -> tuple[Simulation, dict[str, Any], tuple[Any, ...]]:
        return follow_scenario(happens, result, document, whole, usual, contention, steps, settings)

    if isinstance(document, Placement):
        refuse_for_place(typed, _OF_PLACEMENTS if as_json else _OF_PLACEMENTS | {"--explain"})
        placed = simulate_plan(
            document, captured, machine, cost=cost, num_steps=steps, contention=contention, detail=detail
        )
        placed, beside, sentences = follow(placed, document)
        put_timeline(placed, out, trace, chosen)
        simulate_placement(document, captured, machine, placed, contention, beside, as_json=as_json)
        told = explain_bounds(document, captured, machine, cost, contention)[1] if explain else []
        print_tables(*(() if as_json else sentences), *told)
        return
    given, split = document, document.sharding.describe_teams()
    document, captured, machine, cost = form_teams(document, captured, machine, cost)
    if schedule is not None:
        document = adopt_schedule(document, schedule, captured, cost, num_chunks=virtual_stages)
    found = []
    if find_orders is not None:
        sought = find_order(
            document, captured, machine, find_orders, cost=cost, whole=whole_backwards, contention=contention
        )
        document, found = sought.best.plan, ["", sought.explain()]
        against = against or [item.plan.schedule for item in sought.named]
    result = simulate_plan(
        document, captured, machine, cost=cost, num_steps=steps, contention=contention, detail=detail
    )
    result, beside, sentences = follow(result, unlower_plan(document, given))
    basis = cost.explain_basis(captured, document.microbatch_size)
    interval = predict_step_interval(document, captured, machine, cost, contention=contention)
    reasons, explanation = explain_bounds(document, captured, machine, cost, contention) if explain else ({}, [])
    overflows = find_overflows(result, machine)
    compared = compared_schedules(document, against)
    rows, comparison = compare(document, captured, machine, cost, compared, contention)
    ways, exchanges = compare_ways(document, captured, machine, cost, exchange, contention)
    put_timeline(result, out, trace, chosen)
    if page is not None:
        ranked = rank_simulation(result, document, machine)
        allocation = allocate_rank(document, captured, machine, ranked.fullest_rank)
        remark = "\n".join(filter(None, (split, allocation.explain() if allocation else "")))
        drawn = simulation_document(
            ranked,
            result.timeline,
            captured,
            machine,
            cost,
            remark=remark,
            provenance=provenance(),
            whole=lambda found: unlower_plan(found, given),
        )
        put_page(drawn, page, open_browser)
    written = {"orders": find_orders, "timeline": out, "trace": trace, "page": page}
    if as_json:
        files = {name: str(path) for name, path in written.items() if path is not None}
        print_json(
            {
                "plan": str(plan),
                "step_time_s": result.step_time_s,
                "contention": contention,
                **({"teams": split} if split else {}),
                "basis": basis,
                "step_interval_s": [interval.low_s, interval.high_s],
                "step_interval_measured": interval.measured,
                **timeline_rows(result.timeline),
                "steady": steady_rows(result),
                **({"scenario": beside} if beside else {}),
                **({"overflows": [item.row() for item in overflows]} if overflows else {}),
                **({"nodes": [asdict(node) for node in result.nodes]} if result.nodes else {}),
                **({"explanation": reasons} if explain else {}),
                **({"schedules": rows} if rows else {}),
                **({"exchanges": ways} if ways else {}),
                **files,
            }
        )
        return
    print_tables(
        timeline_table(result.timeline),
        describe_steady_step(result),
        *((split,) if split else ()),
        *((NEVER_FLUSHES,) if document.is_asynchronous else ()),
        *sentences,
        *explain_overflows(overflows),
        *explain_nodes(result.nodes),
        basis,
        explain_step_interval(interval),
        draw_grid(result.timeline, width=grid_width(result.timeline.num_ranks)),
        *explanation,
        *comparison,
        *exchanges,
        *found,
    )
    print_tables(*(f"{name} written to {path}" for name, path in written.items() if path is not None))
