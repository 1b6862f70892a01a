"""``meshwright optimize``: rewrite a model into an equivalent, faster one; generate, verify and explain the rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import ImageOption, JsonOption, ModelArgument, SequenceOption
from meshwright.cli.output import TerminalSink, print_tables
from meshwright.spec import RewriteError, suggest

if TYPE_CHECKING:
    from meshwright.rewrite.optimize import Rewriting
    from meshwright.rewrite.rules import Rule
    from meshwright.rewrite.search.ruleset import Guided
    from meshwright.rewrite.verify import Verdict


def optimize_model(
    model: ModelArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the rewritten model to this file (.pt2), for torch.export.load."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per batch that the model will be run on.")
    ] = None,
    sequence_length: SequenceOption = None,
    image_size: ImageOption = None,
    training: Annotated[
        bool, typer.Option("--training", help="Rewrite the forward pass of training; gradients stay the same.")
    ] = False,
    rules: Annotated[
        list[Path] | None,
        typer.Option(
            help="Also use the proved rules of this file (.toml, TASO's .pb, Unity's or a rule book .json). May be "
            "given several times."
        ),
    ] = None,
    unproved: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Use this rule of --rules without proof. May be given several times."),
    ] = None,
    special: Annotated[
        Literal["same", "kept", "ignored"],
        typer.Option(
            help="Which NaN and infinity the result must preserve. same: NaN stays NaN, infinity stays infinity; kept: "
            "not finite in the same places, NaN for infinity allowed; ignored: no guarantee."
        ),
    ] = "kept",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that torch computes with.")] = 1,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="The most seconds to apply rules for.")] = 5.0,
    max_nodes: Annotated[int, typer.Option(min=100, help="The most operators that rules may add.")] = 4_000,
    budget: Annotated[
        float,
        typer.Option(min=0.5, help="Seconds to spend on timing operators, and the same time again on timing models."),
    ] = 30.0,
    report: Annotated[Path | None, typer.Option(help="Write both graphs and the rules to this page (.html).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for a cheaper equivalent graph; keep it if its outputs are equal in float64 and it is faster here.

    The model is captured for one batch size. Proved rules lead to equal graphs; their operators are timed, HiGHS
    chooses the cheapest graph, and timings of whole models decide. If no graph is faster, the model stays as it is.
    """
    from meshwright.rewrite.fx.saving import save_program
    from meshwright.rewrite.matching import SaturationLimits
    from meshwright.rewrite.optimize import LIMITS, rewrite_model
    from meshwright.rewrite.rewrite_report import report_page
    from meshwright.rewrite.search.ruleset import shipped_rules
    from meshwright.spec import write_text
    from meshwright.zoo import load_model

    _check_endings(out, report)
    if unproved and not rules:
        raise typer.BadParameter("--unproved names a rule of --rules, but no file was given. Give both.")
    source = load_model(model, batch_size=batch_size, sequence_length=sequence_length, image_size=image_size)
    source.model.train(training)
    used = shipped_rules(special)
    if rules:
        used = used.joined(_own_rules(rules, unproved or [], special))
    with TerminalSink() as sink:
        rewriting = rewrite_model(
            source.model,
            source.inputs,
            rules=used,
            limits=SaturationLimits(rounds=LIMITS.rounds, nodes=max_nodes, seconds=max_seconds),
            budget_s=budget,
            threads=threads,
            events=sink,
        )
    if report is not None:
        write_text(report_page(model, rewriting), report)
    if out is not None:
        save_program(rewriting.module, source.inputs, out)
    files = [str(path) for path in (out, report) if path is not None]
    if as_json:
        print_json("rewriting", _document(model, rewriting, files))
    else:
        print_tables(*_tables(rewriting), *(Text(f"written to {file}") for file in files))


def _check_endings(out: Path | None, report: Path | None) -> None:
    for path, ending in ((out, ".pt2"), (report, ".html")):
        if path is not None and path.suffix != ending:
            raise typer.BadParameter(f"{path} was given; expected a file name that ends with {ending}.")


