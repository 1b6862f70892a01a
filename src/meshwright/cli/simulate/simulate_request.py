"""The options of ``meshwright simulate``, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from meshwright.cli.exchanges import ExchangeOption
from meshwright.cli.model_arguments import CompiledOption, JsonOption, MeasurementsOption, SoftwareOption
from meshwright.cli.requests import CommandRequest, Of
from meshwright.cli.schedules import FindOrdersOption, VirtualStagesOption, WholeOption
from meshwright.cli.simulate.serving_deployment import is_deployment
from meshwright.cli.trace_options import TraceOption, TraceRanksOption
from meshwright.cli.written_pages import HtmlOption, OpenOption
from meshwright.spec import DocumentError, Placement, Plan
from meshwright.spec.plan_files import read_plan
from meshwright.spec.schedules import DEALT_IN_TURN, SCHEDULE_NAMES

PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN",
        help="A plan or a placement (.json) that `meshwright plan` wrote; for `simulate` also a deployment of "
        "models to serve (.toml).",
    ),
]
_OF_ONE = Of("plan", "placement")
_OF_PLANS = Of("plan", "sweep", "placement")
_OF_SERVING = Of("deployment")


def _unless_dealt(request: SimulateRequest) -> str:
    return "" if request.schedule in DEALT_IN_TURN else f"without --schedule {' or '.join(DEALT_IN_TURN)}"


def _unless_printed(request: SimulateRequest) -> str:
    return "with --json on a placement of ops" if request.as_json and request.form() == "placement" else ""


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(CommandRequest):
    """The options of one call of ``meshwright simulate``.

    Its forms: a plan, a placement of single ops, many cases of either (``sweep``), and a deployment.
    """

    FORMS: ClassVar[Mapping[str, str]] = {
        "plan": "a plan",
        "placement": "a placement of ops",
        "sweep": "a sweep (--sweep)",
        "deployment": "a deployment",
    }

    plan: PlanArgument
    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's: a .toml file or a short form."), _OF_PLANS
    ] = None
    measurements: MeasurementsOption = None
    software: Annotated[SoftwareOption, _OF_PLANS] = None
    graph: Annotated[
        Path | None, typer.Option(help="The captured graph (.json); by default the model is captured."), _OF_PLANS
    ] = None
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="What happens to the machines: a .toml file, or a shipped scenario by name. May be given several "
            "times; each is added on top of the ones before."
        ),
        _OF_PLANS,
    ] = None
    seeds: Annotated[
        int,
        typer.Option(help="Under a scenario with jitter or failures: the number of seeds.", min=1),
        Of("plan", "sweep", "placement", needs="--scenario"),
    ] = 5
    run_steps: Annotated[
        int | None,
        typer.Option(
            help="Simulate a run of this number of steps: failures, checkpoints, price; by default 30 days of steps.",
            min=1,
        ),
        _OF_PLANS,
    ] = None
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARAMETER=VALUES",
            help="Simulate every value of a parameter of plan, scenario or deployment. Values: 1,2,4 or 1..3:5 (five "
            "values) or 0..9 (whole numbers); --out then takes a .csv file. May be given several times, for a grid.",
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(help="Draw a figure of all cases to this file (.svg)."), Of(needs="--sweep")
    ] = None
    figure: Annotated[
        str | None,
        typer.Option(help="Which column to draw; by default the time of a step, or of a run."),
        Of(needs="--sweep"),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            help=f"Another schedule than the plan's: {', '.join(SCHEDULE_NAMES)}, or your own: file.py:function or "
            "orders.csv."
        ),
        Of("plan"),
    ] = None
    virtual_stages: Annotated[VirtualStagesOption, Of("plan", unless=_unless_dealt)] = 2
    find_orders: Annotated[FindOrdersOption, Of("plan")] = None
    whole_backwards: Annotated[WholeOption, Of("plan", needs="--find-orders")] = False
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Also simulate this schedule for the same stages (for a deployment: this policy), and compare. May be "
            "given several times. By default a plan with a schedule of your own is compared with gpipe and 1f1b."
        ),
        Of("plan", "deployment"),
    ] = None
    exchange: Annotated[ExchangeOption, Of("plan")] = None
    compiled: Annotated[CompiledOption, Of("plan", "sweep")] = None
    contention: Annotated[
        Literal["queued", "fair"],
        typer.Option(help="How concurrent transfers use a link: one after the other, or in fair shares."),
        _OF_PLANS,
    ] = "queued"
    steps: Annotated[int, typer.Option(help="Steps to simulate.", min=1), _OF_ONE] = 2
    detail: Annotated[
        Literal["instructions", "ops"],
        typer.Option(help="What the trace shows: instructions, or also the ops inside of them."),
        Of("plan", "placement", needs="--trace"),
    ] = "instructions"
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show the critical path of a step, and what would make it shorter."),
        Of("plan", "placement", unless=_unless_printed),
    ] = False
    policy: Annotated[
        str | None,
        typer.Option(
            help="The policy that forms batches: a name with settings (symphony, timeouts:wait=10) or your own, "
            "file.py:Class."
        ),
        _OF_SERVING,
    ] = None
    seconds: Annotated[float, typer.Option(help="Seconds of requests.", min=0.001, max=1e6), _OF_SERVING] = 10.0
    seed: Annotated[int, typer.Option(help="Seed of the requests.", min=0, max=2**31), _OF_SERVING] = 0
    scale: Annotated[float, typer.Option(help="Multiply all rates by this.", min=0.0, max=1e6), _OF_SERVING] = 1.0
    goodput: Annotated[
        bool,
        typer.Option("--goodput", help="Find the highest scale of all rates with 99 % of the requests in time."),
        _OF_SERVING,
    ] = False
    capacity: Annotated[
        bool,
        typer.Option("--capacity", help="Find the fewest devices with 99 % of each model's requests in time."),
        _OF_SERVING,
    ] = False
    place: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Assign models to groups of devices by this method: packing, replication, simulated, "
            "simulated:beam=K, or best (of the first three). --out then writes the deployment with its groups.",
        ),
        _OF_SERVING,
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write the timeline to this file (.json); with --sweep the table (.csv), for a deployment the "
            "results.",
        ),
    ] = None
    trace: Annotated[TraceOption, _OF_ONE] = None
    trace_ranks: Annotated[TraceRanksOption, Of("plan", "placement", needs="--trace")] = None
    html: Annotated[HtmlOption, Of("plan")] = None
    open_browser: Annotated[OpenOption, Of("plan")] = False
    as_json: JsonOption = False

    def form(self) -> str:
        """Return the form, by the content of the file; a plan or placement with ``--sweep`` is a ``sweep``."""
        if self.is_deployment:
            return "deployment"
        if self.sweep:
            return "sweep"
        return "placement" if isinstance(self.document, Placement) else "plan"

    @cached_property
    def is_deployment(self) -> bool:
        """Whether the file is a deployment."""
        return is_deployment(self.plan)

    @cached_property
    def document(self) -> Plan | Placement:
        """The plan or placement. Raises DocumentError for a file that is neither."""
        return read_plan(self.plan)

    def check(self) -> None:
        """Check the options together. Raises DocumentError if a sweep's --out is not .csv, or its --plot not .svg."""
        super().check()
        for name, path, suffix in (("--out", self.out, ".csv"), ("--plot", self.plot, ".svg")):
            if self.sweep and path is not None and path.suffix != suffix:
                raise DocumentError(
                    f"{name} {path}: a sweep is written there as {suffix[1:].upper()}; choose a name that ends in "
                    f"{suffix}."
                )
