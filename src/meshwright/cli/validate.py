"""``meshwright validate``: the errors of predictions on public measurements, and on the user's own steps.

With ``--published``, published training runs beside the predictions of ``plan`` (`show_published`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import JsonOption
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.cli.plan.plan_command import find_plans
from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.planning import given_options
from meshwright.spec import DocumentError, NullSink, write_text

if TYPE_CHECKING:
    from meshwright.validation import Score
    from meshwright.validation.published import Compared, Predicted
    from meshwright.validation.sets import DataSet


def read_request(words: Sequence[str]) -> PlanRequest:
    """Return the request that these arguments of ``meshwright plan`` describe, parsed and checked as by the command."""
    from meshwright.cli.main import load_verb

    context = load_verb("plan").make_context("plan", list(words))
    request = PlanRequest(given=given_options(context), **context.params)
    request.check()
    return request


def plan_words(words: Sequence[str]) -> Predicted:
    """Search with these arguments of ``meshwright plan``; return the best plan's figures. Raises as ``plan``."""
    from meshwright.validation.published import Predicted

    plans = find_plans(read_request(words), None).plans
    best, row = plans.best, plans.rows()[0]
    low_s, high_s = row["step_interval_s"]
    return Predicted(
        num_devices=row["num_devices"],
        tokens=round(row["tokens_per_s"] * row["step_time_s"]),
        step_s=best.step_time_s,
        low_s=low_s,
        high_s=high_s,
    )


def show_published(names: Sequence[str], out: Path | None, as_json: bool) -> None:
    """Predict the named published runs (all without names); print the comparison, and write it as a page to ``out``.

    Raises DocumentError if ``out`` does not end in .md, or is given together with names.
    """
    from meshwright.validation.published import compare_runs, load_runs, published_page, rows

    if out is not None and (names or out.suffix != ".md"):
        raise DocumentError(
            f"{out}: --out writes a page (.md) of all published runs. Give such a name, and no names of runs."
        )
    runs = load_runs()
    chosen = runs.named(names)
    compared: list[Compared] = []
    with terminal_sink(as_json) as sink:
        events = sink or NullSink()
        for done, item in enumerate(compare_runs(chosen, plan_words), 1):
            events.progress(f"plan {item.run.name}", done, len(chosen))
            compared.append(item)
    if out is not None:
        write_text(published_page(runs, compared), out)
    if as_json:
        page = {"file": str(out)} if out is not None else {}
        left_out = [asdict(item) for item in runs.left_out]
        print_json("scores", {"runs": rows(compared), "left_out": left_out, **page})
        return
    _print_runs(compared)
    if out is not None:
        print_tables(Text(f"page written to {out}"))


def _print_runs(compared: Sequence[Compared]) -> None:
    from meshwright.report.narrow import NarrowTable
    from meshwright.validation.published import HEADINGS, cells, summarise

    named = [[item.run.name, *row[1:]] for item, row in zip(compared, cells(compared), strict=True)]
    numeric = [heading not in ("run", "inside") for heading in HEADINGS]
    table = NarrowTable(list(HEADINGS), named, numeric=numeric, close=True)
    print_tables(table, Text(summarise(compared)))


