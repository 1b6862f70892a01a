"""``meshwright show --play``: the playground, from a model's name, a plan or nothing at all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from meshwright.cli.models import graphs_of, planned_target, refuse_to_load
from meshwright.cli.output import note, open_address, print_tables
from meshwright.cli.recalling import recall_measurements
from meshwright.playground import (
    Model,
    PlaygroundServer,
    Service,
    State,
    Table,
    Workbench,
    serve,
    state_of_cluster,
    state_of_plan,
)
from meshwright.playground.state import MAX_NAME_LENGTH
from meshwright.spec.cluster import Cluster
from meshwright.spec.codec import decode_document, document_kind
from meshwright.spec.errors import PlaygroundError
from meshwright.spec.parsing import read_data
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.shipped import shipped_graphs


def play(reference: str | None, graph_file: Path | None, port: int, open_browser: bool) -> None:
    """Serve the playground until Ctrl-C; ``reference`` is a model, a plan's file, or None for the first model.

    ``graph_file`` holds the graph of the plan's model.
    """
    models = {name: Model(open=partial(graphs_of, name, ())) for name in shipped_graphs()}
    clusters: dict[str, Cluster] = {}
    state = State()
    plan = None if reference is None else _read_plan(reference)
    if plan is None and graph_file is not None:
        raise PlaygroundError("--graph goes with a plan; give the graph itself as MODEL: --play graph.json.")
    if plan is not None and reference is not None:
        refuse_to_load(plan, reference, graph_file, "--play")
        source = plan.model if graph_file is None else str(graph_file)
        target = planned_target(plan) if graph_file is None else None
        opened = partial(graphs_of, source, plan.model_sizes, target=target)
        models[plan.model] = Model(open=opened, sizes=plan.model_sizes)
        state, clusters = state_of_cluster(plan.cluster)
        state = state_of_plan(plan, state)
    elif reference is not None:
        models.setdefault(reference, Model(open=partial(graphs_of, reference, ())))
        state = replace(state, model=reference)
    if len(state.model) > MAX_NAME_LENGTH:
        raise PlaygroundError(f"The model's name has more than {MAX_NAME_LENGTH} characters; give a shorter path.")
    table = recall_measurements(plan, Path(reference or ""), None)
    bench = Workbench(models, clusters, None if table is None else Table(state.kind, table))
    # What cannot be read or captured is an error here, not a message on the page.
    graph, base, _, _ = bench.prepare(state)
    if plan is not None:
        check_plan(plan, graph, base)
    server = PlaygroundServer(Service(bench, state), port)

    def started(url: str) -> None:
        print_tables(f"playground at {url} (Ctrl-C ends it)")
        if open_browser:
            open_address(url)

    serve(server, started)
    note("playground ended")


def _read_plan(reference: str) -> Plan | None:
    """The plan, if the reference is the file of one."""
    if not reference.endswith(".json") or not Path(reference).is_file():
        return None
    data = read_data(reference)
    return decode_document(Plan, data, reference) if document_kind(data) == "plan" else None
