"""``meshwright measure --from``: measurements of other tools, and traces of one's own runs, into the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import note, print_tables
from meshwright.cli.records import op_rows, op_tables
from meshwright.spec.errors import DocumentError
from meshwright.spec.units import format_count

if TYPE_CHECKING:
    from meshwright.records import Imported


def import_files(files: list[Path], out: Path, *, device: str | None, as_json: bool) -> None:
    """Read every file, write what was taken into the table, and show what was taken and what was left out."""
    from meshwright.records import add_records, check_table_place, concat_records, import_file

    check_table_place(out, of_many=True)
    taken = {path: import_file(path, device=device) for path in files}
    for path, item in taken.items():
        if not len(item.records):
            why = ", ".join(f"{count} {reason}" for reason, count in item.left_out.items() if count)
            raise DocumentError(
                f"{path}: {item.kind} without a row that can be used ({why or 'it is empty'}); nothing was written. "
                "Give a file with measurements."
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
    """What became of a file, as plain data."""
    left_out = {reason: count for reason, count in imported.left_out.items() if count}
    return {"file": str(path), "kind": imported.kind, "ops": op_rows(imported.records), "left_out": left_out}
