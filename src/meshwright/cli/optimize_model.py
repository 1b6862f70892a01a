"""``meshwright optimize MODEL``: a faster equivalent of a model, as a torch program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.models import ImageOption, JsonOption, ModelArgument, SequenceOption
from meshwright.cli.output import TerminalSink, print_tables
from meshwright.spec.errors import RewriteError

if TYPE_CHECKING:
    from meshwright.rewrite.optimize import Rewriting
    from meshwright.rewrite.search.ruleset import Guided


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
            help="Also use the proved rules of this file (.toml, TASO's .pb, Unity's or a rule book .json); repeat."
        ),
    ] = None,
    unproved: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Use this rule of --rules without proof; repeat.")
    ] = None,
    special: Annotated[
        Literal["same", "kept", "ignored"],
        typer.Option(
            help="What must be preserved of NaN and infinity: everything; that a value is not finite; nothing."
        ),
    ] = "kept",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that torch computes with.")] = 1,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="The most seconds to apply rules for.")] = 5.0,
    max_nodes: Annotated[int, typer.Option(min=100, help="The most operators that rules may add.")] = 4_000,
    budget: Annotated[
        float, typer.Option(min=0.5, help="Seconds to spend on timing operators, and as long again on timing models.")
    ] = 30.0,
    report: Annotated[Path | None, typer.Option(help="Write both graphs and the rules to this page (.html).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search for a cheaper graph that computes the same; keep it if it is equal in float64 and faster here.

    The model is captured for one batch size. Proved rules lead to equal graphs; their operators are timed, HiGHS
    chooses the cheapest graph, and timings of whole models decide. If no graph is faster, the model stays as it is.
    """
    from meshwright.rewrite.fx.saving import save_program
    from meshwright.rewrite.optimize import LIMITS, rewrite_model
    from meshwright.rewrite.report import report_page
    from meshwright.rewrite.saturate import SaturationLimits
    from meshwright.rewrite.search.ruleset import shipped_rules
    from meshwright.spec.files import write_text
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
                    f"The rule {rule.name!r} of {path} is {verdict.status}, not proved: {verdict.why}. Mend it, leave "
                    f"it out, or use it without proof: --unproved {rule.name!r}."
                )
            ranks = tuple(tuple(each[name] for name in rule.names) for each in verdict.proof.ranks)
            entries.append(BookRule(rule=rule, ranks=ranks, special=special_numbers(rule)))
    if missing:
        raise RewriteError(f"No file of --rules has the rule {sorted(missing)[0]!r} of --unproved.")
    return guide(entries, special)


def _document(model: str, rewriting: Rewriting, files: list[str]) -> dict[str, Any]:
    from meshwright.rewrite.report import rule_rows, summary

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
    from meshwright.rewrite.report import rule_rows, summary

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
            f"{each.found.grown.num_nodes:,} operators; this is the best of what was found by then."
        )
        for each in rewriting.candidates
        if each.found.grown.ended in ("nodes", "seconds")
    ]
    if rewriting.chosen is not None:
        shown += [Text(f"not used, because its outputs differ on this batch: {each}") for each in rewriting.refused]
    return [*shown, Text(summary(rewriting))]
