"""From a plan (or a placement) and a captured model to a ready executor on this rank.

The parts of the session: the program that the simulator would also read, this rank's stages cut from the graph, their
parameters on the device, the process groups, the buckets, and the executor.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.capture import Captured
from meshwright.program import (
    build_placed_program,
    build_program,
    gradient_buckets,
    minibatches_per_update,
    num_filling_steps,
)
from meshwright.runtime.clipping import NormClip
from meshwright.runtime.exchange import BucketBuffer, BucketExchange, Exchange
from meshwright.runtime.executor import Executor, Inputs, Outputs
from meshwright.runtime.layouts import channel_layouts
from meshwright.runtime.models import Model, make_model
from meshwright.runtime.placed import check_placed_writes
from meshwright.runtime.rank_program import RankProgram, SectionName, arrange_rank
from meshwright.runtime.recompute import Again
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.repairs import Repair, check_repair, find_staleness
from meshwright.runtime.split_backward import SplitPart
from meshwright.runtime.stage import Part, StageRunner, stage_feeds, stage_fetches
from meshwright.runtime.stage_steps import OptimizerArgument, StageSteps, own_optimizer
from meshwright.runtime.steps import EndlessSteps, FlushingSteps, Steps
from meshwright.runtime.teams import Grid, make_grid
from meshwright.runtime.transport import Transport
from meshwright.runtime.versions import VersionedPart
from meshwright.runtime.waves import WaveExchange
from meshwright.spec.errors import PlanError, RunError
from meshwright.spec.exchange import WAVES
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import BackwardInput, Instruction, OptimizerStep, Stash
from meshwright.spec.placed_slices import slice_stages
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import Program
from meshwright.spec.sharding import UNSHARDED
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


def open_session(
    captured: Captured,
    plan: Plan | Placement,
    optimizer: OptimizerArgument,
    *,
    run_seed: int = 0,
    repair: Repair | None = None,
    autocast: torch.dtype | None = None,
    clip_norm: float | None = None,
) -> Session:
    """Make this rank ready to execute ``plan``. All ranks of the process group call it together.

    ``optimizer`` is one over the model's parameters, or makes one from those of the rank's stages. ``repair`` is what
    is done about gradients that are stale, ``autocast`` the type in which forwards compute what torch's autocast lets
    them, ``clip_norm`` the norm that all gradients together have at most. Raises PlanError if the plan does not fit the graph, the repair or the
    number of processes, splits what cannot be run in shares, or parts what writes to the same memory.
    """
    check_repair(plan, repair)
    plan = with_clipping(plan, clip_norm)
    if isinstance(plan, Plan):
        check_plan(plan, captured.graph)
        check_runnable(plan)
    else:
        check_placed_writes(captured, plan)
    process, device = join_group()
    sharding = plan.sharding if isinstance(plan, Plan) else UNSHARDED
    num_processes = plan.num_ranks * sharding.width
    if num_processes != dist.get_world_size():
        raise PlanError(
            f"The plan is for {num_processes} ranks, but {dist.get_world_size()} processes were started. "
            f"Start it with `torchrun --nproc-per-node {num_processes}` or `meshwright run`."
        )
    grid = make_grid(sharding, process, plan.num_ranks)
    model, rank = make_model(captured, plan, grid), grid.rank
    own, graph = model.plan, model.graph
    stages = slice_stages(graph, own)
    mine = tuple(stages[index] for index in plan.stages_of(rank))
    program = build_program(plan, captured.graph) if isinstance(plan, Plan) else build_placed_program(plan, graph)
    modules = tuple(model.module(stage_feeds(item), stage_fetches(item), item.ops).to(device) for item in mine)
    parameters = _parameters(graph, mine, modules)
    recorder = Recorder()
    executor: Executor | None = None

    def raise_mark(bucket: int) -> None:
        assert executor is not None, "marks are raised while the executor runs"
        executor.raise_mark(bucket)

    def complete_gradients() -> None:
        for stage in mine:
            model.sum_parts(stage, parameters)

    exchange = _make_exchange(own, graph, mine, parameters, raise_mark)
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    names: tuple[SectionName, ...] = ("prologue", "body", "epilogue") if program.advance else ("body",)
    arranged = {name: arrange_rank(program, getattr(program, name), rank) for name in names}
    doing = _stages_doing(arranged)
    stale = find_staleness(arranged["body"]) if repair is not None else {}
    ahead = stale if repair is not None and repair.kind == "predict" else {}
    parts = tuple(
        _make_part(module, stage.index, doing, ahead.get(stage.index, 0))
        for stage, module in zip(mine, modules, strict=True)
    )
    transport, clip = Transport(program, device, grid), None
    if clip_norm is not None:
        clip = NormClip(
            clip_norm,
            parameters,
            _count_holders(model, stages, own),
            complete_gradients,
            grid,
            transport,
            device,
        )
    loss_scale, scales = _gradient_scales(own, mine)
    executor = Executor(
        rank_programs=arranged,
        num_microbatches=plan.num_microbatches,
        stages=mine,
        runners=tuple(
            StageRunner(part, graph, stage, loss_scale / model.loss_parts, device, autocast)
            for stage, part in zip(mine, parts, strict=True)
        ),
        transport=transport,
        exchange=exchange,
        layouts=channel_layouts(graph, model.stand_in, stages, own.microbatch_size, device, autocast),
        optimizer_step=StageSteps(
            own_optimizer(optimizer, trainable, model.replaced),
            parameters,
            mine,
            doing[OptimizerStep],
            scales,
            rate=lambda stage, updates: repair.rate(stale.get(stage, 0), updates) if repair is not None else 1.0,
            # Before gradients are clipped, all are completed.
            sum_parts=lambda stage: model.sum_parts(stages[stage], parameters) if clip is None else None,
            clip=clip.coefficient if clip is not None else None,
        ),
        recorder=recorder,
        device=device,
        run_seed=run_seed,
        bound_gradient_sends=isinstance(plan, Plan) and not plan.has_own_schedule,
        clip=clip,
    )
    return Session(
        grid=grid,
        plan=plan,
        model=model,
        program=program,
        stages=mine,
        steps=_make_steps(executor, plan, program, rank),
        recorder=recorder,
        exchange=exchange,
        modules=modules,
        parts=parts,
        parameters=parameters,
        device=device,
    )


def with_clipping(plan: Plan | Placement, max_norm: float | None) -> Plan | Placement:
    """The plan in which ranks agree on the norm of all gradients, if these are to be clipped.

    Raises PlanError for a norm that is none, a plan that asks for one where none is given, or one that cannot clip.
    """
    if max_norm is None:
        if isinstance(plan, Plan) and plan.exchange.clip_norm:
            raise PlanError("The plan clips gradients, but no norm was given. Give one: --clip-norm 1.0.")
        return plan
    if not max_norm > 0:
        raise PlanError(f"Gradients were to be clipped to a norm of {max_norm}; expected more than 0.")
    if isinstance(plan, Placement):
        raise PlanError("Gradients cannot be clipped under a placement yet. Leave the norm out, or plan by layers.")
    return replace(plan, exchange=replace(plan.exchange, clip_norm=True))


def _count_holders(model: Model, stages: Sequence[StageSlice], plan: Plan | Placement) -> dict[int, int]:
    """By parameter, how many processes hold it, or the same share of it."""
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for stage in stages:
        for parameter in stage.parameters:
            ranks[parameter].update(plan.stages[stage.index].ranks)
    return {parameter: len(found) * model.alike(parameter) for parameter, found in ranks.items()}


def _make_steps(executor: Executor, plan: Plan | Placement, program: Program, rank: int) -> Steps:
    if isinstance(plan, Plan) and plan.is_asynchronous:
        return EndlessSteps(executor, program, rank, num_filling_steps(plan))
    return FlushingSteps(executor)


def _make_exchange(
    plan: Plan | Placement,
    graph: Graph,
    stages: Sequence[StageSlice],
    parameters: dict[int, torch.nn.Parameter],
    raise_mark: Callable[[int], None],
) -> Exchange | None:
    """What this rank sums with others; None if nothing."""
    buckets = [
        (bucket, [parameters[tensor] for tensor in bucket.parameters])
        for bucket in (gradient_buckets(graph, plan) if isinstance(plan, Plan) else ())
        if any(stage.index in bucket.stages for stage in stages)
    ]
    if not buckets:
        return None
    if isinstance(plan, Plan) and plan.schedule == WAVES:
        return WaveExchange(buckets)
    return BucketExchange([BucketBuffer(bucket, held) for bucket, held in buckets], raise_mark)


def _gradient_scales(plan: Plan | Placement, stages: Sequence[StageSlice]) -> tuple[float, dict[int, float]]:
    """What the loss's gradient is multiplied with, and then those of each stage: an update takes a mean."""
    if isinstance(plan, Placement) or not plan.is_asynchronous:
        return 1.0 / plan.num_microbatches, {}
    return 1.0, {stage.index: 1.0 / minibatches_per_update(plan, stage.index) for stage in stages}


