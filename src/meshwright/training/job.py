"""The ready job: train the model that a plan names, on data that needs no download.

Byte-level language models read the Python standard library's sources; everything else repeats the model's own
synthetic batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, capture_model
from meshwright.cost.memory import Backend
from meshwright.runtime import Repair, RepairKind
from meshwright.spec.codec import write_document
from meshwright.spec.errors import PlanError
from meshwright.spec.files import write_text
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.plan_files import read_plan
from meshwright.spec.units import format_count, format_seconds
from meshwright.spec.workload import Optimizer
from meshwright.training.text import text_batches
from meshwright.zoo import ModelSource, load_model

# Usual starting points: AdamW for small transformers (nanoGPT's order of magnitude), plain SGD for everything else.
LEARNING_RATES = {"adamw": 1e-3, "sgd": 1e-2}

# What the ranks of a run leave in its folder while it goes on.
PROGRESS_FILE = "progress.jsonl"
# And what they leave when it is done.
TIMELINE_FILE, RESULT_FILE = "timeline.json", "result.json"


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its own error."""
    return folder / f"error-{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker is told: the plan's file, the number of steps and of recorded ones, seeds, outputs.

    ``first_recorded``: the first step to record, by number from 0; if none is given, the last ones are recorded.

    ``repair`` of stale gradients, and the updates in which it fades; the norm to which gradients are clipped.
    ``checkpoint``: the folder that checkpoints are written to, every so many
    steps and at the end, and from which a run resumes; ``num_steps`` counts what was done before. ``device``: by
    default what the plan's cluster has. ``compiled``: whether layers are compiled; by default as the plan says.
    ``offload_folder``: where states lie that are kept on drives.
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
    resume: bool = False
    device: Backend | None = None
    compiled: bool | None = None
    offload_folder: str | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    def read_plan(self) -> Plan | Placement:
        """The plan or placement that is run. Raises as `spec.plan_files.read_plan`."""
        return read_plan(self.plan, compiled=self.compiled)


def job_repair(job: Job) -> Repair | None:
    """What the job does about stale gradients. Raises PlanError for what is none."""
    if job.repair is None:
        if job.repair_fade:
            raise PlanError(
                f"{job.repair_fade} updates were given in which a repair fades, but no repair. Give --repair discount."
            )
        return None
    return Repair(kind=job.repair, fade_updates=job.repair_fade)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLayers:
    """Layers of all ranks that were to be compiled: parts of them, how many differ on a rank, seconds of the slowest.

    ``eager``: parts that run as they are, by the reason; ``refused``: why all of them do.
    """

    num_units: int
    num_codes: int
    seconds: float
    eager: dict[str, int] = field(default_factory=dict)
    refused: str = ""

    def explain(self) -> list[str]:
        """Sentences for people."""
        if self.refused:
            return [self.refused]
        parts = format_count(self.num_units - sum(self.eager.values()), "part")
        kinds = format_count(self.num_codes, "kind")
        lines = [f"compiled: {parts} of layers on all ranks ({kinds}), in {format_seconds(self.seconds)} before step 1"]
        return lines + [f"{format_count(count, 'part')} ran eagerly: {reason}" for reason, count in self.eager.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind: loss and seconds of every step, and where the measured timeline is.

    A loss that is not finite is None; a run of inference has none. ``num_before`` are steps that were done before, from
    a checkpoint; ``first_recorded`` is the number, from 0, of the first step in the timeline; ``compiled``: what became
    of layers that were to be compiled.
    """

    plan: str
    losses: tuple[float | None, ...]
    step_seconds: tuple[float, ...]
    timeline: str
    num_before: int = 0
    first_recorded: int = 0
    compiled: CompiledLayers | None = None

    SCHEMA_VERSION: ClassVar[int] = 1


def write_results(folder: Path, timeline: str, result: RunResult) -> RunResult:
    """Write what a run leaves behind, each file whole or not at all; ``timeline`` is the text of its document.

    Raises DocumentError for a folder that cannot be written to.
    """
    path = write_text(timeline, folder / TIMELINE_FILE)
    result = replace(result, timeline=str(path))
    write_document(result, folder / RESULT_FILE)
    return result


def load_source(plan: Plan | Placement, seed: int = 0) -> ModelSource:
    """The plan's model with an example batch, for inference without targets; the same weights on every rank."""
    return _load(plan, seed=seed)


def capture_fake(plan: Plan, seed: int = 0) -> tuple[ModelSource, Captured]:
    """The plan's model and its graph, all of it fake tensors: shapes without memory."""
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
        # A model that bakes its batch size in is captured at the size at which it runs.
        batch_size = plan.microbatch_size


def _load(plan: Plan | Placement, **options: Any) -> ModelSource:
    sizes: dict[str, Any] = dict(plan.model_sizes)
    target = None
    if isinstance(plan, Plan) and plan.rewritten:
        # Needs packages of an extra, which all other plans do without.
        from meshwright.rewrite.planned import rewrite_source, target_of

        target = target_of(plan)
        # It was rewritten for one size of batch.
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
    """The workload's optimizer over some parameters."""
    rate = LEARNING_RATES[optimizer.kind] if lr is None else lr
    if optimizer.kind == "adamw":
        # torch's default on GPUs copies all parameters meanwhile; in one kernel it needs nothing (`cost.memory`).
        return torch.optim.AdamW(parameters, lr=rate, fused=all(item.is_cuda for item in parameters) or None)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9 if optimizer.momentum else 0.0)


def make_batches(source: ModelSource, global_batch: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Endless global batches (inputs, targets): text for byte-level models, else the example's samples repeated."""
    if source.reads_bytes:
        length = pytree.tree_leaves(source.inputs)[0].shape[1]
        for inputs, targets in text_batches(global_batch, length, seed):
            yield ((inputs, targets), ()) if getattr(source.model, "takes_targets", False) else ((inputs,), (targets,))
    tiled = pytree.tree_map_only(torch.Tensor, lambda item: tile(item, global_batch), (source.inputs, source.targets))
    while True:
        yield tiled


def tile(tensor: torch.Tensor, global_batch: int) -> torch.Tensor:
    """Repeat the samples of an example until there are ``global_batch``; a tensor without dims stays as it is."""
    if not tensor.ndim:
        return tensor
    repeats = -(-global_batch // tensor.shape[0])
    return tensor.repeat(repeats, *[1] * (tensor.ndim - 1))[:global_batch]
