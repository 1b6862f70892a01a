"""Schedules: the order in which each rank computes. They yield data; nothing is executed here.

A named schedule is a function plan → the computations of all ranks as columns. It needs a layout (`seats`): where
the stages lie, and with how many replicas. Replica r of a stage with R replicas has the microbatches r, r + R, ...,
or in `shares` those of its share.

    chunked          gpipe, 1f1b, zb-h1, zb-h2     one stage on a rank
                     interleaved, looped-bfs       stages i, i + p, i + 2p, ... on the ranks of stage i
    bidirectional    zb-v, dualpipe-v, dualpipe    two stages on a rank, counted from both ends
    asynchronous     pipedream, pipedream-vertical, pipedream-2bw, hetpipe    one stage on a rank; besides
                     the order, weight versions that are stashed and dropped

A user's own schedules yield typed instructions: `own_schedules` finds them, `orders` checks what they yield.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from meshwright.program.schedules.asynchronous import minibatches_per_update, num_filling_steps
from meshwright.program.schedules.bidirectional import dualpipe, dualpipe_v, zb_v
from meshwright.program.schedules.chunked import (
    gpipe,
    interleaved,
    looped_breadth_first,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
)
from meshwright.program.schedules.seats import OrderColumns, RankOrders, local_microbatches, num_active, stays_on_rank
from meshwright.spec import Plan
from meshwright.spec.plan import ScheduleName, SynchronousName

LayoutKind = Literal["single", "in turn", "v", "bidirectional"]
NamedSchedule = Callable[[Plan], RankOrders]

SCHEDULES: dict[SynchronousName, NamedSchedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved": interleaved,
    "looped-bfs": looped_breadth_first,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}

# The layout of a plan's stages for each schedule; see `seats`.
SCHEDULE_LAYOUTS: dict[ScheduleName, LayoutKind] = {
    "gpipe": "single",
    "1f1b": "single",
    "zb-h1": "single",
    "zb-h2": "single",
    "interleaved": "in turn",
    "looped-bfs": "in turn",
    "zb-v": "v",
    "dualpipe": "bidirectional",
    "dualpipe-v": "v",
    "pipedream": "single",
    "pipedream-vertical": "single",
    "pipedream-2bw": "single",
    "hetpipe": "single",
}

__all__ = [
    "SCHEDULES",
    "SCHEDULE_LAYOUTS",
    "NamedSchedule",
    "OrderColumns",
    "RankOrders",
    "local_microbatches",
    "minibatches_per_update",
    "num_active",
    "num_filling_steps",
    "stays_on_rank",
]
