"""``meshwright measure``: time ops, optimizers and links of this machine, and write the times into a table.

--cluster    write a cluster file that describes this machine
--from       convert profiler traces, and measurements of other tools, into rows of a table
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.measure_more import (
    calibrate_table,
    measure_batches_table,
    measure_device,
    measure_emulated_table,
    measure_links_table,
    read_known,
    write_device_table,
)
from meshwright.cli.model_arguments import ImageOption, JsonOption, SequenceOption, model_sizes
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.cli.record_tables import op_rows, op_tables
from meshwright.spec import DocumentError, encode_document, format_count, write_document, write_text

if TYPE_CHECKING:
    from meshwright.records import Imported

# What these modes do instead of timing a model.
_WITHOUT_MODEL = {
    "--from": "converts files and times nothing; give no MODEL, --microbatch-size, --sequence-length or --image-size.",
    "--cluster": "describes the machine; give no MODEL, --microbatch-size, --sequence-length or --image-size.",
    "--links": "times transfers; give no MODEL, --microbatch-size, --sequence-length or --image-size.",
    "--device-table": "times operators of many sizes; give no MODEL, --microbatch-size, --sequence-length or "
    "--image-size.",
}


def measure(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model whose ops are timed.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The measurement table to write: .json, or .parquet for rows of many devices. By default "
            "measurements.json; with --from, --links and --device-table measurements.parquet. Rows of an existing "
            "table are kept, or replaced by new ones of the same op. With --cluster: the cluster file (.toml or "
            ".json), by default cluster.toml, which must not exist.",
        ),
    ] = None,
    microbatch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--microbatch-size", "-m", help="Samples per microbatch; by default 1, 2 and 4. May be given several times."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes that measure at the same time, the same number as in the later run; by default 2.", min=1
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Number of repetitions. A time is the mean of their middle half; with --batches the table gets the "
            "median, p90 and p99. By default 10, with --batches 100 (about a minute). With --calibrate: steps.",
            min=1,
        ),
    ] = None,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Write a cluster file that describes this machine; takes no MODEL.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --cluster: replace an existing cluster file.")] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Instead of timing, convert this file into rows of the table: a trace of torch's profiler, or another "
            "tool's table. May be given several times.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The device on which ops, --batches and --device-table are timed: cpu or cuda:0; by default a GPU if "
            "there is one. With --from: the name of the device kind, for files that do not contain it."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="On a GPU: the precision in which the model's ops are timed. By default that of plans for the GPU: "
            "mixed if bfloat16 is faster than float32, else float32. May be given several times.",
        ),
    ] = None,
    device_table: Annotated[
        bool,
        typer.Option("--device-table", help="Instead, time single operators of many sizes on a GPU; takes no MODEL."),
    ] = False,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Instead, time every collective between --ranks processes (under a minute); started by torchrun, "
            "between its ranks, also on several machines.",
        ),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Train a few steps of MODEL on this machine, and correct the existing table at --out by them.",
        ),
    ] = False,
    batches: Annotated[
        str | None,
        typer.Option(
            "--batches",
            metavar="SIZES",
            help="Instead, time inference of the whole MODEL on batches of these sizes: 1,2,4 or 1..8 or 1..64:7log "
            "(seven sizes, each twice the one before).",
        ),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Time MODEL, if given, and every collective on this cluster (.toml), emulated on this host as by run "
            "--emulate (root, Linux). The table is emulated-CLUSTER.parquet; use one table for each cluster.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time the model's ops, the optimizers and the links of this machine, on a GPU or on its processors.

    With --cluster, describe the machine instead: devices, memory, links and network cards, as a file for plan. With
    --from, nothing is timed: files of measurements are converted into rows of a table. With --links, only transfers are
    timed: every collective, for process groups of every size and stride. With --calibrate, an existing table is
    corrected by one half of --repeats real steps, and tested on the other half. With --batches, MODEL is timed as a
    whole, as a server runs it.
    """
    modes = {
        "--from": bool(sources),
        "--cluster": cluster,
        "--links": links,
        "--calibrate": calibrate,
        "--batches": batches is not None,
        "--device-table": device_table,
        "--emulate": emulate is not None,
    }
    mode = _one_of([name for name, given in modes.items() if given])
    sizes = model_sizes(sequence_length, image_size)
    _check_options(mode, of_model=bool(model is not None or microbatch_size or sizes), device=device, force=force)
    if precision and mode:
        raise typer.BadParameter(
            f"--precision belongs to timing the ops of a MODEL on a GPU; leave --precision out with {mode}."
        )
    if batches is not None:
        _measure_batches(
            model, out, batches, microbatch_size, ranks, sizes=sizes, device=device, repeats=repeats, as_json=as_json
        )
        return
    if mode == "--device-table":
        write_device_table(out or Path("measurements.parquet"), device=device, repeats=repeats or 10, as_json=as_json)
        return
    if emulate is not None:
        if ranks is not None:
            raise typer.BadParameter("--emulate measures all devices of the cluster; leave --ranks out.")
        measure_emulated_table(
            model,
            out or Path(f"emulated-{Path(emulate).stem}.parquet"),
            microbatch_size or ([1, 2, 4] if model else []),
            emulate,
            sizes=sizes,
            repeats=repeats or 10,
            as_json=as_json,
        )
        return
    if not mode and _is_on_gpu(device, ranks, precision):
        measure_device(
            model,
            out or Path("measurements.json"),
            microbatch_size or [1, 2, 4],
            precisions=precision or [],
            sizes=sizes,
            device=device,
            repeats=repeats or 10,
            as_json=as_json,
        )
        return
    ranks, repeats = ranks or 2, repeats or 10
    if mode == "--from":
        import_files(sources or [], out or Path("measurements.parquet"), device=device, as_json=as_json)
    elif mode == "--cluster":
        write_cluster(out or Path("cluster.toml"), num_ranks=ranks, repeats=repeats, force=force, as_json=as_json)
    elif mode == "--links":
        measure_links_table(out or Path("measurements.parquet"), num_ranks=ranks, as_json=as_json)
    elif mode == "--calibrate":
        _calibrate(model, out, microbatch_size, sizes=sizes, num_ranks=ranks, num_steps=repeats, as_json=as_json)
    else:
        _measure_table(model, out, microbatch_size, sizes=sizes, num_ranks=ranks, repeats=repeats, as_json=as_json)


