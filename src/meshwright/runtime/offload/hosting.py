"""The offload of one rank (`Hosting`): copy gradients to the host, update there, copy new parameters back.

All of it runs in parallel with the computations. A piece is a group of parameters that the host updates together
(`pieces`). `take_to_host` offloads the optimizer, `keep_saved` activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.cost.optimizers import state_bytes
from meshwright.program import HostNeeds, count_host_needs, gradient_buckets, host_pieces
from meshwright.runtime.gradient_reduction import BucketExchange, Exchange
from meshwright.runtime.holding import Holding
from meshwright.runtime.offload.copy_streams import Act, HostStreams, HostWork
from meshwright.runtime.offload.pieces import HostedPiece, PieceFacts, find_pieces, make_hosted
from meshwright.runtime.offload.pinned_memory import DriveFile, HostMemory, check_room
from meshwright.runtime.offload.saved_values import SavedLayers, backend_on, find_stages_away, tell_layers
from meshwright.runtime.offload.states import HostSteps, PieceStates, StatesOnDrives, StatesOnHost
from meshwright.runtime.rank_program import HostItem, MarkKey
from meshwright.spec import Graph, Instruction, Plan, PlanError, ProgramError
from meshwright.spec.offload_instructions import CopyDown, CopyUp, HostStep, ReadStates, SavedDown, SavedUp, WriteStates

# The key of an additional dependency of copies: gradients of which processes of a team hold partial sums are summed.
COMPLETED = -1


class Readiness:
    """Tells the offload threads when values on the device are ready.

    ``partial``: tensor ids of the parameters of whose gradients each process of a team holds only a partial sum.
    ``complete()`` sums these gradients within the team.
    """

    def __init__(
        self,
        pieces: Sequence[HostedPiece],
        streams: HostStreams,
        partial: Collection[int],
        complete: Callable[[], None],
    ) -> None:
        self.streams, self._complete = streams, complete
        self.partial = {piece.facts.number for piece in pieces if not piece.facts.parameters.keys().isdisjoint(partial)}
        self._is_complete = False
        self._marks = _Marks(pieces, streams)

    def begin(self, marks: Collection[MarkKey]) -> None:
        """Start a section whose computations raise these marks."""
        self._is_complete = False
        self._marks.begin(marks)

    def computing(self, index: int) -> None:
        """Report that the computation with this id starts."""
        self._marks.computing(index)

    def computed(self, index: int) -> None:
        """Report that the computation with this id was issued completely."""
        self._marks.computed(index)
        self.streams.happened(index)

    @property
    def completes(self) -> bool:
        """Whether partial sums of gradients still have to be summed within the team in this section."""
        return bool(self.partial) and not self._is_complete

    def complete(self) -> None:
        """Sum the partial sums of gradients within the team; further calls in the same section do nothing."""
        if not self._is_complete:
            self._complete()
            self._is_complete = True
            self.streams.happened(COMPLETED)

    def close(self) -> None:
        """Stop the threads, and remove the hooks from the user's parameters."""
        self.streams.close()
        self._marks.close()


class Hosting:
    """The offload of one rank: its pieces, the offloaded activations of its stages, and the threads for both.

    ``updates`` runs the optimizer on the host, None if it is on the device. ``saved``: by stage, the layers whose
    activations are offloaded.
    """

    def __init__(
        self,
        pieces: Sequence[HostedPiece],
        updates: HostSteps | None,
        readiness: Readiness,
        memory: HostMemory,
        saved: Mapping[int, SavedLayers],
    ) -> None:
        self.readiness, self.memory, self._updates, self._saved = readiness, memory, updates, saved
        self._pieces = {piece.facts.number: piece for piece in pieces}

    @property
    def resident(self) -> set[int]:
        """Tensor ids of the parameters that are kept in host memory between passes."""
        return {i for piece in self._pieces.values() if piece.facts.is_resident for i in piece.facts.parameters}

    @property
    def remark(self) -> str:
        """A warning for the user about the place of optimizer states; "" without one."""
        return self._updates.states.remark if self._updates is not None else ""

    @property
    def moved(self) -> list[tuple[Instruction, int]]:
        """The host's instructions of the last step in the order in which they ended, and the bytes that each moved."""
        return self.readiness.streams.moved

    def begin(self, items: Sequence[HostItem]) -> dict[int, HostWork]:
        """Start the host's instructions of a section; return the work of each, by its id."""
        self.readiness.begin({mark for item in items for mark in item.marks})
        more = {
            item.index: (COMPLETED,)
            for item in items
            if isinstance(item.instruction, CopyDown | HostStep) and item.instruction.piece in self.readiness.partial
        }
        acts = [(item, self._act(item.instruction)) for item in items]
        copies = [item.index for item in items if isinstance(item.instruction, SavedDown | SavedUp)]
        works = self.readiness.streams.begin(acts, more)
        for stage, layers in self._saved.items():
            layers.begin([works[index] for index in copies if works[index].item.instruction.stage == stage])
        return works

    def close(self) -> None:
        """Stop the threads, and free the files on drives."""
        self.readiness.close()
        if self._updates is not None:
            self._updates.states.close()

    def _act(self, instruction: Instruction) -> Act:
        if isinstance(instruction, SavedDown):
            return lambda: self._saved[instruction.stage].copy_down(instruction)
        if isinstance(instruction, SavedUp):
            return lambda: self._saved[instruction.stage].copy_up(instruction)
        updates = self._updates
        assert updates is not None, "pieces are of optimizers on the host"
        match instruction:
            case CopyDown(piece=number):
                return self._pieces[number].copy_down
            case HostStep(piece=number):
                return lambda: updates.update(self._pieces[number])
            case CopyUp(piece=number):
                return self._pieces[number].copy_up
            case ReadStates(piece=number):
                return lambda: updates.states.read(self._pieces[number])
            case WriteStates(piece=number):
                return lambda: updates.states.write(self._pieces[number])
            case _:
                raise ProgramError(
                    f"{instruction} is in a stream of the host, which cannot execute it. Build the program again."
                )


