"""Where a rank's time goes, against a look at every half microsecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_plan
from meshwright.simulator.simulation import rank_seconds
from meshwright.spec import Opcode
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import FixedCost, small_cluster

US = 1_000_000  # ps
BACKWARDS = (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)


def looked_at(timeline, rank, window):
    """Seconds by name, of the spans that are under way in the middle of each microsecond."""
    counts = dict.fromkeys(("forward", "backward", "optimizer", "communication", "exchange", "idle"), 0)
    counts |= dict.fromkeys(("exposed_communication", "exposed_exchange"), 0)
    for moment in range(window[0] + US // 2, window[1], US):
        on = np.flatnonzero((timeline.start_ps <= moment) & (moment < timeline.end_ps))
        mine = [i for i in on.tolist() if timeline.tracks[timeline.track[i]].rank == rank]
        compute = [timeline.opcode[i] for i in mine if timeline.tracks[timeline.track[i]].name == "compute"]
        moves = [timeline.opcode[i] for i in mine if timeline.tracks[timeline.track[i]].name != "compute"]
        counts["forward"] += Opcode.FORWARD in compute
        counts["backward"] += any(opcode in compute for opcode in BACKWARDS)
        counts["optimizer"] += Opcode.OPTIMIZER_STEP in compute
        counts["communication"] += bool(moves)
        counts["exchange"] += Opcode.ALL_REDUCE in moves
        counts["exposed_communication"] += bool(moves) and not compute
        counts["exposed_exchange"] += Opcode.ALL_REDUCE in moves and not compute
        counts["idle"] += not compute
    return counts


@settings(max_examples=30)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    replicas=st.integers(1, 2),
    send=st.integers(1, 6),
    all_reduce=st.integers(1, 9),
    cut=st.integers(0, 30),
)
def test_seconds_are_those_that_one_sees(schedule, replicas, send, all_reduce, cut):
    graph = chain_graph(6)
    plan = make_plan(graph, even_bounds(6, 3), [replicas] * 3, 3 * replicas, schedule=schedule)
    cost = FixedCost(send=send * 1e-6, all_reduce=all_reduce * 1e-6, optimizer=3e-6)
    timeline = simulate_plan(plan, graph, small_cluster(), cost=cost).timeline
    # Parts of backwards may be half microseconds: only what is cut there is lost.
    window = (cut * US, int(timeline.end_ps.max()) // US * US)
    for rank, found in enumerate(rank_seconds(timeline, window)):
        for name, count in looked_at(timeline, rank, window).items():
            assert getattr(found, f"{name}_s") == pytest.approx(count * 1e-6, abs=1e-12), name
