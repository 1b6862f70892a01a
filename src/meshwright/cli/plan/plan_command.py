"""``meshwright plan``: search the space of plans that the options allow.

With ``--rewrite`` the graph is also rewritten, and the plan for the faster of both graphs is kept. ``--method
flexflow`` also finds a strategy of the SOAP space, as a placement (`find_strategy`). `read_choices` turns the options
into the choices that the search covers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.text import Text

from meshwright.cli.exchanges import is_policy, load_order
from meshwright.cli.model_arguments import Mode, graphs_of, planned_target, refuse_experts
from meshwright.cli.output import note, terminal_sink
from meshwright.cli.placements import placement_tables, rank_rows
from meshwright.cli.plan.plan_output import (
    PlanFiles,
    PlanPlaces,
    exchange_best,
    files_to_write,
    follow_policy,
    order_best,
    put_plans,
)
from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.planning import (
    SAMPLES_PER_DEVICE,
    as_written,
    choose_batch,
    choose_precision,
    make_cost_model,
    print_misfit,
    read_prices,
    recall_measurements,
    recall_software,
)
from meshwright.cli.requests import as_command, options_of
from meshwright.cli.schedules import check_orders
from meshwright.cli.written_pages import page_path
from meshwright.spec import (
    Cluster,
    EventSink,
    GradientExchange,
    Graph,
    MeshwrightError,
    Optimizer,
    Placement,
    Plan,
    PlanError,
    Workload,
    format_percent,
    format_seconds,
    read_offload,
    write_document,
    write_text,
)
from meshwright.spec.files import refuse_replacing
from meshwright.spec.made_with import note_making
from meshwright.spec.model_files import is_stored_graph
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.schedules import BASIC_SCHEDULES
from meshwright.spec.sharding import read_placement

if TYPE_CHECKING:
    from meshwright.cost import CostModel
    from meshwright.planner import Choices, Plans, Problem, Shares
    from meshwright.planner.methods.flexflow import SoapResult
    from meshwright.simulator import Simulation


# Simulated proposals without a deadline.
NUM_PROPOSALS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """FlexFlow's best strategy: for each layer, the split (of samples, attributes, parameters) and the devices.

    ``plan_s``: seconds of a step under the best plan. ``placed``: the strategy as a placement, its graph and its
    simulation; None if it cannot run as a placement, for the reason ``refusal``. ``file``: the written file.
    """

    result: SoapResult
    plan_s: float
    placed: tuple[Placement, Graph, Simulation] | None = None
    refusal: str = ""
    file: Path | None = None

    def row(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "layers": self.result.configurations(),
            "estimated_step_s": self.result.step_s,
            "step_time_s": self.placed[2].step_time_s if self.placed else None,
            "plan_step_time_s": self.plan_s,
            "refusal": self.refusal or None,
            "num_simulated": self.result.num_simulated,
            "file": str(self.file) if self.file else None,
        }

    def tables(self) -> Iterator[Any]:
        """Yield the sentences and tables for the terminal."""
        from meshwright.report.narrow import NarrowTable
        from meshwright.simulator import explain_overflows, find_overflows

        headings = ("layers", "from", "to", "sample", "attribute", "parameter", "devices")
        yield "Strategy of single layers (FlexFlow's SOAP space), parts along each kind of dim:"
        yield NarrowTable(headings, list(self._rows()), numeric=(True, False, False, True, True, True, False))
        yield self.result.explain()
        if self.placed is None:
            yield Text(f"The strategy is an estimate alone: {self.refusal}")
        else:
            placement, graph, simulation = self.placed
            machine = self.result.space.cluster
            yield from ("", "As a placement of its parts:")
            yield from placement_tables(placement, rank_rows(placement, graph, simulation, machine), simulation)
            yield from explain_overflows(find_overflows(simulation, machine))
            yield self._compare(simulation.step_time_s)
        if self.file is not None:
            yield Text(f"{'placement' if self.placed else 'strategy'} written to {self.file}")

    def _compare(self, step_s: float) -> str:
        kind = "longer" if step_s > self.plan_s else "shorter"
        return (
            f"Its steady step takes {format_seconds(step_s)}, and {format_seconds(self.plan_s)} under the best "
            f"plan above: {format_percent(abs(step_s / self.plan_s - 1), 1)} {kind}."
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Neighbouring layers with the same parts on the same devices in one row."""
        for (degrees, devices), group in groupby(self.result.configurations(), key=_shown):
            names = [row["layer"] for row in group]
            last = names[-1] if len(names) > 1 else ""
            yield (str(len(names)), names[0], last, *degrees, devices)


