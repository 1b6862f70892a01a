"""The model of one process of a team: its shards of the parameters, and its shard of every op.

Its graph is the local graph that the simulator estimates (`program.plan_lowering`): the same ops in the same order,
with conversions (collectives) among them. Each op is torch's operator on local tensors, except those of
`team_operators`. Whole parameters and buffers stay the user's own objects; shards are new objects.

The modules for a single op in this file call torch's operator, or return empty results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import torch
import torch.distributed as dist

from meshwright.capture import Captured, has_own_graph, own_graph, rebuild
from meshwright.cost.traits import operator_name
from meshwright.program import STAYS_EAGER, ShardedGraph, lower_plan, shard_graph
from meshwright.program.sharding import MESH
from meshwright.runtime.checkpointing import checkpoint_ranges
from meshwright.runtime.compiling import Compilation, compile_units
from meshwright.runtime.teams.grid import AxisGroup, TeamPosition
from meshwright.runtime.teams.shares import (
    cut_of,
    find_uneven,
    is_split,
    join_shares,
    own_indices,
    own_share,
    whole_shape,
)
from meshwright.runtime.teams.team_operators import (
    BIASES,
    AddOnce,
    AddShare,
    Attend,
    Convert,
    CountOn,
    CrossEntropy,
    DropOut,
    LocalConversion,
    LookUp,
    MeanShare,
    RowLoss,
    arranging_module,
    refuse_share,
)
from meshwright.spec import Graph, GraphError, Op, Partial, Plan, PlanError, Replicate, Shard, Sharding, StageSlice
from meshwright.spec.exchange import Axis
from meshwright.spec.sharding import Layout

# Ops that may be applied to parts of a sum one by one; others need the sum.
_LINEAR = (
    "neg",
    "view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "clone",
    "detach",
    "to",
    "_to_copy",
    "sum",
    "mean",
    "alias",
)
_SUMS = ("add", "add_", "sub", "sub_")
_FACTORS = ("mul", "mul_", "div", "div_")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """The model of one process whose ops are split by a ``sharding``, as a `local_models.Model`.

    ``plan`` and ``graph`` are those of the process. ``shares``: its shards of parameters and buffers, by tensor id.
    """

    plan: Plan
    graph: Graph
    sharding: Sharding
    sharded: ShardedGraph
    grid: TeamPosition
    captured: Captured
    device: torch.device
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    compilation: Compilation = field(default_factory=Compilation)

    @property
    def whole(self) -> Graph:
        """The captured graph, before it is split."""
        return self.captured.graph

    def eager(self) -> Self:
        """Return the same model without torch.compile."""
        return replace(self, graph=replace(self.graph, compiled=0), compilation=Compilation(refused=STAYS_EAGER))

    def module(self, feeds: Sequence[int], fetches: Sequence[int], ops: Sequence[int]) -> torch.nn.Module:
        """Return a module that computes this process's shards of ``fetches`` from those of ``feeds``, by the given ops.

        Raises PlanError for an op that cannot be sharded.
        """
        size = self.plan.microbatch_size
        converted = {op.outputs[0]: op.inputs[0] for op in self.graph.ops if op.kind.startswith(MESH)}
        writing = {op.name for op, row in zip(self.whole.ops, self.captured.table.ops, strict=True) if row.written}
        for op in (self.graph.ops[index] for index in ops):
            if op.name in writing:
                self._check_written(op, converted)
        try:
            modules = {index: module for index in ops if (module := self._module_of(index)) is not None}
            made = rebuild(
                self.graph,
                feeds,
                fetches,
                ops,
                batch_size=size,
                converters={},
                modules=modules,
                state=self._share_of,
                device=self.device,
            )
        except GraphError as error:
            raise PlanError(
                f"The plan splits ops, but this model's ops cannot be split: {error.args[0].split(';')[0]}. Plan "
                f"without {self.sharding.describe()} to run."
            ) from None
        return compile_units(checkpoint_ranges(made, self.graph, ops), self.graph, self.compilation)

    def stand_in(self, fetches: Sequence[int]) -> torch.nn.Module:
        """Return a module that computes ``fetches`` by all ops, without communication: shapes and strides are right."""
        size = self.plan.microbatch_size
        ops = range(len(self.graph.ops))
        modules = {index: self._stand_in(index) for index in ops if self._module_of(index) is not None}
        inputs, device = self.graph.inputs, self.device
        return rebuild(self.graph, inputs, fetches, ops, batch_size=size, converters={}, modules=modules, device=device)

    def own_inputs(self, value: torch.Tensor, tensor: int) -> torch.Tensor:
        """Return this process's shard of ``value``, a graph input for one microbatch with this tensor id."""
        return self._own(value, tensor).contiguous() if is_split(tensor, self.sharded.layouts) else value

    def join(self, shares: Sequence[torch.Tensor], tensor: int) -> torch.Tensor:
        """Return the whole tensor from the shards of a team's processes, in their order."""
        size = self.plan.microbatch_size
        return join_shares(shares, tensor, self.sharded.layouts, self.sharding, size)

    def is_split(self, tensor: int) -> bool:
        """Return whether a tensor is sharded over the processes of a team."""
        return is_split(tensor, self.sharded.layouts)

    def alike(self, tensor: int) -> int:
        """Return the number of processes of a team that hold the same shard of a tensor."""
        sharding, layouts = self.sharding, self.sharded.layouts
        return prod(sharding.size(axis) for axis in layouts if not isinstance(layouts[axis][tensor], Shard))

    @property
    def loss_share(self) -> float:
        """The factor for this process's loss, so that the losses of a team's processes add up to the loss."""
        layouts, sharding = self.sharded.layouts, self.sharding
        loss = self.graph.outputs[0]
        return 1.0 / prod(sharding.size(axis) for axis in layouts if not isinstance(layouts[axis][loss], Partial))

    def sum_parts(self, stage: StageSlice, gradients: Mapping[int, torch.Tensor]) -> None:
        """Sum over the team, before the stage is updated, the gradients of which each process holds a partial sum."""
        for item in self.graph.collectives:
            # All processes of a team run the same ops: a tensor without a gradient here has none anywhere.
            if item.phase == "step" and item.tensor in stage.parameters and item.tensor in gradients:
                dist.all_reduce(gradients[item.tensor], group=self.grid.axes[item.axis].group)

    def own_indices(self, tensor: int) -> list[torch.Tensor]:
        """Return, for each dim of a whole parameter or buffer, the indices that this process has."""
        shape = [extent.at(0) for extent in self.whole.tensors[tensor].shape]
        size = self.plan.microbatch_size
        return own_indices(shape, tensor, self.sharded.layouts, self._places, self.sharding, size)

    @property
    def _places(self) -> dict[Axis, int]:
        return {axis: group.index for axis, group in self.grid.axes.items()}

    def _own(self, value: torch.Tensor, tensor: int) -> torch.Tensor:
        return own_share(value, tensor, self.sharded.layouts, self._places, self.sharding, self.plan.microbatch_size)

    def _share_of(self, tensor: int) -> torch.Tensor:
        """The user's own parameter, buffer or constant, or its shard if it is split; the same object for all stages."""
        held: torch.Tensor = self.captured.trace.attribute(self.graph.tensors[tensor].name)
        if not self.is_split(tensor):
            return held
        if tensor not in self.shares:
            share = self._own(held.detach(), tensor).clone(memory_format=torch.contiguous_format)
            is_parameter = isinstance(held, torch.nn.Parameter)
            self.shares[tensor] = torch.nn.Parameter(share, held.requires_grad) if is_parameter else share
        return self.shares[tensor]

    @property
    def replaced(self) -> dict[int, torch.Tensor]:
        """By ``id()`` of a user's parameter, the shard that replaces it on this process."""
        names = {tensor: self.graph.tensors[tensor].name for tensor in self.shares}
        return {id(self.captured.trace.attribute(name)): self.shares[tensor] for tensor, name in names.items()}

    def _check_written(self, op: Op, converted: Mapping[int, int]) -> None:
        """Raise PlanError unless an op on shards writes the shards of its buffers, such as running statistics.

        The ops that can be split so that their buffers and results are split, too, are elementwise or batch norm, which
        treats each channel alone. So a shard of the buffer gets the values that the whole op would write.
        """
        roots = {i: self._root(i, converted) for i in op.inputs}
        buffers = {i: root for i, root in roots.items() if self.graph.tensors[root[0]].role == "buffer"}
        for axis, layouts in self.sharded.layouts.items() if buffers else ():
            is_whole = all(isinstance(layouts[i], Replicate) for i in (*op.inputs, *op.outputs))
            is_sharded = all(isinstance(layouts[i], Shard) for i in (*buffers, *op.outputs))
            if not (is_whole or is_sharded) or any(is_converted for _, is_converted in buffers.values()):
                written, _ = next(iter(buffers.values()))
                raise PlanError(
                    f"The plan splits {op.name!r}, which updates {self.graph.tensors[written].name!r} in its forward; "
                    f"a shard would give other statistics. Place the op whole (`--placement '{op.name}={axis}'`), "
                    "freeze the statistics, or plan without the axis."
                )

    def _root(self, tensor: int, converted: Mapping[int, int]) -> tuple[int, bool]:
        """The tensor that owns another's memory, or from which it was made; and whether a conversion is between."""
        is_converted = False
        while True:
            storage = self.graph.tensors[tensor].storage
            if tensor in converted:
                tensor, is_converted = converted[tensor], True
            elif storage != tensor:
                tensor = storage
            else:
                return tensor, is_converted

    def _stand_in(self, index: int) -> torch.nn.Module:
        made = [self.graph.tensors[i] for i in self.graph.ops[index].outputs]
        shapes = [tuple(extent.at(self.plan.microbatch_size) for extent in tensor.shape) for tensor in made]
        return Empty(shapes, [getattr(torch, tensor.dtype) for tensor in made], self.device)

    def _module_of(self, index: int) -> torch.nn.Module | None:
        """The module for an op that torch's operator on local tensors does not compute; None for others."""
        op = self.graph.ops[index]
        if (arranging := arranging_module(op, self.grid.axes.get("expert"))) is not None:
            return arranging
        if op.kind.startswith(MESH):
            return self._conversion(index, op)
        if has_own_graph(self.graph, op) and self._is_alike(op):
            size = self.whole.batch_size or self.plan.microbatch_size
            return own_graph(self.captured, op, batch_size=size, device=self.device)
        if op.random and op.outputs and self.is_split(op.outputs[0]):
            if op.outputs[0] in self.sharded.own_rows:
                raise refuse_share(op, "applies dropout to routed tokens, which each process has in its own order")
            return self._random(op)
        if op.kind.startswith("aten.cross_entropy_loss."):
            return self._cross_entropy(op)
        made: torch.nn.Module | None = None
        for axis, group in self.grid.axes.items():
            if op.outputs and op.outputs[0] in self.sharded.own_rows:
                continue
            make = _special(self.graph, op, group, self.sharded.layouts[axis])
            if make is not None:
                made = make(made or Plain(self.graph, index, self.plan.microbatch_size, self.device))
        return made

    def _conversion(self, index: int, op: Op) -> Convert:
        source, made = op.inputs[0], op.outputs[0]
        listed = [item for item in self.sharded.collectives if item.at == index]
        layouts = self.sharded.layouts
        moved = [axis for axis in layouts if layouts[axis][source] != layouts[axis][made]]
        assert len(moved) <= 1, "a conversion is one of one axis"
        axis = listed[0].axis if listed else (moved or list(layouts))[0]
        goes_round = op.kind.startswith(f"{MESH}ring")
        backward = next((item.kind for item in listed if item.phase == "backward"), None)
        size = self.plan.microbatch_size
        return Convert(
            LocalConversion(
                axis=self.grid.axes[axis],
                have=cut_of(layouts[axis][source], size),
                want=cut_of(layouts[axis][made], size),
                sums=isinstance(layouts[axis][source], Partial),
                # Ring exchanges are listed where attention waits for them.
                backward="send" if goes_round else backward,
                goes_round=goes_round,
            )
        )

    def _is_alike(self, op: Op) -> bool:
        """Whether every process has the same inputs and outputs of an op."""
        layouts = self.sharded.layouts.values()
        return all(isinstance(given[i], Replicate) for given in layouts for i in (*op.inputs, *op.outputs))

    def _cross_entropy(self, op: Op) -> torch.nn.Module | None:
        layouts = self.sharded.layouts
        rows = [group for axis, group in self.grid.axes.items() if layouts[axis][op.outputs[0]] == Partial()]
        for axis, group in self.grid.axes.items():
            logits = layouts[axis][op.inputs[0]]
            if isinstance(logits, Shard) and logits.dim == 1:
                return CrossEntropy(op, group, rows)
        is_mean = dict(op.attributes).get("reduction", "1") == "1"
        return RowLoss(op, rows) if rows and is_mean else None

    def _random(self, op: Op) -> torch.nn.Module:
        if not op.kind.startswith("aten.dropout."):
            raise refuse_share(op, "draws random numbers, and only dropout can do that on shards")
        made, size = op.outputs[0], self.plan.microbatch_size
        local = [extent.at(size) for extent in self.graph.tensors[made].shape]
        whole = whole_shape(local, made, self.sharded.layouts, self.sharding, size)
        return DropOut(op, whole, lambda mask: self._own(mask, made))


