"""Schedules: the order in which each rank computes, as data; nothing is executed here.

A named schedule is a function of a plan that returns the computations of all ranks as columns. Each schedule requires
that stages are assigned to ranks in a certain way (`seats`), with p ranks per pipeline. Replica r of a stage with R
replicas computes the microbatches r, r + R, ..., or those of its share if the plan has ``shares``.

    chunked          gpipe, 1f1b, zb-h1, zb-h2     one stage on a rank
                     interleaved, looped-bfs       stages i, i + p, i + 2p, ... on the ranks of stage i
    bidirectional    zb-v, dualpipe-v, dualpipe    two stages on a rank, counted from both ends
    asynchronous     pipedream, pipedream-vertical, pipedream-2bw, hetpipe    one stage on a rank; besides
                     the order, weight versions that are stashed and dropped

A user's own schedules yield typed instructions: `own_schedules` finds the schedule, `orders` checks its instructions.
"""

from __future__ import annotations

from meshwright.program.schedules import bidirectional, chunked  # noqa: F401 - they register functions
from meshwright.program.schedules.asynchronous import minibatches_per_update, num_filling_steps
from meshwright.program.schedules.seats import (
    ORDER_WRITERS,
    NamedSchedule,
    OrderColumns,
    RankOrders,
    local_microbatches,
    num_active,
    stays_on_rank,
)
from meshwright.spec.schedules import NAMED_SCHEDULES

# The function that writes the orders of each synchronous schedule.
SCHEDULES: dict[str, NamedSchedule] = {
    name: ORDER_WRITERS[name] for name, facts in NAMED_SCHEDULES.items() if not facts.is_asynchronous
}

__all__ = [
    "SCHEDULES",
    "NamedSchedule",
    "OrderColumns",
    "RankOrders",
    "local_microbatches",
    "minibatches_per_update",
    "num_active",
    "num_filling_steps",
    "stays_on_rank",
]
