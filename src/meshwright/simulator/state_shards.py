"""Replicas that share out the states of a stage among each other (ZeRO), and what gathering parameters costs a pass.

    zero 1   optimizer states: gradients are scattered once per step, parameters gathered (`program.exchange`)
    zero 2   gradients, too: scattered beside each backward; parameters are gathered beside each forward
    zero 3   parameters, too: gathered beside each backward once more

With zero 2 and 3 all of this happens inside of forwards and backwards, as torch's FSDP2 does it
(`program.sharding.zero`): a unit is a repeated layer, and a root unit has all other parameters. Units u of c_u seconds
gather their parameters in g_u and scatter their gradients in r_u seconds on streams of their own,

    forward      the gather of unit u + 1 starts with unit u, and not before the gather of u has ended
    backward     the same from the last unit to the first; a unit's scatter starts when its backward is done, one after
                 the other, and the pass ends with the last one

so that a pass is longer by what outlasts the units beside it. Processors have no streams: there torch waits for each
gather and scatter where it is asked for (`torch.distributed.fsdp`, whose collectives are not asynchronous but for the
stream that they are issued on). What is gathered is copied to where the ops read it, and
gradients to where they are scattered from, on the stream of the ops. The root unit is gathered before the first
one, stays for the backward, and is scattered last. Parameters that several stages share are not cut; their gradients
are summed in buckets.

Where parameters are on the host, a rank's part is copied from there before each gather, and its part of the gradients
to there behind each scatter, on the same streams.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.collectives import CollectiveOp
from meshwright.cost.memory import backend_of
from meshwright.program.sharding import Unit, find_units, padded_bytes
from meshwright.spec import DeviceKind, Graph, Placement, Plan, StageSlice
from meshwright.spec.collective import summing_axes

Floats = NDArray[np.float64]


class StateShards(NamedTuple):
    """The replicas of a stage, as ranks, and those of the other stages, which exchange at the same time."""

    zero: int
    ranks: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...]
    on_host: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether parameters are gathered or gradients scattered inside of passes."""
        return self.zero >= 2 and (len(self.ranks) > 1 or self.on_host)

    @property
    def states(self) -> int:
        """Parts into which optimizer states are cut."""
        return len(self.ranks) if self.zero >= 1 else 1

    @property
    def gradients(self) -> int:
        """Parts into which gradients are cut."""
        return len(self.ranks) if self.zero >= 2 else 1

    @property
    def parameters(self) -> int:
        """Parts into which parameters are cut between passes."""
        return len(self.ranks) if self.zero >= 3 else 1


ALONE = StateShards(0, (0,), ())


def find_shards(plan: Plan | Placement, stage: int) -> StateShards:
    """How the replicas of a stage share its states; of a fold, ask its whole plan."""
    if isinstance(plan, Placement):
        return ALONE
    beside = tuple(item.ranks for index, item in enumerate(plan.stages) if index != stage)
    on_host = plan.offload.parameters == "host"
    return StateShards(plan.exchange.zero, plan.stages[stage].ranks, beside, on_host)


