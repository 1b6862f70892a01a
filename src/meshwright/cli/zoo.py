"""The list of shipped models, as ``meshwright show zoo`` prints it."""

from __future__ import annotations

from typing import Any

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.spec.errors import DocumentError
from meshwright.spec.graph import Graph
from meshwright.spec.shipped import load_shipped_graph, shipped_graphs

ZOO = "zoo"


def show_zoo(as_json: bool, other_options: bool) -> None:
    """Print one row per shipped model; DocumentError if asked for more than tables or JSON."""
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
    """What a shipped graph weighs, by training passes over one sample; ``inputs`` are the sizes of a sample."""
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
