"""Functions shared by `plan` and related verbs: default precision and batch, measurements, prices, nearest plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import Mode
from meshwright.cli.output import note, print_tables
from meshwright.spec import Cluster, DeviceKind, Graph, Placement, Plan, PlanError
from meshwright.spec.exchange import WAVES
from meshwright.spec.made_with import MadeWith, recall
from meshwright.spec.precision import Precision, numbers_of
from meshwright.spec.scenario import Price, Scenario, load_scenario

if TYPE_CHECKING:
    from meshwright.cost import CostModel
    from meshwright.planner import NothingFitsError, RankedPlan


def recall_software(plan: Plan | Placement, given: str | None) -> str | None:
    """Return the training software to predict for: the given one, or (with a note) the plan's own, or None."""
    if given is None and plan.made_with.predicted_for:
        note(f"Estimated for {plan.made_with.predicted_for}, as the plan was made.")
    return given or plan.made_with.predicted_for or None


def recall_measurements(
    plan: Plan | Placement | None, plan_file: Path | None, given: Path | None, cluster: str | None = None
) -> Path | None:
    """Return the measurement table to predict a plan with: the given one, or the one that the plan was made with.

    Prints a note on the table that the plan was made with. On another ``cluster`` than the plan's, and without a plan,
    only the given table is used.
    """
    if plan is None or plan_file is None or cluster not in (None, plan.cluster):
        return given
    recalled = recall(plan.made_with, plan_file, given)
    if recalled.remark:
        note(recalled.remark)
    return recalled.measurements


def as_written(item: RankedPlan, cluster: str, made_with: MadeWith) -> RankedPlan:
    """Return a plan with its cluster as the user named it, and with a record of what the plan was made with."""
    return replace(item, plan=replace(item.plan, cluster=cluster, made_with=made_with))


def make_cost_model(
    cluster: Cluster, measurements: Path | None, precision: Precision, software: str | None = None
) -> CostModel:
    """Return the cost model of a cluster, with a measurement table if one is given.

    Prints a note if the table was measured with another version of torch. Raises what `load_cost_model` and
    `read_software` raise.
    """
    from meshwright.cost import load_cost_model, other_torch, read_software

    cost = load_cost_model(cluster, measurements, precision, read_software(software))
    if told := other_torch(cost.measurements):
        note(told)
    return cost


def print_misfit(error: NothingFitsError, as_json: bool) -> None:
    """Print the memory of the plan that is nearest to fitting, rank by rank. The caller reports the error itself."""
    from meshwright.report import fit_table

    rows = error.nearest.memory_rows()
    if as_json:
        print_json(
            "misfit", {"plans": [], "nearest": error.nearest.plan.describe(), "ranks": rows, "error": str(error)}
        )
    else:
        print_tables(Text(f"Nearest plan: {error.nearest.plan.describe()}"), fit_table(rows))


# Gradient types that a user can choose; None: the precision implies the type.
GradientType = Literal["float32", "bfloat16"]
PRECISION_HELP = "Types of weights, activations and gradients; by default mixed where bfloat16 is faster, else float32."
GRADIENT_HELP = "With --precision mixed: the type in which gradients are accumulated and reduced. By default float32."


# Precisions to propose instead of one that a device lacks.
_REPLACEMENTS: tuple[Precision, ...] = ("float32", "amp-float16", "mixed")
TF32_HELP = "With --precision float32: multiply matrices in TF32 on GPUs. The same as --precision tf32."


def choose_precision(
    precision: Precision | None,
    cluster: Cluster,
    mode: Mode = "training",
    *,
    gradients: GradientType | None = None,
    tf32: bool = False,
    schedules: Collection[str] = (),
) -> Precision:
    """Return the requested precision; by default one of two bytes if bfloat16 is faster than float32 on all devices.

    That default is mixed for training and bfloat16 for inference. It is amp for the schedule `WAVES`, which keeps no
    master weights.

    Raises typer.BadParameter for gradients of a type that the precision does not have, for TF32 with a precision
    that multiplies in another type, and for a precision that a GPU has no arithmetic for.
    """
    if tf32:
        if precision not in (None, "float32", "tf32"):
            raise typer.BadParameter(
                f"--tf32 was given with --precision {precision}, which multiplies in another type. Leave --tf32 out, "
                "or plan in --precision float32."
            )
        precision = "tf32"
    if precision is not None:
        _check_rates(precision, cluster)
    elif all(k.peak_flops_per_s.get("bfloat16", 0.0) > k.peak_flops_per_s.get("float32", 0.0) for k in _kinds(cluster)):
        precision = "bfloat16" if mode == "inference" else "amp" if WAVES in schedules else "mixed"
    precision = precision or "float32"
    if gradients in (None, numbers_of(precision).gradients):
        return precision
    if precision != "mixed" or mode == "inference":
        raise typer.BadParameter(
            f"--grad-dtype {gradients} was given with --precision {precision}, whose gradients are in "
            f"{numbers_of(precision).gradients}. Leave --grad-dtype out, or train in --precision mixed."
        )
    return "mixed-bf16-gradients"