def gather_waits(
    graph: Graph,
    stage: StageSlice,
    forward_s: Floats,
    backward_s: Floats,
    shards: StateShards,
    kind: DeviceKind,
    cost: CostModel,
    kept: Set[int] = frozenset(),
) -> tuple[Floats, Floats]:
    """What comes on top of a stage's ops for parameters and gradients on the way, each of shape (ops,); 0 below zero 2.

    A forward waits before the first op of a unit, a backward before its last one, and for the scatters at the end; on
    processors for each scatter at the first op of its unit.
    """
    waits, copies = np.zeros((2, len(stage.ops))), np.zeros((2, len(stage.ops)))
    if not shards.is_cut or not len(stage.ops):
        return waits[0], waits[1]
    root, units = find_units(graph, stage, kept)
    units = tuple(unit for unit in units if unit.parameters)
    summed = summing_axes(graph)
    for unit in (root, *units):
        copy_s = cost.bucket_seconds(graph, unit.parameters, kind)
        copies[0, unit.first] += copy_s
        copies[1, unit.first] += copy_s
        copies[1, unit.last] += copy_s * (shards.zero == 3 and unit is not root)
    forward_s, backward_s = forward_s + copies[0], backward_s + copies[1]

    def seconds(op: CollectiveOp, unit: Unit) -> float:
        gathers = op == "all_gather"
        # Parameters are cut among replicas alone; gradients are summed over all that hold the same part of them.
        over = {i: () if gathers else summed.get(i, ()) for i in unit.parameters}
        exchanged = [i for i in unit.parameters if gathers or graph.tensors[i].requires_grad]
        total = 0.0
        for axes in dict.fromkeys(over[i] for i in exchanged):
            alike = [i for i in exchanged if over[i] == axes]
            width = cost.numbers.value_bytes if gathers else cost.numbers.gradient_bytes
            num_bytes = padded_bytes(graph, alike, len(shards.ranks), width)
            total += cost.collective_seconds(op, shards.ranks, num_bytes, shards.beside, axes=axes)
            total += _host_copy_seconds(shards, num_bytes / len(shards.ranks), cost)
        return total

    gathers = [seconds("all_gather", unit) for unit in units]
    root_s = seconds("all_gather", root)
    if backend_of(kind) == "cpu":
        for unit, gather_s in zip((root, *units), (root_s, *gathers), strict=True):
            waits[0, unit.first] += gather_s
            waits[1, unit.last] += gather_s * (shards.zero == 3 and unit is not root)
            waits[1, unit.first] += seconds("reduce_scatter", unit)
        return waits[0] + copies[0], waits[1] + copies[1]
    _wait_in_order(waits[0], forward_s, [(unit.first, unit.last) for unit in units], gathers, root_s)
    order, final = range(len(units) - 1, -1, -1), len(stage.ops) - 1
    again = [gathers[u] if shards.zero == 3 else 0.0 for u in order]
    spans = [(final - units[u].last, final - units[u].first) for u in order]
    ends = _wait_in_order(waits[1][::-1], backward_s[::-1], spans, again, 0.0)
    scattered = 0.0
    for end, u in zip(ends, order, strict=True):
        scattered = max(end, scattered) + seconds("reduce_scatter", units[u])
    total = float(backward_s.sum() + waits[1].sum())
    scattered = max(total, scattered) + seconds("reduce_scatter", root)
    waits[1][0] += max(scattered - total, 0.0)
    waits += copies
    return waits[0], waits[1]


def _host_copy_seconds(shards: StateShards, num_bytes: float, cost: CostModel) -> float:
    """What the rank with the slowest link to its host takes to copy its part from there, or to there."""
    if not shards.on_host:
        return 0.0
    cluster = cost.cluster
    ranks = {cluster.nodes[cluster.node_index(rank)].pcie: rank for rank in shards.ranks}
    return max(cost.host_transfer_seconds(rank, num_bytes) for rank in ranks.values())


def unit_bytes(
    graph: Graph, stage: StageSlice, kept: Set[int], float_bytes: int, *, gradients: bool
) -> tuple[int, int]:
    """Bytes of the parameters of the root unit, and of the largest other one; of their ``gradients``, those trained."""
    root, units = find_units(graph, stage, kept)
    root_bytes, *others = (
        sum(
            graph.tensors[i].num_bytes(0, float_bytes)
            for i in unit.parameters
            if graph.tensors[i].requires_grad or not gradients
        )
        for unit in (root, *units)
    )
    return root_bytes, max(others, default=0)


def _wait_in_order(
    waits: Floats, op_s: Floats, spans: list[tuple[int, int]], gathers: list[float], root_s: float
) -> list[float]:
    """Note what units wait for their gathers, at the first op of each; the end of each unit.

    ``op_s`` in the order in which ops run; ``spans`` are the places of the first and last op of each unit in that.
    """
    reached = np.concatenate([[0.0], np.cumsum(op_s)])
    ends: list[float] = []
    # What the root unit has is there before the first op.
    waits[0] += root_s
    waited = began = gathered = root_s
    for (first, last), gather_s in zip(spans, gathers, strict=True):
        # A gather begins with the unit before, but after that unit's own gather.
        gathered = max(gathered, began) + gather_s
        arrival = float(reached[first]) + waited
        began = max(arrival, gathered)
        waits[first] += began - arrival
        waited += began - arrival
        ends.append(float(reached[last + 1]) + waited)
    return ends