def _stages_doing(arranged: Mapping[SectionName, RankProgram]) -> Mapping[type[Instruction], tuple[int, ...]]:
    """The stages that a rank computes some kind of instruction for, in the order in which they come."""
    found: defaultdict[type[Instruction], dict[int, None]] = defaultdict(dict)
    for section in arranged.values():
        for item in section.computations:
            found[type(item.instruction)][item.instruction.stage] = None
    return defaultdict(tuple, {kind: tuple(stages) for kind, stages in found.items()})


def _make_part(
    module: torch.nn.Module, stage: int, doing: Mapping[type[Instruction], tuple[int, ...]], ahead: int
) -> Part:
    """A stage's module as its program calls it: with backwards in two parts, or weights of several versions."""
    if stage in doing[BackwardInput]:
        if any(isinstance(item, Again) for item in module.modules()):
            raise PlanError(
                "The plan computes parts again under a schedule whose backwards come in two parts, each of which would "
                "run them again; such a plan can only be simulated. Choose 1f1b, or compute nothing again."
            )
        return SplitPart(module)
    return VersionedPart(module, ahead) if stage in doing[Stash] else module


def _parameters(
    graph: Graph, stages: Sequence[StageSlice], modules: Sequence[torch.nn.Module]
) -> dict[int, torch.nn.Parameter]:
    """The rank's parameters by tensor id, each once."""
    found: dict[int, torch.nn.Parameter] = {}
    for stage, module in zip(stages, modules, strict=True):
        names = {graph.tensors[tensor].name: tensor for tensor in stage.parameters}
        found |= {names[name]: parameter for name, parameter in module.named_parameters()}
    return found


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
