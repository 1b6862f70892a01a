"""``meshwright show PLAN --as SYSTEM``: a plan as settings of another system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.json_output import print_json
from meshwright.cli.models import graph_to_show
from meshwright.cli.output import note, print_file
from meshwright.spec.cluster import load_cluster
from meshwright.spec.errors import DocumentError
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.report.settings import Settings

System = Literal["accelerate", "deepspeed", "megatron", "torchtitan", "torch-csv"]


def show_settings(value: Any, document: str, graph_file: Path | None, system: System, as_json: bool) -> None:
    """The file on standard output; what it cannot say is at its head, or on standard error if it has no comments."""
    from meshwright.report.settings import export_settings

    if not isinstance(value, Plan):
        raise DocumentError(f"{document}: --as needs a plan, found a {type(value).__name__.lower()}.")
    if system == "torch-csv":
        _show(_orders(value), as_json)
        return
    # Only a cut and what runs again need the layers, and Megatron-LM the number of blocks.
    needed = len(value.stages) > 1 or bool(value.recompute) or system == "megatron" or graph_file is not None
    graph = graph_to_show(value, document, graph_file, f"--as {system}") if needed else None
    _show(export_settings(system, value, load_cluster(value.cluster), graph), as_json)


def _orders(plan: Plan) -> Settings:
    """The order of every rank; needs neither model nor cluster."""
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
