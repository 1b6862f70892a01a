"""The model of one process, with whole or sharded ops (`make_model`), and `replace_held` for its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch

from meshwright.capture import Captured, part
from meshwright.program import STAYS_EAGER, lower_plan
from meshwright.runtime.checkpointing import checkpoint_ranges
from meshwright.runtime.compiling import Compilation, compile_units
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.runtime.teams.local_parts import local_model
from meshwright.spec import Graph, Placement, Plan, StageSlice


def replace_held(modules: Iterable[torch.nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer of the modules by ``change(tensor)``, called once per tensor.

    A tensor that several modules hold stays one tensor. A parameter's substitute becomes a parameter with the same
    ``requires_grad``.
    """
    # Keeps the originals alive, so that no id is given to another tensor meanwhile.
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in [item for whole in modules for item in whole.modules()]:
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None:
                    continue
                if id(value) not in made:
                    found = change(value)
                    if isinstance(value, torch.nn.Parameter) and not isinstance(found, torch.nn.Parameter):
                        found = torch.nn.Parameter(found, requires_grad=value.requires_grad)
                    made[id(value)] = value, found
                    # A module may occur in several places, where its substitutes are met again.
                    made[id(found)] = found, found
                table[name] = made[id(value)][1]  # type: ignore[assignment]


class Model(Protocol):
    """The computations of one process on its device.

    ``graph`` is the local graph of the process, ``whole`` the graph of all processes together; tensors of ``whole``
    have the same ids in both. A team is the group of processes that split the ops of a stage (tensor, context and
    expert parallel).
    """

    @property
    def plan(self) -> Plan | Placement:
        """The plan for the local graph, without tensor, context and expert parallelism."""

    @property
    def graph(self) -> Graph:
        """The local graph of this process."""

    @property
    def whole(self) -> Graph:
        """The graph of all processes together."""

    @property
    def compilation(self) -> Compilation:
        """The state of the layers that torch compiles."""

    @property
    def loss_share(self) -> float:
        """The factor for this process's loss, so that the losses of a team's processes add up to the loss."""

    @property
    def replaced(self) -> dict[int, torch.Tensor]:
        """By ``id()`` of a user's parameter, the shard that replaces it on this process."""

    def eager(self) -> Self:
        """Return the same model without torch.compile, for schedules with split backwards."""

    def module(self, feeds: Sequence[int], fetches: Sequence[int], ops: Sequence[int]) -> torch.nn.Module:
        """Return a module that computes the tensors ``fetches`` from the tensors ``feeds`` by the given ops."""

    def stand_in(self, fetches: Sequence[int]) -> torch.nn.Module:
        """Return a module that computes ``fetches`` from all graph inputs; it is run with fake tensors, for strides."""

    def own_inputs(self, value: torch.Tensor, tensor: int) -> torch.Tensor:
        """Return this process's shard of ``value``, a graph input for one microbatch with this tensor id."""

    def sum_parts(self, stage: StageSlice, gradients: Mapping[int, torch.Tensor]) -> None:
        """Sum over the team, before an update, the gradients of which each process holds only a partial sum.

        ``gradients``: by tensor id; other gradients are left alone.
        """

    def is_split(self, tensor: int) -> bool:
        """Return whether a tensor is sharded over the processes of a team."""

    def alike(self, tensor: int) -> int:
        """Return the number of processes of a team that hold the same shard of a tensor."""

    def own_indices(self, tensor: int) -> list[torch.Tensor]:
        """Return, for each dim of a whole parameter or buffer, the indices that this process has."""

    def join(self, shares: Sequence[torch.Tensor], tensor: int) -> torch.Tensor:
        """Return the whole tensor; ``shares`` are the shards of the team's processes in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The model of a process whose ops are not split."""

    plan: Plan | Placement
    graph: Graph
    captured: Captured
    device: torch.device
    loss_share: float = 1.0
    compilation: Compilation = field(default_factory=Compilation)

    @property
    def whole(self) -> Graph:
        """The captured graph."""
        return self.captured.graph

    @property
    def replaced(self) -> dict[int, torch.Tensor]:
        """Empty: no parameter is replaced by a shard."""
        return {}

    def eager(self) -> Self:
        """Return the same model without torch.compile."""
        return replace(self, graph=replace(self.graph, compiled=0), compilation=Compilation(refused=STAYS_EAGER))

    def module(self, feeds: Sequence[int], fetches: Sequence[int], ops: Sequence[int]) -> torch.nn.Module:
        """Return the module of these ops of the captured model, with recompute and compiled layers."""
        size = self.plan.microbatch_size
        made = part(self.captured, feeds, fetches, batch_size=size, ops=ops, device=self.device)
        return compile_units(checkpoint_ranges(made, self.graph, ops), self.graph, self.compilation)

    def stand_in(self, fetches: Sequence[int]) -> torch.nn.Module:
        """Return the part of the captured model that computes ``fetches`` from all graph inputs."""
        size = self.plan.microbatch_size
        return part(self.captured, self.graph.inputs, fetches, batch_size=size, device=self.device)

    def own_inputs(self, value: torch.Tensor, tensor: int) -> torch.Tensor:  # noqa: ARG002 - nothing is split
        """Return the input unchanged: ops are not split."""
        return value

    def sum_parts(self, stage: StageSlice, gradients: Mapping[int, torch.Tensor]) -> None:
        """Do nothing: each process holds whole gradients."""

    def is_split(self, tensor: int) -> bool:  # noqa: ARG002 - nothing is split
        """Return False: ops are not split."""
        return False

    def alike(self, tensor: int) -> int:  # noqa: ARG002 - nothing is split
        """Return 1: the team has one process."""
        return 1

    def own_indices(self, tensor: int) -> list[torch.Tensor]:
        """Return all indices of each dim: ops are not split."""
        return [torch.arange(extent.at(0)) for extent in self.graph.tensors[tensor].shape]

    def join(self, shares: Sequence[torch.Tensor], tensor: int) -> torch.Tensor:  # noqa: ARG002 - one of its kind
        """Return the only shard, which is the whole tensor."""
        return shares[0]


def make_model(captured: Captured, plan: Plan | Placement, grid: TeamPosition, device: torch.device) -> Model:
    """Return the model of this process, on its device. Raises PlanError for a sharding that cannot be run."""
    if isinstance(plan, Plan) and not plan.sharding.is_whole:
        return local_model(captured, plan, grid, device)
    if isinstance(plan, Plan):
        plan, graph = lower_plan(plan, captured.graph)
        return WholeModel(plan=plan, graph=graph, captured=captured, device=device)
    return WholeModel(plan=plan, graph=captured.graph, captured=captured, device=device)
