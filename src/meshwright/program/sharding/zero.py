"""Collectives of fully sharded data parallelism (ZeRO stage 3; torch's FSDP2): groups of parameters, in order.

Each of the data ranks holds a part of dim 0 of every parameter, padded to equal parts. The parameters of a group are
sent together in one flat buffer. The root group has the parameters that no other group holds.

    forward    a group is gathered before its first op. The root group is gathered before all others and is not freed
    backward   before the backward of a group's last op, the group is gathered again if it was freed, and then the next
               group is prefetched. After the backward of its first op, its gradients are reduce-scattered; those of
               the root group at the end

Source: torch 2.13, torch/distributed/fsdp/_fully_shard (`pre_backward`, `_backward_prefetch`, `_root_post_backward`);
tests/program compares it with what torch issues.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.spec import DTYPE_BYTES, FLOAT_DTYPES, Graph, StageSlice

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from meshwright.spec.exchange import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters (tensor ids) that are all-gathered together for the ops ``start:stop`` of a graph.

    ``frozen``: those of the parameters that have no gradients.
    """

    name: str
    start: int
    stop: int
    parameters: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    is_root: bool = False

    @property
    def trained(self) -> tuple[int, ...]:
        """The parameters that have gradients, which are reduce-scattered."""
        return tuple(i for i in self.parameters if i not in self.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollective:
    """An all-gather just before op ``at`` runs in a phase, or a reduce-scatter just after it.

    ``group`` is an index into the groups of `parameter_groups`.
    """

    kind: Literal["all_gather", "reduce_scatter"]
    phase: Phase
    at: int
    group: int


@lru_cache(maxsize=32)
def parameter_groups(graph: Graph) -> tuple[ParameterGroup, ...]:
    """Return the root group, and one group per repeated layer, as FSDP makes them if each block is wrapped, then all.

    A parameter that several layers read belongs to the root group, and so do the parameters of layers that occur once.
    ``graph`` may be the local graph of a sharding.
    """
    repeated = Counter(layer.block for layer in graph.layers)
    homes: dict[int, set[int]] = {}
    for home, layer in enumerate(graph.layers):
        for op in graph.ops[layer.start : layer.stop]:
            for i in op.inputs:
                if graph.tensors[i].role == "parameter":
                    homes.setdefault(i, set()).add(home)
    blocks = [home for home, layer in enumerate(graph.layers) if layer.block and repeated[layer.block] > 1]
    held: dict[int, list[int]] = {home: [] for home in blocks}
    rest: list[int] = []
    for i in graph.parameters:
        mine = homes.get(i, set())
        (held[min(mine)] if len(mine) == 1 and min(mine) in held else rest).append(i)
    outside = set(rest)
    readers = [at for at, op in enumerate(graph.ops) if not outside.isdisjoint(op.inputs)]
    root = _group(graph, "", 0, max(readers, default=len(graph.ops) - 1) + 1, tuple(rest), is_root=True)
    layers = (
        _group(graph, graph.layers[h].name, graph.layers[h].start, graph.layers[h].stop, tuple(held[h])) for h in blocks
    )
    return (root, *(group for group in layers if group.parameters))


def _group(
    graph: Graph, name: str, start: int, stop: int, parameters: tuple[int, ...], *, is_root: bool = False
) -> ParameterGroup:
    frozen = tuple(i for i in parameters if not graph.tensors[i].requires_grad)
    return ParameterGroup(name=name, start=start, stop=stop, parameters=parameters, frozen=frozen, is_root=is_root)


class GatherUnit(NamedTuple):
    """Parameters that are gathered together for some ops of a stage.

    ``first`` and ``last`` (inclusive) are indices into the stage's ops; ``parameters`` are tensor ids.
    """

    first: int
    last: int
    parameters: tuple[int, ...]


def find_units(graph: Graph, stage: StageSlice, kept: Set[int]) -> tuple[GatherUnit, tuple[GatherUnit, ...]]:
    """Return the stage's part of the root group, and its parts of the other groups (`parameter_groups`).

    ``kept``: parameters that replicas do not shard, which are left out.
    """
    place = {op: index for index, op in enumerate(stage.ops)}
    held = set(stage.parameters) - kept
    root, *groups = parameter_groups(graph)
    units = []
    first, last = stage.ops[0], stage.ops[-1]
    for group in groups:
        if group.stop <= first or last < group.start:
            continue
        rows = [place[op] for op in range(group.start, group.stop) if op in place]
        if rows:
            units.append(GatherUnit(rows[0], rows[-1], tuple(i for i in group.parameters if i in held)))
    return GatherUnit(0, len(stage.ops) - 1, tuple(i for i in root.parameters if i in held)), tuple(units)


def fsdp_collectives(groups: tuple[ParameterGroup, ...], *, reshard: bool = True) -> tuple[GroupCollective, ...]:
    """Return all gathers and scatters of one forward and backward, in the order in which they are issued.

    ``groups`` are those of `parameter_groups`. ``reshard``: all groups except the root are freed after their forward.
    """
    order = [index for index, group in enumerate(groups) if group.parameters]
    forward = sorted(order, key=lambda i: (groups[i].start, not groups[i].is_root))
    # The root's forward ends last, so its backward comes first.
    ended = sorted(order, key=lambda i: (groups[i].is_root, groups[i].stop))
    found = [GroupCollective(kind="all_gather", phase="forward", at=groups[i].start, group=i) for i in forward]
    gathered = {i for i in order if groups[i].is_root or not reshard}
    events: list[tuple[int, GroupCollective]] = []
    for place, i in reversed(list(enumerate(ended))):
        group = groups[i]
        for wanted in (i, *ended[max(place - 1, 0) : place]):
            if wanted not in gathered:
                gathered.add(wanted)
                gather = GroupCollective(kind="all_gather", phase="backward", at=group.stop - 1, group=wanted)
                events.append((2 * gather.at + 1, gather))
        if group.trained:
            scatter = GroupCollective(kind="reduce_scatter", phase="backward", at=group.start, group=i)
            events.append((2 * scatter.at - group.is_root, scatter))
    events.sort(key=lambda event: -event[0])
    return (*found, *(collective for _, collective in events))


def padded_bytes(graph: Graph, parameters: Iterable[int], num_ranks: int, float_bytes: int | None = None) -> int:
    """Return the bytes of the flat buffer of parameters, or of their gradients, with an equal part for every rank.

    ``float_bytes``: bytes per floating-point element in the precision in which the buffer is sent; None for the
    precision of each parameter.
    """
    total = 0
    for i in parameters:
        tensor = graph.tensors[i]
        rows = tensor.shape[0].at(0) if tensor.shape else 1
        width = float_bytes if float_bytes is not None and tensor.dtype in FLOAT_DTYPES else DTYPE_BYTES[tensor.dtype]
        per_row = tensor.num_elements(0) // max(rows, 1)
        total += -(-rows // num_ranks) * num_ranks * per_row * width
    return total