def _own_rules(paths: list[Path], unproved: list[str], special: Literal["same", "kept", "ignored"]) -> Guided:
    from meshwright.rewrite.importing import read_rule_file
    from meshwright.rewrite.rulebook import BookRule
    from meshwright.rewrite.search.ruleset import guide
    from meshwright.rewrite.special import Special, special_numbers
    from meshwright.rewrite.verify import verify

    entries: list[BookRule] = []
    missing = set(unproved)
    for path in paths:
        # A book's own statement does not count as a proof.
        for rule in read_rule_file(path):
            missing.discard(rule.name)
            if rule.name in unproved:
                entries.append(BookRule(rule=rule, ranks=(), special=Special()))
                continue
            verdict = verify(rule, num_sizes=2)
            if verdict.status != "proved":
                raise RewriteError(
                    f"The rule {rule.name!r} of {path} is {verdict.status}, not proved: {verdict.why}. Correct it, "
                    f"leave it out, or use it without proof: --unproved {rule.name!r}."
                )
            ranks = tuple(tuple(each[name] for name in rule.names) for each in verdict.proof.ranks)
            entries.append(BookRule(rule=rule, ranks=ranks, special=special_numbers(rule)))
    if missing:
        raise RewriteError(
            f"--unproved names the rule {sorted(missing)[0]!r}, but no file of --rules has it. Correct the name, or "
            "give the file that has it."
        )
    return guide(entries, special)


def _document(model: str, rewriting: Rewriting, files: list[str]) -> dict[str, Any]:
    from meshwright.rewrite.rewrite_report import rule_rows, summary

    return {
        "model": model,
        "summary": summary(rewriting),
        "chosen": rewriting.chosen.name if rewriting.chosen is not None else None,
        "candidates": [
            {
                "name": each.name,
                "predicted_before_s": each.found.before_s,
                "predicted_after_s": each.found.after_s,
                "proved_cheapest": each.found.proved,
                "speedup": each.speedup,
                "speedup_spread": each.spread,
                "difference_float64": each.worst,
                "growth_ended": each.found.grown.ended,
                "num_nodes": each.found.grown.num_nodes,
                "rules": rule_rows(each, rewriting.rules),
            }
            for each in rewriting.candidates
        ],
        "refused": rewriting.refused,
        "seconds": rewriting.seconds,
        "files": files,
    }


def _tables(rewriting: Rewriting) -> list[Any]:
    from meshwright.rewrite.rewrite_report import rule_rows, summary

    shown: list[Any] = []
    best = rewriting.chosen
    if best is not None:
        table = Table("rule", "operators", "found equal", "gain, µs", "proved", box=None, header_style="bold")
        for row in rule_rows(best, rewriting.rules):
            gain = "" if row["gain_s"] is None else f"{row['gain_s'] * 1e6:.1f}"
            table.add_row(row["rule"], str(row["num_operators"]), str(row["num_equal"]), gain, row["proof"])
        shown.append(table)
    shown += [
        Text(
            f"{each.name}: rules were stopped by the limit of {each.found.grown.ended} at "
            f"{each.found.grown.num_nodes:,} operators; the result is the best graph found until then."
        )
        for each in rewriting.candidates
        if each.found.grown.ended in ("nodes", "seconds")
    ]
    if rewriting.chosen is not None:
        shown += [Text(f"not used, because its outputs differ on this batch: {each}") for each in rewriting.refused]
    return [*shown, Text(summary(rewriting))]


class _ModelFirst(TyperGroup):
    """``optimize MODEL`` is ``optimize model MODEL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["model", *args]
        return super().parse_args(ctx, args)


optimize = typer.Typer(
    name="optimize",
    cls=_ModelFirst,
    help="Rewrite a model into an equivalent, faster one: `meshwright optimize MODEL`; options: `optimize model -h`.",
    no_args_is_help=True,
)
optimize.command("model")(optimize_model)
rules = typer.Typer(name="rules", help="Rewrite rules: generate, verify and explain them.", no_args_is_help=True)
optimize.add_typer(rules)

_KINDS = "rules in .toml, a rule book (.json), TASO's graph_subst.pb, or Unity's graph_subst_3_v2.json"
RuleFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help=f"A file: {_KINDS}. By default the basis that ships.")
]


@rules.command()
def generate(
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the rule book to this file (.json).")],
    operators: Annotated[int, typer.Option(min=1, max=4, help="The most operators on each side of a rule.")] = 3,
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="Find only rules in which this operator occurs, together with the usual operators. A declared "
            "operator, or your own: file.py:function. May be given several times."
        ),
    ] = None,
    attribute: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Value of an attribute of --op that has no default. May be given several times.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Processes that prove rules in parallel.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random values that terms are compared on.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Find rules: enumerate terms, compare their values, prove the equal ones for all sizes, and choose a basis."""
    from meshwright.rewrite.generate.domain import steps_for
    from meshwright.rewrite.generate.generate import generate_rules
    from meshwright.rewrite.rulebook import write_rule_book

    named = [_declare(reference) for reference in op or []]
    values = dict(_pair(text) for text in attribute or [])
    if values and not named:
        raise typer.BadParameter("--attribute describes --op, which was not given. Give both.")
    own = any(":" in reference for reference in op or [])
    with TerminalSink() as sink:
        book = generate_rules(
            operators,
            steps=[step for name in named for step in steps_for(name, values)],
            # Other processes lack the operators that this one declared.
            processes=1 if own else processes,
            seed=seed,
            events=sink,
        )
    write_rule_book(book, out)
    counts = {"num_rules": len(book.rules), "num_basis": len(book.basis), **book.provenance}
    if as_json:
        print_json("rules", counts)
    else:
        lines = [
            f"{counts['num_terms']:,} terms of up to {operators} operators, {counts['num_equal']:,} equal to another",
            f"{counts['num_candidates']:,} candidates after sizes, renaming, commutation and special cases",
            f"{counts['num_proved']:,} proved for all sizes: {len(book.rules):,} rules, which follow from "
            f"{len(book.basis)}",
            f"written to {out}",
        ]
        print_tables(*map(Text, lines))


