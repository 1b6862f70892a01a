"""``meshwright plan``: search the space of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from meshwright.cli.exchanges import OwnExchangeOption, load_order
from meshwright.cli.models import (
    ImageOption,
    JsonOption,
    MeasurementsOption,
    Mode,
    ModelArgument,
    SequenceOption,
    VirtualStagesOption,
    graphs_of,
    model_sizes,
    planned_target,
)
from meshwright.cli.output import terminal_sink
from meshwright.cli.pages import HtmlOption, OpenOption, page_path
from meshwright.cli.plan_files import files_to_write
from meshwright.cli.plan_output import PlanPlaces, exchange_best, order_best, put_plans
from meshwright.cli.planning import (
    GRADIENT_HELP,
    PRECISION_HELP,
    GradientType,
    as_written,
    choose_precision,
    default_batch,
    given_options,
    print_misfit,
    read_prices,
    refuse_beside_from,
)
from meshwright.cli.recalling import recall_measurements
from meshwright.cli.rewriting import RewriteOption, mark_rewritten, plan_rewritten
from meshwright.cli.schedules import FindOrdersOption, WholeOption, place_of_orders
from meshwright.cli.sharding import (
    ContextOption,
    ExpertOption,
    OffloadOption,
    PlacementOption,
    RecomputeOption,
    SequenceParallelOption,
    TensorOption,
    ZeroOption,
)
from meshwright.spec.cluster import MAX_RANKS, load_cluster
from meshwright.spec.exchange import MAX_STALENESS, GradientExchange, ZeroStage
from meshwright.spec.made_with import note_making
from meshwright.spec.model_files import is_stored_graph
from meshwright.spec.offload import read_offload
from meshwright.spec.plan import BASIC_SCHEDULES, SCHEDULE_NAMES
from meshwright.spec.precision import Precision
from meshwright.spec.sharding import read_placement
from meshwright.spec.workload import MAX_GLOBAL_BATCH, Optimizer, OptimizerName, Workload

if TYPE_CHECKING:
    from meshwright.planner import Plans
    from meshwright.spec import EventSink, Graph

# A petabyte: no device has a thousandth of it.
MAX_MEMORY_LIMIT_GIB = 2.0**20
MAX_LISTED = 1000


# What says something about a placement of every op (--method place).
_OF_PLACEMENTS = frozenset(
    {
        "--cluster",
        "--batch",
        "--optimizer",
        "--precision",
        "--grad-dtype",
        "--ranks",
        "--microbatch-size",
        "--measurements",
        "--sequence-length",
        "--image-size",
        "--memory-limit",
        "--out",
        "--method",
        "--fix",
        "--json",
    }
)


def plan(
    call: typer.Context,
    model: ModelArgument,
    cluster: Annotated[str, typer.Option(help="A cluster file (.toml) or a short form: 4xA100, 2x8xH100, 2xcpu.")],
    batch: Annotated[
        int | None, typer.Option(help="Samples per step, over all ranks.", min=1, max=MAX_GLOBAL_BATCH)
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="The optimizer.")] = "adamw",
    precision: Annotated[Precision | None, typer.Option(help=PRECISION_HELP)] = None,
    grad_dtype: Annotated[GradientType | None, typer.Option(help=GRADIENT_HELP)] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Plan forward passes: no loss, no backward, no optimizer.")
    ] = False,
    aim: Annotated[
        Literal["throughput", "latency"],
        typer.Option(help="With --inference: the most samples per second, or a batch that arrives at once soonest."),
    ] = "throughput",
    max_latency: Annotated[
        float | None,
        typer.Option(help="With --inference: seconds that one microbatch may take from its arrival to its answer."),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            help="Use so many devices; repeat for several numbers to choose among. By default all.",
            min=1,
            max=MAX_RANKS,
        ),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            help="What devices cost: a number, per device and hour; or a scenario with prices, a .toml file or a "
            "shipped one by name."
        ),
    ] = None,
    max_price: Annotated[
        float | None, typer.Option(help="Money per hour that a plan may cost, with --prices: a budget.")
    ] = None,
    microbatch_size: Annotated[
        list[int] | None,
        typer.Option("--microbatch-size", "-m", help="Only these microbatch sizes; repeat for several."),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only these schedules: {', '.join(SCHEDULE_NAMES)}, or your own: file.py:function or "
            "orders.csv; repeat for several. By default gpipe and 1f1b."
        ),
    ] = None,
    virtual_stages: VirtualStagesOption = 2,
    staleness: Annotated[
        int,
        typer.Option(
            help="With --schedule hetpipe: by how many waves of minibatches replicas may run ahead of each other.",
            min=0,
            max=MAX_STALENESS,
        ),
    ] = 0,
    find_orders: FindOrdersOption = None,
    whole_backwards: WholeOption = False,
    tensor: TensorOption = None,
    sequence_parallel: SequenceParallelOption = False,
    context: ContextOption = None,
    expert: ExpertOption = None,
    placement: PlacementOption = None,
    exchange: OwnExchangeOption = None,
    zero: ZeroOption = None,
    recompute: RecomputeOption = None,
    offload: OffloadOption = None,
    measurements: MeasurementsOption = None,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    stages: Annotated[int | None, typer.Option(help="Only plans of so many stages.", min=1)] = None,
    memory_limit: Annotated[
        float | None, typer.Option(help="GiB of each device that a plan may use; by default all of its memory.")
    ] = None,
    top: Annotated[int, typer.Option(help="Plans to list.", min=1, max=MAX_LISTED)] = 10,
    front: Annotated[
        bool,
        typer.Option(
            "--front",
            help="Also list those simulated plans that no other one beats in step time, memory and price at once.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the best plan to this file (.json), or plan.json and launch.sh into this folder."
        ),
    ] = None,
    launch: Annotated[Path | None, typer.Option(help="Write a script here that starts the plan; needs --out.")] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="The script is for sbatch (launch.sbatch) instead of for torchrun.")
    ] = False,
    html: HtmlOption = None,
    open_browser: OpenOption = False,
    method: Annotated[
        str,
        typer.Option(
            help="How to search: auto (what fits the problem), slicing, pipedream, alpa, flexflow, differentiable, "
            "unequal, grid, latency, your own as file.py:function, or place (every op on a device of its own)."
        ),
    ] = "auto",
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which the search returns the best that it has.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For methods that draw random numbers.", min=0, max=2**63 - 1)] = 0,
    rewrite: RewriteOption = False,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Start from this plan, made for machines as they were: stages, replicas and microbatches are found "
            "anew in a second; what it splits, shares out and computes again stays.",
        ),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(help="With --method place: NAME=RANK, a layer, module or op and its device; repeat for several."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the fastest layout that fits and explain it. Needs no GPU and allocates no weight."""
    from meshwright.cli.place import PlaceRequest, place_ops, refuse_for_place
    from meshwright.cost import load_cost_model
    from meshwright.planner import (
        NothingFitsError,
        list_shardings,
        replan,
        search_plans,
    )
    from meshwright.planner.replanning import DEADLINE_S
    from meshwright.spec import Plan, read_document

    if memory_limit is not None and not 0 < memory_limit <= MAX_MEMORY_LIMIT_GIB:
        raise typer.BadParameter(
            f"--memory-limit {memory_limit:g} is no amount of memory; give GiB, above 0 and up to "
            f"{MAX_MEMORY_LIMIT_GIB:,.0f}."
        )
    if fix and method != "place":
        raise typer.BadParameter("--fix says where ops go, which only --method place decides; add that.")
    given = given_options(call)
    if start_from is not None:
        refuse_beside_from(given)
    if method == "place":
        refuse_for_place(given, _OF_PLACEMENTS)
        machine = load_cluster(cluster)
        place_ops(
            PlaceRequest(
                model=model,
                sizes=model_sizes(sequence_length, image_size),
                cluster=cluster,
                batch=batch or default_batch(max(ranks or (machine.num_ranks,))),
                optimizer=Optimizer.named(optimizer),
                precision=choose_precision(precision, grad_dtype, machine.device_kind(0).peak_flops_per_s),
                ranks=ranks or [],
                microbatch_sizes=microbatch_size or [],
                measurements=measurements,
                memory_limit_bytes=None if memory_limit is None else int(memory_limit * 2**30),
                fixed=fix or [],
                out=out,
                as_json=as_json,
            )
        )
        return
    away, rates = read_offload(offload or ()), read_prices(prices)
    own_exchange = load_order(exchange) if exchange is not None else None
    files = files_to_write(model, out, launch, slurm)
    page = page_path(html, open_browser, "plan")
    place_of_orders(find_orders, whole_backwards)
    machine = load_cluster(cluster)
    shardings = list_shardings(
        tensor=tensor or (1,),
        context=context or (1,),
        expert=expert or (1,),
        sequence_parallel=sequence_parallel,
        placements=tuple(map(read_placement, placement or ())),
    )
    earlier = None if start_from is None else read_document(Plan, start_from)
    measurements = recall_measurements(earlier, start_from, measurements, cluster)
    mode: Mode = "inference" if inference else "training"
    if earlier is not None:
        mode = earlier.workload.kind
    sizes = model_sizes(sequence_length, image_size)
    moved = None if earlier is None else replace(earlier, model=model, cluster=cluster)
    graph_for = graphs_of(model, sizes, mode=mode, target=planned_target(moved))
    if is_stored_graph(model) and not inference:
        mode = graph_for(1).mode
    peaks = machine.device_kind(0).peak_flops_per_s
    chosen = earlier.workload.precision if earlier else choose_precision(precision, grad_dtype, peaks, mode)
    width, experts = (max(getattr(item, name) for item in shardings) for name in ("width", "expert"))
    workload = Workload(
        kind=mode,
        global_batch=batch or default_batch(max(max(ranks or (machine.num_ranks,)) // width, 1) * experts),
        precision=chosen,
        optimizer=Optimizer.named(optimizer),
    )
    limit_bytes = None if memory_limit is None else int(memory_limit * 2**30)
    cost = load_cost_model(machine, measurements, chosen)

    def search(
        graph_for: Callable[[int], Graph], microbatch_sizes: Sequence[int] | None, events: EventSink | None
    ) -> Plans:
        return search_plans(
            graph_for,
            machine,
            workload,
            cost=cost,
            model=model,
            model_sizes=sizes,
            method=method,
            num_devices=ranks,
            num_stages=stages,
            num_chunks=virtual_stages,
            microbatch_sizes=microbatch_sizes,
            schedules=schedule or BASIC_SCHEDULES,
            shardings=shardings,
            zero=[cast("ZeroStage", stage) for stage in zero or (0,)],
            recompute=recompute or ("none",),
            offload=(away,),
            exchange=GradientExchange(staleness=staleness),
            memory_limit_bytes=limit_bytes,
            aim=aim,
            max_latency_s=max_latency,
            prices=rates,
            max_price_per_hour=max_price,
            max_plans=top,
            deadline_s=deadline,
            seed=seed,
            events=events,
        )

    found: list[str] = []
    try:
        with terminal_sink(as_json) as events:
            if moved is not None:
                plans = replan(
                    moved,
                    graph_for,
                    cost,
                    memory_limit_bytes=limit_bytes,
                    prices=rates,
                    max_plans=top,
                    deadline_s=DEADLINE_S if deadline is None else deadline,
                    seed=seed,
                    events=events,
                )
                plans = mark_rewritten(plans, moved.rewritten)
            else:
                plans = search(graph_for, microbatch_size, events)
                again = partial(search, events=events) if rewrite else None
                plans, graph_for, found = plan_rewritten(plans, graph_for, again, model, sizes, mode, machine)
    except NothingFitsError as error:
        print_misfit(error, as_json)
        raise
    if find_orders is not None:
        plans, said = order_best(plans, graph_for, cost, find_orders, whole=whole_backwards, limit_bytes=limit_bytes)
        found += said
    if exchange is not None and own_exchange is not None:
        plans, said = exchange_best(plans, graph_for, cost, exchange, own_exchange, limit_bytes=limit_bytes)
        found += said
    # The reference as it was given, so that `simulate` and `run` find the same cluster.
    made_with = note_making(measurements, files.plan or page or Path("plan.json"))
    named = replace(plans, ranked=tuple(as_written(item, cluster, made_with) for item in plans.ranked))
    places = PlanPlaces(files=files, orders=find_orders, page=page, opened=open_browser)
    put_plans(named, graph_for, cost, places, model=model, found=found, with_front=front, as_json=as_json)
