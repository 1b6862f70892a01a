"""Schedules of bidirectional pipelines: every rank holds a stage near each end of the model.

    zb-v         stages i and 2p - 1 - i on position i, backwards in two parts        Qi et al., 2024 (2405.15362), ZB-V
    dualpipe     two replicas of every stage, microbatches enter from both ends       DeepSeek-V3 report (2412.19437)
    dualpipe-v   half of dualpipe, folded like zb-v                                   deepseek-ai/DualPipe, README

The table gives the steps of DualPipe for a rank at distance d from the outer end of P positions (in dualpipe: P is half
of all positions), with c microbatches in each direction. Chunk 0 is the rank's stage nearer to its own end, chunk 1 the
other. F is a forward, B a whole backward, I a backward's part for inputs, W its part for weights:

    1  (P - d - 1)·2    F0                  5  P - d - 1    B1, then (F1 B0)
    2  d + 1            F0 F1               6  d + 1        B1 B0, from the middle on in two parts
    3  P - d - 1        I1 W F1             7  P - d - 1    W I0
    4  c - 2P + d + 1   (F0 B1) (F1 B0)        8  d + 1        W

Computations in brackets run together (`OrderColumns.joint`): DeepSeek's implementation overlaps the computation of one
with the communication of the other. At the turning point (d = P - 1), the first forward of step 4 runs alone, because
no backward is ready to overlap with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from meshwright.program.schedules.seats import (
    OrderColumns,
    RankOrders,
    Seat,
    gather_columns,
    join_ranks,
    sit_both_ways,
    sit_in_a_v,
    writes_orders,
)
from meshwright.spec import Opcode, Plan, PlanError

Row = tuple[Opcode, int, int]
# The same, and whether it runs together with the next one.
JointRow = tuple[Opcode, int, int, bool]


@writes_orders("zb-v")
def zb_v(plan: Plan) -> RankOrders:
    """Return the orders of the zero-bubble V schedule (ZB-V), which needs about the memory of 1f1b."""
    seats = sit_in_a_v(plan)
    return join_ranks(_zb_v_of(seats.of(rank)) for rank in range(plan.num_ranks))


def _zb_v_of(seat: Seat) -> OrderColumns:
    mine = seat.microbatches.tolist()
    size, position = seat.num_positions, seat.position
    # Orders are those of at least 2p - 1 microbatches, without the microbatches that do not exist.
    count = max(2 * size - 1, len(mine))
    rows = _zb_v(size, position, count)
    return gather_columns((opcode, seat.stages[chunk], mine[m]) for opcode, chunk, m in rows if m < len(mine))


def _zb_v(size: int, position: int, count: int) -> Iterator[Row]:
    """Yield (opcode, chunk, microbatch), as in torch's ScheduleZBVZeroBubble."""
    done = {(opcode, chunk): 0 for opcode in Opcode for chunk in (0, 1)}

    def next_of(opcode: Opcode, chunk: int) -> Row:
        done[opcode, chunk] += 1
        return opcode, chunk, done[opcode, chunk] - 1

    def whole(chunk: int) -> Iterator[Row]:
        yield next_of(Opcode.BACKWARD_INPUT, chunk)
        yield next_of(Opcode.BACKWARD_WEIGHT, chunk)

    for _ in range(2 * (size - position) - 1):
        yield next_of(Opcode.FORWARD, 0)
    for _ in range(position):
        yield next_of(Opcode.FORWARD, 1)
        yield next_of(Opcode.FORWARD, 0)
    for _ in range(size - position):
        yield next_of(Opcode.FORWARD, 1)
        yield from whole(1)
    while done[Opcode.FORWARD, 1] < done[Opcode.FORWARD, 0] or done[Opcode.FORWARD, 0] < count:
        if done[Opcode.FORWARD, 0] < count:
            yield next_of(Opcode.FORWARD, 0)
        yield from whole(0)
        yield next_of(Opcode.FORWARD, 1)
        yield from whole(1)
    for _ in range(position):
        yield next_of(Opcode.BACKWARD_INPUT, 0)
        yield next_of(Opcode.BACKWARD_INPUT, 1)
    for _ in range(size - position):
        yield next_of(Opcode.BACKWARD_INPUT, 0)
        yield next_of(Opcode.BACKWARD_WEIGHT, 0)
    for chunk in (1, 0):
        while done[Opcode.BACKWARD_WEIGHT, chunk] < done[Opcode.BACKWARD_INPUT, chunk]:
            yield next_of(Opcode.BACKWARD_WEIGHT, chunk)