def find_strategy(found: CommandPlans, request: PlanRequest, file: Path | None) -> Strategy | str:
    """Search strategies of single layers for the same problem, and write the best one to ``file``.

    Return the strategy, or a sentence with the reason why no strategy was found. The search takes half of a deadline,
    if there is one.
    """
    from meshwright.planner.methods.flexflow import search_soap, soap_space

    if request.rewrite:
        return "Strategies of single layers are searched for the model as it is: leave --rewrite out to search them."
    best = found.plans.best.plan
    workload, machine = best.workload, found.cost.cluster
    num_devices = max(request.ranks) if request.ranks else None
    if request.max_price is not None:
        # As large as the budget allowed for plans.
        num_devices = max(item.plan.num_devices for item in found.plans.ranked)
    try:
        graph = found.graph_for(workload.global_batch)
        space = soap_space(graph, machine, workload, found.cost, num_devices=num_devices, can_run=True)
        result = search_soap(
            space,
            num_proposals=None if request.deadline else NUM_PROPOSALS,
            seconds=request.deadline and request.deadline / 2,
            seed=request.seed,
        )
    except MeshwrightError as error:
        return f"Strategies of single layers (FlexFlow's SOAP space) were not searched: {error}"
    except KeyboardInterrupt:
        return "Strategies of single layers (FlexFlow's SOAP space): the search was interrupted."
    made_with = note_making(found.measurements, file or Path("placement.json"), found.predicted_for)
    strategy = Strategy(result=result, plan_s=found.plans.best.step_time_s, file=file)
    try:
        placed = _place(result, request, graph)
    except MeshwrightError as error:
        if file is not None:
            write_text(_as_json(result), file)
        return replace(strategy, refusal=str(error))
    placement, parts, simulation = placed
    placement = replace(placement, made_with=made_with)
    if file is not None:
        write_document(placement, file)
    return replace(strategy, placed=(placement, parts, simulation))


def strategy_file(out: Path | None) -> Path | None:
    """Return the file for FlexFlow's strategy: ``out``, or ``placement.json`` in it if it has no suffix (a folder).

    Returns None without ``out``.
    """
    file = out if out is None or out.suffix else out / "placement.json"
    if file is not None:
        refuse_replacing(file)
    return file


def _place(result: SoapResult, request: PlanRequest, graph: Graph) -> tuple[Placement, Graph, Simulation]:
    from meshwright.planner.methods.flexflow import place_strategy
    from meshwright.simulator import simulate_plan

    size = result.space.workload.global_batch
    if result.is_split:
        graph = graphs_of(request.model, request.sizes, mode=graph.mode, degrees=result.degrees)(size)
    placement = replace(
        place_strategy(result, graph), model=request.model, model_sizes=request.sizes, cluster=request.cluster
    )
    return placement, graph, simulate_plan(placement, graph, result.space.cluster, cost=result.space.cost)


def _as_json(result: SoapResult) -> str:
    import json

    return json.dumps(result.document(), indent=1) + "\n"


