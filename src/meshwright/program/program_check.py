"""Check that the orders of all ranks can run to their end together (`play_orders`); draw schedules.

Orders are played with a fixed time per computation and without transfers. A forward needs the forwards that feed its
stage, a backward the backwards of the stages that its stage feeds, on the rank that computes the microbatch. Either
ranks wait for each other in a cycle, or all computations end. Transfers and gradient sums add no cycles, because a rank
receives in the order in which its partner sends, and sums after its last backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.program.order_bounds import Order
from meshwright.program.orders import compute_orders
from meshwright.spec import DeadlockError, Opcode, Plan, PlanError, Stream, Timeline, instruction_name

# As in papers: a backward takes twice the time of a forward, each of its two parts the time of a forward.
SLOTS: Mapping[int, int] = {
    Opcode.FORWARD: 1,
    Opcode.BACKWARD: 2,
    Opcode.BACKWARD_INPUT: 1,
    Opcode.BACKWARD_WEIGHT: 1,
}
# More than any screen shows; playing them takes seconds and hundreds of megabytes.
MAX_PICTURED = 500_000

# (backward?, stage) → the stages whose computations of the same kind and microbatch must be done before.
Needs = Callable[[bool, int], Sequence[int]]
# (backward?, stage, microbatch) of what other computations may need; none needs gradients of weights.
_Key = tuple[bool, int, int]
_Row = tuple[int, int, int]


def play_orders(
    plan: Plan, orders: Sequence[Order], needs: Needs, slots: Mapping[int, int] = SLOTS
) -> list[list[tuple[int, int]]]:
    """Return, by rank, (start, end) of each of its computations, in slots, if each runs as early as possible.

    ``needs(backward, stage)`` gives the stages that must have computed the same microbatch before; ``slots`` the time
    of each opcode. Raises DeadlockError, which names the cycle, if ranks wait for each other.
    """
    return _Play(plan, orders, needs, slots).run()


def picture_schedule(plan: Plan) -> Timeline:
    """Return the plan's schedule as papers draw it: a forward takes one slot, a backward two, transfers none.

    The times of the timeline (``start_ps``, ``end_ps``) are slots, not ps. No graph is needed: every stage feeds the
    next stage, or those that `Plan.feeds` returns. Raises the errors of `compute_orders`, DeadlockError if the ranks
    wait for each other in a cycle, and PlanError for more than `MAX_PICTURED` instructions.
    """
    count = 2 * plan.num_microbatches * len(plan.stages)
    if count > MAX_PICTURED:
        raise PlanError(
            f"The plan has {count:,} forwards and backwards, but at most {MAX_PICTURED:,} can be drawn. Draw a plan "
            "with fewer microbatches, or simulate this plan."
        )
    orders = compute_orders(plan)
    if plan.workload.kind == "inference":
        orders = tuple(without_backwards(order, np.zeros(len(plan.stages), np.bool_)) for order in orders)
    after = [plan.feeds(stage) for stage in range(len(plan.stages))]
    before = [[source for source, targets in enumerate(after) if stage in targets] for stage in range(len(after))]

    def needs(backward: bool, stage: int) -> Sequence[int]:
        return after[stage] if backward else before[stage]

    spans = play_orders(plan, orders, needs)
    table = np.concatenate([order.columns.table() for order in orders])
    times = np.array([span for each in spans for span in each], np.int64).reshape(-1, 2)
    nothing = np.zeros(len(times), np.int64)
    return Timeline(
        origin="predicted",
        num_ranks=plan.num_ranks,
        tracks=tuple(Stream(rank=order.rank, name="compute") for order in orders),
        track=np.repeat(np.arange(len(orders)), [len(order) for order in orders]).astype(np.int32),
        opcode=table[:, 0].astype(np.int8),
        stage=table[:, 1],
        microbatch=table[:, 2],
        peer=np.full(len(times), -1, np.int32),
        step=nothing.astype(np.int32),
        num_bytes=nothing,
        start_ps=times[:, 0],
        end_ps=times[:, 1],
        memory_rank=np.zeros(0, np.int32),
        memory_time_ps=np.zeros(0, np.int64),
        memory_bytes=np.zeros(0, np.int64),
    )


def without_backwards(order: Order, differentiated: NDArray[np.bool_]) -> Order:
    """Return the order without the backwards of stages that need no backward.

    ``differentiated``, of shape (stages,), is True for stages that have a backward.
    """
    kept = np.flatnonzero((order.columns.opcode == Opcode.FORWARD) | differentiated[order.columns.stage])
    lines, places = (
        tuple(told[place] for place in kept.tolist()) if told else () for told in (order.lines, order.places)
    )
    return Order(rank=order.rank, columns=order.columns.select(kept), lines=lines, places=places)


class _Play:
    def __init__(self, plan: Plan, orders: Sequence[Order], needs: Needs, slots: Mapping[int, int]) -> None:
        self._plan, self._orders, self._needs, self._slots = plan, orders, needs, slots
        self._rows: list[list[_Row]] = [list(map(tuple, order.columns.table().tolist())) for order in orders]
        self._spans: list[list[tuple[int, int]]] = [[] for _ in orders]
        self._done: dict[_Key, int] = {}
        self._waiting: dict[_Key, list[int]] = {}

    def run(self) -> list[list[tuple[int, int]]]:
        ready = deque(range(len(self._orders)))
        while ready:
            rank = ready.popleft()
            rows, spans = self._rows[rank], self._spans[rank]
            while len(spans) < len(rows):
                together = self._together(rank)
                keys = [key for row in together for key in self._keys(row)]
                missing = next((key for key in keys if key not in self._done), None)
                if missing is not None:
                    self._waiting.setdefault(missing, []).append(rank)
                    break
                end = max([spans[-1][1] if spans else 0, *(self._done[key] for key in keys)])
                for row in together:
                    spans.append((end, end + self._slots[row[0]]))
                    end += self._slots[row[0]]
                for opcode, stage, microbatch in together:
                    if opcode != Opcode.BACKWARD_WEIGHT:
                        key = (opcode != Opcode.FORWARD, stage, microbatch)
                        self._done[key] = end
                        ready.extend(self._waiting.pop(key, ()))
        stuck = [rank for rank, rows in enumerate(self._rows) if len(self._spans[rank]) < len(rows)]
        if stuck:
            raise self._deadlock(stuck)
        return self._spans

    def _together(self, rank: int) -> list[_Row]:
        """Return the next computation of a rank, and those that run together with it."""
        first = last = len(self._spans[rank])
        while self._orders[rank].columns.joint[last]:
            last += 1
        return self._rows[rank][first : last + 1]

    def _keys(self, row: _Row) -> list[_Key]:
        opcode, stage, microbatch = row
        if opcode == Opcode.BACKWARD_WEIGHT:
            return []
        backward = opcode != Opcode.FORWARD
        return [(backward, peer, microbatch) for peer in self._needs(backward, stage)]

    def _deadlock(self, stuck: list[int]) -> DeadlockError:
        """Return the error: every stuck rank waits for a stuck rank, so follow from the first until one repeats."""
        path: list[int] = []
        rank = stuck[0]
        while rank not in path:
            path.append(rank)
            rank = self._awaited(rank)[1]
        lines = "; ".join(self._describe(each) for each in path[path.index(rank) :])
        return DeadlockError(
            f"{self._plan.schedule} can never finish: {len(stuck)} of {len(self._orders)} ranks wait for each other in "
            f"a cycle, or for a rank in it: {lines}. Change the order of these instructions in the schedule."
        )

    def _awaited(self, rank: int) -> tuple[_Key, int]:
        keys = (key for row in self._together(rank) for key in self._keys(row))
        missing = next(key for key in keys if key not in self._done)
        return missing, self._plan.stages[missing[1]].rank_of(missing[2])

    def _describe(self, rank: int) -> str:
        order, place = self._orders[rank], len(self._spans[rank])
        (backward, stage, microbatch), other = self._awaited(rank)
        here = instruction_name(*self._rows[rank][place], -1)
        there = instruction_name(Opcode.BACKWARD if backward else Opcode.FORWARD, stage, microbatch, -1)
        return f"rank {rank} waits before {here}{order.where(self._plan, place)}, which needs {there} of rank {other}"