def _kinds(cluster: Cluster) -> list[DeviceKind]:
    """The kinds of the cluster's devices."""
    return list({kind.name: kind for kind in map(cluster.device_kind, range(cluster.num_ranks))}.values())


def _check_rates(precision: Precision, cluster: Cluster) -> None:
    numbers = numbers_of(precision)
    for kind in _kinds(cluster):
        rates = kind.peak_flops_per_s
        # A device that is not a GPU by its description computes in all types, but has no tensor cores.
        needed = [numbers.arithmetic] if numbers.products else [numbers.compute] if kind.compute_capability else []
        missing = [dtype for dtype in needed if dtype not in rates]
        if not missing:
            continue
        instead = [word for word in _REPLACEMENTS if numbers_of(word).arithmetic in rates]
        raise typer.BadParameter(
            f"--precision {precision} computes in {missing[0]}, for which {kind.usual_name} has no rate. Plan with "
            f"--precision {' or '.join(instead or list(rates))}, or state the rate in peak_flops_per_s of the device "
            "kind if it has one."
        )


# Enough microbatches to fill a pipeline as deep as the cluster.
SAMPLES_PER_DEVICE = 8


def choose_batch(
    batch: int | None, tokens: int | None, model: str, cluster: Cluster, graph_for: Callable[[int], Graph]
) -> int:
    """Return the samples per step: ``batch``, the samples in ``tokens``, or by default 8 per device of the cluster.

    Raises typer.BadParameter for tokens of a model without token inputs, and for tokens that are not a whole number of
    samples.
    """
    if tokens is None:
        return batch or SAMPLES_PER_DEVICE * cluster.num_ranks
    if batch is not None:
        raise typer.BadParameter("--batch and --tokens both set the size of a step; give one of them.")
    length = graph_for(1).sequence_length
    if length is None:
        raise typer.BadParameter(
            f"--tokens was given for {model}, whose first input is not a sequence of tokens. Give --batch."
        )
    if tokens % length:
        below, above = tokens // length * length, -(-tokens // length) * length
        nearest = f"{below} or {above}" if below else str(above)
        raise typer.BadParameter(
            f"--tokens {tokens} is not a multiple of {length}, the tokens of one sample; the nearest is {nearest}. "
            "Give that, or another --sequence-length."
        )
    return tokens // length


def given_options(context: typer.Context) -> tuple[str, ...]:
    """Return the options that the user typed, by their long names, whatever their values."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.param_type_name == "option" and source is not None and source.name == "COMMANDLINE":
            given.append(max(parameter.opts, key=len))
    return tuple(given)


def repeat_options(context: typer.Context) -> str:
    """Return the options that the user typed, with their values, as one string quoted for a shell."""
    words: list[str] = []
    for parameter in context.command.params:
        name = max(parameter.opts, key=len)
        if name in given_options(context):
            value = context.params[parameter.name or ""]
            if isinstance(value, bool):
                words += [name] if value else parameter.secondary_opts[:1]
            else:
                words += [name, str(value)]
    return shlex.join(words)


def read_prices(text: str | None) -> Scenario:
    """Return the prices of --prices: a number per device and hour, or a scenario's name or file; None: no prices.

    Raises PlanError for a scenario without prices.
    """
    if text is None:
        return Scenario()
    with suppress(ValueError):
        return Scenario(effects=(Price(per_hour=float(text)),))
    found = load_scenario(text).only(Price)
    if not found.effects:
        raise PlanError(
            f"Scenario {text!r} has no prices. Give one with prices, or a number: money per device and hour."
        )
    return found