def local_model(captured: Captured, plan: Plan, grid: TeamPosition, device: torch.device) -> LocalModel:
    """Return the model of this process, on its device, under a plan that splits ops.

    Raises PlanError if a tensor cannot be split evenly, or if the plan gathers tensors again in the backward.
    """
    if plan.sharding.regather:
        raise PlanError(
            "The plan gathers sequence-parallel activations again in the backward (`regather`), which can only be "
            "simulated. Plan without `regather` to run."
        )
    local_plan, graph = lower_plan(plan, captured.graph)
    sharded = shard_graph(captured.graph, plan.sharding)
    _check_returned(captured.graph, plan, sharded)
    uneven = find_uneven(captured.graph, graph, sharded.layouts, plan.sharding)
    if uneven is not None:
        tensor = captured.graph.tensors[uneven]
        raise PlanError(
            f"The plan splits {tensor.name!r}, of shape {list(map(str, tensor.shape))}, which "
            f"{plan.sharding.describe()} does not divide; such a plan can only be simulated. Choose sizes that divide "
            "it, or place the ops that read it whole (`--placement NAME=tensor`)."
        )
    return LocalModel(
        plan=local_plan,
        graph=graph,
        sharding=plan.sharding,
        sharded=sharded,
        grid=grid,
        captured=captured,
        device=device,
    )


