"""``meshwright measure``: times of this machine, into the measurement table; with ``--cluster``, what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.measure_calibrate import calibrate_table
from meshwright.cli.measure_cluster import write_cluster
from meshwright.cli.measure_from import import_files
from meshwright.cli.models import ImageOption, JsonOption, SequenceOption, model_sizes
from meshwright.cli.output import print_json, print_tables, terminal_sink
from meshwright.spec.codec import read_document
from meshwright.spec.measurements import Measurements


def measure(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model whose ops are timed.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The table (.json, measurements.json; or .parquet, for many devices); what it holds already is kept "
            "or renewed. With --from: measurements.parquet. With --cluster: the cluster file (.toml or .json, "
            "cluster.toml), which must be new.",
        ),
    ] = None,
    microbatch_size: Annotated[
        list[int] | None, typer.Option("--microbatch-size", "-m", help="Samples per microbatch; repeat for several.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="Processes that measure at the same time, as in the later run.", min=1)
    ] = 2,
    repeats: Annotated[int, typer.Option(help="Repetitions; the median counts.", min=1)] = 10,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Write a cluster file from what this machine has; takes no MODEL.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --cluster: replace a cluster file that is there.")
    ] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Take measurements from this file instead: a trace of torch's profiler, another tool's table; repeat.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --from: the name of the device kind, where a file does not say it.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Train a few steps of MODEL here and correct the table at --out by them."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time the model's ops, the optimizers and the links of this machine, with every process busy at once.

    With --cluster, describe the machine instead: devices, memory, links and network cards, as a file for plan. With
    --from, nothing is timed: files of measurements become rows of a table. With --calibrate, a table that is there is
    corrected by --repeats real steps, half of which only judge it.
    """
    if sources:
        if model is not None or cluster or calibrate or force or microbatch_size or sequence_length or image_size:
            raise typer.BadParameter("--from times nothing; it takes --out, --device and --json alone.")
        import_files(sources, out or Path("measurements.parquet"), device=device, as_json=as_json)
        return
    if device is not None:
        raise typer.BadParameter("--device belongs to --from; what is timed here names its device itself.")
    if cluster:
        if model is not None or calibrate or microbatch_size or sequence_length is not None or image_size is not None:
            raise typer.BadParameter("--cluster describes the machine; it takes no MODEL and no sizes of one.")
        write_cluster(out or Path("cluster.toml"), num_ranks=ranks, repeats=repeats, force=force, as_json=as_json)
        return
    if force:
        raise typer.BadParameter("--force belongs to --cluster; a table of measurements is completed, not replaced.")
    out = out or Path("measurements.json")
    if calibrate:
        if model is None or len(microbatch_size or []) > 1:
            raise typer.BadParameter("--calibrate trains one MODEL with one microbatch size: give it, and -m once.")
        calibrate_table(
            model,
            out,
            (microbatch_size or [1])[0],
            sizes=model_sizes(sequence_length, image_size),
            num_ranks=ranks,
            num_steps=repeats,
            as_json=as_json,
        )
        return

    from meshwright.measurement import merge_measurements
    from meshwright.records import save_measurements
    from meshwright.report import measurement_rows, measurement_table
    from meshwright.training import measure_here

    known = read_document(Measurements, out) if out.suffix == ".json" and out.exists() else None
    with terminal_sink(as_json) as events:
        table = measure_here(
            model,
            microbatch_size or ([1, 2, 4] if model else []),
            sizes=model_sizes(sequence_length, image_size),
            num_ranks=ranks,
            repeats=repeats,
            events=events,
        )
    if known is not None:
        table = merge_measurements(known, table)
    save_measurements(table, out)
    if as_json:
        print_json({**measurement_rows(table), "file": str(out)})
    else:
        print_tables(measurement_table(table), f"measurements written to {out}")
