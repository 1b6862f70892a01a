"""The kernels of ops that are compiled together (`fuse_unit`), and the values saved for their backward (`kept_values`).

The backward recomputes all values that are not saved. As in torch, the saved values are a minimum cut of the graph of
values, between the forward and the values that only the backward makes. Cutting at a value costs its bytes, weighted by
its distance from the backward, and doubled if the value would not be stored otherwise. Some values are never
recomputed: products, reductions to less than a quarter of the bytes, values that the backward stores, and values that
are read before and after such a value (torch 2.13, torch/_functorch/partitioners.py, solve_min_cut).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.fusion.fused_kernels import FusedKernel, fuse
from meshwright.cost.fusion.inductor_lowering import lower
from meshwright.cost.fusion.written_values import (
    EXTERNS,
    ORDERED,
    REDUCTIONS,
    VIEWS,
    Device,
    FusedValue,
    Written,
    write_unit,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from meshwright.cost.autocast import Widths
    from meshwright.spec import Graph
    from meshwright.spec.precision import Numbers


_SEEN_THROUGH = VIEWS | {ORDERED}
_RECOMPUTED = frozenset({"point", "copy", "gather", "fill"}) | REDUCTIONS | _SEEN_THROUGH
# Sorts that the cut assumes to be fused with their readers, or with their inputs: including outputs of a kernel with
# several.
_GIVES, _TAKES = _RECOMPUTED | {"random", "part"}, _RECOMPUTED | {"random", "part"}
_FAR = 10**9
# solve_min_cut: outputs smaller than the inputs by this factor are kept; the weight of each step from the backward.
_REDUCES, _FARTHER, _FARTHEST = 4, 1.1, 100


def kept_values(written: Written) -> set[int]:
    """Return the indices of the values that are saved for the backward, including parameters and inputs of the unit."""
    return _Cut(written).solve()


class _Cut:
    def __init__(self, written: Written) -> None:
        self.values, self.leaving = written.values, frozenset(written.forward_yields)
        self.users: list[list[int]] = [[] for _ in self.values]
        for index, value in enumerate(self.values):
            for source in dict.fromkeys(value.inputs):
                self.users[source].append(index)
        count = len(self.values)
        self.late = written.is_late()
        self.early = [False] * count
        todo = [i for i in written.forward_yields if not self.late[i]]
        while todo:
            index = todo.pop()
            if not self.early[index]:
                self.early[index] = True
                todo += self.values[index].inputs
        for index, value in enumerate(self.values):
            self.early[index] |= value.sort == "given" and not value.backward
        self.distance = [0] * count
        for index in reversed(range(count)):
            if self.early[index]:
                self.distance[index] = min((self.distance[user] + 1 for user in self.users[index]), default=_FAR)

    def solve(self) -> set[int]:
        """Return the indices of the values at which the minimum cut runs."""
        flow = Flow(2 * len(self.values) + 2)
        source, sink = 2 * len(self.values), 2 * len(self.values) + 1
        banned = self._banned()
        for index, value in enumerate(self.values):
            if self.late[index]:
                flow.add(2 * index, sink, math.inf)
                continue
            if index in banned:
                flow.add(source, 2 * index, math.inf)
            flow.add(2 * index, 2 * index + 1, self._weight(index, value))
            for user in self.users[index]:
                flow.add(2 * index + 1, 2 * user, math.inf)
        behind = flow.cut(source, sink)
        return {
            index
            for index in range(len(self.values))
            if not self.late[index] and 2 * index not in behind and 2 * index + 1 in behind
        }

    def _weight(self, index: int, value: FusedValue) -> float:
        if value.parameter:
            return 0.0
        if value.sort in ("several", "random", ORDERED):
            return math.inf
        near = max(min(self.distance[index], _FARTHEST), 1)
        stored = value.sort == "given" or not all(self._fusible(index, user) for user in self.users[index])
        return float(int(value.num_bytes * _FARTHER**near) * (1 if stored else 2))

    def _fusible(self, first: int, second: int) -> bool:
        if self.values[second].sort == "cat":
            return True
        return self.values[first].sort in _GIVES and self.values[second].sort in _TAKES

    def _banned(self) -> set[int]:
        found = {i for i, value in enumerate(self.values) if value.sort == "given" or value.sort in EXTERNS}
        for index, value in enumerate(self.values):
            if self.early[index] and value.sort not in _SEEN_THROUGH and self._dear(index, value):
                found.add(index)
        for index in range(len(self.values)):
            if self.early[index]:
                self._ban_far_readers(index, found)
        return found

    def _dear(self, index: int, value: FusedValue) -> bool:
        """Return whether a value is not recomputed."""
        if value.sort not in _RECOMPUTED or self._stored_later(index):
            return True
        return value.num_bytes * _REDUCES < sum(self.values[i].num_bytes for i in dict.fromkeys(value.inputs))

    def _stored_later(self, index: int) -> bool:
        """Return whether a value leaves the unit, or a kernel of the backward needs it, or a view of it, in memory."""
        todo = [index]
        while todo:
            current = todo.pop()
            if current in self.leaving:
                return True
            for user in self.users[current]:
                if not self.early[user] and not self._fusible(current, user):
                    return True
                if self.values[user].sort in _SEEN_THROUGH:
                    todo.append(user)
        return False

    def _ban_far_readers(self, index: int, banned: set[int]) -> None:
        """Ban the recomputation of a value's readers that come after a kernel that is not fused."""
        readers = [user for user in self.users[index] if self.early[user]]
        if not readers:
            return
        limit = self._first_unfused(readers, max(readers))
        for user in readers:
            if user > limit and self._fusible(index, user) and self.values[user].sort not in _SEEN_THROUGH:
                banned.add(user)

    def _first_unfused(self, readers: list[int], last: int) -> int:
        heap = [(user, True) for user in readers]
        heapq.heapify(heap)
        seen = set(heap)
        while heap:
            index, fused = heapq.heappop(heap)
            if not fused:
                return index
            for user in self.users[index]:
                item = (user, self._fusible(index, user))
                if self.early[user] and user <= last and item not in seen:
                    seen.add(item)
                    heapq.heappush(heap, item)
        return last


