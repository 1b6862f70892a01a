"""Replicas that shard the states of a stage among each other (ZeRO), and the time that forwards and backwards wait.

    zero 1   shards optimizer states: gradients are reduce-scattered and parameters all-gathered once per step
             (`program.gradient_exchange`)
    zero 2   also shards gradients: scattered during each backward; parameters are gathered during each forward
    zero 3   also shards parameters: gathered again during each backward

With zero 2 and 3 these collectives run inside forwards and backwards, as in torch's FSDP2 (`program.sharding.zero`): a
unit is a repeated layer, and a root unit has all other parameters. Unit u computes for c_u seconds, gathers its
parameters in g_u and scatters its gradients in r_u seconds, on separate streams:

    forward      the gather of unit u + 1 starts with unit u, and not before the gather of u has ended
    backward     the same from the last unit to the first; a unit's scatter starts when its backward is done, one after
                 the other, and the pass ends with the last one

so a forward or backward grows by the part of gathers and scatters that the units' computation does not hide. CPUs have
no streams: there torch waits for each gather and scatter where it is called. Gathered parameters are copied to where
the ops read them, and gradients to where they are scattered from, on the stream of the ops. The root unit is gathered
before the first unit, stays gathered until the backward, and is scattered last. Parameters that several stages share
are not sharded; their gradients are summed in buckets.

With a shard size, each group of replicas shards states among its members. All groups communicate at the same time; the
group on the most nodes determines the time. In the last backward of a step, after the scatter of each unit, the ranks
with the same shard sum it across groups: on a separate stream, or on CPUs while everything waits.

If parameters are on the host, a rank's shard is copied to the device before each gather, and its shard of the gradients
to the host after each scatter, on the same streams.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.collectives import CollectiveOp
from meshwright.cost.memory import backend_of
from meshwright.program import padded_bytes
from meshwright.program.sharding import GatherUnit, find_units
from meshwright.spec import Cluster, DeviceKind, Graph, Placement, Plan, StageSlice
from meshwright.spec.exchange import summing_axes

Floats = NDArray[np.float64]


class StateShards(NamedTuple):
    """How the replicas of a stage shard its states.

    ``zero``: the ZeRO stage. ``ranks``: the group of replicas that shard states among each other; ``beside``: the
    groups that communicate at the same time. ``on_host``: parameters are in host memory. With several groups, the ranks
    in ``across`` hold the same shard, and ``beside_across`` are the other sets of ranks that do.
    """

    zero: int
    ranks: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...]
    on_host: bool = False
    across: tuple[int, ...] = ()
    beside_across: tuple[tuple[int, ...], ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether parameters are gathered and gradients scattered inside forwards and backwards."""
        return self.zero >= 2 and (len(self.ranks) > 1 or self.on_host)

    @property
    def states(self) -> int:
        """The number of shards of the optimizer states; 1 if they are not sharded."""
        return len(self.ranks) if self.zero >= 1 else 1


ALONE = StateShards(0, (0,), ())


class Waits(NamedTuple):
    """Seconds for which a stage waits: before each op of a forward and a backward, and in a step's last backward.

    ``forward`` and ``backward`` have shape (ops,).
    """

    forward: Floats
    backward: Floats
    last_s: float


def find_shards(plan: Plan | Placement, stage: int, cluster: Cluster) -> StateShards:
    """Return how the replicas of a stage shard its states on a cluster; for a `Fold`, pass its whole plan."""
    if isinstance(plan, Placement):
        return ALONE
    exchange, on_host = plan.exchange, plan.offload.parameters == "host"
    if not exchange.zero:
        # Nothing is sharded; other groups do not matter.
        return StateShards(0, plan.stages[stage].ranks, (), on_host)
    sharing = [_widest_first(exchange.shard_groups(item.ranks), cluster) for item in plan.stages]
    across = [_widest_first(exchange.replicating_groups(item.ranks), cluster) for item in plan.stages]
    own, *beside = sharing[stage]
    mine, *beside_across = across[stage] if len(sharing[stage]) > 1 else ((),)
    for index in range(len(plan.stages)):
        if index != stage:
            beside += sharing[index]
            beside_across += across[index] if len(sharing[index]) > 1 else ()
    return StateShards(exchange.zero, own, tuple(beside), on_host, mine, tuple(beside_across))


def _widest_first(groups: tuple[tuple[int, ...], ...], cluster: Cluster) -> list[tuple[int, ...]]:
    """Return groups that communicate at the same time, the one on most nodes first."""
    most = max(groups, key=lambda ranks: len({cluster.node_index(rank) for rank in ranks}))
    return [most, *(ranks for ranks in groups if ranks is not most)]


