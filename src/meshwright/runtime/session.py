"""What one rank holds while it works on a plan, and the process group that it is in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.runtime.exchange import Exchange
from meshwright.runtime.executor import Inputs, Outputs
from meshwright.runtime.models import Model
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.stage import Part
from meshwright.runtime.steps import Steps
from meshwright.runtime.teams import Grid
from meshwright.spec.errors import PlanError, RunError
from meshwright.spec.graph import Graph
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan
from meshwright.spec.program import Program
from meshwright.spec.slices import StageSlice

# A rank that waits longer than this for a message gives up: the other end is dead or stuck.
COMMUNICATION_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Everything one rank holds while it works on a plan or a placement: its ``stages``, and the module of each.

    ``plan`` is the whole plan, ``model`` what this process has of it; ``parts`` are the modules as the program calls
    them.
    """

    grid: Grid
    plan: Plan | Placement
    model: Model
    program: Program
    stages: tuple[StageSlice, ...]
    steps: Steps
    recorder: Recorder
    exchange: Exchange | None
    modules: tuple[torch.nn.Module, ...]
    parts: tuple[Part, ...]
    parameters: dict[int, torch.nn.Parameter]
    device: torch.device

    def microbatch_inputs(self, tensors: Sequence[torch.Tensor]) -> dict[int, Inputs]:
        """Cut a global batch (graph inputs in order) into microbatches, for each stage what it reads.

        Raises PlanError if the sizes do not fit.
        """
        return {stage.index: split_batch(self.plan, self.model, stage, tensors, self.device) for stage in self.stages}

    @property
    def rank(self) -> int:
        """This process."""
        return self.grid.process

    @property
    def graph(self) -> Graph:
        """What this process computes of the model."""
        return self.model.graph

    def run_step(self, step: int, tensors: Sequence[torch.Tensor]) -> Outputs:
        """Run on with the global batch of a step (graph inputs in order); the outputs that this rank made.

        Under a schedule that never flushes they may be those of earlier steps; `finish` gives the last ones. Raises
        PlanError if the sizes do not fit, RunError for a step out of order.
        """
        return self.steps.run_step(step, self.microbatch_inputs(tensors))

    def finish(self) -> Outputs:
        """Run to its end what is under way; the outputs that this rank made. All ranks call it together.

        Raises RunError if fewer steps were run than a schedule takes to fill and empty its pipeline.
        """
        return self.steps.finish()

    def close(self) -> None:
        """Give the user's parameters back without hooks."""
        if self.exchange is not None:
            self.exchange.close()


def join_group() -> tuple[int, torch.device]:
    """Join the process group that torchrun set up (or stay in the one that is there); returns rank and device."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RunError(
                "This process is not a rank: RANK is not set. Start the script once per rank, for instance with "
                "`torchrun --standalone --nproc-per-node 2 script.py`, or run the plan with `meshwright run`."
            )
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=COMMUNICATION_TIMEOUT)
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    return dist.get_rank(), device


def check_runnable(plan: Plan) -> None:
    """Raise PlanError for a plan that can only be simulated."""
    if plan.only_simulated:
        raise PlanError(
            f"The plan {plan.only_simulated}, which can only be simulated; the runtime sums whole buckets, on "
            "the device. Plan without that to run."
        )


def split_batch(
    plan: Plan | Placement, model: Model, stage: StageSlice, tensors: Sequence[torch.Tensor], device: torch.device
) -> Inputs:
    """Microbatch m is rows ``m * size : (m + 1) * size`` of every input with a batch dim; others go whole to all.

    Where inputs are split, this process gets its share.
    """
    graph, batch, count = model.whole, plan.workload.global_batch, plan.num_microbatches
    size = batch // count
    rows: list[list[torch.Tensor]] = [[] for _ in range(count)]
    position = {tensor: place for place, tensor in enumerate(graph.inputs)}
    for tensor in stage.inputs:
        facts, value = graph.tensors[tensor], tensors[position[tensor]]
        batched = bool(facts.shape) and (facts.shape[0].per_sample > 0 or facts.shape[0].fixed == graph.batch_size)
        if batched and value.shape[0] != batch:
            raise PlanError(
                f"Input {facts.name!r} has {value.shape[0]} samples, but the plan's global batch is {batch} "
                f"({count} microbatches of {size}). Give batches of {batch} samples "
                f"(DataLoader: batch_size={batch}, drop_last=True), or plan again."
            )
        value = value.to(device)
        for microbatch, row in enumerate(rows):
            given = value.narrow(0, microbatch * size, size) if batched else value
            row.append(model.own_inputs(given, tensor))
    return rows
