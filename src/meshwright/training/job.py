"""The job of `meshwright run`: train the model that a plan names, on data that needs no download.

Byte-level language models are trained on the source files of the Python standard library. All other models repeat
their example batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, capture_model
from meshwright.cost.memory import Backend
from meshwright.runtime import Repair, RepairKind
from meshwright.spec import (
    NotFiniteError,
    Optimizer,
    Placement,
    Plan,
    PlanError,
    format_count,
    format_seconds,
    write_document,
    write_text,
)
from meshwright.spec.plan_files import read_plan
from meshwright.training.text import text_batches
from meshwright.zoo import ModelSource, load_model

# Usual starting points: AdamW for small transformers (nanoGPT's order of magnitude), plain SGD for everything else.
LEARNING_RATES = {"adamw": 1e-3, "sgd": 1e-2}

# Files that the ranks of a run write into its folder while it runs.
PROGRESS_FILE = "progress.jsonl"
# Files that the ranks write at the end.
TIMELINE_FILE, RESULT_FILE, DECISIONS_FILE = "timeline.json", "result.json", "decisions.json"


def error_file(folder: Path, rank: int) -> Path:
    """Return the path to which a rank writes its error."""
    return folder / f"error-{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The settings of a run, the same for every rank.

    ``plan``: the path of the plan. ``num_steps``: the steps to train, including those before a checkpoint that the run
    resumes. ``num_recorded_steps`` are in the timeline; ``first_recorded``: the first of them, by number from 0 (None:
    the last steps of the run). ``learning_rate``: None for that of `LEARNING_RATES`. ``save_model``: the path to write
    the trained weights to. ``pin_cores``: give each rank its own CPU cores.

    ``repair``: the remedy for stale gradients; ``repair_fade``: the number of updates in which it fades, 0 for never.
    ``clip_norm``: the norm to which gradients are clipped. ``checkpoint``: the folder of checkpoints, written every
    ``checkpoint_every`` steps (0: only at the end), or with ``checkpoint_auto`` as often as pays if a failure comes
    every ``mttf_s`` seconds (`saving`); ``checkpoint_keep`` and ``checkpoint_keep_every``: those to keep
    (`checkpoint.KeepRule`); with ``resume`` the run continues from the newest one. ``device``: by default that of the
    plan's cluster. ``compiled``: whether layers are compiled; by default as planned.
    ``offload_folder``: the folder for optimizer states on drives. ``allow_nan``: train on if a loss is not finite.
    ``restarts``: how often the ranks are started again from the newest checkpoint after one died or hung.
    ``hang_after_s``: the seconds without progress after which a rank hangs; 0 for no limit, None for that of
    `training.watch`.
    """

    plan: str
    num_steps: int
    num_recorded_steps: int = 5
    first_recorded: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    save_model: str | None = None
    pin_cores: bool = True
    repair: RepairKind | None = None
    repair_fade: int = 0
    clip_norm: float | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 0
    checkpoint_auto: bool = False
    mttf_s: float | None = None
    checkpoint_keep: int = 2
    checkpoint_keep_every: int = 0
    resume: bool = False
    device: Backend | None = None
    compiled: bool | None = None
    offload_folder: str | None = None
    allow_nan: bool = False
    restarts: int = 0
    hang_after_s: float | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    def read_plan(self) -> Plan | Placement:
        """Return the plan or placement to run. Raises as `spec.plan_files.read_plan`."""
        return read_plan(self.plan, compiled=self.compiled)


