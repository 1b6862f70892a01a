"""``meshwright measure`` for other things than ops on a CPU: links, calibration by real steps, whole batches, GPUs.

``--links`` (`measure_links_table`) times every collective between the available ranks. ``--calibrate``
(`calibrate_table`) corrects a table by real steps. ``--batches`` (`measure_batches_table`) times batches of a whole
model. ``--emulate`` (`measure_emulated_table`) times a model and links on an emulated cluster. On a GPU,
`measure_device` times the ops of a model, `write_device_table` single operators.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.cli.record_tables import op_rows, op_tables
from meshwright.spec import MeasurementError, Measurements, format_count, format_seconds, read_document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.costs import Interval
    from meshwright.records import Records
    from meshwright.spec.measurements import TransferKind
    from meshwright.training import Calibration


def calibrate_table(
    model: str,
    out: Path,
    microbatch_size: int,
    *,
    sizes: tuple[tuple[str, int], ...],
    num_ranks: int,
    num_steps: int,
    as_json: bool,
) -> None:
    """Correct the measurement table at ``out`` by real steps of the model, and print the corrections.

    The table stays as it is if the corrections do not improve the prediction of other steps. Raises MeasurementError if
    ``out`` does not exist.
    """
    from meshwright.records import load_measurements, save_measurements
    from meshwright.spec import load_cluster
    from meshwright.training import calibrate_here

    if not out.exists():
        raise MeasurementError(
            f"{out}: there is no table to correct. Measure first (`meshwright measure {model} --out {out}`), then "
            "calibrate."
        )
    known = load_measurements(out, load_cluster("cpu"))
    with terminal_sink(as_json) as events:
        found = calibrate_here(
            model, known, microbatch_size, sizes=sizes, num_ranks=num_ranks, num_steps=num_steps, events=events
        )
    if not found.why_kept:
        save_measurements(found.table, out)
    if as_json:
        print_json("calibration", {**found.row(), "file": str(out)})
        return
    print_tables(*calibration_tables(found, model, out))


def calibration_tables(found: Calibration, model: str, out: Path) -> list[Any]:
    """Return the corrections, their effect on the predicted step, and the path of the table, for the terminal."""
    from meshwright.report import make_table

    parts = [
        {
            "part": item.part,
            "predicted": format_seconds(item.predicted_s),
            "measured": format_seconds(item.measured_s),
            "factor": f"{item.factor:.3f}",
        }
        for item in found.corrections
    ]
    steps = [
        {"step time": name, "seconds": format_seconds(seconds), "error": error}
        for name, seconds, error in (
            (f"measured ({found.num_judged} other steps)", found.measured_s, ""),
            ("predicted before", found.before_s, f"{found.error_before:+.1%}"),
            ("predicted after", found.after_s, f"{found.error_after:+.1%}"),
        )
    ]
    return [
        f"{'corrections' if found.why_kept else 'corrected'} by {found.num_fitted} steps of {model}:",
        make_table(parts),
        make_table(steps),
        found.why_kept or f"measurements written to {out}",
    ]


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
    """Time inference of the model on batches of each size in ``batches``, as `read_batch_sizes` reads them.

    The rows are added to the table at ``out``, and printed with the line fitted to them.
    """
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
    """Return the batch sizes of a string, each once and ascending: ``1,2,4``, ``1..8``, ``1..64:7log``.

    Raises ScenarioError for an invalid range, typer.BadParameter for a size that is not a whole number of at least 1.
    """
    from meshwright.simulator.scenarios import read_values

    values = read_values(text)
    odd = [value for value in values if type(value) is not int or value < 1]
    if odd:
        raise typer.BadParameter(
            f"--batches {text!r} has {odd[0]!r}; expected whole numbers of at least 1: 1,2,4,8, or 1..8 for all up to "
            "8, or 1..64:7log for seven sizes, each twice the one before."
        )
    return sorted({int(value) for value in values})


def read_known(out: Path) -> Measurements | None:
    """Return the table of one device at ``out``; None if the file is missing or is a table of many devices (.parquet).

    Raises DocumentError for a file name that is not that of a table.
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
    """Time the ops of a model on a GPU, write each row into the table at ``out`` at once, and print the table."""
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
        note(
            f"{format_count(run.num_kept, 'op')} not timed again: {out} already has them for this device and version "
            "of torch."
        )
    if as_json:
        facts = {"left_out": run.left_out, "num_kept": run.num_kept, "warnings": list(run.warnings)}
        print_json("measurements", {**measurement_rows(run.table), **facts, "file": str(out)})
    else:
        print_tables(measurement_table(run.table), f"measurements written to {out}")