def _shown(row: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Degrees by kind, several dims of a kind as a product, and devices."""
    degrees: dict[str, list[str]] = {"sample": [], "attribute": [], "parameter": []}
    for kind, degree in row["degrees"]:
        degrees[kind].append(str(degree))
    return tuple("×".join(items) for items in degrees.values()), ", ".join(map(str, row["devices"]))


def read_choices(request: PlanRequest, graph: Graph, workload: Workload, counts: tuple[int, ...]) -> Choices:
    """Return the choices that the search covers, restricted by the options; ``counts``: allowed numbers of devices.

    A method that covers the whole space varies all choices. Other methods vary only choices that options name.
    """
    from meshwright.planner import whole_space
    from meshwright.planner.adoption import DEFAULT_CHUNKS
    from meshwright.planner.methods import OPEN_METHODS

    is_open = request.method in OPEN_METHODS and not closes_space(request)
    # Given values, and the defaults of methods that do not cover the whole space.
    choices: dict[str, tuple[Any, Any]] = {
        "tensor": (request.tensor, (1,)),
        "sequence_parallel": (request.sequence_parallel, False),
        "context": (request.context, (1,)),
        "expert": (request.expert, (1,)),
        "zero": (request.zero, (0,)),
        "shard_sizes": (request.shard, (0,)),
        "recompute": (request.recompute, ("none",)),
        "offload": (None if request.offload is None else (read_offload(request.offload),), (ON_DEVICE,)),
        "schedules": (request.schedule, BASIC_SCHEDULES),
        "num_chunks": (None if request.virtual_stages is None else (request.virtual_stages,), (DEFAULT_CHUNKS,)),
    }
    # A user's order of gradients applies only to plain sums among replicas.
    closed = () if request.exchange is None else ("tensor", "context", "expert", "zero")
    chosen: dict[str, Any] = {}
    for name, (given, usual) in choices.items():
        # An empty list means "not given"; the False of --no-sequence-parallel is given.
        is_given = given not in (None, [], ())
        chosen[name] = given if is_given else None if is_open and name not in closed else usual
    return whole_space(
        graph,
        request.machine,
        workload,
        compiled=request.compiled,
        placements=tuple(map(read_placement, request.placement or ())),
        num_devices=counts,
        num_stages=() if request.stages is None else (request.stages,),
        microbatch_sizes=request.microbatch_size or (),
        **chosen,
    )


def closes_space(request: PlanRequest) -> bool:
    """Return whether --schedule names a schedule that the grid cannot bound; then only named choices vary."""
    from meshwright.planner.methods import OPEN_METHODS
    from meshwright.planner.methods.grid.cover import FLIGHTS

    return request.method in OPEN_METHODS and not set(request.schedule or ()) <= {*FLIGHTS}


def remark_on_schedules() -> str:
    """Return the sentence to print if `closes_space` is true."""
    from meshwright.planner.methods.grid.cover import FLIGHTS

    return (
        f"With other schedules than {', '.join(FLIGHTS)} only what options name is searched: give --tensor, --zero, "
        "--recompute and the like to search more."
    )


GraphFor = Callable[[int], "Graph"]


# Options that an exchange policy fixes, by the names of their fields.
_OF_REPLICAS: dict[str, Any] = {
    "stages": 1,
    "schedule": ["1f1b"],
    "tensor": [1],
    "sequence_parallel": False,
    "context": [1],
    "expert": [1],
    "zero": [0],
    "shard": None,
    "recompute": ["none"],
    "offload": ["none"],
    "precision": "float32",
    "grad_dtype": None,
    "tf32": False,
    "compiled": False,
    "inference": False,
    "rewrite": False,
    "find_orders": None,
    "shares": False,
    "microbatch_size": None,
    "virtual_stages": None,
    "method": "auto",
    "top": 1,
}


def for_replicas(request: PlanRequest) -> tuple[PlanRequest, GradientExchange]:
    """Return the request for one whole replica on each device that computes under an exchange policy, and the exchange.

    Raises BadParameter for options that ask for something else, and as `with_policy`.
    """
    from meshwright.program.controllers import with_policy

    assert request.exchange is not None
    if request.form() == "from":
        raise typer.BadParameter(
            f"--exchange {request.exchange} needs a plan of its own. Leave --from out, and give the batch and options."
        )
    fields = {option.field: option.name for option in options_of(PlanRequest).values()}
    asked = [
        fields[name]
        for name, only in _OF_REPLICAS.items()
        if fields[name] in request.given and getattr(request, name) not in (only, ())
    ]
    if asked or len(request.ranks or ()) > 1:
        raise typer.BadParameter(
            f"--exchange {request.exchange} trains one whole replica in float32 on each device. Leave out "
            f"{' and '.join(asked or ['all --ranks but one'])}."
        )
    exchange = with_policy(request.exchange, (request.ranks or [request.machine.num_ranks])[0])
    num_replicas = (request.ranks or [request.machine.num_ranks])[0] - len(exchange.servers)
    batch = choose_batch(
        request.batch,
        request.tokens,
        request.model,
        request.machine,
        graphs_of(request.model, request.sizes, mode="training"),
    )
    if request.batch is None and request.tokens is None:
        batch = SAMPLES_PER_DEVICE * num_replicas
    if batch % num_replicas:
        nearest = [
            each for each in (batch // num_replicas * num_replicas, -(-batch // num_replicas) * num_replicas) if each
        ]
        raise typer.BadParameter(
            f"A global batch of {batch} samples does not divide among the {num_replicas} replicas of --exchange "
            f"{request.exchange}; the nearest is {' or '.join(map(str, nearest))}."
        )
    values = _OF_REPLICAS | {"microbatch_size": [batch // num_replicas], "ranks": [num_replicas]}
    return replace(request, batch=batch, tokens=None, **values), exchange


def read_exchange(request: PlanRequest) -> tuple[PlanRequest, Callable[..., tuple[Plans, list[str]]] | None]:
    """Return the request as ``--exchange`` restricts it, and the function that then changes the best plan (or None)."""
    if request.exchange is None:
        return request, None
    if not is_policy(request.exchange):
        return request, partial(exchange_best, order=load_order(request.exchange))
    request, exchange = for_replicas(request)
    return request, partial(follow_policy, exchange=exchange)


def run_plan(request: PlanRequest) -> None:
    """Search for the fastest layout that fits and explain it. Needs no GPU and allocates no weight."""
    # A wrong cluster raises before a model is fetched or captured.
    _ = request.machine
    if request.form() == "place":
        from meshwright.cli.plan.plan_output import place_ops

        place_ops(request)
        return
    from meshwright.planner import NothingFitsError

    files = files_to_write(request.model, request.out, request.launch, request.slurm)
    of_strategy = strategy_file(request.out) if request.method == "flexflow" else None
    # A file holds the placement; then the plan is written only if there is no strategy.
    is_instead = of_strategy is not None and of_strategy == files.plan
    if is_instead and request.launch is not None:
        raise PlanError(
            f"--method flexflow writes a placement to {of_strategy}, which needs no script. Leave --launch out, or "
            "give a folder (--out) for plan, script and placement."
        )
    page = page_path(request.html, request.open_browser, "plan")
    check_orders(request.find_orders)
    request, exchanged = read_exchange(request)
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
    if is_instead and isinstance(strategy, Strategy):
        files = PlanFiles(plan=None, script=None, slurm=request.slurm)
    plans, remarks = found.plans, list(found.remarks)
    if request.find_orders is not None:
        plans, said = order_best(plans, found.graph_for, found.cost, request)
        remarks += said
    if exchanged is not None:
        plans, said = exchanged(plans, found.graph_for, found.cost, request)
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
    """The plans that a command found, their graph by microbatch size, costs, measurements, and remarks to print."""

    plans: Plans
    graph_for: GraphFor
    cost: CostModel
    measurements: Path | None
    remarks: Sequence[str] = ()
    predicted_for: str | None = None
    shares: Shares | None = None


def find_plans(request: PlanRequest, events: EventSink | None) -> CommandPlans:
    """Search the plans that the request allows; with --rewrite also for the rewritten graph. ``events``: progress."""
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
    """Return the problem that a request describes. Raises for an invalid request, before anything is searched."""
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
    """Search plans for the rewritten graph; return the faster plans, their graph, and a sentence on the comparison.

    ``search`` searches plans for a graph and microbatch sizes. ``graphs(target=...)`` returns the graph, by microbatch
    size, of the model rewritten for a device.
    """
    from meshwright.rewrite.planned import RewriteTarget
    from meshwright.spec import format_seconds

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
    """Return the plans with ``rewritten`` set to the kind of device that their graph was rewritten for."""
    ranked = tuple(replace(item, plan=replace(item.plan, rewritten=kind)) for item in plans.ranked)
    return replace(plans, ranked=ranked)
