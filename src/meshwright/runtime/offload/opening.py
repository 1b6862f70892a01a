"""Builds a rank's host: the pieces of its updates, memory for them, states, threads.

If the optimizer of FSDP2 shards is on the host, gradients keep their own type, and parameters are in host memory. FSDP2
casts summed gradients to the type of the shards. With master weights on the host, shards have the type of the
parameters, but gradients must stay wide. If parameters are on the host, a `CPUOffloadPolicy` keeps shards there, and
copies gradients to them; on processors, whose memory is both, it does nothing, and this module moves shards and
gradients into host memory, so that they are not counted as device memory.

Only this module uses the internal names of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.cost.optimizers import state_bytes
from meshwright.program import HostNeeds, count_host_needs, gradient_buckets, host_pieces
from meshwright.runtime.exchange import BucketExchange, Exchange
from meshwright.runtime.holding import Holding
from meshwright.runtime.offload.drives import DriveFile
from meshwright.runtime.offload.hosting import Readiness
from meshwright.runtime.offload.memory import HostMemory
from meshwright.runtime.offload.pieces import HostedPiece, PieceFacts, find_pieces, make_hosted
from meshwright.runtime.offload.room import check_room
from meshwright.runtime.offload.saved import SavedLayers, backend_on, find_stages_away, tell_layers
from meshwright.runtime.offload.states import PieceStates, StatesOnDrives, StatesOnHost
from meshwright.runtime.offload.streams import HostStreams
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph
from meshwright.spec.offload_instructions import HostStep
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """The pieces of a rank in host memory, its needs there, and the signals of what is ready."""

    plan: Plan
    pieces: list[HostedPiece]
    memory: HostMemory
    needs: HostNeeds
    readiness: Readiness
    folder: Path

    def make_states(self, optimizer: torch.optim.Optimizer | None) -> PieceStates:
        """Create the place of the optimizer's states. Raises RunError for a folder that cannot hold them."""
        if self.plan.offload.optimizer == "host" or detect_fake_mode() is not None:
            return StatesOnHost(optimizer, self.memory)
        file = DriveFile(self.folder, self.needs.drive_bytes)
        each = state_bytes(self.plan.workload.optimizer, self.plan.workload.precision)
        return StatesOnDrives(optimizer, self.memory, file, self.pieces, each)


def take_to_host(
    share: Holding,
    exchange: Exchange | None,
    updated: Mapping[int, torch.nn.Parameter],
    complete: Callable[[], None],
    device: torch.device,
    folder: Path,
    rank: int,
) -> Hosted | None:
    """Move a rank's updated tensors to host memory; None if its plan steps on the device. All call it together.

    ``complete()`` sums gradients of which the processes of a team have parts. Raises RunError for hosts or drives
    without room.
    """
    plan = share.plan
    if not isinstance(plan, Plan) or plan.offload.optimizer == "device":
        return None
    facts = _find_facts(share, plan, exchange, updated)
    needs = count_host_needs(plan, share.model.graph, rank, backend_on(device))
    if detect_fake_mode() is None:
        check_room(needs, folder)
    memory, numbers = HostMemory(device), plan.workload.numbers
    if plan.exchange.zero >= 2 and numbers.gradients != numbers.values:
        widen_gradients(share.modules, getattr(torch, numbers.gradients))
    if plan.offload.parameters == "host" and device.type == "cpu" and detect_fake_mode() is None:
        move_to_host(share.modules, memory)
    on_drives = plan.offload.optimizer == "nvme" and detect_fake_mode() is None
    pieces = [make_hosted(item, numbers, memory, on_drives=on_drives) for item in facts]
    readiness = Readiness(pieces, HostStreams(device), find_partial(share.model.graph), complete)
    return Hosted(plan=plan, pieces=pieces, memory=memory, needs=needs, readiness=readiness, folder=folder)


class KeptSaved(NamedTuple):
    """The layers of stages whose activations are on the host, by stage, with its memory and threads."""

    layers: dict[int, SavedLayers]
    memory: HostMemory
    readiness: Readiness