def write_device_table(out: Path, *, device: str | None, repeats: int, as_json: bool) -> None:
    """Time single operators of many sizes on a GPU, write rows into the table at ``out`` at once, and print them."""
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


def measure_links_table(out: Path, *, num_ranks: int, as_json: bool) -> None:
    """Time every collective on this machine (under torchrun: on all its machines), write the rows, and print a summary.

    Raises MeasurementError for fewer than two ranks, and what `check_table_place` raises.
    """
    from meshwright.cost.collectives import fit_collectives
    from meshwright.measurement import measure_links, measure_links_here
    from meshwright.records import add_records, check_table_place
    from meshwright.report import make_table
    from meshwright.training import started_by_torchrun

    by_torchrun = started_by_torchrun()
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun else num_ranks
    if ranks < 2:
        raise MeasurementError(
            f"Timing links needs at least two ranks; got {ranks}. Give --ranks 2 or more, or start two or more "
            "processes by torchrun."
        )
    check_table_place(out, of_many=True)
    with terminal_sink(as_json) as events:
        found = measure_links_here(events=events) if by_torchrun else measure_links(num_ranks=num_ranks, events=events)
    if found is None:
        return
    walls = found.where(phase="")
    scale = fit_collectives(walls).interpolated
    rows = place_rows(walls)
    add_records(found, out)
    if as_json:
        errors = {"small": _range(scale.latency), "large": _range(scale.bandwidth)}
        print_json("measured-links", {"places": rows, "interpolated": errors, "file": str(out)})
        return
    print_tables(
        make_table(rows, title="t = latency + bytes / bandwidth, bytes of the full tensor"),
        "Sizes between those measured, tested by leaving sizes out: 80 % of them took "
        f"{_share(scale.latency)} of the prediction where latency dominates, {_share(scale.bandwidth)} where bandwidth "
        "does.",
        Text(f"{len(found)} rows written to {out}"),
    )


def measure_emulated_table(
    model: str | None,
    out: Path,
    microbatch_sizes: list[int],
    cluster: str,
    *,
    sizes: tuple[tuple[str, int], ...],
    repeats: int,
    as_json: bool,
) -> None:
    """Time a model and every collective on an emulated cluster, write the rows, and print a summary.

    Raises what `measure_emulated` and `check_table_place` raise.
    """
    from meshwright.records import add_records, check_table_place
    from meshwright.report import make_table
    from meshwright.spec import load_cluster
    from meshwright.training import measure_emulated

    check_table_place(out, of_many=True)
    with terminal_sink(as_json) as events:
        found = measure_emulated(
            model, microbatch_sizes, load_cluster(cluster), sizes=sizes, repeats=repeats, events=events
        )
    add_records(found, out)
    links = found.where(kernel="gloo", phase="")
    ops, places = found.where(kernel=""), place_rows(links)
    if as_json:
        print_json("emulated-measurements", {"ops": op_rows(ops), "places": places, "file": str(out)})
        return
    print_tables(
        *op_tables(ops),
        make_table(places, title="t = latency + bytes / bandwidth, bytes of the full tensor"),
        Text(f"{format_count(len(found), 'row')} written to {out}"),
    )


def place_rows(walls: Records) -> list[dict[str, Any]]:
    """Return one row per collective and arrangement of process groups, with the line fitted to its times.

    ``walls`` are rows of wall-clock seconds. Keys: ``op``, ``ranks`` (of a group), ``groups`` (that run at the same
    time), ``stride`` (between the ranks of a group), ``sizes`` (number of measured sizes), ``latency_s``,
    ``bandwidth_bytes_per_s`` (None if the time does not grow with the size).
    """
    from meshwright.report import fit_transfers
    from meshwright.spec import TransferMeasurement

    sizes = [walls.size(name).tolist() for name in ("ranks", "groups", "stride", "bytes")]
    places: dict[tuple[str, int, int, int], list[TransferMeasurement]] = {}
    for op, ranks, groups, stride, num_bytes, seconds in zip(walls.op, *sizes, walls.seconds.tolist(), strict=True):
        kind = cast("TransferKind", op)
        row = TransferMeasurement(kind=kind, num_ranks=ranks, num_bytes=num_bytes, seconds=seconds)
        places.setdefault((op, ranks, groups, stride), []).append(row)
    rows = []
    for (op, ranks, groups, stride), mine in places.items():
        latency_s, bandwidth = fit_transfers(mine)
        place = {"op": op, "ranks": ranks, "groups": groups, "stride": stride}
        rows.append({**place, "sizes": len(mine), "latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth})
    return rows


def _range(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _share(interval: Interval) -> str:
    return f"{100 * interval.low:.0f} to {100 * interval.high:.0f} %"
