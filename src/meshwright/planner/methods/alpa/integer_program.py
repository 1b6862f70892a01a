"""Alpa's integer program: choose one strategy per group of ops, and convert tensors between groups; HiGHS solves it.

    minimise    Σ_v s_v · c_v  +  Σ_t z_t · R_t                                    (Alpa, section 4.2, eq. 1-5)
    subject to  Σ_k s_v[k] = 1                                     s_v[k] ∈ {0, 1}
                Σ_w e_r[h, w] = Σ of s_u[k] that lay t out as h    e_r ∈ [0, 1]
                Σ_h e_r[h, w] = Σ of s_v[k] that read t as w
                z_t[h, w] ≥ e_r[h, w] for every reader r of t
                Σ_v s_v · m_v + Σ_t z_t · m_t ≤ memory             if memory is limited

v is a group of ops (node) with costs c_v (seconds) and m_v (bytes) per strategy; s_v chooses its strategy. t is a
tensor, u the node that produces it, r one of its readers (for v); h and w are the layouts it has and a reader wants,
and R_t the seconds of conversions. There are two differences from Alpa. Alpa's e has a row and a column per strategy;
here they are per layout, because the cost of a conversion depends on the layouts only. Readers of a tensor in the same
layout share one conversion (z), as in the executed program, whereas Alpa charges each reader. A reader in the same
group as the producer needs no e: its z follows from s.
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
    """A node of the program, a group of ops: seconds per step and bytes per device of its K strategies, shape (K,)."""

    seconds: Floats
    memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedTensor:
    """One tensor, the node that produces it, and the nodes that read it; layouts are given by index.

    ``have[k]`` is the layout in which node ``producer`` leaves the tensor under its strategy k. ``readers`` are pairs
    of a node and an array: the layout that it needs under each of its strategies. ``seconds`` and ``memory_bytes`` of
    the conversion from each layout to each have shape (layouts of the producer, layouts of readers).
    """

    producer: int
    have: Integers
    readers: tuple[tuple[int, Integers], ...]
    seconds: Floats
    memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySolution:
    """The solution: ``chosen`` is the index of the strategy of each node, ``objective_s`` their total seconds.

    ``bound_s`` is a proven lower bound of the objective. ``status`` is the status that HiGHS reports.
    """

    chosen: tuple[int, ...]
    objective_s: float
    bound_s: float
    status: str
    num_variables: int
    num_constraints: int


class ProgramColumns:
    """The columns (variables) and rows (constraints) of the integer program for `meshwright.solving.minimise`."""

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
        """Solve the program within ``deadline_s`` seconds; return it, and the chosen strategy of each node.

        Raises NoFeasiblePlanError if no choice fits into memory, or if the time ends before a solution is found.
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
                f"No placements were found in {deadline_s:g} s; the solver HiGHS reports {found.status!r}. If it is "
                "infeasible, memory does not suffice: raise the limit or use a larger mesh; if time ended, allow more."
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
    """Choose one strategy per node with the least total seconds; HiGHS proves optimality unless the time ends.

    ``memory_limit_bytes`` is per device, None for no limit. Raises NoFeasiblePlanError if no choice fits into memory,
    MeshwrightError if highspy is not installed.
    """
    return ProgramColumns(nodes, tensors, memory_limit_bytes).solve(deadline_s)[0]