def validate(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SET]...",
            help="Data sets to score; by default all. After --steps: your table; after --published: names of runs.",
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the data sets and score nothing.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Score only a part of the data sets that take long.")] = False,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Score step predictions alone: on the public steps, or on your own table, '--steps FILE.csv' "
            "(columns of training_steps.csv).",
        ),
    ] = False,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Compare published training runs with the predictions of `plan`, each with its command; takes about "
            "two minutes.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the scores as a page (.md), with date and versions.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score predictions against public measurements that were held out, beside those of baselines: errors in per cent.

    The exit code is 0 whether targets are met or not; `--json` says which are met.
    """
    from meshwright.validation.sets import find_datasets

    if published:
        if steps or listed or quick:
            raise typer.BadParameter(
                "--published takes only names of runs, --out and --json; leave --steps, --list and --quick out."
            )

        show_published(sets or [], out, as_json)
        return
    if steps and sets:
        if len(sets) > 1 or listed or quick or out is not None:
            raise typer.BadParameter(
                "--steps FILE.csv scores your own table alone; it takes no SET, --list, --quick or --out."
            )
        _score_own_steps(Path(sets[0]), as_json)
        return
    datasets = find_datasets(["steps"] if steps else sets or [])
    if listed:
        _list_datasets(datasets, as_json)
        return
    _score_sets(datasets, out, quick=quick, as_json=as_json)


def _score_sets(datasets: Sequence[DataSet], out: Path | None, *, quick: bool, as_json: bool) -> None:
    from meshwright.spec import NullSink
    from meshwright.validation.validate import score_datasets, tabulate_scores

    if out is not None:
        _check_page(datasets, out, quick=quick)
    scored = []
    with terminal_sink(as_json) as events:
        for dataset, scores in score_datasets(datasets, events or NullSink(), quick=quick):
            scored.append((dataset, scores))
            if not as_json:
                _print_scores(f"{dataset.name}: {dataset.about}", scores)
                sys.stdout.flush()  # the reader of a pipe sees each set when it is done
    if out is not None:
        _write_page(scored, out)
    if as_json:
        page = {"file": str(out)} if out is not None else {}
        print_json("scores", {"sets": {dataset.name: tabulate_scores(scores) for dataset, scores in scored}, **page})
    elif out is not None:
        print_tables(Text(f"scores written to {out}"))


def _score_own_steps(path: Path, as_json: bool) -> None:
    from meshwright.validation.step_table import list_reasons
    from meshwright.validation.validate import score_step_file, tabulate_scores

    scores, left_out = score_step_file(path)
    if as_json:
        reasons = [asdict(reason) for reason in left_out]
        print_json("scores", {"sets": {str(path): tabulate_scores(scores)}, "left_out": reasons})
        return
    _print_scores(f"{path}: by source", scores)
    for reason in list_reasons(left_out):
        note(f"{path}: {reason}")


def _list_datasets(datasets: Sequence[DataSet], as_json: bool) -> None:
    from meshwright.report import make_table

    rows = [{"set": dataset.name, "about": dataset.about} for dataset in datasets]
    if as_json:
        print_json("scores", {"sets": rows})
    else:
        print_tables(make_table(rows))


def _print_scores(title: str, scores: Sequence[Score]) -> None:
    from meshwright.report.narrow import NarrowTable
    from meshwright.validation.page import SCORE_HEADINGS, number_notes, score_cells

    cells = score_cells(scores)
    # The first column names parts and arms; columns without any figure are left out.
    used = [i for i in range(len(SCORE_HEADINGS)) if any(row[i].strip("–") for row in cells)]
    table = NarrowTable(
        [SCORE_HEADINGS[i] for i in used],
        [[row[i] for i in used] for row in cells],
        numeric=[SCORE_HEADINGS[i] not in (SCORE_HEADINGS[0], "target") for i in used],
        close=True,
    )
    print_tables(Text(title), table, *(Text(line) for line in number_notes(scores)))


def _check_page(datasets: Sequence[DataSet], out: Path, *, quick: bool) -> None:
    """Raise, before anything is scored, for a path that is not a page, or a page whose sets would be lost."""
    from meshwright.spec import DocumentError
    from meshwright.validation.sets import DATASETS

    if out.suffix != ".md":
        raise DocumentError(f"{out}: the page of scores is written in Markdown. Choose a name that ends in .md.")
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    there = {dataset.name for dataset in DATASETS if f"## {dataset.name}" in lines}
    lost = sorted(there - {dataset.name for dataset in datasets})
    if lost or (there and quick):
        what = f"no scores of {', '.join(lost)}" if lost else "only parts of its sets (--quick)"
        raise DocumentError(
            f"{out}: a page of {', '.join(sorted(there))} would be replaced by one with {what}. Choose another name, "
            "or score all of its sets."
        )


def _write_page(scored: Sequence[tuple[DataSet, tuple[Score, ...]]], out: Path) -> None:
    from meshwright.spec import write_text
    from meshwright.validation.page import scores_page

    write_text(scores_page(scored), out)
