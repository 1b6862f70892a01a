"""``meshwright show``: show the contents of any document.

show PLAN --as SYSTEM    a plan as settings of another system
show zoo                 the list of shipped models
show DOCUMENT --cluster  costs of a model's layers on a cluster's devices (`show_costs`)
show GRAPH --memory      memory of a model under recompute, sharding and offload (`show_memory`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.cli.json_output import print_document, print_json
from meshwright.cli.model_arguments import JsonOption, graph_to_show
from meshwright.cli.output import grid_width, note, print_file, print_tables
from meshwright.cli.planning import choose_precision, make_cost_model
from meshwright.cli.record_tables import show_records
from meshwright.cli.written_pages import HtmlOption, page_path, provenance, put_page
from meshwright.spec import (
    Cluster,
    DocumentError,
    Graph,
    Measurements,
    MeshwrightError,
    Optimizer,
    Placement,
    Plan,
    PlaygroundError,
    Program,
    Timeline,
    Workload,
    decode_document,
    encode_document,
    format_bytes,
    load_cluster,
    load_shipped_graph,
    shipped_graphs,
    suggest,
)
from meshwright.spec.codec import document_kind
from meshwright.spec.files import refuse_replacing
from meshwright.spec.parsing import read_data
from meshwright.spec.precision import Precision

if TYPE_CHECKING:
    from meshwright.report.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRequest:
    """The options of ``show`` about costs; each has its default if it was not given."""

    cluster: str | None = None
    collectives: bool = False
    ranks: str | None = None
    memory: bool = False
    measurements: Path | None = None
    precision: Precision | None = None

    @property
    def is_asked(self) -> bool:
        """Whether ``--collectives`` or ``--cluster`` asks for costs."""
        return self.collectives or self.cluster is not None


def show_costs(value: Any, document: str, estimating: CostRequest, batch_size: int, as_json: bool) -> None:
    """Print costs: of a model's layers, one table per kind of device, or (--collectives) of a cluster's collectives.

    Raises DocumentError if the document is not a graph, or not a cluster.
    """
    if estimating.collectives:
        _show_collectives(value, document, estimating, as_json)
        return
    from meshwright.cost.layer_rows import cost_rows, cost_table, explain_optimizer, optimizer_row

    if not isinstance(value, Graph):
        raise DocumentError(
            f"{document}: --cluster estimates the layers of a model, found a {type(value).__name__.lower()}. Give a "
            "shipped model's name or a captured graph; `meshwright simulate` estimates a plan."
        )
    machine = load_cluster(estimating.cluster or "")
    precision = choose_precision(estimating.precision, machine, value.mode)
    if estimating.memory:
        show_memory(value, machine, precision, batch_size, as_json)
        return
    cost = make_cost_model(machine, estimating.measurements, precision)
    if as_json:
        devices = []
        for kind in machine.device_kinds:
            layers, total = cost_rows(cost, value, batch_size, kind)
            step = optimizer_row(cost, value, kind)
            devices.append({"kind": kind.name, "layers": layers, "total": total, "optimizer": step})
        print_json(
            "layer-costs", {"model": value.name, "batch_size": batch_size, "precision": precision, "devices": devices}
        )
        return
    tables = [cost_table(cost, value, batch_size, kind) for kind in machine.device_kinds]
    steps = [(kind, optimizer_row(cost, value, kind)) for kind in machine.device_kinds]
    lines = [explain_optimizer(row, kind) for kind, row in steps if row is not None]
    print_tables(*tables, *lines, cost.explain_basis(value, batch_size))


def _show_collectives(value: Any, document: str, estimating: CostRequest, as_json: bool) -> None:
    """The time of every collective among ranks of a cluster, and the orders of ring and tree."""
    from meshwright.cost.collectives.listing import list_collectives, tables_of_listing

    if not isinstance(value, Cluster):
        raise DocumentError(
            f"{document}: --collectives needs a cluster, found a {type(value).__name__.lower()}. Give a file or "
            "a short form, 2x8xH100."
        )
    precision = choose_precision(estimating.precision, value)
    cost = make_cost_model(value, estimating.measurements, precision)
    listing = list_collectives(cost, _read_ranks(estimating.ranks, value))
    if as_json:
        print_json("collectives", {"cluster": value.name, "precision": precision, **listing})
        return
    print_tables(*tables_of_listing(listing, value.name))


def _read_ranks(text: str | None, cluster: Cluster) -> tuple[int, ...]:
    """Ranks as ``0,1,2``; all without a string."""
    if text is None:
        return tuple(range(cluster.num_ranks))
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DocumentError(f"--ranks {text!r}: expected numbers with commas between them, such as 0,1,2,3.") from None


def show_memory(graph: Graph, machine: Cluster, precision: Precision, batch_size: int, as_json: bool) -> None:
    """Print the memory of each layer, and of a rank under recompute, ZeRO and offload, in training with AdamW.

    Raises GraphError for a graph that is not for training.
    """
    from meshwright.cost.memory.layer_choices import choice_rows, layer_rows
    from meshwright.report import make_table

    workload = Workload(global_batch=batch_size, precision=precision, optimizer=Optimizer(kind="adamw"))
    layers = layer_rows(graph, batch_size, workload, machine)
    ways = choice_rows(graph, batch_size, workload, machine)
    kind = machine.device_kind(0)
    if as_json:
        facts = {"model": graph.name, "cluster": machine.name, "batch_size": batch_size, "precision": precision}
        print_json("layer-memory", {**facts, "device": kind.name, "layers": layers, "ways": ways})
        return
    samples = "1 sample" if batch_size == 1 else f"{batch_size} samples"
    limit = format_bytes(kind.memory_bytes)
    print_tables(
        make_table(
            layers,
            title=f"{graph.name}, {precision}, {samples}: what a microbatch keeps, by recompute",
            collapse="layer",
        ),
        make_table(
            ways,
            title=f"One of {machine.num_ranks} ranks that share it by ZeRO, AdamW; {kind.name}: {limit}",
            hide=("parameters_bytes", "gradients_bytes"),
        ),
    )


KINDS = {kind.__name__.lower(): kind for kind in (Graph, Plan, Placement, Program, Timeline, Cluster, Measurements)}


def show(
    document: Annotated[
        str | None,
        typer.Argument(
            help="A graph, plan, placement, program, timeline, cluster or measurement file, a cluster's short form, a "
            "zoo name, or `zoo` for all of them. With --play: a model or a plan, or nothing."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per batch for the figures of a graph.", min=1)] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Estimate the layers of a model on these devices: a file (.toml) or a short form, 8xH100. With "
            "--play: start with the best plan of a search on them."
        ),
    ] = None,
    measurements: Annotated[
        Path | None, typer.Option(help="A measurement table of these devices (.json), for --cluster.")
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Precision for --cluster; by default mixed where devices compute bfloat16 faster."),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives", help="Show the time of each collective on a cluster, and its best ring and tree."
        ),
    ] = False,
    ranks: Annotated[
        str | None, typer.Option(help="Ranks for --collectives, 0,1,2,3; by default all.", metavar="RANKS")
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="With --cluster: the memory of a model with recompute, sharding or offload."),
    ] = False,
    program: Annotated[bool, typer.Option("--program", help="Show the program of a plan instead of the plan.")] = False,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule",
            help="Draw the schedule of a plan, one row per rank, as papers do. With --play: allow a schedule of the "
            "plan that is a function in a file to be run.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the drawing of --schedule to this file (.svg).", metavar="FILE.svg"),
    ] = None,
    system: Annotated[
        System | None,
        typer.Option(
            "--as",
            help="Print a plan as settings of this system, or its orders (torch-csv), and what these cannot express.",
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            help="The captured graph (.json) of a plan, for --program, --as and --play. Needed if the plan's model is "
            "a .py file, because `show` does not execute a file that only the plan names."
        ),
    ] = None,
    as_json: JsonOption = False,
    play: Annotated[
        bool, typer.Option("--play", help="Serve a local page with controls that change the plan (Ctrl-C ends it).")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of --play on 127.0.0.1; by default a free one.", min=0, max=65535)
    ] = 0,
    html: HtmlOption = None,
    open_browser: Annotated[
        bool,
        typer.Option(
            "--open",
            help="Open the page of --play or --html in the browser; without either, a temporary page is written.",
        ),
    ] = False,
) -> None:
    """Show the contents of a document: in tables, as JSON, or on a page to play with."""
    asks_page = html is not None or open_browser
    estimating = CostRequest(
        cluster=cluster,
        collectives=collectives,
        ranks=ranks,
        memory=memory,
        measurements=measurements,
        precision=precision,
    )
    if play:
        other = as_json or program or system is not None or html is not None or out is not None or batch_size != 1
        if other or collectives or ranks is not None or memory:
            raise PlaygroundError(
                "--play shows a page of its own; give --cluster, --measurements, --precision, --graph, --schedule, "
                "--port and --open only, or leave --play out."
            )
        from meshwright.cli.play import PlayRequest
        from meshwright.cli.play import play as play_page

        play_page(
            PlayRequest(
                reference=document,
                graph_file=graph,
                cluster=cluster,
                measurements=measurements,
                precision=precision,
                runs_schedule=schedule,
                port=port,
                open_browser=open_browser,
            )
        )
        return
    _check_options(port, graph, of_plan=bool(not schedule and (program or system is not None)))
    _check_drawing(out, schedule=schedule)
    _check_views(text=schedule or system is not None, program=program, asks_page=asks_page, estimating=estimating)
    if document is None:
        raise DocumentError("No document was given. Give a file or a cluster's short form, or --play for a page.")
    if document == ZOO or Path(document).suffix == ".parquet":
        others = bool(program or schedule or system or asks_page or estimating.is_asked or batch_size != 1)
        listing = show_zoo if document == ZOO else partial(show_records, Path(document))
        listing(as_json, others)
        return
    page = page_path(html, open_browser, "document")
    value = read_any(document)
    if estimating.is_asked:
        show_costs(value, document, estimating, batch_size, as_json)
        return
    if system is not None:
        show_settings(value, document, graph, system, as_json)
        return
    if schedule:
        from meshwright.cli.schedules import show_schedule

        show_schedule(value, document, as_json, out)
        return
    if program:
        if not isinstance(value, Plan | Placement):
            raise DocumentError(f"{document}: --program needs a plan, found a {type(value).__name__.lower()}.")
        from meshwright.cli.schedules import program_to_show

        value = program_to_show(value, document, graph)
    placed = put_page(page_of(value, Path(document).name, batch_size), page, open_browser) if page else ""
    if as_json:
        print_document(encode_document(value))
    else:
        print_tables(*tables_of(value, batch_size), *([placed] if placed else []))


def _check_options(port: int, graph: Path | None, *, of_plan: bool) -> None:
    if port:
        raise PlaygroundError("--port belongs to the page of --play; give --play, or leave --port out.")
    if graph is not None and not of_plan:
        raise DocumentError(
            "--graph belongs to --program, --as or --play of a plan; give one of these, or leave --graph out."
        )


def _check_drawing(out: Path | None, *, schedule: bool) -> None:
    if out is not None and not schedule:
        raise DocumentError("--out writes the drawing of --schedule; give both, or leave --out out.")
    if out is not None and out.suffix != ".svg":
        raise DocumentError(f"--out {out} does not end in .svg, the format of the drawing. Give a name that does.")
    if out is not None:
        refuse_replacing(out)


def _check_views(*, text: bool, program: bool, asks_page: bool, estimating: CostRequest) -> None:
    if text and asks_page:
        raise DocumentError(
            "--schedule and --as print text; leave --html and --open out. `meshwright simulate PLAN --html FILE` draws "
            "the schedule of a plan on a page."
        )
    if estimating.ranks is not None and not estimating.collectives:
        raise DocumentError("--ranks belongs to --collectives of a cluster; give --collectives, or leave --ranks out.")
    if estimating.collectives and estimating.cluster is not None:
        raise DocumentError("--collectives shows the cluster that is given as the document; leave --cluster out.")
    if estimating.memory and (estimating.cluster is None or estimating.measurements is not None):
        raise DocumentError("--memory counts bytes on the devices of --cluster; give --cluster, and no --measurements.")
    if not estimating.is_asked and estimating != CostRequest():
        raise DocumentError(
            "--measurements and --precision belong to --cluster or --collectives; give one, or leave them out."
        )
    if estimating.is_asked and (text or program or asks_page):
        raise DocumentError(
            "--cluster prints a table of layers, --collectives one of collectives; leave --program, --schedule, --as, "
            "--html and --open out."
        )


def read_any(reference: str) -> Any:
    """Read a document of any kind, which its schema names, the graph of a shipped model, or a cluster's short form.

    Raises DocumentError for another file name or an unknown schema.
    """
    if reference in shipped_graphs():
        return load_shipped_graph(reference)
    path = Path(reference)
    if path.suffix not in (".json", ".toml"):
        try:
            meant_as_file = bool(path.suffix) or path.exists() or len(path.parts) > 1
        except OSError:  # an impossible file name
            meant_as_file = True
        if meant_as_file:
            raise DocumentError(f"{reference}: documents end in .json or .toml. Check the file's name.")
        return load_cluster(reference)
    data = read_data(reference)
    kind = document_kind(data)
    if kind not in KINDS:
        schema = data.get("schema") if isinstance(data, dict) else None
        hint = suggest(kind or "", KINDS)
        raise DocumentError(f"{reference}: schema {schema!r} is not a document of Meshwright{hint}.")
    return decode_document(KINDS[kind], data, reference)


def page_of(value: Any, name: str, batch_size: int) -> dict[str, Any]:
    """Return the page document of a document. A plan's page shows the cluster, too, if its description is found."""
    from meshwright.report.page import shown_document

    cluster = None
    if isinstance(value, Plan):
        try:
            cluster = load_cluster(value.cluster)
        except MeshwrightError as error:
            note(f"The page does not show the cluster: {error}")
    return shown_document(value, name, batch_size=batch_size, cluster=cluster, provenance=provenance())