class _Marks:
    """Raises the marks of pieces outside all buckets, from hooks of their parameters."""

    def __init__(self, pieces: Sequence[HostedPiece], streams: HostStreams) -> None:
        self._streams = streams
        self._counts: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._of: defaultdict[int, list[MarkKey]] = defaultdict(list)
        self._raising = -1
        self._handles = []
        for piece in pieces:
            trained = [item for item in piece.facts.parameters.values() if item.requires_grad]
            if piece.facts.mark >= 0:
                self._counts[piece.facts.mark] = len(trained)
                hook = self._hook(piece.facts.mark)
                self._handles += [item.register_post_accumulate_grad_hook(hook) for item in trained]

    def begin(self, marks: Collection[MarkKey]) -> None:
        self._of.clear()
        for mark in marks:
            self._of[mark.instruction].append(mark)

    def computing(self, index: int) -> None:
        self._raising = index
        # `SavedLayers` raises the marks of layers.
        marks = (mark.number for mark in self._of.get(index, ()) if mark.number in self._counts)
        self._missing = {number: self._counts[number] for number in marks}

    def computed(self, index: int) -> None:
        self._missing = {}
        for mark in self._of.get(index, ()):
            self._streams.happened(mark)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, piece: int) -> Callable[[torch.Tensor], None]:
        def reached(_parameter: torch.Tensor) -> None:
            if piece in self._missing:
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    self._streams.happened(MarkKey(self._raising, piece))

        return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """The pieces of a rank in host memory.

    ``needs``: bytes of host memory and drives that the rank needs. ``folder``: where states on drives are kept.
    """

    plan: Plan
    pieces: list[HostedPiece]
    memory: HostMemory
    needs: HostNeeds
    readiness: Readiness
    folder: Path

    def make_states(self, optimizer: torch.optim.Optimizer | None) -> PieceStates:
        """Return the storage of the optimizer's states, in host memory or on drives as planned.

        Raises RunError if the folder cannot hold them.
        """
        if self.plan.offload.optimizer == "host" or detect_fake_mode() is not None:
            return StatesOnHost(optimizer, self.memory)
        file = DriveFile(self.folder, self.needs.drive_bytes)
        each = state_bytes(self.plan.workload.optimizer, self.plan.workload.precision)
        return StatesOnDrives(optimizer, self.memory, file, self.pieces, each)


# If the optimizer of FSDP2 shards is on the host, gradients keep their own type, and parameters are in host memory.
# FSDP2 casts summed gradients to the type of the shards. With master weights on the host, shards have the type of the
# parameters, but gradients must stay wide. If parameters are on the host, a `CPUOffloadPolicy` keeps shards there, and
# copies gradients to them; on processors, whose memory is both, it does nothing, and this module moves shards and
# gradients into host memory, so that they are not counted as device memory. Only this module uses the internal names of
# FSDP2.
def take_to_host(
    share: Holding,
    exchange: Exchange | None,
    updated: Mapping[int, torch.nn.Parameter],
    complete: Callable[[], None],
    device: torch.device,
    folder: Path,
    rank: int,
) -> Hosted | None:
    """Make host copies of the tensors that a rank's optimizer updates; None if the optimizer is on the device.

    ``updated``: these tensors by tensor id. ``complete()`` sums gradients of which the processes of a team hold
    partial sums. All processes call it together. Raises RunError if a host or drive lacks room.
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
    """By stage, the layers whose activations are offloaded, with the host memory and the threads for the copies."""

    layers: dict[int, SavedLayers]
    memory: HostMemory
    readiness: Readiness


def keep_saved(share: Holding, hosted: Hosted | None, device: torch.device, rank: int) -> KeptSaved | None:
    """Offload the activations of a rank's stages to its host; None if the plan keeps them on the device.

    All processes call it together. Raises RunError if a host lacks room (`take_to_host` has checked that already if
    ``hosted`` is given).
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
    """Return the tensor ids of parameters of whose gradients each process of a team holds only a partial sum.

    These are summed before an update.
    """
    return {item.tensor for item in graph.collectives if item.phase == "step"}


def _find_facts(
    share: Holding, plan: Plan, exchange: Exchange | None, updated: Mapping[int, torch.nn.Parameter]
) -> list[PieceFacts]:
    """The pieces whose steps the program has for this rank, in the program's order."""
    if plan.exchange.partition_bytes:
        raise PlanError(
            f"The plan keeps {plan.offload.describe()}, and splits gradient buckets into parts (partition_bytes = "
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
    """Give the gradients of FSDP2 shards the type ``dtype``, which may differ from the type of the shards."""
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
    """Move FSDP2 shards, and their gradients when these are created, into host memory. For CPU devices only."""
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
