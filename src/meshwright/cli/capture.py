"""``meshwright capture``: turn a model into a graph of ops and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import (
    ImageOption,
    JsonOption,
    Mode,
    ModelArgument,
    SequenceOption,
    graphs_of,
    model_sizes,
)
from meshwright.cli.output import print_tables
from meshwright.spec import write_document


def capture(
    model: ModelArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the graph to this file (.json).")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per batch for the FLOPs and bytes in the table.")] = 1,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    inference: Annotated[bool, typer.Option("--inference", help="Capture without loss and backward.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a model into a graph: ops, tensors, layers, FLOPs, what autograd saves. No weight is allocated."""
    from meshwright.report import graph_rows, graph_table

    mode: Mode = "inference" if inference else "training"
    graph = graphs_of(model, model_sizes(sequence_length, image_size), mode=mode)(batch_size)
    if out is not None:
        write_document(graph, out)
    if as_json:
        print_json(
            "graph-summary",
            {
                "model": model,
                "graph_hash": graph.content_hash,
                "num_ops": len(graph.ops),
                "num_parameters": graph.num_parameters(),
                "batch_size": batch_size,
                "layers": graph_rows(graph, batch_size),
                "file": str(out) if out else None,
            },
        )
    else:
        print_tables(graph_table(graph, batch_size))
        if out is not None:
            print_tables(f"graph written to {out}")
