"""Sums across groups that share states, in a lane of their own: when they leave, behind what, what errors become."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.program import build_program
from meshwright.runtime import arrange_rank
from meshwright.runtime.transport import Behind, WaitedOnce
from meshwright.simulator import simulate_plan
from meshwright.spec import AllReduce, GradientExchange, Opcode, ReduceScatter
from tests.graphs import chain_graph, make_plan
from tests.simulator.plans import FixedCost, small_cluster

GRAPH = chain_graph(6)


def pairs(**options):
    """Four replicas that share states in pairs, with a bucket per layer."""
    exchange = GradientExchange(zero=1, shard_size=2, bucket_bytes=1, **options)
    return replace(make_plan(GRAPH, [(0, 6)], [4], 8), exchange=exchange)


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_across_groups_leave_with_their_buckets(overlap):
    program = build_program(pairs(overlap=overlap), GRAPH)
    arranged = arrange_rank(program, program.body, 0)
    backward = next(item for item in arranged.computations if item.marked or item.then)
    leaving = backward.marked if overlap else backward.then
    kinds = [type(item.instruction) for item in leaving]
    assert kinds == [ReduceScatter, AllReduce] * 6
    for scatter, across in zip(leaving[::2], leaving[1::2], strict=True):
        assert scatter.instruction.bucket == across.instruction.bucket
        assert across.behind == (scatter.index,)
        assert (scatter.group, across.group) == ((0, 1), (0, 2))
        assert scatter.behind == scatter.awaits == across.awaits == ()


def test_what_all_agree_on_waits_for_sums_across_groups():
    program = build_program(pairs(clip_norm=True), GRAPH)
    arranged = arrange_rank(program, program.body, 0)
    issued = [item for computed in arranged.computations for item in (*computed.marked, *computed.then)]
    sums = {item.index for item in issued if item.behind}
    (agreed,) = [item for item in issued if item.group == (0, 1, 2, 3)]
    assert len(sums) == 6
    assert set(agreed.awaits) == sums
    assert issued.index(agreed) > max(place for place, item in enumerate(issued) if item.index in sums)


def test_sums_across_groups_are_predicted_inside_of_the_backward():
    cost = FixedCost(all_reduce=1e-6)
    early, late = (
        simulate_plan(pairs(overlap=overlap), GRAPH, small_cluster(), cost=cost).timeline for overlap in (True, False)
    )
    for timeline, is_early in ((early, True), (late, False)):
        rank = np.array([track.rank for track in timeline.tracks])[timeline.track]
        last = timeline.end_ps[(timeline.opcode == Opcode.BACKWARD) & (rank == 0)].max()
        across = np.flatnonzero((timeline.opcode == Opcode.ALL_REDUCE) & (rank == 0))
        scatters = np.flatnonzero((timeline.opcode == Opcode.REDUCE_SCATTER) & (rank == 0))
        assert len(across) == len(scatters) == 6
        assert (timeline.start_ps[across] >= timeline.end_ps[scatters]).all()
        assert (timeline.start_ps[across].min() < last) == is_early
    assert early.end_ps.max() < late.end_ps.max()


class Failing:
    def wait(self):
        raise ValueError("the other end is gone")


def test_work_behind_another_raises_what_went_wrong_and_later_work_goes_on(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    behind, done = Behind(torch.device("cpu")), []

    class Noting:
        def wait(self):
            done.append(1)

    work = behind.begin([Failing()], Noting)
    with pytest.raises(ValueError, match="the other end is gone"):
        work.wait()
    assert done == []
    once = WaitedOnce(Noting())
    behind.begin([once], Noting).wait()
    once.wait()
    assert once.ended is not None
    assert done == [1, 1], "one of the work before, which is waited for once, and one of its own"