class Flow:
    """A directed graph with edge capacities, for a maximum flow by shortest augmenting paths (Dinic's algorithm)."""

    def __init__(self, num_nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(num_nodes)]
        self.to: list[int] = []
        self.left: list[float] = []

    def add(self, start: int, end: int, capacity: float) -> None:
        """Add an edge with a capacity, and the reverse edge with capacity 0."""
        for origin, target, amount in ((start, end, capacity), (end, start, 0.0)):
            self.edges[origin].append(len(self.to))
            self.to.append(target)
            self.left.append(amount)

    def cut(self, source: int, sink: int) -> set[int]:
        """Return the nodes on the sink's side of a minimum cut: those that reach the sink after a maximum flow."""
        while (levels := self._levels(source, sink)) is not None:
            places = [0] * len(self.edges)
            while self._push(source, sink, levels, places):
                pass
        reached, todo = {sink}, [sink]
        while todo:
            node = todo.pop()
            for edge in self.edges[node]:
                if self.left[edge ^ 1] > 0 and self.to[edge] not in reached:
                    reached.add(self.to[edge])
                    todo.append(self.to[edge])
        return reached

    def _levels(self, source: int, sink: int) -> list[int] | None:
        levels = [-1] * len(self.edges)
        levels[source] = 0
        todo = deque([source])
        while todo:
            node = todo.popleft()
            for edge in self.edges[node]:
                if self.left[edge] > 0 and levels[self.to[edge]] < 0:
                    levels[self.to[edge]] = levels[node] + 1
                    todo.append(self.to[edge])
        return levels if levels[sink] >= 0 else None

    def _push(self, source: int, sink: int, levels: list[int], places: list[int]) -> float:
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min(self.left[edge] for edge in path)
                for edge in path:
                    self.left[edge] -= amount
                    self.left[edge ^ 1] += amount
                return amount
            while places[node] < len(self.edges[node]):
                edge = self.edges[node][places[node]]
                if self.left[edge] > 0 and levels[self.to[edge]] == levels[node] + 1:
                    break
                places[node] += 1
            else:
                if not path:
                    return 0.0
                levels[node] = -1
                node = self.to[path.pop() ^ 1]
                continue
            path.append(edge)
            node = self.to[edge]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedUnit:
    """The kernels of ops that are compiled together, forward and backward, each in launch order."""

    forward: tuple[FusedKernel, ...]
    backward: tuple[FusedKernel, ...]


def fuse_unit(
    graph: Graph,
    start: int,
    stop: int,
    batch_size: int,
    numbers: Numbers,
    widths: Widths,
    later: frozenset[int],
    device: Device = "cuda",
) -> FusedUnit:
    """Return the kernels of the ops ``start:stop`` of a graph, compiled together.

    ``later``: ids of tensors made by these ops that ops after ``stop`` or the graph's outputs need.
    """
    written = write_unit(graph, start, stop, batch_size, numbers, widths, later, device)
    values, late, leaving = written.values, written.is_late(), written.forward_yields
    kept = kept_values(written) if written.backward_yields else set()
    kept |= {i for i, value in enumerate(values) if value.sort == ORDERED and value.inputs[0] in kept and not late[i]}
    given = {i for i, value in enumerate(values) if value.sort == "given"}
    own = [i for i in sorted(kept - given) if i < written.num_forward or values[i].sort != ORDERED]
    yields = list(dict.fromkeys([*leaving, *own]))
    order = _order(values, yields, given, range(written.num_forward))
    forward = fuse(values, *lower(values, order, given, yields, device, leaving), start, device, backward=False)
    held, yields = given | set(own), list(dict.fromkeys(written.backward_yields))
    order = _order(values, yields, held, [i for i, is_late in enumerate(late) if is_late])
    backward = fuse(values, *lower(values, order, held, yields, device), start, device, backward=True)
    return FusedUnit(forward=forward, backward=backward)


def _order(
    values: Sequence[FusedValue], wanted: Sequence[int], held: Collection[int], first: Sequence[int]
) -> list[int]:
    """Return the values to make for the wanted ones: those of ``first`` in order, each right before it is needed."""
    needed: set[int] = set()
    todo = [i for i in wanted if i not in held]
    while todo:
        index = todo.pop()
        if index not in needed:
            needed.add(index)
            todo += [i for i in values[index].inputs if i not in held]
    found: dict[int, None] = {}
    for index in (*(i for i in first if i in needed), *sorted(needed)):
        todo = [index]
        while todo:
            missing = [i for i in values[todo[-1]].inputs if i in needed and i not in found]
            if missing:
                todo += reversed(missing)
            else:
                found.setdefault(todo.pop())
    return list(found)