def _check_returned(graph: Graph, plan: Plan, sharded: ShardedGraph) -> None:
    """Raise PlanError if processes would return parts. In training they return losses, which have their factor."""
    for axis, layouts in sharded.layouts.items() if plan.workload.kind == "inference" else ():
        for tensor in graph.outputs:
            if not isinstance(layouts[tensor], Replicate):
                maker = next((op.name for op in graph.ops if tensor in op.outputs), "")
                raise PlanError(
                    f"The plan leaves each process of the {axis} axis only a shard of {graph.tensors[tensor].name!r}, "
                    f"which the model returns. Place the op that makes it whole (`--placement '{maker}={axis}'`), or "
                    "plan without the axis."
                )


def _special(
    graph: Graph, op: Op, axis: AxisGroup, layouts: tuple[Layout, ...]
) -> Callable[[torch.nn.Module], torch.nn.Module] | None:
    """The wrapper of the operator's module for an op on an axis; None if its operator works alone.

    Raises PlanError for an op that cannot be sharded.
    """
    if not op.outputs:
        return None
    name, attributes = operator_name(op), dict(op.attributes)
    read, made = [layouts[i] for i in op.inputs], layouts[op.outputs[0]]
    if name == "embedding":
        if not isinstance(made, Replicate) and attributes.get("scale_grad_by_freq") == "True":
            raise refuse_share(op, "scales gradients by the frequency of tokens")
        return (lambda _: LookUp(op, axis)) if read[0] == Shard(0) else None
    if name == "scaled_dot_product_attention" and isinstance(made, Shard) and made.dim == 2:
        return lambda call: Attend(op, axis, call)
    if name == "arange" and isinstance(made, Shard):
        return lambda call: CountOn(axis, call)
    is_part = [isinstance(item, Partial) for item in read]
    if any(is_part) and not _keeps_sums(graph, op, is_part):
        raise refuse_share(op, "needs a complete sum, of which each process has only a partial sum")
    if not isinstance(made, Partial):
        return None
    if name in BIASES and len(op.inputs) > 2:
        return lambda call: AddOnce(BIASES[name], axis, call)
    if any(is_part):
        is_whole = tuple(not part for part in is_part)
        return (lambda call: AddShare(is_whole, axis.size, call)) if name in _SUMS and any(is_whole) else None
    is_mean = name == "mean" or (("loss" in name or "binary" in name) and attributes.get("reduction", "1") == "1")
    return (lambda call: MeanShare(axis.size, call)) if is_mean else None


