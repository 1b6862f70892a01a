"""Check and describe how a plan assigns stages to ranks, as a schedule requires it (`Seats`); columns for orders.

A *position* is the index of a rank within its pipeline, from 0. Unless every rank has a single stage (`sit_alone`),
every stage must have the same number of replicas, and the r-th replicas of all stages form a pipeline of their own.
`OrderColumns` and `RankOrders` hold the computations of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.spec import Placement, Plan, PlanError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderColumns:
    """Computations in order, as columns of shape (n,): kind, stage and microbatch of each.

    ``opcode`` is one of `spec.instructions.COMPUTATIONS`. ``joint``: the computation runs together with the next one.
    Neither of the two begins before both can begin, and their results are sent when both are done.
    """

    opcode: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joint: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.opcode)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrderColumns) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__
        )

    __hash__ = None  # type: ignore[assignment]

    def table(self) -> NDArray[np.int32]:
        """Return rows of opcode, stage and microbatch, shape (n, 3)."""
        return np.stack([self.opcode.astype(np.int32), self.stage, self.microbatch], axis=1)

    def select(self, places: NDArray[np.int64] | NDArray[np.bool_] | slice) -> OrderColumns:
        """Return the computations at the given indices, in a slice, or where a mask is true."""
        return OrderColumns(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankOrders:
    """The computations of all ranks, concatenated: rank r has ``offsets[r]:offsets[r + 1]`` of ``columns``."""

    offsets: NDArray[np.int64]
    columns: OrderColumns

    def split(self) -> tuple[OrderColumns, ...]:
        """Return one `OrderColumns` per rank."""
        return tuple(self.columns.select(slice(*ends)) for ends in pairwise(self.offsets.tolist()))

    def later(self, shift: int) -> RankOrders:
        """Return the same orders with ``shift`` added to every microbatch number."""
        if not shift:
            return self
        return replace(self, columns=replace(self.columns, microbatch=self.columns.microbatch + np.int32(shift)))

    def select(self, kept: NDArray[np.bool_]) -> RankOrders:
        """Return the orders with only the computations for which the mask ``kept``, of shape (n,), is true."""
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return RankOrders(offsets=offsets, columns=self.columns.select(kept))


NamedSchedule = Callable[[Plan], RankOrders]
ORDER_WRITERS: dict[str, NamedSchedule] = {}


def writes_orders(name: str) -> Callable[[NamedSchedule], NamedSchedule]:
    """Return a decorator that registers a function as the writer of a schedule's orders.

    ``name`` must be a schedule of `spec.schedules.NAMED_SCHEDULES`.
    """

    def register(function: NamedSchedule) -> NamedSchedule:
        assert name not in ORDER_WRITERS, f"two functions for {name}"
        ORDER_WRITERS[name] = function
        return function

    return register


def make_columns(opcode: ArrayLike, stage: ArrayLike, microbatch: ArrayLike, joint: ArrayLike = False) -> OrderColumns:
    """Return `OrderColumns` of the given computations; a single ``stage`` or ``joint`` is used for all rows."""
    kinds = np.asarray(opcode, np.int8)
    return OrderColumns(
        opcode=kinds,
        stage=np.broadcast_to(np.asarray(stage, np.int32), kinds.shape),
        microbatch=np.asarray(microbatch, np.int32),
        joint=np.broadcast_to(np.asarray(joint, np.bool_), kinds.shape),
    )


def gather_columns(rows: Iterable[tuple[int, ...]]) -> OrderColumns:
    """Return the given rows (opcode, stage, microbatch) as columns.

    A row may have a fourth number: 1 if the computation runs together with the next one (`OrderColumns.joint`).
    """
    table = np.array(list(rows), np.int32)
    return make_columns(*table.reshape(len(table), -1).T) if len(table) else make_columns((), (), ())


def join_ranks(orders: Iterable[OrderColumns]) -> RankOrders:
    """Concatenate the orders of all ranks, given by ascending rank."""
    given = tuple(orders)
    columns = OrderColumns(
        **{
            name: np.concatenate([getattr(order, name) for order in given])
            for name in OrderColumns.__dataclass_fields__
        }
    )
    return RankOrders(offsets=np.cumsum([0, *map(len, given)]), columns=columns)


Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """One rank of a pipeline: its position, 0 to ``num_positions`` - 1, its stages and its microbatches, in order."""

    position: int
    num_positions: int
    stages: tuple[int, ...]
    microbatches: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seats:
    """Position, stages and microbatches of every rank.

    ``positions`` has shape (ranks,), with values of 0 to ``num_positions`` - 1. ``stages`` has shape (ranks, stages per
    rank). Rank r computes ``counts[r]`` microbatches: ``firsts[r]``, ``firsts[r] + steps[r]`` and so on.
    """

    positions: Ids
    num_positions: int
    stages: NDArray[np.int32]
    firsts: Ids
    steps: Ids
    counts: Ids

    def of(self, rank: int) -> Seat:
        """Return position, stages and microbatches of one rank."""
        first, step, count = (int(column[rank]) for column in (self.firsts, self.steps, self.counts))
        return Seat(
            position=int(self.positions[rank]),
            num_positions=self.num_positions,
            stages=tuple(self.stages[rank].tolist()),
            microbatches=np.arange(first, first + step * count, step, dtype=np.int32),
        )


def local_microbatches(plan: Plan, stage: int, rank: int) -> range | tuple[int, ...]:
    """Return the microbatches that ``rank`` computes of ``stage``, one of its stages, in order."""
    own = plan.stages[stage]
    return own.microbatches_of(own.ranks.index(rank), plan.num_microbatches)


def stays_on_rank(plan: Plan | Placement, source: int, target: int) -> bool:
    """Return whether two stages compute every microbatch on the same rank, so that nothing is sent between them.

    Raises PlanError if this holds for some microbatches only.
    """
    stages = [plan.stages[stage] for stage in (source, target)]
    ranks = [stage.ranks for stage in stages]
    if set(ranks[0]).isdisjoint(ranks[1]):
        return False
    turns = [stage.turns for stage in stages]
    if ranks[0] == ranks[1] and turns[0] == turns[1]:
        return True
    period = min(lcm(*map(len, turns)), plan.num_microbatches)
    shared = {plan.stages[source].rank_of(m) == plan.stages[target].rank_of(m) for m in range(period)}
    if shared == {True, False}:
        raise PlanError(
            f"Stages {source} and {target} compute some microbatches on the same rank and some on different ones "
            f"({list(ranks[0])[:8]} and {list(ranks[1])[:8]}); expected all or none. Give both the same ranks, in the "
            "same order."
        )
    return shared == {True}


def num_active(plan: Plan, stage: int) -> int:
    """Return the microbatches that a replica of ``stage`` has in flight: PipeDream's number of active minibatches.

    This is ceil((R_s + R_(s+1) + …) / R_s) with R_s replicas of stage s, and p - s in a pipeline of p stages without
    replicas; with that number a pipeline of balanced stages never waits. Where stages form branches, the sum goes along
    the path to the end with the most ranks. Where replicas have ``shares``, the result is the largest number of any
    replica of the stage.
    """
    return int(active_counts(plan)[stage])


@lru_cache(maxsize=64)
def active_counts(plan: Plan) -> Ids:
    """Return `num_active` of every stage, shape (stages,)."""
    if plan.has_shares:
        total = plan.num_microbatches
        own = [stage.counts(total) for stage in plan.stages]
        pairs = [zip(widths, counts, strict=True) for widths, counts in zip(find_windows(plan), own, strict=True)]
        return np.array([max(-(-width * count // total) for width, count in pair) for pair in pairs], np.int64)
    ahead = [0] * len(plan.stages)
    for stage in reversed(range(len(plan.stages))):
        later = max((ahead[target] for target in plan.feeds(stage)), default=0)
        ahead[stage] = len(plan.stages[stage].ranks) + later
    return np.array([-(-count // len(stage.ranks)) for count, stage in zip(ahead, plan.stages, strict=True)], np.int64)


def find_windows(plan: Plan) -> list[list[int]]:
    """Return, by stage and replica, the window of microbatches in flight of plans whose replicas have shares.

    A replica runs the forward of microbatch m before the backward of b if m - b is below its window (`chunked`).
    """
    count = plan.num_microbatches
    counts = [stage.counts(count) for stage in plan.stages]
    # Along the longest path where stages form branches.
    widest, behind = [0] * len(plan.stages), [0] * len(plan.stages)
    for stage in reversed(range(len(plan.stages))):
        behind[stage] = max((widest[target] for target in plan.feeds(stage)), default=0)
        widest[stage] = -(-count // min(counts[stage])) + behind[stage]
    return [[count // own + behind[stage] for own in counts[stage]] for stage in range(len(plan.stages))]


@lru_cache(maxsize=64)
def sit_alone(plan: Plan, *, alike: bool = False) -> Seats:
    """Return the seats of a plan with one stage on every rank.

    Raises PlanError for other plans, and with ``alike`` also if stages have different numbers of replicas.
    """
    check_alone(plan)
    if alike and len({len(stage.ranks) for stage in plan.stages}) > 1:
        raise _wrong(plan, "the same number of replicas for every stage", "Give all stages the same number of ranks")
    return _seat_all(plan, [stage.ranks for stage in plan.stages], [(stage,) for stage in range(len(plan.stages))])


def check_alone(plan: Plan) -> None:
    """Raise PlanError unless the plan has one stage on every rank."""
    if plan.has_virtual_stages:
        raise _wrong(plan, "one stage on every rank", "Give each stage ranks of its own")


def sit_in_turn(plan: Plan) -> Seats:
    """Return the seats of a plan with stages i, i + p, i + 2p, ... on the same ranks.

    Raises PlanError for other plans, or if stages have different numbers of replicas.
    """
    size = _num_positions(plan)
    own = [stage.ranks for stage in plan.stages[:size]]
    if len(plan.stages) % size or any(stage.ranks != own[i % size] for i, stage in enumerate(plan.stages)):
        raise _wrong(
            plan,
            f"stages i and i + {size} on the same ranks, and a number of stages that {size} divides",
            "Assign the stages to the ranks in turn",
        )
    return _seat_all(plan, own, [tuple(range(i, len(plan.stages), size)) for i in range(size)])


def sit_in_a_v(plan: Plan) -> Seats:
    """Return the seats of a plan with stages i and 2p - 1 - i on the same ranks.

    Raises PlanError for other plans, or if stages have different numbers of replicas.
    """
    size = _num_positions(plan)
    ranks = [stage.ranks for stage in plan.stages]
    if len(ranks) != 2 * size or ranks != ranks[::-1]:
        raise _wrong(
            plan,
            f"two stages on every rank, stage i with stage {2 * size - 1} - i",
            "Assign the stages to the ranks in order and then in reverse",
        )
    return _seat_all(plan, ranks[:size], [(i, 2 * size - 1 - i) for i in range(size)])


def sit_both_ways(plan: Plan) -> Seats:
    """Return the seats of a plan with two replicas of every stage, for pipelines in both directions.

    Position i must hold the first replica of stage i and the second replica of stage p - 1 - i; raises PlanError for
    other plans. A seat's microbatches are those of the first replica; the second replica has the microbatch after each.
    """
    size = len(plan.stages)
    pairs = [stage.ranks for stage in plan.stages]
    firsts = [pair[:1] for pair in pairs]
    if size % 2 or any(len(pair) != 2 for pair in pairs) or [pair[1:] for pair in pairs] != firsts[::-1]:
        raise _wrong(
            plan,
            "an even number of stages with two replicas each, the first replica of stage i on the rank of the second "
            "replica of stage p - 1 - i",
            "Let the pipeline run in both directions",
        )
    return _seat_all(plan, firsts, [(i, size - 1 - i) for i in range(size)])


def _num_positions(plan: Plan) -> int:
    """Return the number of positions in each pipeline. Raises PlanError if the numbers of replicas differ."""
    replicas = {len(stage.ranks) for stage in plan.stages}
    if len(replicas) > 1:
        raise _wrong(plan, "the same number of replicas for every stage", "Give all stages the same number of ranks")
    return plan.num_ranks // replicas.pop()


def _seat_all(plan: Plan, ranks: list[tuple[int, ...]], stages: list[tuple[int, ...]]) -> Seats:
    """Return the seats of the ranks at each position with its stages; microbatches go by the replicas of the first."""
    if plan.has_shares:
        raise _wrong(plan, "replicas that take turns, without shares", "Remove the shares")
    sitting = np.concatenate([np.array(own, np.int64) for own in ranks])
    position, replica = (
        np.repeat(np.arange(len(ranks)), [len(own) for own in ranks]),
        np.concatenate([np.arange(len(own)) for own in ranks]),
    )
    order = np.argsort(sitting)
    positions, firsts = position[order], replica[order]
    steps = np.array([len(plan.stages[own[0]].ranks) for own in stages], np.int64)[positions]
    return Seats(
        positions=positions,
        num_positions=len(ranks),
        stages=np.array(stages, np.int32)[positions],
        firsts=firsts,
        steps=steps,
        counts=-(-(plan.num_microbatches - firsts) // steps),
    )


def _wrong(plan: Plan, expected: str, remedy: str) -> PlanError:
    shown = ", ".join(f"{index}: {list(stage.ranks)[:8]}" for index, stage in enumerate(plan.stages[:8]))
    more = ", ..." if len(plan.stages) > 8 else ""
    return PlanError(
        f"The schedule {plan.schedule} was given {len(plan.stages)} stages on ranks {shown}{more}; expected "
        f"{expected}. {remedy}, or choose another schedule."
    )
