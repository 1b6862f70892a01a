"""The integer program: one strategy per group, and conversions of the tensors between them, solved by HiGHS.

    minimise    Σ_v s_v · c_v  +  Σ_t z_t · R_t                                    (Alpa, section 4.2, eq. 1-5)
    subject to  Σ_k s_v[k] = 1                                     s_v[k] ∈ {0, 1}
                Σ_w e_r[h, w] = Σ of s_u[k] that lay t out as h    e_r ∈ [0, 1]
                Σ_h e_r[h, w] = Σ of s_v[k] that read t as w
                z_t[h, w] ≥ e_r[h, w] for every reader r of t
                Σ_v s_v · m_v + Σ_t z_t · m_t ≤ memory             if memory is limited

It differs from Alpa's in two ways. Alpa's e has a row and a column per strategy; here they are per layout, because the
cost of a conversion depends on nothing else. And z: readers of a tensor in the same layout share its conversion, as in
the executed program, whereas Alpa charges each. A reader of the same group has no e: its z follows from s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.methods.alpa.mesh import Floats, Integers
from meshwright.solving import SparseRows, minimise
from meshwright.spec import NoFeasiblePlanError

# Microseconds keep costs well above the solver's tolerances.
_SCALE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyNode:
    """Seconds and bytes of each strategy of a group, shape (K,)."""

    seconds: Floats
    memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedTensor:
    """One tensor and its readers: node ``producer`` lays it out as layout ``have[k]`` under its strategy k.

    ``readers`` are nodes, each with the layout that it needs under each of its strategies. ``seconds`` and
    ``memory_bytes`` of a conversion have shape (haves, wants).
    """

    producer: int
    have: Integers
    readers: tuple[tuple[int, Integers], ...]
    seconds: Floats
    memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySolution:
    """The strategy of each node. ``bound_s``: no choice costs less, proven. ``status``: as reported by HiGHS."""

    chosen: tuple[int, ...]
    objective_s: float
    bound_s: float
    status: str
    num_variables: int
    num_constraints: int


class ProgramColumns:
    """Columns and rows of the program, appended array by array."""

    def __init__(
        self, nodes: Sequence[StrategyNode], tensors: Sequence[RoutedTensor], memory_limit_bytes: float | None
    ) -> None:
        self.nodes = nodes
        sizes = [len(node.seconds) for node in nodes]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.costs = [node.seconds for node in nodes]
        self.bytes = [node.memory_bytes for node in nodes]
        self.num_columns = self.num_binaries = int(self.first[-1])
        self.matrix = SparseRows()
        for v, size in enumerate(sizes):
            row = self.matrix.add(np.ones(1), np.ones(1))
            self.matrix.fill(np.full(size, row), self._strategies(v), 1.0)
        for tensor in tensors:
            self._add_tensor(tensor, limited=memory_limit_bytes is not None)
        if memory_limit_bytes is not None:
            num_bytes = np.concatenate(self.bytes)
            unit = max(memory_limit_bytes, 1.0)
            row = self.matrix.add(np.full(1, -np.inf), np.full(1, memory_limit_bytes / unit))
            at = np.flatnonzero(num_bytes)
            self.matrix.fill(np.full(len(at), row), at, num_bytes[at] / unit)

    def _strategies(self, node: int) -> Integers:
        return np.arange(self.first[node], self.first[node + 1])

    def _columns(self, costs: Floats, num_bytes: Floats) -> Integers:
        columns = np.arange(self.num_columns, self.num_columns + costs.size)
        self.costs.append(costs.ravel())
        self.bytes.append(num_bytes.ravel())
        self.num_columns += costs.size
        return columns.reshape(costs.shape)

    def _add_tensor(self, tensor: RoutedTensor, *, limited: bool) -> None:
        costs = tensor.seconds > 0
        if limited:
            costs |= tensor.memory_bytes > 0
        readers = {(reader, want.tobytes()): (reader, want) for reader, want in tensor.readers}
        if not costs.any():
            return
        if len(readers) == 1:
            ((reader, want),) = readers.values()
            if reader != tensor.producer:
                self._carry(tensor, reader, want, self._columns(tensor.seconds, tensor.memory_bytes))
                return
        shared = self._columns(np.where(costs, tensor.seconds, 0.0), np.where(costs, tensor.memory_bytes, 0.0))
        nothing = np.zeros(costs.shape)
        for reader, want in readers.values():
            if reader == tensor.producer:
                # A node's own strategy decides both the tensor's layout and how it is read.
                row = self.matrix.add(np.zeros(costs.size), np.full(costs.size, np.inf))
                self.matrix.fill(row + tensor.have * costs.shape[1] + want, self._strategies(reader), -1.0)
            else:
                carried = self._columns(nothing, nothing)
                self._carry(tensor, reader, want, carried)
                row = self.matrix.add(np.zeros(costs.size), np.full(costs.size, np.inf))
                self.matrix.fill(row + np.arange(costs.size), carried.ravel(), -1.0)
            self.matrix.fill(row + np.arange(costs.size), shared.ravel(), 1.0)

    def _carry(self, tensor: RoutedTensor, reader: int, want: Integers, carried: Integers) -> None:
        """Add rows that tie a reader's conversion to both ends: its sums are the producer's and the reader's layout."""
        haves, wants = carried.shape
        row = self.matrix.add(np.zeros(haves), np.zeros(haves))
        self.matrix.fill(row + np.repeat(np.arange(haves), wants), carried.ravel(), 1.0)
        self.matrix.fill(row + tensor.have, self._strategies(tensor.producer), -1.0)
        row = self.matrix.add(np.zeros(wants), np.zeros(wants))
        self.matrix.fill(row + np.tile(np.arange(wants), haves), carried.ravel(), 1.0)
        self.matrix.fill(row + want, self._strategies(reader), -1.0)

    def solve(self, deadline_s: float) -> tuple[StrategySolution, list[int]]:
        """Solve the program.

        Raises NoFeasiblePlanError if memory does not suffice, or time ends before a solution is found.
        """
        found = minimise(
            np.concatenate(self.costs),
            np.ones(self.num_columns),
            self.matrix,
            np.arange(self.num_columns) < self.num_binaries,
            purpose="Alpa's integer programs are solved",
            deadline_s=deadline_s,
            scale=_SCALE,
        )
        values = found.values
        if values is None:
            raise NoFeasiblePlanError(
                f"No placements were found in {deadline_s:g} s: HiGHS says {found.status!r}. If memory is "
                "limited, raise the limit or use a larger mesh; if time ended, allow more time."
            )
        chosen = [int(values[a:b].argmax()) for a, b in zip(self.first[:-1], self.first[1:], strict=True)]
        solution = StrategySolution(
            chosen=tuple(chosen),
            objective_s=found.objective,
            bound_s=found.bound,
            status=found.status,
            num_variables=self.num_columns,
            num_constraints=self.matrix.count,
        )
        return solution, chosen


def solve_choices(
    nodes: Sequence[StrategyNode],
    tensors: Sequence[RoutedTensor],
    *,
    memory_limit_bytes: float | None = None,
    deadline_s: float = 600.0,
) -> StrategySolution:
    """Return the cheapest choice of a strategy per node; HiGHS on one thread, to proven optimality.

    Raises NoFeasiblePlanError if no choice fits in memory, MeshwrightError without highspy.
    """
    return ProgramColumns(nodes, tensors, memory_limit_bytes).solve(deadline_s)[0]
