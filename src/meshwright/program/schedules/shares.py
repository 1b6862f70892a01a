"""GPipe and 1F1B where replicas have shares of the microbatches: windows in place of counts.

With equal replicas 1F1B keeps so many microbatches of a replica in flight. Where replica r of stage s computes m_r of M
microbatches, one is due every M / m_r microbatches, and it runs

    forward of m before backward of b  if  m - b < w_r = floor(M / m_r) + q        q = Σ stages behind max ceil(M / m_r)

that is, while b is on its way through the stages behind and back, and none of their replicas is waited for. With equal
shares this is PipeDream's number of active minibatches. No order of such ranks can wait in a circle: let forwards of
microbatch m happen at m, backwards at m + w_r; then w_r of a stage is above q, and no w_r of the next one is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.program.schedules.columns import OrderColumns, RankOrders, join_ranks, make_columns
from meshwright.program.schedules.layouts import check_alone
from meshwright.spec.instructions import Opcode
from meshwright.spec.plan import Plan


def write_windows(plan: Plan, windows: Sequence[Sequence[int]]) -> RankOrders:
    """The orders of all ranks. Raises PlanError for several stages on a rank."""
    check_alone(plan)
    orders: dict[int, OrderColumns] = {}
    for index, stage in enumerate(plan.stages):
        for replica, rank in enumerate(stage.ranks):
            own = np.array(stage.microbatches_of(replica, plan.num_microbatches), np.int32)
            # A backward comes before the forward that no longer belongs to its window.
            order = np.argsort(np.concatenate([own, own + (windows[index][replica] - 0.5)]), kind="stable")
            opcode = np.repeat((Opcode.FORWARD, Opcode.BACKWARD), len(own))
            orders[rank] = make_columns(opcode[order], index, np.tile(own, 2)[order])
    return join_ranks(orders[rank] for rank in range(plan.num_ranks))