def _declare(reference: str) -> str:
    """Return the name of an operator; if the reference names a user's file, declare its operator first."""
    from meshwright.spec.own_code import load_function, split_reference

    parts = split_reference(reference)
    if parts is None:
        return reference
    path, name = parts
    load_function(path, name, expected="declares an operator: @operator def function(a, x)", error=RewriteError)
    return name.rstrip("_")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise typer.BadParameter(f"--attribute {text!r} was given; expected name=value.")
    return name, value


@rules.command()
def verify(
    file: RuleFile = None,
    sizes: Annotated[
        int, typer.Option(min=1, max=1000, help="Sets of random sizes for each choice of ranks and dims.")
    ] = 8,
    dims: Annotated[int, typer.Option(min=1, max=6, help="Prove for tensors of up to this many dims.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trials.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="Also list the rules that are proved.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove every rule for all sizes, test it on random tensors, and print a counterexample for a false one.

    Exit code 1 if a rule is refuted.
    """
    from meshwright.rewrite.verify import verify as verify_rule

    wanted, title = _read(file), file.name if file is not None else "the shipped basis"
    verdicts = []
    with TerminalSink() as sink:
        for number, rule in enumerate(wanted, 1):
            verdicts.append(verify_rule(rule, num_sizes=sizes, seed=seed, most_dims=dims))
            sink.progress(f"verify {title}", number, len(wanted))
    if as_json:
        print_json(
            "verdicts", {"file": title, "counts": _counts(verdicts), "rules": [_row(verdict) for verdict in verdicts]}
        )
    else:
        listed = [verdict for verdict in verdicts if every or verdict.status != "proved"]
        print_tables(*([_table(listed)] if listed else []), _summary(title, verdicts))
    if any(verdict.status == "refuted" for verdict in verdicts):
        raise typer.Exit(1)


@rules.command()
def explain(
    name: Annotated[str, typer.Argument(help="The rule's name; `verify --all` lists them.")],
    file: RuleFile = None,
    dims: Annotated[int, typer.Option(min=1, max=6, help="Consider tensors of up to this many dims.")] = 4,
) -> None:
    """Show why a rule holds: its sizes as letters, and the value of both sides at an index; or why it does not."""
    from meshwright.rewrite.rewrite_report import explain_rule

    print_tables(*map(Text, explain_rule(_find(_read(file, whole=True), name, file), dims)))


def _read(file: Path | None, *, whole: bool = False) -> list[Rule]:
    """The rules of a file; without one, the basis or all rules of the shipped book."""
    from meshwright.rewrite.importing import read_rule_file
    from meshwright.rewrite.rulebook import shipped_rule_book

    if file is not None:
        return read_rule_file(file)
    book = shipped_rule_book()
    return [entry.rule for entry in (book.rules if whole else book.basis)]


def _find(known: list[Rule], name: str, file: Path | None) -> Rule:
    for rule in known:
        if rule.name == name:
            return rule
    close = suggest(name, [rule.name for rule in known])
    where = str(file) if file is not None else "The shipped rule book"
    raise RewriteError(f"{where} has no rule {name!r}{close}. Give one of its {len(known)} names.")


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


def _summary(title: str, verdicts: list[Verdict]) -> Text:
    counts = ", ".join(f"{count} {name}" for name, count in _counts(verdicts).items() if count)
    agreed = sum(verdict.num_agreed for verdict in verdicts)
    return Text(f"{title}: {len(verdicts)} rules, {counts}; {agreed:,} trials agreed")