def tables_of(value: Any, batch_size: int) -> list[Any]:
    """Return what the terminal shows of a document: sentences and tables."""
    from meshwright import report

    views: dict[type, Callable[[], list[Any]]] = {
        Graph: lambda: [report.graph_table(value, batch_size)],
        Plan: lambda: [value.describe(), report.plan_table(value)],
        Placement: lambda: [value.describe(), report.make_table(report.placement_rows(value))],
        Program: lambda: [report.program_table(value)],
        Timeline: lambda: [
            report.timeline_table(value),
            report.draw_grid(value, width=grid_width(value.num_ranks)),
        ],
        Cluster: lambda: [report.cluster_table(value)],
        Measurements: lambda: [report.measurement_table(value)],
    }
    return views[type(value)]()


System = Literal["accelerate", "deepspeed", "megatron", "torchtitan", "torch-csv"]


def show_settings(value: Any, document: str, graph_file: Path | None, system: System, as_json: bool) -> None:
    """Print the settings file on standard output.

    Comments at its top list what the system cannot express; if the format has no comments (JSON), the list is printed
    on standard error.
    """
    from meshwright.report.settings import export_settings

    if not isinstance(value, Plan):
        raise DocumentError(f"{document}: --as needs a plan, found a {type(value).__name__.lower()}.")
    if system == "torch-csv":
        _show(_orders(value), as_json)
        return
    # Only a cut and recompute need the layers, and Megatron-LM the number of blocks.
    needed = len(value.stages) > 1 or bool(value.recompute) or system == "megatron" or graph_file is not None
    graph = graph_to_show(value, document, graph_file, f"--as {system}") if needed else None
    _show(export_settings(system, value, load_cluster(value.cluster), graph), as_json)


