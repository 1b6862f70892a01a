"""``meshwright simulate``: run a plan, a placement or a deployment on the virtual clock.

With ``--explain``, show the critical path of a step and what would make it shorter (`explain_bounds`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.exchanges import compare_ways
from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import graph_of_plan
from meshwright.cli.output import grid_width, print_tables
from meshwright.cli.planning import make_cost_model, recall_measurements, recall_software
from meshwright.cli.requests import as_command
from meshwright.cli.schedules import check_orders, compare, compared_schedules
from meshwright.cli.simulate.scenario_output import follow_scenario, run_sweep
from meshwright.cli.simulate.serving_deployment import simulate_serving
from meshwright.cli.simulate.simulate_request import SimulateRequest
from meshwright.cli.trace_options import put_timeline, traced_ranks
from meshwright.cli.written_pages import page_path, provenance, put_page
from meshwright.spec import Cluster, Graph, Opcode, Placement, Plan, load_cluster
from meshwright.spec.plan_files import with_compiled
from meshwright.spec.scenario import load_scenarios

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel
    from meshwright.planner import RankedPlan
    from meshwright.simulator import Contention, Overflow, Simulation
    from meshwright.spec.scenario import Scenario


def explain_bounds(
    plan: Plan | Placement, graph: Graph, machine: Cluster, cost: CostModel, contention: Contention
) -> tuple[dict[str, Any], list[Any]]:
    """Find the critical path of a step, and what would shorten it; return rows for ``--json`` and tables to print."""
    from meshwright.report import explanation_rows, explanation_table
    from meshwright.simulator import SHORTER, explain_step

    explained = explain_step(plan, graph, machine, cost=cost, contention=contention)
    bounds = [bound.name.lower() for bound in explained.bounds]
    levers = [asdict(item) for item in explained.levers]
    rows = explanation_rows(explained.path, bounds, levers)
    return rows, ["", explanation_table(explained.path, bounds, levers, SHORTER)]


NEVER_FLUSHES = (
    "The schedule is asynchronous: the first step above fills the pipeline and the last one drains it; the steady "
    "step is the time of a step in between."
)


def run_simulate(request: SimulateRequest) -> None:
    """Predict when every instruction of a plan runs, its step time and each rank's peak memory.

    For a deployment: which requests are answered in time, the latencies, and what devices do.
    """
    if request.form() == "deployment":
        simulate_serving(request.plan, request)
        return
    from meshwright.report import check_ranks

    chosen = traced_ranks(request.trace, request.trace_ranks)
    check_orders(request.find_orders)
    document = request.document
    if request.compiled is not None:
        document = with_compiled(document, request.compiled)
    check_ranks(chosen, document.num_tracks)
    measurements = recall_measurements(document, request.plan, request.measurements, request.cluster)
    machine = load_cluster(request.cluster or document.cluster)
    software = recall_software(document, request.software)
    cost = make_cost_model(machine, measurements, document.workload.precision, software)
    case = _Case(request, document, graph_of_plan(document, request.graph), cost, load_scenarios(request.scenario))
    if request.sweep:
        run_sweep(request, document, case.whole, cost, case.scenario, case.settings)
    elif isinstance(document, Placement):
        _simulate_placement(case, document, chosen)
    else:
        _simulate_plan(case, document, chosen)


simulate = as_command(SimulateRequest, run_simulate)
simulate.__name__ = "simulate"


@dataclass(frozen=True, slots=True)
class _Case:
    """What is simulated: the document, the whole graph, the costs without a scenario, and the scenario."""

    request: SimulateRequest
    document: Plan | Placement
    whole: Graph
    usual: CostModel
    scenario: Scenario

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of simulated runs and seeds."""
        return {"num_seeds": self.request.seeds, "run_steps": self.request.run_steps}

    def costs(self) -> CostModel:
        """The costs of the machines as the scenario changes them."""
        from meshwright.simulator.scenarios import apply_scenario

        return apply_scenario(self.usual, self.scenario)

    def follow(
        self, result: Simulation, document: Plan | Placement
    ) -> tuple[Simulation, dict[str, Any], tuple[Any, ...]]:
        """Apply the scenario to the simulation: return the timeline, facts, and sentences."""
        asked = self.request
        return follow_scenario(
            self.scenario, result, document, self.whole, self.usual, asked.contention, asked.steps, self.settings
        )


def _simulate_placement(case: _Case, document: Placement, chosen: tuple[int, ...] | None) -> None:
    from meshwright.cli.placements import print_placement
    from meshwright.simulator import simulate_plan

    request, cost = case.request, case.costs()
    result = simulate_plan(
        document,
        case.whole,
        cost.cluster,
        cost=cost,
        num_steps=request.steps,
        contention=request.contention,
        detail=request.detail,
    )
    result, beside, sentences = case.follow(result, document)
    put_timeline(result, request.out, request.trace, chosen)
    print_placement(document, case.whole, cost.cluster, result, request.contention, beside, as_json=request.as_json)
    if request.as_json:
        return
    told = explain_bounds(document, case.whole, cost.cluster, cost, request.contention)[1] if request.explain else []
    print_tables(*sentences, *told)


@dataclass(slots=True)
class _Simulated:
    """A plan as its devices see it, its simulation, ``facts`` for JSON, and ``after``, which is printed last."""

    plan: Plan
    graph: Graph
    machine: Cluster
    cost: CostModel
    result: Simulation
    ranked: RankedPlan
    overflows: Sequence[Overflow]
    facts: dict[str, Any]
    sentences: Sequence[Any]
    after: list[Any]


