"""``meshwright doctor``: examine this machine, list its problems, and name a remedy for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import JsonOption
from meshwright.cli.output import print_tables
from meshwright.spec import format_count

if TYPE_CHECKING:
    from meshwright.host import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST:PORT", help="Addresses that this machine should reach; each is connected to."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Examine this machine: versions, devices, memory, links, reachability, limits, with a remedy for each problem.

    Exit code 1 if there is a problem.
    """
    from meshwright.host import Host, examine, parse_address

    try:
        wanted = [parse_address(address) for address in addresses or []]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    findings = examine(Host(), wanted)
    num_problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print_json("diagnosis", {"num_problems": num_problems, "findings": [finding.as_row() for finding in findings]})
    else:
        print_tables(*_tables(findings), _summary(findings))
    if num_problems:
        raise typer.Exit(1)


def _tables(findings: Sequence[Finding]) -> list[Table | Text]:
    """One grid per area, with columns aligned over all of them; a remedy follows its finding."""
    width = max(len(finding.name) for finding in findings)
    tables: list[Table | Text] = []
    for area, group in groupby(findings, key=lambda finding: finding.area):
        table = _grid(width)
        table.title, table.title_justify, table.title_style = Text(area), "left", "bold"
        for finding in group:
            status = Text(f"  {finding.status}", style=_STYLES[finding.status])
            table.add_row(status, Text(finding.name), Text(finding.found))
            if finding.remedy:
                table.add_row("", "", Text(f"→ {finding.remedy}"))
            if finding.help_address:
                # Outside the table, which would fold it: nobody can use an address in two pieces.
                address = Text(f"{'':11}→ {finding.help_address}", no_wrap=True, overflow="ignore")
                tables += [table, address]
                table = _grid(width)
        if table.row_count:
            tables.append(table)
    return tables


def _grid(width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len("  problem"))
    table.add_column(min_width=width)
    table.add_column(overflow="fold")
    return table


def _summary(findings: Sequence[Finding]) -> Text:
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
    return Text(
        f"{counts['ok']} ok, {format_count(counts['note'], 'note')}, {format_count(counts['problem'], 'problem')}",
        style="bold red" if counts["problem"] else "bold",
    )