def _orders(plan: Plan) -> Settings:
    """The order of instructions of every rank; needs neither model nor cluster."""
    from meshwright.program import compute_orders, write_orders
    from meshwright.report.settings import export_orders

    written = write_orders(plan, compute_orders(plan))
    return export_orders(
        plan,
        written.text,
        num_lines=written.num_lines,
        num_pipelines=written.num_pipelines,
        shared_stage=written.shared_stage,
    )


def _show(settings: Settings, as_json: bool) -> None:
    from meshwright.report.settings import notes

    if as_json:
        print_json(
            "settings",
            {
                "system": settings.system,
                "version": settings.version,
                "file_name": settings.file_name,
                "values": dict(settings.values),
                "text": settings.text,
                "start": settings.start,
                "fill_in": list(settings.fill_in),
                "not_expressed": [{"what": item.what, "reason": item.reason} for item in settings.unsaid],
            },
        )
        return
    print_file(settings.text)
    note(f"{settings.system} {settings.version}; usual name of the file: {settings.file_name}")
    if settings.has_comments:
        note(f"To fill in: {len(settings.fill_in)}; not expressed: {len(settings.unsaid)}; see the head of the file.")
        return
    for line in notes(settings.start, settings.fill_in, settings.unsaid):
        note(line)


ZOO = "zoo"


