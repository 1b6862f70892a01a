"""``meshwright compare``: compare a predicted timeline with a measured one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.json_output import print_document
from meshwright.cli.model_arguments import JsonOption
from meshwright.cli.output import print_tables
from meshwright.cli.trace_options import TraceRanksOption, traced_ranks
from meshwright.cli.written_pages import HtmlOption, OpenOption, page_path, provenance, put_page
from meshwright.spec import Timeline, encode_document, read_document, write_document


def compare(
    predicted: Annotated[Path, typer.Argument(help="The timeline that `simulate --out` wrote.")],
    measured: Annotated[Path, typer.Argument(help="The timeline that `run` wrote.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the comparison to this file (.json).")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write both timelines as one trace for ui.perfetto.dev to this file (.json, or .json.gz)."),
    ] = None,
    trace_ranks: TraceRanksOption = None,
    html: HtmlOption = None,
    open_browser: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare a predicted and a measured timeline: step time, each kind of instruction, and the order of issue."""
    from meshwright.report import compare_timelines, comparison_table, write_trace
    from meshwright.report.page import comparison_document

    page = page_path(html, open_browser, "comparison")
    chosen = traced_ranks(trace, trace_ranks)
    first, second = read_document(Timeline, predicted), read_document(Timeline, measured)
    comparison = compare_timelines(first, second)
    if out is not None:
        write_document(comparison, out)
    if trace is not None:
        write_trace([first, second], trace, ranks=chosen)
    placed = ""
    if page is not None:
        placed = put_page(comparison_document(comparison, first, second, provenance=provenance()), page, open_browser)
    if as_json:
        print_document(encode_document(comparison))
    else:
        print_tables(comparison_table(comparison), *([placed] if placed else []))
