"""``meshwright validate --published``: published training runs beside the predictions of ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables, terminal_sink
from meshwright.cli.plan.command import find_plans
from meshwright.cli.plan.request import PlanRequest
from meshwright.cli.planning import given_options
from meshwright.spec import DocumentError
from meshwright.spec.events import NullSink
from meshwright.spec.files import write_text

if TYPE_CHECKING:
    from meshwright.validation.published import Compared, Predicted


def read_request(words: Sequence[str]) -> PlanRequest:
    """Parse and check the arguments of ``meshwright plan``, as the command line does."""
    from meshwright.cli.main import load_verb

    context = load_verb("plan").make_context("plan", list(words))
    request = PlanRequest(given=given_options(context), **context.params)
    request.check()
    return request


def plan_words(words: Sequence[str]) -> Predicted:
    """The best plan of a command line. Raises what ``plan`` raises."""
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
    """Predict the named runs, or all, and print or write them."""
    from meshwright.validation.published import compare_runs, load_runs
    from meshwright.validation.published_page import published_page, rows

    if out is not None and (names or out.suffix != ".md"):
        raise DocumentError(f"{out}: the page holds all published runs, in Markdown (.md). Give no names beside --out.")
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
    from meshwright.validation.published_page import HEADINGS, cells, summarise

    named = [[item.run.name, *row[1:]] for item, row in zip(compared, cells(compared), strict=True)]
    numeric = [heading not in ("run", "inside") for heading in HEADINGS]
    table = NarrowTable(list(HEADINGS), named, numeric=numeric, close=True)
    print_tables(table, Text(summarise(compared)))
