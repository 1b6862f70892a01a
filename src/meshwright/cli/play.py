"""``meshwright show --play``: serve the playground, a local page that predicts plans while they are changed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from meshwright.cli.model_arguments import graphs_of, planned_target
from meshwright.cli.output import note, open_address, print_tables, terminal_sink
from meshwright.cli.plan.plan_command import make_problem
from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.planning import recall_measurements
from meshwright.playground import (
    Controls,
    MeasuredTable,
    OfferedModel,
    PlaygroundServer,
    Service,
    Workbench,
    from_query,
    serve,
    state_of_cluster,
    to_query,
)
from meshwright.playground.controls import MAX_NAME_LENGTH
from meshwright.program import find_schedule
from meshwright.spec import (
    Graph,
    ModelReferenceError,
    Plan,
    PlaygroundError,
    ScheduleReferenceError,
    check_plan,
    decode_document,
    shipped_graphs,
)
from meshwright.spec.codec import document_kind
from meshwright.spec.made_with import UNKNOWN
from meshwright.spec.model_files import is_stored_graph
from meshwright.spec.own_code import split_reference
from meshwright.spec.parsing import read_data
from meshwright.spec.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """The options of ``show --play``.

    ``reference`` is a model, a plan's file, or None for the default model; ``graph_file`` holds the graph of the plan's
    model. With ``cluster``, the playground starts with the best plan of a search on this cluster, or with the given
    plan moved to it. With ``runs_schedule``, a schedule of the plan that is a function in a file may be run. ``port`` 0
    is a free port.
    """

    reference: str | None = None
    graph_file: Path | None = None
    cluster: str | None = None
    measurements: Path | None = None
    precision: Precision | None = None
    runs_schedule: bool = False
    port: int = 0
    open_browser: bool = False


def play(request: PlayRequest) -> None:
    """Serve the playground on a local port until Ctrl-C. Raises PlaygroundError for contradicting options."""
    plan = None if request.reference is None else _read_plan(request.reference)
    _check_request(request, plan)
    bench, state = _begin(request, plan)
    server = PlaygroundServer(Service(bench, state), request.port)

    def started(url: str) -> None:
        print_tables(f"playground at {url} (Ctrl-C ends it)")
        if request.open_browser:
            open_address(url)

    serve(server, started)
    note("playground ended")


def _check_request(request: PlayRequest, plan: Plan | None) -> None:
    """Refuse options that contradict each other."""
    if plan is None and request.graph_file is not None:
        raise PlaygroundError(
            "--graph goes with a plan, and no plan was given. To play with a graph: meshwright show --play graph.json."
        )
    if request.runs_schedule and (plan is None or split_reference(plan.schedule) is None):
        raise PlaygroundError(
            "--schedule lets --play run a plan's schedule that is a function in a file; there is no such schedule "
            "here. Leave --schedule out."
        )
    if plan is not None and request.precision is not None:
        raise PlaygroundError(
            "--precision goes with a model on --cluster; a plan has its own precision. Leave --precision out."
        )
    if plan is None and request.cluster is None and (request.measurements or request.precision):
        raise PlaygroundError("--measurements and --precision go with --cluster of --play; give --cluster, too.")


def _begin(request: PlayRequest, plan: Plan | None) -> tuple[Workbench, Controls]:
    """Return the workbench and its first state; a failed read or capture raises instead of becoming a page message."""
    models = {name: OfferedModel(open=partial(graphs_of, name, ())) for name in shipped_graphs()}
    if plan is not None:
        return _begin_with_plan(request, plan, models)
    name = request.reference or Controls().model
    if request.cluster is None:
        models.setdefault(name, OfferedModel(open=partial(graphs_of, name, ())))
        state = replace(Controls(), model=name)
        _check_state(state)
        bench = Workbench(models)
        bench.prepare(state)
        return bench, state
    graph_for = graphs_of(name, ())
    models[name] = OfferedModel(open=lambda: graph_for)
    asked = PlanRequest(
        model=name, cluster=request.cluster, measurements=request.measurements, precision=request.precision
    )
    best = replace(_search(asked, graph_for), cluster=request.cluster)
    state, clusters = state_of_cluster(request.cluster)
    bench = Workbench(models, clusters, _table(state, request.measurements))
    state = bench.open_plan(best, state)
    _check_state(state)
    return bench, state


def _begin_with_plan(request: PlayRequest, plan: Plan, models: dict[str, OfferedModel]) -> tuple[Workbench, Controls]:
    file = request.reference or ""
    if request.graph_file is None and split_reference(plan.model) is not None:
        name, shown = shlex.quote(plan.model), f"meshwright show {shlex.quote(file)} --play --graph"
        raise ModelReferenceError(
            f"{file} is a plan of {plan.model!r}, and `show` executes no file that only a plan names. Name the model "
            f"yourself to have it captured: {shown} {name}. Or give its graph: meshwright capture {name} --out "
            f"graph.json, then {shown} graph.json."
        )
    if split_reference(plan.schedule) is not None and not request.runs_schedule:
        options = [] if request.graph_file is None else ["--graph", str(request.graph_file)]
        raise ScheduleReferenceError(
            f"{file} follows {plan.schedule!r}, and `show` executes no file that only a plan names. Allow it to run: "
            f"meshwright show {shlex.join([file, '--play', *options, '--schedule'])}."
        )
    measurements = recall_measurements(plan, Path(file), request.measurements, request.cluster)
    if request.cluster is not None and request.cluster != plan.cluster:
        plan = replace(plan, cluster=request.cluster, made_with=UNKNOWN)
    source, target = plan.model, planned_target(plan)
    if request.graph_file is not None:
        source = str(request.graph_file)
        # A stored graph is already rewritten.
        target = None if is_stored_graph(source) else target
    graph_for = graphs_of(source, plan.model_sizes, mode=plan.workload.kind, target=target)
    models[plan.model] = OfferedModel(open=lambda: graph_for, sizes=plan.model_sizes, rewritten=plan.rewritten)
    state, clusters = state_of_cluster(plan.cluster)
    bench = Workbench(models, clusters, _table(state, measurements))
    graph = graph_for(plan.microbatch_size)
    state = bench.open_plan(plan, state, graph)
    _check_state(state)
    check_plan(plan, graph, bench.prepare(state)[1])
    find_schedule(plan)
    return bench, state


def _search(request: PlanRequest, graph_for: Callable[[int], Graph]) -> Plan:
    """The best plan that `meshwright plan` finds; if nothing fits, the nearest one, marked so on the page."""
    from meshwright.planner import Limits, NothingFitsError, search_plans

    problem = make_problem(request, graph_for)
    try:
        with terminal_sink(False) as events:
            return search_plans(problem, request.method, Limits(max_plans=1, events=events)).best.plan
    except NothingFitsError as error:
        note(f"{error} The page shows the nearest plan.")
        return error.nearest.plan


def _table(state: Controls, measurements: Path | None) -> MeasuredTable | None:
    return None if measurements is None else MeasuredTable(state.kind, measurements)


def _check_state(state: Controls) -> None:
    """Raise PlaygroundError for values beyond the controls, such as a cluster or a batch beyond their limits."""
    if len(state.model) > MAX_NAME_LENGTH:
        raise PlaygroundError(f"The model's name has more than {MAX_NAME_LENGTH} characters; give a shorter path.")
    try:
        from_query(to_query(state))
    except PlaygroundError as error:
        raise PlaygroundError(
            f"The playground cannot show this plan: {error} Use `meshwright simulate` for it."
        ) from None


def _read_plan(reference: str) -> Plan | None:
    """The plan, if the reference is the file of one."""
    if not reference.endswith(".json") or not Path(reference).is_file():
        return None
    data = read_data(reference)
    if document_kind(data) == "placement":
        raise PlaygroundError(
            f"{reference} is a placement of single ops, which the playground cannot show. Use `meshwright "
            "simulate` for it."
        )
    return decode_document(Plan, data, reference) if document_kind(data) == "plan" else None
