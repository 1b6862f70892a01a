"""What `plan` and its kin share: defaults of a workload, and what is printed where nothing fits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import typer
from rich.text import Text

from meshwright.cli.models import Mode
from meshwright.cli.output import print_json, print_tables
from meshwright.spec.errors import PlanError
from meshwright.spec.made_with import MadeWith
from meshwright.spec.precision import Precision
from meshwright.spec.scenario import Price, Scenario, load_scenario

if TYPE_CHECKING:
    from meshwright.planner import NothingFitsError, RankedPlan


def as_written(item: RankedPlan, cluster: str, made_with: MadeWith) -> RankedPlan:
    """A plan with the reference of its cluster, and with what it was made with."""
    return replace(item, plan=replace(item.plan, cluster=cluster, made_with=made_with))


def print_misfit(error: NothingFitsError, as_json: bool) -> None:
    """The nearest plan, rank by rank, before the error itself."""
    from meshwright.report import fit_table

    rows = error.nearest.memory_rows()
    if as_json:
        print_json({"plans": [], "nearest": error.nearest.plan.describe(), "ranks": rows, "error": str(error)})
    else:
        print_tables(Text(f"Nearest plan: {error.nearest.plan.describe()}"), fit_table(rows))


# What a user can say of gradients; None where the precision alone says it.
GradientType = Literal["float32", "bfloat16"]
PRECISION_HELP = "Types of weights, activations and gradients; by default mixed where bfloat16 is faster, else float32."
GRADIENT_HELP = "Of --precision mixed: the type in which gradients are added up and summed. By default float32."


def choose_precision(
    precision: Precision | None, gradients: GradientType | None, peaks: dict[str, float], mode: Mode = "training"
) -> Precision:
    """The precision that is asked for; by default two bytes where the device computes bfloat16 faster than float32.

    Raises typer.BadParameter for a type of gradients beside a precision that has its own.
    """
    if precision is None and peaks.get("bfloat16", 0.0) > peaks.get("float32", 0.0):
        precision = "mixed" if mode == "training" else "bfloat16"
    precision = precision or "float32"
    if gradients is None:
        return precision
    if precision not in ("mixed", "mixed-bf16-gradients") or mode != "training":
        raise typer.BadParameter(
            f"--grad-dtype {gradients} was given with --precision {precision}, which says what gradients are in. Leave "
            "it out, or train in --precision mixed."
        )
    return "mixed" if gradients == "float32" else "mixed-bf16-gradients"


def default_batch(num_ranks: int) -> int:
    """Eight samples per rank: enough microbatches to fill a pipeline as deep as the cluster."""
    return 8 * num_ranks


# What a plan that a search starts from answers itself.
_OF_THE_PLAN = frozenset(
    {
        "--batch",
        "--optimizer",
        "--precision",
        "--grad-dtype",
        "--inference",
        "--aim",
        "--ranks",
        "--microbatch-size",
        "--schedule",
        "--virtual-stages",
        "--staleness",
        "--stages",
        "--tensor",
        "--sequence-parallel",
        "--context",
        "--expert",
        "--placement",
        "--rewrite",
        "--zero",
        "--recompute",
        "--offload",
        "--method",
    }
)


def given_options(context: typer.Context) -> tuple[str, ...]:
    """The options that the user typed, by their long names, whatever their values."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.param_type_name == "option" and source is not None and source.name == "COMMANDLINE":
            given.append(max(parameter.opts, key=len))
    return tuple(given)


def repeat_options(context: typer.Context) -> str:
    """The options that the user typed, as a shell reads them."""
    words: list[str] = []
    for parameter in context.command.params:
        name = max(parameter.opts, key=len)
        if name in given_options(context):
            value = context.params[parameter.name or ""]
            words += [name] if value is True else [name, str(value)]
    return shlex.join(words)


def read_prices(text: str | None) -> Scenario:
    """What devices cost, as it was typed. Raises PlanError for a scenario without prices."""
    if text is None:
        return Scenario()
    with suppress(ValueError):
        return Scenario(effects=(Price(per_hour=float(text)),))
    found = load_scenario(text).only(Price)
    if not found.effects:
        raise PlanError(f"Scenario {text!r} has no prices. Give one that has, or a number: money per device and hour.")
    return found


def refuse_beside_from(given: Sequence[str]) -> None:
    """Refuse options that a plan to start from answers itself; raises typer.BadParameter."""
    if limits := [name for name in given if name in ("--max-latency", "--max-price")]:
        raise typer.BadParameter(
            f"{', '.join(limits)}: --from keeps to the devices that there are and to the plan's workload; it has no "
            "limits of latency or money. Plan anew, without --from."
        )
    wrong = [name for name in given if name in _OF_THE_PLAN]
    if wrong:
        raise typer.BadParameter(
            f"{', '.join(wrong)}: --from takes these from the plan that it starts from. Leave them out, or leave out "
            "--from."
        )
