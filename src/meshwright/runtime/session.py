"""The session of one rank (`Session`): it runs a plan batch by batch (`Steps`). Also joins the process group."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from meshwright.cost.memory import Backend
from meshwright.runtime.devices import own_device
from meshwright.runtime.executor import Executor, Inputs, Outputs, Visit
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.gradient_reduction import Exchange
from meshwright.runtime.local_models import Model
from meshwright.runtime.offload import Hosting
from meshwright.runtime.precisions import multiplying
from meshwright.runtime.prefetch import Coming, Prefetched
from meshwright.runtime.rank_program import SectionName
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.replica_broadcast import BufferSync
from meshwright.runtime.stage_module import Part
from meshwright.runtime.stage_steps import StageSteps
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.spec import Graph, Placement, Plan, PlanError, Program, RunError, StageSlice, format_count
from meshwright.spec.instructions import UPDATES
from meshwright.spec.plan import check_counts

_PROLOGUE = -1


# Which sections of a program run when a global batch arrives: a synchronous program runs its body once per step. In an
# asynchronous one W microbatches enter in the prologue and W more in the epilogue; with M microbatches in a global
# batch, that is A = W / M batches each.
#
#     batch b < 2 A     the prologue, up to the last microbatch that has arrived
#     batch b >= 2 A    the body once more, A batches behind the arriving ones
#     finish            the epilogue: the last A batches enter, and all batches leave the pipeline
#
# Sections follow each other without a barrier: sends and collectives of one repetition continue in the next.
class Steps(Protocol):
    """Runs a program batch by batch."""

    # The number of batches that fill and empty the pipeline; a run needs at least that number.
    num_filling: int

    @property
    def next_repetition(self) -> int:
        """The number of the next repetition of the body, by which the recorder numbers steps."""

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Run the batch of a step; return the outputs that are available.

        ``inputs[s][m]`` are the graph inputs of stage s for microbatch m, in the order of `StageSlice.inputs`.
        """

    def finish(self) -> Outputs:
        """Finish all work in progress; return the outputs that are available."""


