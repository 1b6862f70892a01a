"""Waits of a stage's ops for copies of activations to and from the host, and when the copies may begin.

The activations of each unit u of a stage (some layers, `cost.memory.away`) are copied down to the host in d_u seconds
and up to the device in p_u seconds, one unit after the other in each direction.

    forward     the copy of u begins when u has ended and the copy of the unit before has ended; unit u + 2 and the end
                of the stage's forward wait for the copy
    backward    the first copy up begins with the stage's backward; the copy for u begins together with the unit of the
                copy before, but not before that copy has ended; u begins when its copy has ended

The timeline shows the copies themselves (`program.host_offload`); this module computes the part of their time that is
not hidden behind computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import Away, as_kept, backend_of, find_away
from meshwright.spec import DeviceKind, Graph, Opcode, Placement, Plan, Section, StageSlice
from meshwright.spec.instructions import SAVED_COPIES

if TYPE_CHECKING:
    from meshwright.simulator.span_parts import SpanParts

Floats = NDArray[np.float64]


class SavedCopies(NamedTuple):
    """The units of a stage whose activations are copied to the host.

    By unit: the indices of its ``first`` and ``last`` op within the stage, and the seconds of its copies down and up.
    """

    away: Away
    first: tuple[int, ...]
    last: tuple[int, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]


def find_copies(
    graph: Graph, plan: Plan | Placement, stage: StageSlice, kind: DeviceKind, cost: CostModel, ranks: Sequence[int]
) -> SavedCopies | None:
    """Return the copies of a stage's saved activations between device and host, for the kind of device of ``ranks``.

    If ranks have different links to their hosts, the slowest link counts. Returns None if activations stay on the
    device.
    """
    if isinstance(plan, Placement) or plan.offload.activations == "device":
        return None
    kept = as_kept(graph, plan.workload.numbers, backend_of(kind))
    away = find_away(kept, stage, plan.microbatch_size, plan.workload.float_bytes, backend_of(kind))
    ops = np.array(stage.ops, np.int64)
    ends = np.searchsorted(ops, [unit.stop for unit in away.units])
    first = (0, *ends[:-1].tolist()) if len(ends) else ()
    links = {cost.cluster.nodes[cost.cluster.node_index(rank)].pcie: rank for rank in ranks}

    def seconds(num_bytes: int) -> float:
        return max(cost.host_transfer_seconds(rank, num_bytes) for rank in links.values()) if num_bytes else 0.0

    return SavedCopies(
        away=away,
        first=tuple(first),
        last=tuple((ends - 1).tolist()),
        down_s=tuple(seconds(unit.down_bytes) for unit in away.units),
        up_s=tuple(seconds(unit.up_bytes) for unit in away.units),
    )


def saved_waits(copies: SavedCopies | None, forward_s: Floats, backward_s: Floats) -> tuple[Floats, Floats]:
    """Return the seconds for which each op of a stage waits for copies, in a forward and in a backward.

    ``forward_s`` and ``backward_s`` are the ops' own seconds; all arrays have shape (ops,).
    """
    forward, backward = np.zeros(len(forward_s)), np.zeros(len(backward_s))
    if copies is None or not copies.away.values:
        return forward, backward
    now = down = 0.0
    ended = [0.0, 0.0]
    for first, last, down_s in zip(copies.first, copies.last, copies.down_s, strict=True):
        forward[first] += max(ended[-2] - now, 0.0)
        now = max(now, ended[-2]) + float(forward_s[first : last + 1].sum())
        down = max(down, now) + down_s if down_s else down
        ended.append(down)
    forward[-1] += max(down - now, 0.0)
    now, coming = 0.0, copies.away.coming
    up = copies.up_s[coming[0]]
    for number in reversed(range(len(copies.first))):
        first, last = copies.first[number], copies.last[number]
        if number in coming:
            backward[last] += max(up - now, 0.0)
            began, now = now, max(now, up)
            after = coming[coming.index(number) + 1 :][:1]
            up = max(began, up) + copies.up_s[after[0]] if after else up
        now += float(backward_s[first : last + 1].sum())
    return forward, backward


class EstimatedCopies:
    """The activation copies of all stages on all ``kinds`` of devices; ``ranks`` lists the ranks of each stage."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan | Placement,
        stages: Sequence[StageSlice],
        kinds: Sequence[DeviceKind],
        ranks: Sequence[Sequence[int]],
        cost: CostModel,
    ) -> None:
        self._copies = [
            [find_copies(graph, plan, stage, kind, cost, own) for kind in kinds]
            for stage, own in zip(stages, ranks, strict=True)
        ]
        self._shape = 2, len(stages), len(kinds), len(graph.layers)

    def moved_bytes(self, section: Section, kind: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``section.num_bytes``, with the bytes of activation copies replaced.

        For these, the bytes that the kernels of each rank's kind of device save are used; ``kind`` is the index of that
        kind, by instruction.
        """
        rows = np.flatnonzero(np.isin(section.opcode, SAVED_COPIES))
        if not len(rows):
            return section.num_bytes
        num_bytes = np.zeros(self._shape, np.int64)
        for stage, of_kinds in enumerate(self._copies):
            for number, copies in enumerate(of_kinds):
                for unit in copies.away.units if copies else ():
                    num_bytes[:, stage, number, unit.layer] = unit.down_bytes, unit.up_bytes
        comes = (section.opcode[rows] == Opcode.SAVED_UP).astype(np.int64)
        moved = section.num_bytes.copy()
        moved[rows] = num_bytes[comes, section.stage[rows], kind[rows], section.peer[rows]]
        return moved

    def find_part(self, parts: SpanParts, stage: int, kind: int, opcode: int, mark: int) -> int:
        """Return the index of the part of a forward or backward after which the copy of a layer may begin.

        ``mark`` is -1 - the number of that layer. The first part is the host's own work; the copy for the first unit of
        a backward may begin after it.
        """
        copies = self._copies[stage][kind]
        assert copies is not None, "marks of layers are those of copies"
        number = [unit.layer for unit in copies.away.units].index(-1 - mark)
        if opcode == Opcode.FORWARD:
            return int(np.flatnonzero(parts.number == copies.last[number])[0])
        place = copies.away.coming.index(number) if number in copies.away.coming else 0
        return int(np.flatnonzero(parts.number == copies.last[copies.away.coming[place - 1]])[0]) - 1 if place else 0