def show_zoo(as_json: bool, other_options: bool) -> None:
    """Print one row per shipped model. Raises DocumentError if ``other_options`` than --json were given."""
    if other_options:
        raise DocumentError(
            "`show zoo` lists the shipped models, as a table or with --json; no other option goes with it. Leave the "
            "others out, or give one model's name instead of zoo."
        )
    rows = [zoo_row(load_shipped_graph(name)) for name in shipped_graphs()]
    if as_json:
        print_json("zoo", {"models": rows})
        return
    from meshwright.report import make_table

    print_tables(make_table(rows, hide=["graph_hash"]))


def zoo_row(graph: Graph) -> dict[str, Any]:
    """Return the sizes of a shipped graph; ``step_flops`` and ``inputs`` (shapes) are for training on one sample."""
    trainable = graph.num_parameters(trainable_only=True)
    inputs = [graph.tensors[i] for i in graph.inputs]
    return {
        "model": graph.name,
        "num_parameters": graph.num_parameters(),
        "trainable": None if trainable == graph.num_parameters() else trainable,
        "num_layers": len(graph.layers),
        "step_flops": graph.flops(1),
        "inputs": ", ".join("×".join(map(str, tensor.shape[1:])) or "1" for tensor in inputs),
        "graph_hash": graph.content_hash,
    }