def _keeps_sums(graph: Graph, op: Op, is_part: Sequence[bool]) -> bool:
    """Whether an op on parts of a sum makes parts of its result, and each process knows the gradients of the rest."""
    name = operator_name(op)
    if name not in _FACTORS:
        return name in (*_LINEAR, *_SUMS)
    others = [i for i, part in zip(op.inputs, is_part, strict=True) if not part]
    is_scaled = is_part.count(True) == 1 and (is_part[0] or name.startswith("mul"))
    return is_scaled and not any(graph.tensors[i].requires_grad for i in others)


class Plain(torch.nn.Module):
    """The module of one op: torch's operator, called with the op's inputs."""

    def __init__(self, graph: Graph, index: int, batch_size: int, device: torch.device) -> None:
        super().__init__()
        op = graph.ops[index]
        feeds = tuple(dict.fromkeys(op.inputs))
        self._places = tuple(op.inputs.index(i) for i in feeds)
        self._call = rebuild(graph, feeds, op.outputs[:1], [index], batch_size=batch_size, converters={}, device=device)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return the operator's result."""
        found: tuple[torch.Tensor] = self._call(*(given[place] for place in self._places))
        return found[0]


class Empty(torch.nn.Module):
    """The module of one op that returns uninitialised tensors of given shapes and types."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        super().__init__()
        self._looks, self._device = tuple(zip(shapes, dtypes, strict=True)), device

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:  # noqa: ARG002 - only shapes count
        """Return one tensor, or a tuple of several."""
        made = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._looks)
        return made[0] if len(made) == 1 else made