def gather_waits(
    graph: Graph,
    stage: StageSlice,
    forward_s: Floats,
    backward_s: Floats,
    shards: StateShards,
    kind: DeviceKind,
    cost: CostModel,
    kept: Set[int] = frozenset(),
) -> Waits:
    """Return the seconds that gathers and scatters add to a stage's ops; 0 for ZeRO stages 0 and 1.

    A forward waits at the first op of a unit, a backward at the unit's last op and, for the scatters, at its own end;
    on CPUs it waits for each scatter at the first op of its unit. ``forward_s`` and ``backward_s`` are the ops' own
    seconds, ``kept`` parameters that are not sharded.
    """
    waits, copies = np.zeros((2, len(stage.ops))), np.zeros((2, len(stage.ops)))
    if not shards.is_cut or not len(stage.ops):
        return Waits(waits[0], waits[1], 0.0)
    root, units = find_units(graph, stage, kept)
    units = tuple(unit for unit in units if unit.parameters)
    summed = summing_axes(graph)
    for unit in (root, *units):
        copy_s = cost.bucket_seconds(graph, unit.parameters, kind)
        copies[0, unit.first] += copy_s
        copies[1, unit.first] += copy_s
        copies[1, unit.last] += copy_s * (shards.zero == 3 and unit is not root)
    forward_s, backward_s = forward_s + copies[0], backward_s + copies[1]

    def seconds(op: CollectiveOp, unit: GatherUnit) -> float:
        gathers = op == "all_gather"
        # Parameters are sharded over replicas alone; gradients are summed over all ranks with the same shard of them.
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

    def across_seconds(unit: GatherUnit) -> float:
        trained = [i for i in unit.parameters if graph.tensors[i].requires_grad]
        if not shards.across or not trained:
            return 0.0
        kept_bytes = padded_bytes(graph, trained, len(shards.ranks), cost.numbers.gradient_bytes) // len(shards.ranks)
        return cost.collective_seconds("all_reduce", shards.across, kept_bytes, shards.beside_across)

    gathers = [seconds("all_gather", unit) for unit in units]
    root_s = seconds("all_gather", root)
    if backend_of(kind) == "cpu":
        for unit, gather_s in zip((root, *units), (root_s, *gathers), strict=True):
            waits[0, unit.first] += gather_s
            waits[1, unit.last] += gather_s * (shards.zero == 3 and unit is not root)
            waits[1, unit.first] += seconds("reduce_scatter", unit)
        last_s = sum(across_seconds(unit) for unit in (root, *units))
        return Waits(waits[0] + copies[0], waits[1] + copies[1], last_s)
    _wait_in_order(waits[0], forward_s, [(unit.first, unit.last) for unit in units], gathers, root_s)
    order, final = range(len(units) - 1, -1, -1), len(stage.ops) - 1
    again = [gathers[u] if shards.zero == 3 else 0.0 for u in order]
    spans = [(final - units[u].last, final - units[u].first) for u in order]
    ends = _wait_in_order(waits[1][::-1], backward_s[::-1], spans, again, 0.0)
    scattered = summed_s = 0.0
    total = float(backward_s.sum() + waits[1].sum())
    for end, unit in (*zip(ends, (units[u] for u in order), strict=True), (total, root)):
        scattered = max(end, scattered) + seconds("reduce_scatter", unit)
        summed_s = max(summed_s, scattered) + across_seconds(unit)
    waits[1][0] += max(scattered - total, 0.0)
    waits += copies
    return Waits(waits[0], waits[1], max(summed_s - max(scattered, total), 0.0))


def _host_copy_seconds(shards: StateShards, num_bytes: float, cost: CostModel) -> float:
    """Return the seconds for the rank with the slowest link to its host to copy its shard from or to there."""
    if not shards.on_host:
        return 0.0
    cluster = cost.cluster
    ranks = {cluster.nodes[cluster.node_index(rank)].pcie: rank for rank in shards.ranks}
    return max(cost.host_transfer_seconds(rank, num_bytes) for rank in ranks.values())


def _wait_in_order(
    waits: Floats, op_s: Floats, spans: list[tuple[int, int]], gathers: list[float], root_s: float
) -> list[float]:
    """Add the wait of each unit for its gather at the unit's first op; return the end of each unit, in seconds.

    ``op_s`` is in the order in which ops run; ``spans`` are the indices of the first and last op of each unit in it.
    """
    reached = np.concatenate([[0.0], np.cumsum(op_s)])
    ends: list[float] = []
    # The root unit is gathered before the first op.
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