def job_repair(job: Job) -> Repair | None:
    """Return the job's repair of stale gradients; None without one. Raises PlanError for an unknown repair."""
    if job.repair is None:
        if job.repair_fade:
            raise PlanError(f"--repair-fade {job.repair_fade} was given without a repair. Give --repair discount, too.")
        return None
    return Repair(kind=job.repair, fade_updates=job.repair_fade)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLayers:
    """The compiled layers of all ranks.

    ``num_units``: the number of parts of layers on all ranks. ``num_codes``: the largest number of different parts on
    a rank; each of them is compiled once. ``seconds``: the time of the slowest rank to compile. ``eager``: the number
    of parts that run eagerly, by reason. ``refused``: the reason if all run eagerly, else "".
    """

    num_units: int
    num_codes: int
    seconds: float
    eager: dict[str, int] = field(default_factory=dict)
    refused: str = ""

    def explain(self) -> list[str]:
        """Return lines of text for the user."""
        if self.refused:
            return [self.refused]
        parts = format_count(self.num_units - sum(self.eager.values()), "part")
        kinds = format_count(self.num_codes, "kind")
        lines = [f"compiled: {parts} of layers on all ranks ({kinds}), in {format_seconds(self.seconds)} before step 1"]
        return lines + [f"{format_count(count, 'part')} ran eagerly: {reason}" for reason, count in self.eager.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart of a run: the ``step`` that it had reached, why it failed, and the seconds until it was there again.

    ``lost_s`` is 0 if it failed again before; the last of these restarts has the time of all.
    """

    step: int
    why: str
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The results of a run.

    ``plan`` and ``timeline``: paths of the plan and of the measured timeline. ``saving``: a line on the interval of
    checkpoints, "" if it was not measured. ``losses``: by step, None for a loss that
    is not finite; empty for inference. ``step_seconds``: seconds of each step. ``num_before``: the number of earlier
    steps, from a checkpoint. ``first_recorded``: the number (from 0) of the first step in the timeline. ``compiled``:
    the compiled layers, None if the plan compiles no layers. ``decisions``: the path of the decisions of an exchange
    policy; ``gradients``: how many gradients the policy applied, dropped and abandoned, as far as it counts them.
    """

    plan: str
    losses: tuple[float | None, ...]
    step_seconds: tuple[float, ...]
    timeline: str
    num_before: int = 0
    first_recorded: int = 0
    compiled: CompiledLayers | None = None
    saving: str = ""
    restarts: tuple[Restart, ...] = ()
    decisions: str = ""
    gradients: dict[str, int] = field(default_factory=dict)

    SCHEMA_VERSION: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Progress after a step; ``step`` is its number from 1.

    ``seconds``: the time of the step. ``losses``: the losses that became known in this step; ``last_loss``: the number
    of the last step whose loss is known. Under an asynchronous schedule losses become known some steps later.
    """

    step: int
    losses: tuple[float, ...]
    last_loss: int
    samples_per_s: float
    seconds: float


class Trained(NamedTuple):
    """What a rank returns at the end of a run: results, and on rank 0 documents as JSON text.

    ``timeline``: the measured timeline; ``decisions``: the log of an exchange policy.
    """

    result: RunResult
    timeline: str | None = None
    decisions: str | None = None


def write_results(folder: Path, trained: Trained) -> RunResult:
    """Write the results of a run on rank 0 to a folder; return them with the paths of the documents.

    Each file is written completely or not at all. Raises DocumentError if the folder cannot be written to.
    """
    assert trained.timeline is not None
    result = replace(trained.result, timeline=str(write_text(trained.timeline, folder / TIMELINE_FILE)))
    if trained.decisions is not None:
        result = replace(result, decisions=str(write_text(trained.decisions, folder / DECISIONS_FILE)))
    write_document(result, folder / RESULT_FILE)
    return result


def load_source(plan: Plan | Placement, seed: int = 0) -> ModelSource:
    """Return the plan's model with an example batch, with the same weights on every rank.

    For inference the batch has no targets. Raises the errors of loading the model.
    """
    return _load(plan, seed=seed)


def capture_fake(plan: Plan, seed: int = 0) -> tuple[ModelSource, Captured]:
    """Return the plan's model and its capture, as fake tensors (shapes without memory)."""
    batch_size: int | None = None
    while True:
        source = _load(plan, seed=seed, batch_size=batch_size, fake=True)
        captured = capture_model(
            source.model,
            source.inputs,
            targets=source.targets,
            loss=source.loss,
            mode=plan.workload.kind,
            verify=False,
        )
        if captured.graph.batch_size in (None, plan.microbatch_size) or batch_size is not None:
            return source, captured
        # A model with a fixed batch size is captured at the size at which it runs.
        batch_size = plan.microbatch_size


def _load(plan: Plan | Placement, **options: Any) -> ModelSource:
    sizes: dict[str, Any] = dict(plan.model_sizes)
    target = None
    if isinstance(plan, Plan) and plan.rewritten:
        # Needs packages of an extra, which other plans do not need.
        from meshwright.rewrite.planned import rewrite_source, target_of

        target = target_of(plan)
        # It was rewritten for one batch size.
        sizes["batch_size"] = plan.microbatch_size
    if isinstance(plan, Placement) and plan.degrees:
        from meshwright.training.split_model import split_source

        sizes["batch_size"] = plan.microbatch_size
        return split_source(load_model(plan.model, **{**options, **sizes}), plan.degrees, plan.workload.kind)
    source = load_model(plan.model, **{**options, **sizes})
    if target is not None:
        source = rewrite_source(source, target, plan.workload.kind)
    return source if plan.workload.kind == "training" else replace(source, targets=(), loss=None)


def make_optimizer(
    parameters: list[torch.nn.Parameter], optimizer: Optimizer, lr: float | None
) -> torch.optim.Optimizer:
    """Return the workload's optimizer over these parameters; ``lr`` None gives the rate in `LEARNING_RATES`."""
    rate = LEARNING_RATES[optimizer.kind] if lr is None else lr
    if optimizer.kind == "adamw":
        # torch's default on GPUs copies all parameters meanwhile; the fused kernel needs no memory (`cost.memory`).
        return torch.optim.AdamW(parameters, lr=rate, fused=all(item.is_cuda for item in parameters) or None)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9 if optimizer.momentum else 0.0)


def make_batches(source: ModelSource, global_batch: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield endless global batches (inputs, targets) of ``global_batch`` samples.

    For byte-level models the samples are text, for other models those of the example, repeated.
    """
    if source.reads_bytes:
        length = pytree.tree_leaves(source.inputs)[0].shape[1]
        for inputs, targets in text_batches(global_batch, length, seed):
            yield ((inputs, targets), ()) if getattr(source.model, "takes_targets", False) else ((inputs,), (targets,))
    tiled = pytree.tree_map_only(torch.Tensor, lambda item: tile(item, global_batch), (source.inputs, source.targets))
    while True:
        yield tiled


def tile(tensor: torch.Tensor, global_batch: int) -> torch.Tensor:
    """Return a tensor of ``global_batch`` samples (dim 0), repeated from an example; a scalar is returned unchanged."""
    if not tensor.ndim:
        return tensor
    repeats = -(-global_batch // tensor.shape[0])
    return tensor.repeat(repeats, *[1] * (tensor.ndim - 1))[:global_batch]


def not_finite(step: int, ranks: Sequence[int]) -> NotFiniteError:
    """Return the error of a run in which ``ranks`` computed a loss that is not finite in ``step`` (from 0)."""
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return NotFiniteError(
        f"The loss of step {step + 1}, computed by {named}, is not finite. Lower the learning rate, clip gradients "
        "with --clip-norm, or look at the data of that step. With --allow-nan the run goes on."
    )
