"""``meshwright measure --batches``: times of batches of a whole model, and the line fitted to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.spec.codec import read_document
from meshwright.spec.measurements import Measurements

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure_batches_table(
    model: str,
    out: Path,
    batches: str,
    *,
    sizes: tuple[tuple[str, int], ...],
    device: str | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Time the model on batches of each size, put the rows into the table at ``out``, and show them with their line."""
    from meshwright.measurement import merge_measurements
    from meshwright.records import save_measurements
    from meshwright.report import batch_rows, latency_rows
    from meshwright.training import measure_batches_here

    asked = read_batch_sizes(batches)
    known = read_known(out)
    with terminal_sink(as_json) as events:
        table = measure_batches_here(
            model, asked, sizes=sizes, device=device, repeats=repeats, known=known, events=events
        )
    save_measurements(table if known is None else merge_measurements(known, table), out)
    left_out = asked[len(table.batches) :]
    if left_out:
        note(f"Batches of {left_out[0]} do not fit in memory; left out: {', '.join(map(str, left_out))}.")
    if as_json:
        facts = {"device": table.device, "conditions": table.conditions, "left_out_batch_sizes": left_out}
        lines = latency_rows(table.batches)
        print_json(
            "measured-batches", {**facts, "batches": batch_rows(table.batches), "latency": lines, "file": str(out)}
        )
    else:
        print_tables(*_tables(table), Text(f"measurements written to {out}"))


def read_batch_sizes(text: str) -> list[int]:
    """Return the batch sizes of a text, each once and ascending: ``1,2,4``, ``1..8``, ``1..64:7log``.

    Raises ScenarioError for an invalid range, typer.BadParameter for a size that is not a whole number of at least 1.
    """
    from meshwright.simulator.scenarios import read_values

    values = read_values(text)
    odd = [value for value in values if type(value) is not int or value < 1]
    if odd:
        raise typer.BadParameter(
            f"--batches {text!r} has {odd[0]!r}; expected whole numbers of at least 1: 1,2,4,8, or 1..8 for all up to "
            "8, or 1..64:7log for seven, each twice the one before."
        )
    return sorted({int(value) for value in values})


def read_known(out: Path) -> Measurements | None:
    """Return the table of one device at ``out``; None if the file is missing or holds many devices.

    Raises DocumentError for a name that a table cannot have.
    """
    from meshwright.records import check_table_place

    check_table_place(out)
    return read_document(Measurements, out) if out.suffix == ".json" and out.exists() else None


def _tables(table: Measurements) -> Sequence[Any]:
    from meshwright.report import batch_rows, describe_latency, latency_rows, make_table

    lines = [describe_latency(row) for row in latency_rows(table.batches)]
    return (
        Text(f"{table.conditions}; device {table.device}"),
        make_table(batch_rows(table.batches), hide=("model",)),
        *(Text(line) for line in lines if line),
    )