class FlushingSteps:
    """The steps of a synchronous schedule: each batch runs to its end.

    Asynchronous works that the next step waits for itself may continue after the step.
    """

    num_filling = 0

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._place = 0

    @property
    def next_repetition(self) -> int:
        """The number of the next step."""
        return self._place

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Run step number ``step`` to its end; ``inputs[s][m]``: graph inputs of stage s for microbatch m.

        Return the outputs of the step.
        """
        self._executor.feed(0, inputs)
        self._executor.begin(Visit("body", self._place, step))
        self._executor.go_on()
        self._executor.end_step()
        self._place += 1
        return self._executor.take_outputs()

    def finish(self) -> Outputs:
        """Wait for all works in progress; no outputs are left."""
        self._executor.settle()
        return {}


class EndlessSteps:
    """The steps of an asynchronous schedule: batches enter the pipeline without flushing it.

    A call may return outputs of earlier batches. After `finish` the next batch fills the pipeline again.
    """

    def __init__(self, executor: Executor, program: Program, rank: int, num_filling: int) -> None:
        self._executor = executor
        self._size = program.advance
        self.num_filling = num_filling
        own = np.concatenate([program.body.stream_range(stream) for stream in program.streams_of(rank)])
        self._updates = int(np.isin(program.body.opcode[own.astype(np.int64)], UPDATES).sum())
        self._first = 0
        self._fed = 0
        self._is_filled = False
        # The places of consecutive streams are numbered consecutively.
        self._base = 0

    @property
    def next_repetition(self) -> int:
        """The number of the repetition that the next batch starts, once the pipeline is full."""
        return self._base + max(self._fed - self.num_filling, 0)

    def run_step(self, step: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Add a batch to the pipeline, and run the instructions that it allows; return the outputs made.

        Raises RunError unless ``step`` follows the step before.
        """
        if self._fed and step != self._first + self._fed:
            raise RunError(
                f"Step {step} was given after step {self._first + self._fed - 1}, while minibatches are in flight. "
                "Number steps consecutively, or call `finish` between them."
            )
        if not self._fed:
            self._first = step
            self._executor.begin(self._visit(_PROLOGUE))
        self._executor.feed(self._fed, inputs)
        self._fed += 1
        if not self._is_filled:
            self._is_filled = self._executor.go_on(self._fed * self._size)
        elif self._fed > self.num_filling:
            place = self._fed - self.num_filling - 1
            self._executor.begin(self._visit(place))
            self._executor.go_on()
            # Other ranks have long received these sends: this frees the memory of sends that no gradient answers.
            self._executor.settle(self._base + place - self.num_filling // 2 - 1)
        self._executor.release()
        return self._executor.take_outputs()

    def finish(self) -> Outputs:
        """Empty the pipeline; return the outputs made.

        Raises RunError if fewer batches were run than fill and empty the pipeline.
        """
        if not self._fed:
            return {}
        repetitions = self._fed - self.num_filling
        if repetitions < 0:
            raise RunError(
                f"The pipeline was given {format_count(self._fed, 'step')}; expected at least {self.num_filling}, "
                f"which this schedule needs to fill and empty it. Run {-repetitions} more, then finish or save "
                "again; checkpoints saved before are complete."
            )
        self._executor.begin(self._visit(repetitions))
        self._executor.go_on()
        self._executor.settle()
        self._executor.restart()
        self._base += repetitions + 2
        self._fed, self._is_filled = 0, False
        return self._executor.take_outputs()

    def _visit(self, place: int) -> Visit:
        """The section at a place; sections are numbered as if the body came once, so one after it has lower offsets."""
        if place == _PROLOGUE:
            return Visit("prologue", self._base + place, self._first)
        name: SectionName = "epilogue" if place == self._fed - self.num_filling else "body"
        on = place - (name == "epilogue")
        return Visit(name, self._base + place, self._first, on * self._size, on * self._updates)


# Metadata of steps and ranks is sent between CPUs, whatever device computes.
_GROUP_BACKENDS: dict[Backend, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# A rank that waits longer than this for a message stops: the other end is dead or stuck.
COMMUNICATION_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rank that executes a plan or a placement, with its ``stages`` and one module for each.

    ``plan`` is the whole plan, ``model`` the model of this process. ``parts``: the modules, wrapped for split backwards
    or several weight versions. ``make_shorter(count)`` makes steps with fewer microbatches, kept in ``shorter``.
    ``hosting`` is the offload, None without one.
    """

    grid: TeamPosition
    plan: Plan | Placement
    model: Model
    program: Program
    stages: tuple[StageSlice, ...]
    steps: Steps
    recorder: Recorder
    exchange: Exchange | None
    updates: StageSteps
    modules: tuple[torch.nn.Module, ...]
    parts: tuple[Part, ...]
    parameters: dict[int, torch.nn.Parameter]
    device: torch.device
    sync_buffers: BufferSync
    make_shorter: Callable[[int], Steps]
    hosting: Hosting | None = None
    shorter: dict[int, Steps] = field(default_factory=dict)

    def count_microbatches(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the number of microbatches in a global batch (graph inputs in order); a data set may end with fewer.

        Raises PlanError for a batch that the plan's microbatches do not divide, or that is larger than the plan's.
        """
        graph, whole = self.model.whole, self.plan.workload.global_batch
        count = self.plan.num_microbatches
        size = whole // count
        for tensor, value in zip(graph.inputs, tensors, strict=True):
            if not is_batched(graph, tensor):
                continue
            own, rest = divmod(value.shape[0], size)
            if rest or not 0 < own <= count:
                raise PlanError(
                    f"Input {graph.tensors[tensor].name!r} has {value.shape[0]} samples, but the plan's global batch "
                    f"is {whole} ({count} microbatches of {size}); expected that many, or a smaller multiple of {size} "
                    f"at the end of a data set. Give batches of {whole} samples (DataLoader: batch_size={whole}, "
                    "drop_last=True), or plan again."
                )
            return own
        return count

    def microbatch_inputs(self, tensors: Sequence[torch.Tensor]) -> dict[int, Inputs]:
        """Cut a global batch (graph inputs in order) into microbatches; return for each stage the inputs that it reads.

        Raises PlanError if the number of samples does not match the plan.
        """
        count = self.count_microbatches(tensors)
        return {
            stage.index: _split_batch(self.plan, self.model, stage, tensors, self.device, count)
            for stage in self.stages
        }

    @property
    def rank(self) -> int:
        """The number of this process in the process group."""
        return self.grid.process

    @property
    def own_state(self) -> list[torch.Tensor]:
        """The parameters, master weights and buffers (or shards of them) that this process holds on its device."""
        buffers = [item for module in self.modules for item in module.buffers()]
        away = self.hosting.resident if self.hosting is not None else ()
        parameters = [item for i, item in self.parameters.items() if i not in away]
        return [own_part(item) for item in (*parameters, *self.updates.masters, *buffers)]

    def count_host_bytes(self) -> int:
        """Return the bytes of host memory in use for offloaded states."""
        return self.hosting.memory.num_bytes if self.hosting is not None else 0

    @property
    def remark(self) -> str:
        """A warning for the user, such as about the place of offloaded states; "" without one."""
        return self.hosting.remark if self.hosting is not None else ""

    @property
    def graph(self) -> Graph:
        """The local graph of this process."""
        return self.model.graph

    def run_step(self, step: int, tensors: Sequence[torch.Tensor]) -> Outputs:
        """Run the global batch of a step (graph inputs in order); return the outputs that this rank made.

        Under an asynchronous schedule they may be outputs of earlier steps; `finish` returns the last ones. Raises
        PlanError if the number of samples does not match the plan, RunError for a step out of order.
        """
        return self.run_microbatches(step, self.count_microbatches(tensors), self.microbatch_inputs(tensors))

    def run_microbatches(self, step: int, count: int, inputs: Mapping[int, Inputs]) -> Outputs:
        """Run a step of ``count`` microbatches, whose inputs were cut already; otherwise as `run_step`.

        ``inputs``: by stage of this rank, the inputs of each microbatch.
        """
        self.sync_buffers()
        with multiplying(self.plan.workload.numbers):
            if count == self.plan.num_microbatches:
                return self.steps.run_step(step, inputs)
            if count not in self.shorter:
                self.shorter[count] = self.make_shorter(count)
            self.steps.finish()
            made = self.shorter[count].run_step(step, inputs)
            self.shorter[count].finish()
            return made

    def reads(self, microbatch: int) -> bool:
        """Return whether a stage of this rank reads inputs of a microbatch."""
        plans = self.plan.stages
        return any(stage.inputs and plans[stage.index].rank_of(microbatch) == self.grid.rank for stage in self.stages)

    def coming_inputs(self, count: int, take: Callable[[int], Prefetched]) -> dict[int, Inputs]:
        """Return inputs for `run_microbatches` that are loaded in the background; reading one waits for it.

        ``take(m)`` waits for microbatch m of a global batch and returns the graph inputs in order.
        """
        return {stage.index: Coming(count, take, self._choose(stage)) for stage in self.stages}

    def _choose(self, stage: StageSlice) -> Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]:
        position = {tensor: place for place, tensor in enumerate(self.model.whole.inputs)}
        return lambda tensors: [self.model.own_inputs(tensors[position[i]], i) for i in stage.inputs]

    def finish(self) -> Outputs:
        """Finish all work in progress; return the outputs that this rank made. All ranks call it together.

        Raises RunError if fewer steps were run than an asynchronous schedule needs to fill and empty its pipeline.
        """
        with multiplying(self.plan.workload.numbers):
            return self.steps.finish()

    def close(self) -> None:
        """Remove the hooks from the user's parameters, and release offloaded states."""
        if self.hosting is not None:
            self.hosting.close()
        if self.exchange is not None:
            self.exchange.close()


def _leave_group() -> None:
    """Join the group's threads while Python still runs.

    A thread of gloo that frees its last tensor needs the interpreter's lock; once the interpreter ends, it is unwound
    there instead, and C++ aborts the process ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def join_group(kind: Backend = "cpu") -> tuple[int, torch.device]:
    """Join the process group that torchrun set up (or keep the existing one); return rank and device.

    Raises RunError if RANK is not set, if the host has too few GPUs, or if an existing group lacks a backend for this
    type of device.
    """
    device = own_device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RunError(
                "This process is not a rank: RANK is not set. Start the script once per rank, for instance with "
                "`torchrun --standalone --nproc-per-node 2 script.py`, or run the plan with `meshwright run`."
            )
        dist.init_process_group(_GROUP_BACKENDS[kind], timeout=COMMUNICATION_TIMEOUT)
        atexit.register(_leave_group)
    found = dist.get_backend_config()
    if missing := [name for name in _GROUP_BACKENDS[kind].split(",") if name not in found and "fake" not in found]:
        raise RunError(
            f"The process group has the backends {found}, without {' and '.join(missing)}. Call "
            f'init_process_group("{_GROUP_BACKENDS[kind]}"), or leave it to Meshwright.'
        )
    return dist.get_rank(), device


def check_runnable(plan: Plan) -> None:
    """Raise PlanError for a plan that can only be simulated."""
    if plan.only_simulated:
        raise PlanError(
            f"The plan {plan.only_simulated}, which can only be simulated; the runtime sums gradient buckets, whole or "
            "in parts, by all-reduce on the device. Plan without this option to run."
        )
    check_counts(plan)


def _split_batch(
    plan: Plan | Placement,
    model: Model,
    stage: StageSlice,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    count: int,
) -> Inputs:
    """Microbatch m is rows ``m * size : (m + 1) * size`` of every input with a batch dim; other inputs are not cut.

    If inputs are sharded, this process gets its share.
    """
    graph, size = model.whole, plan.workload.global_batch // plan.num_microbatches
    rows: list[list[torch.Tensor]] = [[] for _ in range(count)]
    position = {tensor: place for place, tensor in enumerate(graph.inputs)}
    for tensor in stage.inputs:
        (value,) = to_device([tensors[position[tensor]]], device)
        has_samples = is_batched(graph, tensor)
        if has_samples and len(value) != count * size:
            raise PlanError(
                f"Input {graph.tensors[tensor].name!r} has {len(value)} samples, another input has {count * size}; "
                "expected the same number for all inputs. Check how the batch is made."
            )
        for microbatch, row in enumerate(rows):
            given = value.narrow(0, microbatch * size, size) if has_samples else value
            row.append(model.own_inputs(given, tensor))
    return rows


def to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tensors on a device. Copies to a GPU go through pinned memory and are asynchronous."""
    if device.type != "cuda":
        return tuple(item.to(device) for item in tensors)
    return tuple(
        item.to(device) if item.is_cuda else item.pin_memory().to(device, non_blocking=True) for item in tensors
    )


def is_batched(graph: Graph, tensor: int) -> bool:
    """Return whether the first dim of a graph input is the batch."""
    shape = graph.tensors[tensor].shape
    return bool(shape) and (shape[0].per_sample > 0 or shape[0].fixed == graph.batch_size)
