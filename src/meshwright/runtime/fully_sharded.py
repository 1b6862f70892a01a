"""Replicas of a stage that shard gradients and parameters (ZeRO 2 and 3): torch's FSDP2, configured by the plan.

Parameters that are all-gathered together form a unit (`program.sharding.zero`). Each unit becomes a module that holds
its parameters; the module of the stage holds the parameters of the root unit. The behaviour that the simulator assumes
is set here, and not left to torch's defaults:

    zero 3     the parameters of a unit are freed after its forward, and gathered again in the backward, one unit ahead
    zero 2     the parameters of a unit stay gathered until its backward; the root unit does so with zero 3, too
    sums       gradients are summed over the replicas after each microbatch's backward, and not divided: losses are
               already weighted for the mean
    hybrid     with a shard size, parameters are sharded within groups of replicas, on a mesh of two dims; the groups
               sum their shards of the gradients in the last backward before an update (`StageRunner.backward`)
    types      with master weights, the shards are master weights; parameters are gathered in the type of the
               parameters, and gradients summed in the type of the gradients

Parameters that several stages use are not sharded; their gradients are summed in buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.program.sharding import GatherUnit, find_units
from meshwright.runtime.local_models import replace_held
from meshwright.runtime.ranges import enclose, find_ops
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.spec import Graph, Offload, Plan, PlanError, StageSlice
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.precision import Numbers


def replica_groups(plan: Plan, grid: TeamPosition) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the process group of each set of replicas, by the ranks of their stage in the plan.

    All processes call it together.
    """
    alone = plan.offload.parameters == "host"
    shared = dict.fromkeys(stage.ranks for stage in plan.stages if len(stage.ranks) > 1 or alone)
    return {ranks: grid.new_group(ranks) for ranks in shared}


def replica_meshes(
    plan: Plan, grid: TeamPosition, groups: Mapping[tuple[int, ...], dist.ProcessGroup], device: torch.device
) -> dict[tuple[int, ...], DeviceMesh]:
    """Return the meshes on which this process shards parameters, by the ranks of the stage in the plan.

    ``groups`` as from `replica_groups`. A mesh has one dim. If parameters are sharded within several groups of
    replicas (hybrid), its dims are "replicate" and "shard". All processes call it together.
    """
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    with unset_fake_temporarily():
        for ranks, group in groups.items():
            sharing, across = plan.exchange.shard_groups(ranks), plan.exchange.replicating_groups(ranks)
            if len(sharing) == 1:
                made: dist.ProcessGroup | list[dist.ProcessGroup] = group
            else:
                made = [_own_group(across, grid), _own_group(sharing, grid)]
            if grid.rank not in ranks:
                continue
            mesh = None if len(sharing) == 1 else [[grid.process_of(rank) for rank in each] for each in sharing]
            names = None if len(sharing) == 1 else ("replicate", "shard")
            meshes[ranks] = DeviceMesh.from_group(made, device.type, mesh=mesh, mesh_dim_names=names)
    return meshes


def _own_group(groups: Sequence[tuple[int, ...]], grid: TeamPosition) -> dist.ProcessGroup:
    """The group of this process, or the last one if it is in none; all groups are created."""
    made = [(ranks, grid.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in made if grid.rank in ranks), made[-1][1])


def share_out(
    module: torch.nn.Module,
    graph: Graph,
    stage: StageSlice,
    mesh: DeviceMesh,
    *,
    kept: Collection[int],
    let_go: bool,
    numbers: Numbers,
    offload: Offload = ON_DEVICE,
) -> Mapping[int, torch.nn.Parameter]:
    """Shard the parameters of a stage's module over ``mesh``; return this rank's shards by tensor id.

    ``kept``: the tensor ids of parameters that stay whole. ``let_go``: the parameters of a unit are freed after its
    forward (zero 3). ``offload``: where shards and master weights are kept. Raises PlanError for parameters that FSDP2
    cannot shard.
    """
    assert isinstance(module, fx.GraphModule), "parts are cut as graphs"
    root, units = find_units(graph, stage, set(kept))
    gathered = [
        (unit.parameters, _enclose_unit(module, graph, stage, unit, f"unit_{number}"))
        for number, unit in enumerate(units)
        if unit.parameters
    ]
    gathered.append((root.parameters, module))
    ignored = {module.get_parameter(graph.tensors[i].name) for i in kept if i in stage.parameters}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    values, gradients = getattr(torch, numbers.values), getattr(torch, numbers.gradients)
    if offload.optimizer != "device":
        # Master weights, if any, are with the optimizer.
        policy = MixedPrecisionPolicy(
            reduce_dtype=gradients if gradients is not values else None, cast_forward_inputs=False
        )
    elif numbers.master and graph.mode == "training":
        master = getattr(torch, numbers.master)
        # A process's shards of the parameters are its master weights.
        replace_held(
            [module],
            lambda value: (
                value.detach().to(master)
                if isinstance(value, torch.nn.Parameter) and value not in ignored and value.is_floating_point()
                else value
            ),
        )
        policy = MixedPrecisionPolicy(param_dtype=values, reduce_dtype=gradients, cast_forward_inputs=False)
    before: list[FSDPModule] = []
    for _, item in gathered:
        options: dict[str, Any] = {"mp_policy": policy, "ignored_params": ignored}
        if offload.parameters == "host":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        each = _fully_shard(item, mesh, let_go=let_go and item is not module, options=options)
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)
        each.set_modules_to_backward_prefetch(before if let_go else [])
        if before and offload.parameters == "host" and item is not module:
            # Prefetches of a unit start with the unit before it.
            before[0].set_modules_to_forward_prefetch([each])
        before = [each]
    return {i: item.get_parameter(graph.tensors[i].name) for parameters, item in gathered for i in parameters}


def _fully_shard(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    let_go: bool,
    options: Mapping[str, Any],
) -> FSDPModule:
    try:
        return fully_shard(module, mesh=mesh, reshard_after_forward=let_go, **options)
    except (ValueError, NotImplementedError) as error:
        raise PlanError(
            f"The plan shards parameters (ZeRO 2 or 3), but torch's FSDP2 cannot shard this model: {error} Change "
            "the parameter, or plan with --zero 1 or 0."
        ) from None


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a sharded tensor (DTensor); any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _enclose_unit(
    module: fx.GraphModule, graph: Graph, stage: StageSlice, unit: GatherUnit, name: str
) -> torch.nn.Module:
    """The module of the ops of a unit, which holds its parameters in place of the stage's module."""
    first, last = stage.ops[unit.first], stage.ops[unit.last]
    nodes = []
    for node in module.graph.nodes:
        ops = find_ops(node)
        if ops is None or ops[1] < first or ops[0] > last:
            continue
        if ops[0] < first or ops[1] > last:
            raise PlanError(
                f"The plan recomputes ops {ops[0]}:{ops[1] + 1} together, but gathers the parameters of ops "
                f"{first}:{last + 1} separately (ZeRO). Recompute whole layers, or parts of one layer."
            )
        nodes.append(node)
    names = {graph.tensors[i].name for i in unit.parameters}
    enclose(module, name, nodes, lambda body: body, names)
    for node in [node for node in module.graph.nodes if node.op == "get_attr" and node.target in names]:
        module.graph.erase_node(node)
    for each in names:
        owner, _, leaf = each.rpartition(".")
        del module.get_submodule(owner)._parameters[leaf]
    module.recompile()
    return module.get_submodule(name)
