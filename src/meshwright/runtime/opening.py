"""From a plan (or a placement) and a captured model to a session: all parts of a rank, put together.

The program that the simulator would also read, this rank's stages cut from the graph, their parameters on the device,
the process groups, the buckets, the updates, and the executor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
from meshwright.runtime.clipping import NormClip, count_holders, with_clipping
from meshwright.runtime.exchange import BucketBuffer, BucketExchange, Exchange
from meshwright.runtime.executor import Executor
from meshwright.runtime.layouts import channel_layouts
from meshwright.runtime.models import Model, make_model
from meshwright.runtime.placed import check_placed_writes
from meshwright.runtime.rank_program import RankProgram, SectionName, arrange_rank
from meshwright.runtime.recompute import Again
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.repairs import Repair, check_repair, find_staleness
from meshwright.runtime.session import Session, check_runnable, join_group
from meshwright.runtime.split_backward import SplitPart
from meshwright.runtime.stage import Part, StageRunner, stage_feeds, stage_fetches
from meshwright.runtime.stage_steps import OptimizerArgument, StageSteps, own_optimizer
from meshwright.runtime.steps import EndlessSteps, FlushingSteps, Steps
from meshwright.runtime.teams import Grid, make_grid
from meshwright.runtime.transport import Transport
from meshwright.runtime.versions import VersionedPart
from meshwright.runtime.waves import WaveExchange
from meshwright.spec.errors import PlanError
from meshwright.spec.exchange import WAVES
from meshwright.spec.graph import Graph
from meshwright.spec.instructions import BackwardInput, Instruction, OptimizerStep, Stash
from meshwright.spec.placed_slices import slice_stages
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan, check_plan
from meshwright.spec.program import Program
from meshwright.spec.sharding import UNSHARDED
from meshwright.spec.slices import StageSlice


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
    them, ``clip_norm`` the norm that all gradients together have at most. Raises PlanError if the plan does not fit the
    graph, these or the number of processes, splits what cannot be run in shares, or parts what writes to the same
    memory.
    """
    check_repair(plan, repair)
    plan = with_clipping(plan, clip_norm)
    _check_fit(captured, plan)
    grid, device = _join(plan)
    share = _take_share(captured, plan, grid, device)
    transport, recorder = Transport(share.program, device, grid), Recorder()
    executor: Executor | None = None

    def raise_mark(bucket: int) -> None:
        assert executor is not None, "marks are raised while the executor runs"
        executor.raise_mark(bucket)

    exchange = _make_exchange(share, raise_mark)
    clip = _make_clip(share, clip_norm, grid, transport, device) if clip_norm is not None else None
    stale = find_staleness(share.arranged["body"]) if repair is not None else {}
    parts = _make_parts(share, stale if repair is not None and repair.kind == "predict" else {})
    executor = Executor(
        rank_programs=share.arranged,
        num_microbatches=plan.num_microbatches,
        stages=share.stages,
        runners=_make_runners(share, parts, device, autocast),
        transport=transport,
        exchange=exchange,
        layouts=channel_layouts(
            share.model.graph,
            share.model.stand_in,
            share.all_stages,
            share.model.plan.microbatch_size,
            device,
            autocast,
        ),
        optimizer_step=_make_updates(share, optimizer, repair, stale, clip),
        recorder=recorder,
        device=device,
        run_seed=run_seed,
        bound_gradient_sends=isinstance(plan, Plan) and not plan.has_own_schedule,
        clip=clip,
    )
    return Session(
        grid=grid,
        plan=plan,
        model=share.model,
        program=share.program,
        stages=share.stages,
        steps=_make_steps(executor, plan, share.program, grid.rank),
        recorder=recorder,
        exchange=exchange,
        modules=share.modules,
        parts=parts,
        parameters=share.parameters,
        device=device,
    )


def _check_fit(captured: Captured, plan: Plan | Placement) -> None:
    if isinstance(plan, Plan):
        check_plan(plan, captured.graph)
        check_runnable(plan)
    else:
        check_placed_writes(captured, plan)


def _join(plan: Plan | Placement) -> tuple[Grid, torch.device]:
    """This process's place in the plan. Raises PlanError unless as many processes were started as it has devices."""
    process, device = join_group()
    sharding = plan.sharding if isinstance(plan, Plan) else UNSHARDED
    num_processes = plan.num_ranks * sharding.width
    if num_processes != dist.get_world_size():
        raise PlanError(
            f"The plan is for {num_processes} ranks, but {dist.get_world_size()} processes were started. "
            f"Start it with `torchrun --nproc-per-node {num_processes}` or `meshwright run`."
        )
    return make_grid(sharding, process, plan.num_ranks), device


class _Share(NamedTuple):
    """What a process has of a plan: its ``stages`` of ``all_stages``, what it issues for them, and their modules."""

    model: Model
    program: Program
    arranged: dict[SectionName, RankProgram]
    all_stages: tuple[StageSlice, ...]
    stages: tuple[StageSlice, ...]
    modules: tuple[torch.nn.Module, ...]
    parameters: dict[int, torch.nn.Parameter]

    @property
    def plan(self) -> Plan | Placement:
        """The plan as the process follows it."""
        return self.model.plan


