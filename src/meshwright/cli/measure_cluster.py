"""``meshwright measure --cluster``: this machine as a cluster file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from meshwright.cli.json_output import print_json
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.spec.codec import encode_document, write_document
from meshwright.spec.errors import DocumentError
from meshwright.spec.files import write_text

_HEADING = """{name}, as `meshwright measure --cluster` found it on {date}.
found: asked of this machine. measured: timed on it. datasheet: of the device kind, by the shipped description.
For more hosts, copy [[nodes]] and give each its name; correct what is wrong."""


def write_cluster(out: Path, *, num_ranks: int, repeats: int, force: bool, as_json: bool) -> None:
    """Describe this machine, time what no datasheet tells, write the file and show it."""
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
        raise DocumentError(f"{out}: cluster files end in .toml or .json. Choose such a name.")
    try:
        taken = out.exists()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise DocumentError(f"{out}: cannot be written ({error.strerror}). Choose a writable place.") from None
    if taken and not force:
        raise DocumentError(f"{out} is there already. Choose another --out, or replace it with --force.")
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
        note(f"Nothing was measured: {why}. Rates of processors are those of the shipped description.")
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
