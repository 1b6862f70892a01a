"""The part of a plan that one process runs (`Holding`): its stages, their modules and parameters, its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from meshwright.capture import Captured
from meshwright.program import build_placed_program, build_program, gradient_buckets
from meshwright.runtime.fully_sharded import replica_groups, replica_meshes, share_out
from meshwright.runtime.local_models import Model, make_model, replace_held
from meshwright.runtime.offload.saved_values import find_stages_away, mark_units
from meshwright.runtime.rank_program import RankProgram, SectionName, arrange_rank
from meshwright.runtime.replica_broadcast import BufferSync, written_buffers
from meshwright.runtime.stage_module import stage_feeds, stage_fetches
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.spec import Graph, Placement, Plan, Program, StageSlice, slice_stages


class Holding(NamedTuple):
    """The part of a plan that one process runs.

    ``stages`` are its stages among ``all_stages``, and ``modules`` one module for each. ``arranged``: its instructions
    by section. ``parameters``: the parameters of the modules by tensor id, sharded under ZeRO 2 and 3; ``cut``: the
    same before replicas sharded them. ``sync_buffers`` makes the buffers of replicas equal before a step.
    """

    model: Model
    program: Program
    arranged: dict[SectionName, RankProgram]
    all_stages: tuple[StageSlice, ...]
    stages: tuple[StageSlice, ...]
    modules: tuple[torch.nn.Module, ...]
    cut: dict[int, torch.nn.Parameter]
    parameters: dict[int, torch.nn.Parameter]
    sync_buffers: BufferSync

    @property
    def plan(self) -> Plan | Placement:
        """The plan of this process, without tensor, context and expert parallelism (`local_models.Model.plan`)."""
        return self.model.plan

    def replaced(self, updated: Mapping[int, torch.nn.Parameter]) -> dict[int, torch.Tensor | None]:
        """Return, by ``id()`` of a user's parameter, the tensor that the optimizer updates in its place.

        ``updated``: the optimizer's tensors by tensor id. None for a parameter that only other processes update.
        """
        last = {id(given): updated.get(i) for i, given in self.cut.items() if updated.get(i) is not given}
        first = {user: last.get(id(own), own) for user, own in self.model.replaced.items()}
        return {**last, **first}


def take_holding(captured: Captured, plan: Plan | Placement, grid: TeamPosition, device: torch.device) -> Holding:
    """Cut this process's part out of the captured model. All processes call it together.

    Raises PlanError if the plan cannot be run.
    """
    model = make_model(captured, plan, grid, device)
    program = build_program(plan, captured.graph) if isinstance(plan, Plan) else build_placed_program(plan, model.graph)
    if model.graph.compiled and program.splits_backwards:
        model = model.eager()
    every = slice_stages(model.graph, model.plan)
    stages = tuple(every[index] for index in plan.stages_of(grid.rank))
    modules = tuple(model.module(stage_feeds(item), stage_fetches(item), item.ops) for item in stages)
    away_of = find_stages_away(model.plan, model.graph, stages, device)
    for stage, module in zip(stages, modules, strict=True):
        if stage.index in away_of:
            mark_units(module, away_of[stage.index])
    replace_held(modules, lambda value: _moved(value, device))
    cut = _parameters(model.graph, stages, modules)
    shared, sync = _join_replicas(captured, model, tuple(zip(stages, modules, strict=True)), grid, device)
    return Holding(
        model=model,
        program=program,
        arranged=arrange_sections(program, grid.rank),
        all_stages=every,
        stages=stages,
        modules=modules,
        cut=cut,
        parameters={**cut, **shared},
        sync_buffers=sync,
    )


def _join_replicas(
    captured: Captured,
    model: Model,
    parts: Sequence[tuple[StageSlice, torch.nn.Module]],
    grid: TeamPosition,
    device: torch.device,
) -> tuple[dict[int, torch.nn.Parameter], BufferSync]:
    """This rank's shards, by tensor id, of the tensors that replicas shard, and the broadcasts before a step."""
    plan = model.plan
    if not isinstance(plan, Plan):
        return {}, BufferSync(())
    shares_out = plan.exchange.zero >= 2
    # The replicas of an asynchronous schedule each run at their own pace.
    written = frozenset[int]() if plan.is_asynchronous else written_buffers(captured)
    groups = replica_groups(plan, grid) if shares_out or written else {}
    replicated = [
        (stage, module, plan.stages[stage.index].ranks)
        for stage, module in parts
        if plan.stages[stage.index].ranks in groups
    ]
    shared: dict[int, torch.nn.Parameter] = {}
    if shares_out:
        kept = {i for bucket in gradient_buckets(model.graph, plan) for i in bucket.parameters}
        let_go = plan.exchange.zero == 3
        meshes = replica_meshes(plan, grid, groups, device)
        for stage, module, ranks in replicated:
            shared |= share_out(
                module,
                model.graph,
                stage,
                meshes[ranks],
                kept=kept,
                let_go=let_go,
                numbers=plan.workload.numbers,
                offload=plan.offload,
            )
    told: list[tuple[list[torch.Tensor], int, dist.ProcessGroup]] = []
    for stage, module, ranks in replicated:
        names = {model.graph.tensors[i].name for i in stage.buffers if i in written}
        buffers = [item for name, item in module.named_buffers() if name in names]
        told.append((buffers, grid.process_of(ranks[0]), groups[ranks]))
    return shared, BufferSync(told)


def arrange_sections(program: Program, rank: int) -> dict[SectionName, RankProgram]:
    """Return the instructions of a rank by section: prologue, body and epilogue, or the body alone."""
    names: tuple[SectionName, ...] = ("prologue", "body", "epilogue") if program.advance else ("body",)
    return {name: arrange_rank(program, getattr(program, name), rank) for name in names}


def _moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; parameters stay the user's own objects. Fake ones, of a dry run, are made again."""
    if value.device == device:
        return value
    if detect_fake_mode() is not None:
        # Not `to`: torch computes with the known values of small fake tensors, such as counters.
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if not isinstance(value, torch.nn.Parameter):
        return value.to(device)
    value.data = value.data.to(device)
    return value


def _parameters(
    graph: Graph, stages: Sequence[StageSlice], modules: Sequence[torch.nn.Module]
) -> dict[int, torch.nn.Parameter]:
    """The rank's parameters by tensor id, each once."""
    found: dict[int, torch.nn.Parameter] = {}
    for stage, module in zip(stages, modules, strict=True):
        names = {graph.tensors[tensor].name: tensor for tensor in stage.parameters}
        found |= {names[name]: parameter for name, parameter in module.named_parameters()}
    return found