def _take_share(captured: Captured, plan: Plan | Placement, grid: Grid, device: torch.device) -> _Share:
    model = make_model(captured, plan, grid)
    program = build_program(plan, captured.graph) if isinstance(plan, Plan) else build_placed_program(plan, model.graph)
    names: tuple[SectionName, ...] = ("prologue", "body", "epilogue") if program.advance else ("body",)
    every = slice_stages(model.graph, model.plan)
    stages = tuple(every[index] for index in plan.stages_of(grid.rank))
    modules = tuple(model.module(stage_feeds(item), stage_fetches(item), item.ops).to(device) for item in stages)
    return _Share(
        model=model,
        program=program,
        arranged={name: arrange_rank(program, getattr(program, name), grid.rank) for name in names},
        all_stages=every,
        stages=stages,
        modules=modules,
        parameters=_parameters(model.graph, stages, modules),
    )


def _make_steps(executor: Executor, plan: Plan | Placement, program: Program, rank: int) -> Steps:
    if isinstance(plan, Plan) and plan.is_asynchronous:
        return EndlessSteps(executor, program, rank, num_filling_steps(plan))
    return FlushingSteps(executor)


def _make_exchange(share: _Share, raise_mark: Callable[[int], None]) -> Exchange | None:
    """What this rank sums with others; None if nothing."""
    plan, held = share.plan, {stage.index for stage in share.stages}
    buckets = [
        (bucket, [share.parameters[tensor] for tensor in bucket.parameters])
        for bucket in (gradient_buckets(share.model.graph, plan) if isinstance(plan, Plan) else ())
        if held.intersection(bucket.stages)
    ]
    if not buckets:
        return None
    if isinstance(plan, Plan) and plan.schedule == WAVES:
        return WaveExchange(buckets)
    return BucketExchange([BucketBuffer(bucket, parameters) for bucket, parameters in buckets], raise_mark)


def _make_clip(share: _Share, max_norm: float, grid: Grid, transport: Transport, device: torch.device) -> NormClip:
    def complete_gradients() -> None:
        for stage in share.stages:
            share.model.sum_parts(stage, share.parameters)

    holders = count_holders(share.all_stages, share.plan, share.model.alike)
    return NormClip(max_norm, share.parameters, holders, complete_gradients, grid, transport, device)


def _make_parts(share: _Share, ahead: Mapping[int, int]) -> tuple[Part, ...]:
    """Each stage's module as its program calls it: backwards in two parts, or weights of several versions."""
    doing = _stages_doing(share.arranged)
    found: list[Part] = []
    for stage, module in zip(share.stages, share.modules, strict=True):
        if stage.index in doing[BackwardInput]:
            if any(isinstance(item, Again) for item in module.modules()):
                raise PlanError(
                    "The plan computes parts again under a schedule whose backwards come in two parts, each of which "
                    "would run them again; such a plan can only be simulated. Choose 1f1b, or compute nothing again."
                )
            found.append(SplitPart(module))
        elif stage.index in doing[Stash]:
            found.append(VersionedPart(module, ahead.get(stage.index, 0)))
        else:
            found.append(module)
    return tuple(found)


def _make_runners(
    share: _Share, parts: Sequence[Part], device: torch.device, autocast: torch.dtype | None
) -> tuple[StageRunner, ...]:
    plan, model = share.plan, share.model
    # Where stages update at different times, each takes the mean itself (`_make_updates`).
    scale = 1.0 if _updates_by_stage(plan) else 1.0 / plan.num_microbatches
    return tuple(
        StageRunner(part, model.graph, stage, scale, device, autocast)
        for stage, part in zip(share.stages, parts, strict=True)
    )


def _make_updates(
    share: _Share,
    optimizer: OptimizerArgument,
    repair: Repair | None,
    stale: Mapping[int, int],
    clip: NormClip | None,
) -> StageSteps:
    plan, model, parameters = share.plan, share.model, share.parameters
    scales: dict[int, float] = {}
    if isinstance(plan, Plan) and _updates_by_stage(plan):
        scales = {stage.index: 1.0 / minibatches_per_update(plan, stage.index) for stage in share.stages}
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return StageSteps(
        own_optimizer(optimizer, trainable, model.replaced),
        parameters,
        share.stages,
        _stages_doing(share.arranged)[OptimizerStep],
        scales,
        rate=lambda stage, updates: repair.rate(stale.get(stage, 0), updates) if repair is not None else 1.0,
        # Before gradients are clipped, all are completed.
        sum_parts=lambda stage: model.sum_parts(share.all_stages[stage], parameters) if clip is None else None,
        clip=clip.coefficient if clip is not None else None,
    )


def _updates_by_stage(plan: Plan | Placement) -> bool:
    return isinstance(plan, Plan) and plan.is_asynchronous


def _stages_doing(arranged: Mapping[SectionName, RankProgram]) -> Mapping[type[Instruction], tuple[int, ...]]:
    """The stages that a rank computes some kind of instruction for, in the order in which they come."""
    found: defaultdict[type[Instruction], dict[int, None]] = defaultdict(dict)
    for section in arranged.values():
        for item in section.computations:
            found[type(item.instruction)][item.instruction.stage] = None
    return defaultdict(tuple, {kind: tuple(stages) for kind, stages in found.items()})


def _parameters(
    graph: Graph, stages: Sequence[StageSlice], modules: Sequence[torch.nn.Module]
) -> dict[int, torch.nn.Parameter]:
    """The rank's parameters by tensor id, each once."""
    found: dict[int, torch.nn.Parameter] = {}
    for stage, module in zip(stages, modules, strict=True):
        names = {graph.tensors[tensor].name: tensor for tensor in stage.parameters}
        found |= {names[name]: parameter for name, parameter in module.named_parameters()}
    return found
