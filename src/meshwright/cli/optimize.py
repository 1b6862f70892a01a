"""``meshwright optimize``: equivalent, cheaper graphs; so far the rules that make them, verified and explained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from meshwright.cli.models import JsonOption
from meshwright.cli.output import TerminalSink, print_json, print_tables
from meshwright.spec.errors import RewriteError, suggest

if TYPE_CHECKING:
    from meshwright.rewrite.rules import Rule
    from meshwright.rewrite.verify import Verdict

optimize = typer.Typer(
    name="optimize", help="Rewrite graphs into equivalent, cheaper ones: their rules.", no_args_is_help=True
)
rules = typer.Typer(name="rules", help="Rules of rewriting: are they true, and why?", no_args_is_help=True)
optimize.add_typer(rules)

RuleFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Rules: .toml, TASO's graph_subst.pb, or Unity's graph_subst_3_v2.json."),
]


@rules.command()
def verify(
    file: RuleFile,
    sizes: Annotated[
        int, typer.Option(min=1, max=1000, help="Sets of random sizes for each choice of ranks and dims.")
    ] = 8,
    dims: Annotated[int, typer.Option(min=1, max=6, help="Prove for tensors of up to so many dims.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trials.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="List the rules that are proved, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove every rule for all sizes, try it on random tensors, and give a counter-example for what is false.

    Exit code 1 if a rule is refuted.
    """
    from meshwright.rewrite.importing import read_rule_file
    from meshwright.rewrite.verify import verify as verify_rule

    wanted = read_rule_file(file)
    verdicts = []
    with TerminalSink() as sink:
        for number, rule in enumerate(wanted, 1):
            verdicts.append(verify_rule(rule, num_sizes=sizes, seed=seed, most_dims=dims))
            sink.progress(f"verify {file.name}", number, len(wanted))
    if as_json:
        print_json({"file": str(file), "counts": _counts(verdicts), "rules": [_row(verdict) for verdict in verdicts]})
    else:
        listed = [verdict for verdict in verdicts if every or verdict.status != "proved"]
        print_tables(*([_table(listed)] if listed else []), _summary(file, verdicts))
    if any(verdict.status == "refuted" for verdict in verdicts):
        raise typer.Exit(1)


@rules.command()
def explain(
    file: RuleFile,
    name: Annotated[str, typer.Argument(help="The rule's name; `verify --all` lists them.")],
    dims: Annotated[int, typer.Option(min=1, max=6, help="Consider tensors of up to so many dims.")] = 4,
) -> None:
    """Show why a rule holds: its sizes in letters, and the number that both sides are at an index; or why not."""
    from meshwright.rewrite.explain import explain_rule
    from meshwright.rewrite.importing import read_rule_file

    print_tables(*map(Text, explain_rule(_find(read_rule_file(file), name, file), dims)))


def _find(known: list[Rule], name: str, file: Path) -> Rule:
    for rule in known:
        if rule.name == name:
            return rule
    close = suggest(name, [rule.name for rule in known])
    raise RewriteError(f"{file} has no rule {name!r}.{close} Give one of its {len(known)} names.")


def _counts(verdicts: list[Verdict]) -> dict[str, int]:
    names = ("proved", "refuted", "tested", "never fits")
    return {name: sum(verdict.status == name for verdict in verdicts) for name in names}


def _row(verdict: Verdict) -> dict[str, object]:
    return {
        "name": verdict.rule.name,
        "rule": str(verdict.rule),
        "source": verdict.rule.source,
        "status": verdict.status,
        "why": verdict.why,
        "num_agreed": verdict.num_agreed,
    }


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rule", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("why", overflow="fold")
    styles = {"proved": "green", "refuted": "bold red"}
    for verdict in verdicts:
        status = Text(verdict.status, style=styles.get(verdict.status, "yellow"))
        table.add_row(Text(verdict.rule.name), status, Text(verdict.why))
    return table


def _summary(file: Path, verdicts: list[Verdict]) -> Text:
    counts = ", ".join(f"{count} {name}" for name, count in _counts(verdicts).items() if count)
    agreed = sum(verdict.num_agreed for verdict in verdicts)
    return Text(f"{file.name}: {len(verdicts)} rules, {counts}; {agreed:,} trials agreed")