def keep_saved(share: Holding, hosted: Hosted | None, device: torch.device, rank: int) -> KeptSaved | None:
    """Let a rank's stages keep their activations on its host; None if its plan leaves them on the device.

    All call it together. Raises RunError for hosts without room, which were checked already if the optimizer is
    ``hosted``.
    """
    plan = share.plan
    away_of = find_stages_away(plan, share.model.graph, share.stages, device)
    if not isinstance(plan, Plan) or not away_of:
        return None
    if hosted is None and detect_fake_mode() is None:
        check_room(count_host_needs(plan, share.model.graph, rank, backend_on(device)), None)
    memory = hosted.memory if hosted is not None else HostMemory(device)
    readiness = hosted.readiness if hosted is not None else Readiness([], HostStreams(device), (), lambda: None)
    doubled = any(item.dtype is torch.float64 for item in share.parameters.values())
    widening = torch.float64.itemsize / plan.workload.numbers.value_bytes if doubled else 1.0
    layers = {}
    for stage, module in zip(share.stages, share.modules, strict=True):
        if stage.has_backward:
            away = away_of[stage.index]
            layers[stage.index] = SavedLayers(away, memory, readiness.streams, device, widening)
            tell_layers(module, layers[stage.index])
    return KeptSaved(layers, memory, readiness)


def find_partial(graph: Graph) -> set[int]:
    """The parameters of whose gradients each process of a team has only a part, to be summed before an update."""
    return {item.tensor for item in graph.collectives if item.phase == "step"}


def _find_facts(
    share: Holding, plan: Plan, exchange: Exchange | None, updated: Mapping[int, torch.nn.Parameter]
) -> list[PieceFacts]:
    """The pieces whose steps the program has for this rank, in the program's order."""
    if plan.exchange.partition_bytes:
        raise PlanError(
            f"The plan keeps {plan.offload.describe()}, and cuts buckets of gradients into parts (partition_bytes = "
            f"{plan.exchange.partition_bytes}); such a plan can only be simulated. Leave partition_bytes out."
        )
    buckets = gradient_buckets(share.model.graph, plan)
    assert exchange is None or isinstance(exchange, BucketExchange), "plans that flush sum buckets"
    buffers = {item.index: item for item in exchange.filled} if exchange is not None else {}
    exchanged = [(bucket, buffers[bucket.index]) for bucket in buckets if bucket.index in buffers]
    items = [item.instruction for item in share.arranged["body"].beside]
    order = [item.piece for item in items if isinstance(item, HostStep)]
    every = host_pieces(share.model.graph, plan, buckets)
    numbered = [(len(buckets) + place, piece) for place, piece in enumerate(every)]
    unsummed = [(number, piece) for number, piece in numbered if number in order]
    are_resident = plan.offload.parameters == "host"
    found = {item.number: item for item in find_pieces(exchanged, unsummed, updated, are_resident=are_resident)}
    return [found[number] for number in order]


def widen_gradients(modules: Sequence[torch.nn.Module], dtype: torch.dtype) -> None:
    """Let summed gradients of shards have a type of their own."""
    for group in _groups(modules):
        group._init_mp_dtypes = _with_gradients(group, dtype)
        for item in group.fsdp_params:
            item.sharded_param.grad_dtype = dtype


def _with_gradients(group: Any, dtype: torch.dtype) -> Callable[[], None]:
    initialise = group._init_mp_dtypes

    def initialise_and_widen() -> None:
        initialise()
        group._orig_dtype = dtype

    return initialise_and_widen


def move_to_host(modules: Sequence[torch.nn.Module], memory: HostMemory) -> None:
    """Move shards, and their gradients when they are created, into host memory; for processors."""
    for group in _groups(modules):
        for item in group.fsdp_params:
            parameter, padded = item.sharded_param, item._sharded_param_data
            local = parameter._local_tensor
            own = memory.moved(padded)
            item._sharded_param_data = own
            parameter._local_tensor = own[: local.numel()].view(local.shape)
            if parameter.requires_grad:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                gradient = memory.empty(local.numel(), dtype).view(local.shape)
                parameter.register_post_accumulate_grad_hook(_placed_at(gradient))


def _placed_at(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def place(parameter: torch.Tensor) -> None:
        assert isinstance(parameter.grad, DTensor), "gradients of shards are shards"
        # Further microbatches are added to the first one's gradient in place.
        if parameter.grad._local_tensor is not gradient:
            parameter.grad._local_tensor = gradient.copy_(parameter.grad._local_tensor)

    return place


def _groups(modules: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for module in modules:
        for each in module.modules():
            if isinstance(each, FSDPModule):
                group: Any = each._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    yield group