def _one_of(modes: list[str]) -> str:
    """Return the one requested mode; "" for the usual one."""
    if len(modes) > 1:
        raise typer.BadParameter(f"{' and '.join(modes)} exclude each other; give one of them.")
    return modes[0] if modes else ""


def _check_options(mode: str, *, of_model: bool, device: str | None, force: bool) -> None:
    """Refuse options that belong to another mode."""
    if mode in _WITHOUT_MODEL and of_model:
        raise typer.BadParameter(f"{mode} {_WITHOUT_MODEL[mode]}")
    if device is not None and mode in ("--cluster", "--links", "--calibrate", "--emulate"):
        raise typer.BadParameter(
            f"--device was given with {mode}, which chooses its devices itself; leave --device out."
        )
    if force and mode != "--cluster":
        raise typer.BadParameter(
            "--force belongs to --cluster; a measurement table is completed, not replaced. Leave --force out."
        )


def _is_on_gpu(device: str | None, num_ranks: int | None, precisions: list[str] | None) -> bool:
    """Whether ops are timed on a GPU. Raises typer.BadParameter for options of the other kind of device."""
    from meshwright.training import choose_device

    chosen = choose_device(device)
    if chosen != "cpu" and num_ranks is not None:
        raise typer.BadParameter(
            "--ranks are processes that share processors (CPU); on a GPU each op is timed alone. Leave --ranks out, or "
            "measure the processors with --device cpu."
        )
    if chosen == "cpu" and precisions:
        raise typer.BadParameter(
            "--precision belongs to GPUs; on processors (CPU) ops are timed in the types of the model. Leave "
            "--precision out."
        )
    return chosen != "cpu"


def _measure_batches(
    model: str | None,
    out: Path | None,
    batches: str,
    microbatch_sizes: list[int] | None,
    num_ranks: int | None,
    *,
    sizes: tuple[tuple[str, int], ...],
    device: str | None,
    repeats: int | None,
    as_json: bool,
) -> None:
    if model is None:
        raise typer.BadParameter("--batches times one whole MODEL: give it as an argument.")
    if microbatch_sizes:
        raise typer.BadParameter("--batches already names the sizes to time; leave --microbatch-size out.")
    if num_ranks is not None:
        raise typer.BadParameter("--batches times MODEL in one process, on one device; leave --ranks out.")
    place = out or Path("measurements.json")
    measure_batches_table(model, place, batches, sizes=sizes, device=device, repeats=repeats or 100, as_json=as_json)


def _calibrate(
    model: str | None,
    out: Path | None,
    microbatch_sizes: list[int] | None,
    *,
    sizes: tuple[tuple[str, int], ...],
    num_ranks: int,
    num_steps: int,
    as_json: bool,
) -> None:
    if model is None or len(microbatch_sizes or []) > 1:
        raise typer.BadParameter(
            "--calibrate trains one MODEL with one microbatch size: give MODEL, and -m at most once."
        )
    size = (microbatch_sizes or [1])[0]
    place = out or Path("measurements.json")
    calibrate_table(model, place, size, sizes=sizes, num_ranks=num_ranks, num_steps=num_steps, as_json=as_json)


