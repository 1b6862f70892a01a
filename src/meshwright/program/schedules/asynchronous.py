"""Asynchronous schedules: every rank continues with the next minibatch while older ones are in flight.

Here a microbatch of the plan is called a *minibatch*, as in the papers. A step of the plan, with its M =
``num_microbatches`` minibatches, is one repetition of the program's body. Stage s has R_s replicas, each with k_s =
`num_active` minibatches in flight; a replica computes its local minibatches j = 0, 1, ... in the order

    F(0) ... F(k_s - 1),  then for each j:  B(j), update if due, F(j + k_s)

so that u = max(0, j - k_s + 1) of its backwards are done when F(j) begins. F(j) and B(j) use the same version of the
weights; version v is the result of v updates. If an update comes between F(j) and B(j), a copy of the version is kept
(`Stash`) from the update until the last backward that needs the copy (`Drop`).

    schedule              update                   version of minibatch m = j R_s + r at stage s
    pipedream             every R_s minibatches    max(0, j - k_s + 1): the newest
    pipedream-vertical    the same                 max(0, m // R_e - k_e + 1) R_e // R_s: at all stages the one with
                                                   which m entered the pipeline (vertical sync)
    pipedream-2bw         every M minibatches      max(0, m // M - 1)
    hetpipe               every minibatch, and     u + max(0, u // n - D) with n = M / R and u of the first stage: all
                          a merge of each wave     stages have the version with which j entered the pipeline

In `hetpipe` the r-th replicas of all stages are a *virtual worker*, which updates its own weights. Every n of its
minibatches form a wave. After a wave the wave's updates are summed over the virtual workers, and as soon as wave c is
done, the changes that the other workers made in wave c - D are merged into the weights (D is the plan's ``staleness``).
So a virtual worker is at most D waves ahead of another, and a minibatch lacks the updates of at most
(D + 1) n + k_0 - 2 earlier minibatches of another worker; HetPipe's own waves have n = k_0, its s_local + 1.

e is the stage with the most minibatches (k_e - 1) R_e between an update and its use: the first one, unless stages have
different numbers of replicas and another one waits longer.

Sources: Narayanan et al., PipeDream (SOSP 2019, section 3.3), and Memory-Efficient Pipeline-Parallel DNN Training
(ICML 2021, 2006.09503, section 3.1) for 2BW, double-buffered weights; Park et al., HetPipe (ATC 2020, 2005.14038) for
waves, with an all-reduce in place of its parameter servers, which lets the same minibatches begin.

W = M (ceil(max(k_s R_s) / M) + D) minibatches, with D = 0 without waves, run in the prologue. From then on, each
repetition of the body uses the versions of the repetition before, increased by the same number, so that all repetitions
are alike. W more minibatches follow in the epilogue, until all minibatches have left the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.program.schedules.seats import OrderColumns, make_columns, num_active, sit_alone
from meshwright.spec import Opcode, Plan, PlanError
from meshwright.spec.exchange import WAVES
from meshwright.spec.instructions import COMPUTATIONS

Ids = NDArray[np.int64]
# (plan, stage, replica, local minibatches) → the version of the weights that each of them uses.
Versions = Callable[[Plan, int, int, Ids], Ids]

PROLOGUE, BODY, EPILOGUE = 0, 1, 2
# What may happen in one turn of a rank, in this order.
_BACKWARD, _DROP, _STASH, _STEP, _MERGE, _FORWARD = range(6)
_OPCODES = np.array(
    [Opcode.BACKWARD, Opcode.DROP, Opcode.STASH, Opcode.OPTIMIZER_STEP, Opcode.MERGE, Opcode.FORWARD], np.int8
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndlessOrder:
    """The order of a rank in a run with the body once: computations, updates, and copies of weights.

    All columns have shape (n,). ``microbatch`` is -1 except for computations; ``version`` is the version of the
    weights; ``section`` is `PROLOGUE`, `BODY` or `EPILOGUE`.
    """

    stage: int
    opcode: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    version: NDArray[np.int32]
    section: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.opcode)

    def computations(self) -> OrderColumns:
        """Return only the forwards and backwards, without updates and copies."""
        chosen = np.isin(self.opcode, COMPUTATIONS)
        return make_columns(self.opcode[chosen], self.stage, self.microbatch[chosen])


def endless_order(plan: Plan, rank: int) -> EndlessOrder:
    """Return the order of a rank under an asynchronous schedule.

    Raises PlanError if the schedule does not support the plan's stages, replicas or number of microbatches, and for
    inference.
    """
    seat = sit_alone(plan).of(rank)
    _check(plan)
    versions_of, per_update = _RULES[plan.schedule]
    stage, period, ahead = seat.position, plan.num_microbatches, num_active(plan, seat.position)
    replicas = plan.stages[stage].ranks
    fill = _fill(plan)
    count = (2 * fill + period) // len(replicas)
    local = np.arange(count)
    versions = versions_of(plan, stage, replicas.index(rank), local)
    turn = per_update(plan, stage)
    updated_in = (np.arange(count // turn) + 1) * turn - 1
    merged_in = _merges(plan, stage, count)
    # Updates and merges make versions in the order of their turns, a merge after the update of its turn.
    made_in = np.sort(np.concatenate([updated_in, merged_in]), kind="stable")
    updates, merges = np.searchsorted(made_in, updated_in), np.searchsorted(made_in, merged_in, side="right") - 1
    last_use = np.full(len(made_in) + 1, -1, np.int64)
    np.maximum.at(last_use, versions, local)
    kept = np.flatnonzero(last_use[:-1] > made_in)
    # Turn and place in it; the forwards before the first turn have turn -1.
    rows = [
        (local, _BACKWARD, local, versions),
        (last_use[kept], _DROP, None, kept),
        (made_in[kept], _STASH, None, kept),
        (updated_in, _STEP, None, updates),
        (merged_in, _MERGE, None, merges),
        (np.maximum(local - ahead, -1), _FORWARD, local, versions),
    ]
    turns = np.concatenate([row[0] for row in rows])
    places = np.concatenate([np.full(len(row[0]), row[1]) for row in rows])
    minibatches = np.concatenate([np.full(len(row[0]), -1) if row[2] is None else row[2] for row in rows])
    version = np.concatenate([row[3] for row in rows])
    order = np.lexsort([minibatches, places, turns])
    first, stop = fill // len(replicas), (fill + period) // len(replicas)
    minibatches, turns = minibatches[order], turns[order]
    return EndlessOrder(
        stage=stage,
        opcode=_OPCODES[places[order]],
        microbatch=np.where(minibatches < 0, -1, minibatches * len(replicas) + replicas.index(rank)).astype(np.int32),
        version=version[order].astype(np.int32),
        section=((turns >= first).astype(np.int8) + (turns >= stop)).astype(np.int8),
    )


def minibatches_per_update(plan: Plan, stage: int) -> int:
    """Return after how many minibatches a stage updates its weights; a synchronous schedule: after all microbatches."""
    if not plan.is_asynchronous:
        return plan.num_microbatches
    turns = _RULES[plan.schedule][1](plan, stage)
    # Virtual workers update independently; other replicas together.
    return turns if plan.schedule == WAVES else turns * len(plan.stages[stage].ranks)


def num_filling_steps(plan: Plan) -> int:
    """Return how many global batches an asynchronous schedule needs to fill and empty the pipeline.

    No run is shorter. Returns 0 for synchronous schedules.
    """
    return 2 * _fill(plan) // plan.num_microbatches if plan.is_asynchronous else 0


def _fill(plan: Plan) -> int:
    """Return W: the minibatches that run before the body, which is also the number that enter after it."""
    under_way = max(num_active(plan, stage) * len(item.ranks) for stage, item in enumerate(plan.stages))
    return (-(-under_way // plan.num_microbatches) + plan.exchange.staleness) * plan.num_microbatches


def _merges(plan: Plan, stage: int, count: int) -> Ids:
    """Return the turns, of ``count``, in which waves are merged: the last turns of the waves from the D-th on."""
    if plan.schedule != WAVES or len(plan.stages[stage].ranks) == 1:
        return np.zeros(0, np.int64)
    wave = _every_step(plan, stage)
    return np.arange(plan.exchange.staleness, count // wave) * wave + wave - 1


def _newest(plan: Plan, stage: int, replica: int, local: Ids) -> Ids:  # noqa: ARG001 - the signature of all rules
    return np.maximum(local - num_active(plan, stage) + 1, 0)


def _at_entry(plan: Plan, stage: int, replica: int, local: Ids) -> Ids:
    # The stage that is furthest behind determines the version of all stages: the first one, if replicas are equal.
    entry = max(range(len(plan.stages)), key=lambda s: (num_active(plan, s) - 1) * len(plan.stages[s].ranks))
    own, first = len(plan.stages[stage].ranks), len(plan.stages[entry].ranks)
    entered = np.maximum((local * own + replica) // first - num_active(plan, entry) + 1, 0)
    return entered * first // own


def _one_behind(plan: Plan, stage: int, replica: int, local: Ids) -> Ids:  # noqa: ARG001 - the signature of all rules
    return np.maximum(local // _every_step(plan, stage) - 1, 0)


def _with_waves(plan: Plan, stage: int, replica: int, local: Ids) -> Ids:  # noqa: ARG001 - the signature of all rules
    updated: Ids = np.maximum(local - num_active(plan, 0) + 1, 0)
    if len(plan.stages[stage].ranks) == 1:
        return updated
    return updated + np.maximum(updated // _every_step(plan, stage) - plan.exchange.staleness, 0)


def _every_turn(plan: Plan, stage: int) -> int:  # noqa: ARG001 - the signature of all rules
    return 1


def _every_step(plan: Plan, stage: int) -> int:
    return plan.num_microbatches // len(plan.stages[stage].ranks)


# Versions of minibatches, and the number of a replica's backwards after which an update is due.
_RULES: dict[str, tuple[Versions, Callable[[Plan, int], int]]] = {
    "pipedream": (_newest, _every_turn),
    "pipedream-vertical": (_at_entry, _every_turn),
    "pipedream-2bw": (_one_behind, _every_step),
    "hetpipe": (_with_waves, _every_turn),
}


def _check(plan: Plan) -> None:
    if plan.workload.kind == "inference":
        raise PlanError(
            f"The schedule {plan.schedule} was given for inference, where weights never change. Choose 1f1b: without "
            "backwards, its pipeline stays full."
        )
    replicas = [len(stage.ranks) for stage in plan.stages]
    if plan.schedule == WAVES and len(set(replicas)) > 1:
        raise PlanError(
            f"The schedule {plan.schedule} was given stages with {', '.join(map(str, replicas))} replicas; expected "
            "the same number of each, because the replicas of all stages form virtual workers. Choose equal replicas."
        )
    for index, stage in enumerate(plan.stages):
        if plan.num_microbatches % len(stage.ranks):
            raise PlanError(
                f"The schedule {plan.schedule} was given {plan.num_microbatches} microbatches for the "
                f"{len(stage.ranks)} replicas of stage {index}; expected a multiple, because replicas update their "
                f"weights together. Choose a multiple of {len(stage.ranks)} microbatches, or another schedule."
            )
        if plan.schedule == "pipedream-2bw" and num_active(plan, index) * len(stage.ranks) > plan.num_microbatches:
            raise PlanError(
                f"The schedule {plan.schedule} was given {plan.num_microbatches} microbatches between two updates, "
                f"while {num_active(plan, index) * len(stage.ranks)} are in flight at stage {index}; two versions of "
                "the weights suffice only if there are at least as many microbatches between updates as in flight. "
                "Choose more microbatches."
            )