def _simulate_plan(case: _Case, document: Plan, chosen: tuple[int, ...] | None) -> None:
    request = case.request
    page = page_path(request.html, request.open_browser, "simulation")
    found = _follow_plan(case, document)
    put_timeline(found.result, request.out, request.trace, chosen)
    if page is not None:
        _put_page(case, document, found, page)
    written = {"orders": request.find_orders, "timeline": request.out, "trace": request.trace, "page": page}
    written = {name: path for name, path in written.items() if path is not None}
    if request.as_json:
        facts = {"plan": str(request.plan), "step_time_s": found.result.step_time_s, **found.facts}
        print_json("simulation", {**facts, **{name: str(path) for name, path in written.items()}})
        return
    _print_plan(case, document, found)
    print_tables(*(f"{name} written to {path}" for name, path in written.items()))


def _follow_plan(case: _Case, document: Plan) -> _Simulated:
    """Simulate the plan, under another schedule or a found order if asked for, and compare."""
    from meshwright.planner import adopt_schedule, find_order, predict_step_interval, rank_simulation
    from meshwright.program import STAYS_EAGER, unlower_plan
    from meshwright.report import timeline_rows, workload_row
    from meshwright.simulator import find_overflows, form_teams, simulate_plan, steady_rows

    request, costs = case.request, case.costs()
    plan, graph, machine, cost = form_teams(document, case.whole, costs.cluster, costs)
    contention, against, found = request.contention, request.against, []
    if request.schedule is not None:
        plan = adopt_schedule(plan, request.schedule, graph, cost, num_chunks=request.virtual_stages)
    if request.find_orders is not None:
        sought = find_order(
            plan,
            graph,
            machine,
            request.find_orders,
            cost=cost,
            whole=request.whole_backwards,
            contention=contention,
        )
        plan, found = sought.best.plan, ["", sought.explain()]
        against = against or [item.plan.schedule for item in sought.named]
    result = simulate_plan(
        plan, graph, machine, cost=cost, num_steps=request.steps, contention=contention, detail=request.detail
    )
    result, beside, sentences = case.follow(result, unlower_plan(plan, document))
    interval = predict_step_interval(plan, graph, machine, cost, contention=contention)
    reasons, explanation = explain_bounds(plan, graph, machine, cost, contention) if request.explain else ({}, [])
    rows, comparison = compare(plan, graph, machine, cost, compared_schedules(plan, against), contention)
    ways, exchanges = compare_ways(plan, graph, machine, cost, request.exchange, contention)
    ranked = rank_simulation(result, plan, graph, machine, cost=cost)
    overflows = find_overflows(result, machine, ranked.reserved_bytes)
    optional = {
        "teams": document.sharding.describe_teams(),
        "scenario": beside,
        "overflows": [item.row() for item in overflows],
        "nodes": [asdict(node) for node in result.nodes],
        "explanation": reasons,
        "schedules": rows,
        "exchanges": ways,
    }
    facts = {
        "workload": workload_row(document, case.whole),
        "contention": contention,
        "basis": cost.explain_basis(graph, plan.microbatch_size),
        "step_interval_s": [interval.low_s, interval.high_s],
        "step_interval_measured": interval.measured,
        **timeline_rows(result.timeline),
        "steady": steady_rows(result),
        **{name: value for name, value in optional.items() if value},
    }
    if document.compiled and Opcode.BACKWARD_INPUT in result.timeline.opcode:
        found = [*found, STAYS_EAGER]
    after = [*explanation, *comparison, *exchanges, *found]
    return _Simulated(plan, graph, machine, cost, result, ranked, overflows, facts, sentences, after)


def _put_page(case: _Case, document: Plan, found: _Simulated, page: Any) -> None:
    from meshwright.planner import simulation_document
    from meshwright.program import unlower_plan
    from meshwright.simulator import allocate_rank

    ranked = found.ranked
    allocation = allocate_rank(found.plan, found.graph, found.machine, ranked.fullest_rank)
    split = document.sharding.describe_teams()
    drawn = simulation_document(
        ranked,
        found.result.timeline,
        found.graph,
        found.machine,
        found.cost,
        remark="\n".join(filter(None, (split, allocation.explain() if allocation else ""))),
        provenance=provenance(),
        whole=lambda plan: unlower_plan(plan, document),
    )
    put_page(drawn, page, case.request.open_browser)


def _print_plan(case: _Case, document: Plan, found: _Simulated) -> None:
    from meshwright.planner import explain_step_interval
    from meshwright.planner.evaluate import StepInterval
    from meshwright.report import describe_workload, draw_grid, timeline_table
    from meshwright.simulator import describe_steady_step, explain_nodes, explain_overflows

    result, split = found.result, document.sharding.describe_teams()
    low_s, high_s = found.facts["step_interval_s"]
    interval = StepInterval(low_s=low_s, high_s=high_s, measured=found.facts["step_interval_measured"])
    print_tables(
        Text(describe_workload(document, case.whole)),
        timeline_table(result.timeline),
        describe_steady_step(result),
        *((split,) if split else ()),
        *((NEVER_FLUSHES,) if found.plan.is_asynchronous else ()),
        *found.sentences,
        *explain_overflows(found.overflows),
        *explain_nodes(result.nodes),
        found.facts["basis"],
        explain_step_interval(interval),
        draw_grid(result.timeline, width=grid_width(result.timeline.num_ranks)),
        *found.after,
    )