def _measure_table(
    model: str | None,
    out: Path | None,
    microbatch_sizes: list[int] | None,
    *,
    sizes: tuple[tuple[str, int], ...],
    num_ranks: int,
    repeats: int,
    as_json: bool,
) -> None:
    from meshwright.measurement import merge_measurements
    from meshwright.records import save_measurements
    from meshwright.report import measurement_rows, measurement_table
    from meshwright.training import measure_here

    out = out or Path("measurements.json")
    known = read_known(out)
    with terminal_sink(as_json) as events:
        table = measure_here(
            model,
            microbatch_sizes or ([1, 2, 4] if model else []),
            sizes=sizes,
            num_ranks=num_ranks,
            repeats=repeats,
            events=events,
        )
    if known is not None:
        table = merge_measurements(known, table)
    save_measurements(table, out)
    if as_json:
        print_json("measurements", {**measurement_rows(table), "file": str(out)})
    else:
        print_tables(measurement_table(table), f"measurements written to {out}")


_HEADING = """{name}, as `meshwright measure --cluster` found it on {date}.
found: asked of this machine. measured: timed on it. datasheet: of the device kind, by the shipped description.
For more hosts, copy [[nodes]] and give each its name; correct what is wrong."""


def write_cluster(out: Path, *, num_ranks: int, repeats: int, force: bool, as_json: bool) -> None:
    """Write a cluster file that describes this machine, and print it. Rates that no datasheet states are measured.

    Raises DocumentError for a name that does not end in .toml or .json, and for an existing file without ``force``.
    """
    from meshwright.host import (
        Host,
        ask_torch,
        cluster_toml,
        describe_machine,
        devices_to_measure,
        find_machine,
    )
    from meshwright.report import cluster_table

    if out.suffix not in (".toml", ".json"):
        raise DocumentError(f"{out}: the name of a cluster file ends in .toml or .json. Choose such a name.")
    try:
        taken = out.exists()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise DocumentError(f"{out}: cannot be written ({error.strerror}). Choose a writable place.") from None
    if taken and not force:
        raise DocumentError(f"{out} already exists. Choose another --out, or replace it with --force.")
    facts = ask_torch(Host())
    machine = find_machine(Host(), facts)
    rates = {}
    if facts.installed and not facts.failure:
        from meshwright.measurement import measure_rates

        with terminal_sink(as_json) as events:
            for name, device in devices_to_measure(machine).items():
                rates[name] = measure_rates(device, num_ranks=num_ranks, repeats=repeats, events=events)
    elif devices_to_measure(machine):
        why = facts.failure or "torch is not installed (pip install 'meshwright[torch]')"
        note(f"Nothing was measured: {why}. The rates of processors are from the shipped description.")
    described = describe_machine(machine, rates)
    if out.suffix == ".toml":
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        write_text(cluster_toml(described, _HEADING.format(name=machine.name, date=date)), out)
    else:
        write_document(described.cluster, out)
    if as_json:
        print_json(
            "described-cluster",
            {"cluster": encode_document(described.cluster), "remarks": described.remarks, "file": str(out)},
        )
    else:
        print_tables(cluster_table(described.cluster), f"cluster written to {out}")


def import_files(files: list[Path], out: Path, *, device: str | None, as_json: bool) -> None:
    """Convert files of measurements into rows of the table ``out``; print the rows, and the number left out by reason.

    ``device``: the name of the device kind, for files that do not contain it. Raises DocumentError if a file has no
    usable row; then nothing is written.
    """
    from meshwright.records import add_records, check_table_place, concat_records, import_file

    check_table_place(out, of_many=True)
    taken = {path: import_file(path, device=device) for path in files}
    for path, item in taken.items():
        if not len(item.records):
            why = ", ".join(f"{count} {reason}" for reason, count in item.left_out.items() if count)
            raise DocumentError(
                f"{path}: {item.kind} without a row that can be used ({why or 'the file is empty'}); nothing was "
                "written. Give a file with measurements."
            )
    add_records(concat_records(item.records for item in taken.values()), out)
    if as_json:
        print_json(
            "imported-records", {"files": [file_rows(path, item) for path, item in taken.items()], "file": str(out)}
        )
        return
    for path, item in taken.items():
        heading = f"{path}: {item.kind}, {format_count(len(item.records), 'row')}"
        print_tables(Text(heading), *op_tables(item.records))
        for reason, count in item.left_out.items():
            if count:
                note(f"{path}: {count} left out: {reason}")
    print_tables(Text(f"rows written to {out}"))


def file_rows(path: Path, imported: Imported) -> dict[str, Any]:
    """Return a row of an imported file for ``--json``.

    Keys: ``file``, ``kind``, ``ops`` (rows of `op_rows`), ``left_out`` (number of left-out rows by reason).
    """
    left_out = {reason: count for reason, count in imported.left_out.items() if count}
    return {"file": str(path), "kind": imported.kind, "ops": op_rows(imported.records), "left_out": left_out}
