"""The options of ``meshwright plan``, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from meshwright.cli.exchanges import OwnExchangeOption
from meshwright.cli.model_arguments import (
    ImageOption,
    JsonOption,
    MeasurementsOption,
    ModelArgument,
    SequenceOption,
    SoftwareOption,
    model_sizes,
)
from meshwright.cli.planning import GRADIENT_HELP, PRECISION_HELP, TF32_HELP, GradientType
from meshwright.cli.requests import CommandRequest, Of
from meshwright.cli.schedules import FindOrdersOption, WholeOption
from meshwright.cli.written_pages import HtmlOption, OpenOption
from meshwright.spec import Cluster, load_cluster
from meshwright.spec.cluster import MAX_RANKS
from meshwright.spec.exchange import MAX_STALENESS, WAVES
from meshwright.spec.precision import Precision
from meshwright.spec.schedules import DEALT_IN_TURN, SCHEDULE_NAMES
from meshwright.spec.workload import MAX_GLOBAL_BATCH, OptimizerName

if TYPE_CHECKING:
    from meshwright.cost.memory import MemoryLimit

# A petabyte: no device has a thousandth of it.
MAX_MEMORY_LIMIT_GIB = 2.0**20
MAX_LISTED = 1000
_DRAWING = ("flexflow", "differentiable")


def _unless_trained(request: PlanRequest) -> str:
    return "with --inference" if request.inference else ""


def _unless_waves(request: PlanRequest) -> str:
    return "" if WAVES in (request.schedule or ()) else f"without --schedule {WAVES}"


def _unless_dealt(request: PlanRequest) -> str:
    from meshwright.planner.methods import OPEN_METHODS

    names = request.schedule or (DEALT_IN_TURN if request.method in OPEN_METHODS and not request.inference else ())
    return "" if set(names) & set(DEALT_IN_TURN) else f"without --schedule {' or '.join(DEALT_IN_TURN)}"


def _unless_split(request: PlanRequest) -> str:
    sizes = (*(request.tensor or ()), *(request.context or ()), *(request.expert or ()))
    return "" if any(size > 1 for size in sizes) else "without --tensor, --context or --expert above 1"


def _unless_tensor(request: PlanRequest) -> str:
    return "" if any(size > 1 for size in request.tensor or (2,)) else "with --tensor 1"


def _unless_drawn(request: PlanRequest) -> str:
    from meshwright.planner import METHODS

    named = request.method if request.method == "auto" or request.method in METHODS else ""
    return f"with --method {named}, which draws no random numbers" if named and named not in _DRAWING else ""


def _unless_shared(request: PlanRequest) -> str:
    if request.aim == "latency":
        return "with --aim latency; shares are of the time of a step"
    return "with --rewrite, whose plans are for another graph" if request.rewrite else ""


def _unless_json(request: PlanRequest) -> str:
    return "with --json, which always contains the Pareto front" if request.as_json else ""


@dataclass(frozen=True, kw_only=True)
class PlanRequest(CommandRequest):
    """The options of one call of ``meshwright plan``.

    Its forms: a search for plans (``search``), a search that starts from an earlier plan (``from``), and a placement of
    ops (``place``).
    """

    FORMS: ClassVar[Mapping[str, str]] = {
        "search": "a search for plans",
        "from": "a plan made with --from, whose workload and layout are kept",
        "place": "a placement of ops (--method place)",
    }

    model: ModelArgument
    cluster: Annotated[str, typer.Option(help="A cluster file (.toml) or a short form: 4xA100, 2x8xH100, 2xcpu.")]
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per step, over all ranks. By default 8 per device.", min=1, max=MAX_GLOBAL_BATCH),
        Of("search", "place"),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per step, over all ranks, in place of --batch.", min=1),
        Of("search", "place"),
    ] = None
    optimizer: Annotated[
        OptimizerName, typer.Option(help="The optimizer."), Of("search", "place", unless=_unless_trained)
    ] = "adamw"
    precision: Annotated[Precision | None, typer.Option(help=PRECISION_HELP), Of("search", "place")] = None
    grad_dtype: Annotated[
        GradientType | None, typer.Option(help=GRADIENT_HELP), Of("search", "place", unless=_unless_trained)
    ] = None
    tf32: Annotated[bool, typer.Option("--tf32", help=TF32_HELP), Of("search", "place")] = False
    inference: Annotated[
        bool, typer.Option("--inference", help="Plan forward passes: no loss, no backward, no optimizer."), Of("search")
    ] = False
    aim: Annotated[
        Literal["throughput", "latency"],
        typer.Option(help="Maximize samples per second, or minimize the latency of a batch that arrives at once."),
        Of("search", needs="--inference"),
    ] = "throughput"
    max_latency: Annotated[
        float | None,
        typer.Option(help="Seconds that one microbatch may take from its arrival to its answer."),
        Of("search", needs="--inference"),
    ] = None
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of devices to use. By default all. May be given several times: the search then chooses.",
            min=1,
            max=MAX_RANKS,
        ),
        Of("search", "place"),
    ] = None
    prices: Annotated[
        str | None,
        typer.Option(
            help="Prices of devices: a number, money per device and hour; or a scenario with prices, a .toml file or "
            "the name of a shipped scenario."
        ),
        Of("search", "from"),
    ] = None
    max_price: Annotated[
        float | None,
        typer.Option(help="The most money per hour that a plan may cost."),
        Of("search", needs="--prices"),
    ] = None
    microbatch_size: Annotated[
        list[int] | None,
        typer.Option("--microbatch-size", "-m", help="Only this microbatch size. May be given several times.", min=1),
        Of("search", "place"),
    ] = None
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only this schedule: {', '.join(SCHEDULE_NAMES)}, or your own: file.py:function or orders.csv. By "
            "default 1f1b, gpipe, interleaved and zb-h1. May be given several times."
        ),
        Of("search"),
    ] = None
    virtual_stages: Annotated[
        int | None,
        typer.Option(
            help="Only this number of stages on every rank under interleaved and looped-bfs. By default 2 or 4.",
            min=1,
            max=64,
        ),
        Of("search", unless=_unless_dealt),
    ] = None
    staleness: Annotated[
        int,
        typer.Option(
            help="With hetpipe: by how many waves (the minibatches of a step) replicas may run ahead of each other.",
            min=0,
            max=MAX_STALENESS,
        ),
        Of("search", unless=_unless_waves),
    ] = 0
    find_orders: Annotated[FindOrdersOption, Of("search", "from", unless=_unless_trained)] = None
    whole_backwards: Annotated[WholeOption, Of("search", "from", needs="--find-orders")] = False
    tensor: Annotated[
        list[int] | None,
        typer.Option(
            help="Tensor parallelism: the number of devices to split every op over, as far as it can be split. May be "
            "given several times: the search then chooses.",
            min=1,
        ),
        Of("search"),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Sequence parallelism: split the tokens between the matrix products that --tensor splits. By default "
            "both are tried.",
        ),
        Of("search", unless=_unless_tensor),
    ] = None
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Context parallelism: the number of devices to split the tokens of every sequence over. May be given "
            "several times: the search then chooses.",
            min=1,
        ),
        Of("search"),
    ] = None
    expert: Annotated[
        list[int] | None,
        typer.Option(
            help="Expert parallelism: the number of devices to spread the experts of every layer over, each with its "
            "own samples. May be given several times: the search then chooses.",
            min=1,
        ),
        Of("search"),
    ] = None
    placement: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP=AXIS:DIM",
            help="Split ops by your own choice: the name of an op or module (* and ? as in file names), an axis, and a "
            "dim of the first output or input, as in 'embeddings.*=expert:output1'; without a dim the ops stay whole. "
            "May be given several times.",
        ),
        Of("search", unless=_unless_split),
    ] = None
    exchange: Annotated[OwnExchangeOption, Of("search", "from", unless=_unless_trained)] = None
    zero: Annotated[
        list[int] | None,
        typer.Option(
            help="What replicas shard instead of each keeping a copy: nothing (0), optimizer states (1), gradients "
            "too (2), parameters too (3, as FSDP does). May be given several times: the search then chooses.",
            min=0,
            max=3,
        ),
        Of("search", unless=_unless_trained),
    ] = None
    shard: Annotated[
        list[int] | None,
        typer.Option(
            help="With --zero 1 to 3: the number of replicas that shard states among each other, such as the 8 of a "
            "node; gradients are also summed across such groups (HSDP). 0: all replicas. May be given several "
            "times: the search then chooses.",
            min=0,
        ),
        Of("search", unless=_unless_trained),
    ] = None
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="What is recomputed in the backward pass instead of being kept: none, op (blocks except matrix "
            "products and attention), attention, every-2 (every second block), full (every block), keep=KIND+KIND "
            "(blocks except these ops), layers such as 0:12, or words for stages such as full@0,op@1:3. May be given "
            "several times: the search then chooses.",
        ),
        Of("search", unless=_unless_trained),
    ] = None
    offload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=WHERE",
            help="What is offloaded from the devices, and where to: optimizer=host or optimizer=nvme (optimizer "
            "states; the host computes the optimizer step), parameters=host (with --zero 3), activations=host (until "
            "the backward pass), or none. May be given several times, or once with commas. By default offload is tried "
            "only if nothing else fits.",
        ),
        Of("search", unless=_unless_trained),
    ] = None
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Let torch compile the layers, each on its own: chains of ops that move memory become one kernel.",
        ),
        Of("search"),
    ] = False
    measurements: MeasurementsOption = None
    software: SoftwareOption = None
    sequence_length: SequenceOption = None
    image_size: ImageOption = None
    stages: Annotated[int | None, typer.Option(help="Only plans with this number of stages.", min=1), Of("search")] = (
        None
    )
    memory_limit: Annotated[
        float | None,
        typer.Option(
            help="GiB of memory that a plan may use on each device. By default the device's memory less what CUDA and "
            "NCCL take."
        ),
    ] = None
    memory_margin: Annotated[
        float | None,
        typer.Option(
            help="Safety margin: a plan fits if its predicted memory, plus this share of it, fits. By default 0.15 on "
            "GPUs, the error that 9 of 10 predictions stay below, and 0 on CPUs and with --memory-limit.",
            min=0,
            max=10,
        ),
    ] = None
    top: Annotated[int, typer.Option(help="Number of plans to list.", min=1, max=MAX_LISTED), Of("search", "from")] = 10
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Also list the Pareto front: the simulated plans that no other one beats in step time, memory and "
            "price at once.",
        ),
        Of("search", "from", unless=_unless_json),
    ] = False
    shares: Annotated[
        bool,
        typer.Option(
            "--shares", help="Print what each choice of the best plan gains: its share of the gain over a plain plan."
        ),
        Of("search", unless=_unless_shared),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the best plan to this file (.json), or plan.json and launch.sh into this folder."
        ),
    ] = None
    launch: Annotated[
        Path | None,
        typer.Option(help="Write the script that starts the plan to this file."),
        Of("search", "from", needs="--out"),
    ] = None
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Write the script for sbatch of Slurm (launch.sbatch) instead of for torchrun."),
        Of("search", "from", needs="--out"),
    ] = False
    html: Annotated[HtmlOption, Of("search", "from")] = None
    open_browser: Annotated[OpenOption, Of("search", "from")] = False
    method: Annotated[
        str,
        typer.Option(
            help="How to search: auto (the method that fits the problem), slicing, pipedream, alpa, flexflow, "
            "differentiable, "
            "unequal, grid, latency, your own as file.py:function, or place (a device chosen for every single op)."
        ),
        Of("search", "place"),
    ] = "auto"
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds after which the search returns the best plans found so far."),
        Of("search", "from"),
    ] = None
    seed: Annotated[
        int,
        typer.Option(help="Seed of methods that draw random numbers.", min=0, max=2**63 - 1),
        Of("search", unless=_unless_drawn),
    ] = 0
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite",
            help="Also search layouts of the rewritten graph, and keep it if the simulated step is shorter. The model "
            "is rewritten for the cluster's first kind of device and the microbatches of the best plan.",
        ),
        Of("search"),
    ] = False
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Start from this earlier plan on changed machines. Stages, replicas and microbatches are searched "
            "again (about a second); sharding, ZeRO and recompute are kept.",
        ),
        Of("from"),
    ] = None
    fix: Annotated[
        list[str] | None,
        typer.Option(help="Assign a layer, module or op to a rank: NAME=RANK. May be given several times."),
        Of("place"),
    ] = None
    as_json: JsonOption = False

    def form(self) -> str:
        """Return ``from`` with --from, ``place`` with --method place, else ``search``."""
        if self.start_from is not None:
            return "from"
        return "place" if self.method == "place" else "search"

    def check(self) -> None:
        """Check the options together. Raises BadParameter for an amount of memory that no device has."""
        super().check()
        if self.memory_limit is not None and not 0 < self.memory_limit <= MAX_MEMORY_LIMIT_GIB:
            raise typer.BadParameter(
                f"--memory-limit {self.memory_limit:g} is not an amount of memory; give GiB, above 0 and up to "
                f"{MAX_MEMORY_LIMIT_GIB:,.0f}."
            )

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The requested sizes of the model, as pairs (name, value)."""
        return model_sizes(self.sequence_length, self.image_size)

    @property
    def memory(self) -> MemoryLimit:
        """The part of a device's memory that a plan may use."""
        from meshwright.cost.memory import MemoryLimit

        num_bytes = None if self.memory_limit is None else int(self.memory_limit * 2**30)
        return MemoryLimit(num_bytes=num_bytes, margin=self.memory_margin)

    @cached_property
    def machine(self) -> Cluster:
        """The cluster of --cluster. Raises what `load_cluster` raises."""
        return load_cluster(self.cluster)
