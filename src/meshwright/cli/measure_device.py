"""``meshwright measure`` on a GPU: the ops of a model one by one, or a table of the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.measure_batches import read_known
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.cli.records import op_rows, op_tables
from meshwright.spec.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

# Reasons for left-out ops that are shown.
_SHOWN = 5


def measure_device(
    model: str | None,
    out: Path,
    microbatch_sizes: list[int],
    *,
    precisions: list[str],
    sizes: tuple[tuple[str, int], ...],
    device: str | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure on a GPU, write rows into the table at ``out`` as they come, and show it."""
    from meshwright.records import save_measurements
    from meshwright.report import measurement_rows, measurement_table
    from meshwright.training import choose_device, measure_device_here

    known = read_known(out)
    with terminal_sink(as_json) as events:
        run = measure_device_here(
            model,
            microbatch_sizes,
            precisions=precisions,
            sizes=sizes,
            device=choose_device(device),
            repeats=repeats,
            known=known,
            save=lambda table: save_measurements(table, out),
            events=events,
        )
    _tell(run.left_out, run.warnings)
    if run.num_kept:
        note(f"{format_count(run.num_kept, 'op')} kept: {out} already has them for this device and torch.")
    if as_json:
        facts = {"left_out": run.left_out, "num_kept": run.num_kept, "warnings": list(run.warnings)}
        print_json("measurements", {**measurement_rows(run.table), **facts, "file": str(out)})
    else:
        print_tables(measurement_table(run.table), f"measurements written to {out}")


def write_device_table(out: Path, *, device: str | None, repeats: int, as_json: bool) -> None:
    """Measure single operators on a GPU, write rows into the table at ``out`` as they come, and show them."""
    from meshwright.records import add_records, check_table_place, read_records_at
    from meshwright.training import choose_device, device_table_here

    check_table_place(out, of_many=True)
    known = read_records_at(out) if out.exists() else None
    with terminal_sink(as_json) as events:
        rows, left_out, warnings = device_table_here(
            device=choose_device(device),
            repeats=repeats,
            known=known,
            save=lambda records: add_records(records, out),
            events=events,
        )
    _tell(left_out, warnings)
    if as_json:
        print_json(
            "device-table", {"ops": op_rows(rows), "left_out": left_out, "warnings": list(warnings), "file": str(out)}
        )
    else:
        print_tables(*op_tables(rows), Text(f"{format_count(len(rows), 'row')} written to {out}"))


def _tell(left_out: Mapping[str, str], warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        note(warning)
    for what, why in list(left_out.items())[:_SHOWN]:
        note(f"left out: {what}: {why}")
    if len(left_out) > _SHOWN:
        note(f"{len(left_out) - _SHOWN} more were left out; --json lists them.")