@writes_orders("dualpipe-v")
def dualpipe_v(plan: Plan) -> RankOrders:
    """Return the orders of DualPipe-V, DualPipe folded in two.

    Raises PlanError for fewer than 2p microbatches per replica, with p ranks in a pipeline.
    """
    seats = sit_in_a_v(plan)
    return join_ranks(_dualpipe_v_of(plan, seats.of(rank)) for rank in range(plan.num_ranks))


def _dualpipe_v_of(plan: Plan, seat: Seat) -> OrderColumns:
    mine = seat.microbatches.tolist()
    _require(plan, len(mine), 2 * seat.num_positions)
    rows = _dualpipe(seat.num_positions, seat.position, len(mine))
    return gather_columns((opcode, seat.stages[chunk], mine[m], joint) for opcode, chunk, m, joint in rows)


@writes_orders("dualpipe")
def dualpipe(plan: Plan) -> RankOrders:
    """Return the orders of DualPipe, where microbatches enter from both ends.

    Raises PlanError for fewer than 2p microbatches, with p stages, or an odd number of them.
    """
    seats = sit_both_ways(plan)
    _require(plan, plan.num_microbatches, 2 * seats.num_positions, even=True)
    return join_ranks(_dualpipe_of(plan, seats.of(rank)) for rank in range(plan.num_ranks))


def _dualpipe_of(plan: Plan, seat: Seat) -> OrderColumns:
    half = seat.num_positions // 2
    # The first replicas have the even microbatches, the second ones the odd; near the far end the roles are swapped.
    swapped = seat.position >= half
    distance = seat.num_positions - 1 - seat.position if swapped else seat.position
    rows = _dualpipe(half, distance, plan.num_microbatches // 2)
    return gather_columns(
        (opcode, seat.stages[chunk ^ swapped], 2 * m + (chunk ^ swapped), joint) for opcode, chunk, m, joint in rows
    )


def _dualpipe(size: int, distance: int, count: int) -> Iterator[JointRow]:
    """Yield (opcode, chunk, microbatch, joint) of the steps in the module's table."""
    turn = _Turn()
    inner = size - distance - 1
    for _ in range(2 * inner):
        yield turn.forward(0)
    for _ in range(distance + 1):
        yield turn.forward(0)
        yield turn.forward(1)
    for _ in range(inner):
        yield turn.inputs(1)
        yield turn.weights()
        yield turn.forward(1)
    for step in range(count - 2 * size + distance + 1):
        yield turn.forward(0, joint=step > 0 or inner > 0)
        yield turn.backward(1)
        yield turn.forward(1, joint=True)
        yield turn.backward(0)
    for _ in range(inner):
        yield turn.backward(1)
        yield turn.forward(1, joint=True)
        yield turn.backward(0)
    # All backwards of steps 5 and 6, of chunk 1 and 0 in turn; the later half of them in two parts.
    whole = 2 * ((distance + 1) // 2) + (distance + 1) % 2
    for place in range(2 * (distance + 1)):
        chunk = 1 - place % 2
        yield turn.backward(chunk) if place < whole else turn.inputs(chunk)
    for _ in range(inner):
        yield turn.weights()
        yield turn.inputs(0)
    for _ in range(distance + 1):
        yield turn.weights()


class _Turn:
    """Counts the next microbatch of each chunk, and queues the deferred gradients of weights."""

    def __init__(self) -> None:
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._owed: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int, *, joint: bool = False) -> JointRow:
        self._forwards[chunk] += 1
        return Opcode.FORWARD, chunk, self._forwards[chunk] - 1, joint

    def backward(self, chunk: int, opcode: Opcode = Opcode.BACKWARD) -> JointRow:
        self._backwards[chunk] += 1
        return opcode, chunk, self._backwards[chunk] - 1, False

    def inputs(self, chunk: int) -> JointRow:
        row = self.backward(chunk, Opcode.BACKWARD_INPUT)
        self._owed.append(row[1:3])
        return row

    def weights(self) -> JointRow:
        return Opcode.BACKWARD_WEIGHT, *self._owed.popleft(), False


def _require(plan: Plan, count: int, least: int, *, even: bool = False) -> None:
    if count < least or (even and count % 2):
        raise PlanError(
            f"The schedule {plan.schedule} was given {count} microbatches for a replica; expected "
            f"{'an even number, ' if even else ''}at least {least} to fill both directions. Choose more microbatches, "
            "or another schedule."
        )
