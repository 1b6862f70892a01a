"""The input pipeline: a bounded queue before the first stage, with back-pressure both ways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import build_program
from meshwright.simulator import estimate_program, simulate_plan, simulate_program
from meshwright.spec import Loader, Opcode, PlanError
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.exchanges import layered_plan
from tests.simulator.plans import FixedCost, small_cluster


def with_loader(plan, load_us: float, depth: int):
    loader = Loader(seconds_per_sample=load_us * 1e-6 / plan.microbatch_size, depth=depth)
    return replace(plan, workload=replace(plan.workload, loader=loader))


def step_us(count, forward, backward, load, depth, update, num_steps=30):
    """One rank by a recurrence: the queue, the device, and nothing else."""
    loaded = computed = 0
    taken, ends = [], []
    for _ in range(num_steps):
        for _ in range(count):
            room = taken[len(taken) - depth] if len(taken) >= depth else 0
            loaded = max(loaded, room) + load
            computed = max(computed, loaded) + forward
            taken.append(computed)
            computed += backward
        computed += update
        ends.append(computed)
    return (ends[-1] - ends[-13]) / 12


@settings(max_examples=examples(40))
@given(
    count=st.integers(1, 4),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    load=st.integers(0, 40),
    depth=st.integers(1, 7),
    update=st.integers(0, 5),
)
def test_a_slow_loader_keeps_the_device_waiting(count, forward, backward, load, depth, update):
    graph = chain_graph(1)
    plan = with_loader(make_plan(graph, [(0, 1)], [1], count), load, depth)
    cost = FixedCost(forward=forward * 1e-6, backward=backward * 1e-6, optimizer=update * 1e-6)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost)
    expected = step_us(count, forward, backward, load, depth, update)
    assert result.step_time_s == pytest.approx(expected * 1e-6, rel=1e-9)
    # Two are enough where both take their time evenly: the slower of the two decides.
    if depth > count:
        computed = count * (forward + backward) + update
        assert result.step_time_s == pytest.approx(max(computed, count * load) * 1e-6, rel=1e-9)
    # Loading is no communication.
    assert result.ranks[0].communication_s == 0


@pytest.mark.parametrize("way", [{}, {"across_steps": True}, {"every_steps": 3}, {"zero": 1}])
def test_the_queue_is_never_longer_than_its_depth(way):
    graph, depth = chain_graph(3), 2
    plan = with_loader(layered_plan(graph, 2, num_microbatches=6, **way), 1.0, depth)
    program = build_program(plan, graph)
    check_program(program)
    costs = estimate_program(program, plan, graph, FixedCost(all_reduce=3e-6))
    timeline = simulate_program(program, costs, 3)
    ranks = np.array([track.rank for track in timeline.tracks])[timeline.track]
    for rank in range(2):
        mine = np.flatnonzero(ranks == rank)
        loads = mine[timeline.opcode[mine] == Opcode.LOAD]
        forwards = mine[(timeline.opcode[mine] == Opcode.FORWARD) & (timeline.stage[mine] == 0)]
        assert timeline.microbatch[loads].tolist() == timeline.microbatch[forwards].tolist()
        assert (timeline.end_ps[loads] <= timeline.start_ps[forwards]).all()
        # In the step in which the training begins, the queue fills; then a load waits for room.
        room = timeline.end_ps[forwards[:-depth]]
        assert (timeline.start_ps[loads[depth:]] >= room).all()


def test_only_ranks_that_read_inputs_load():
    graph = chain_graph(2)
    plan = with_loader(make_plan(graph, [(0, 1), (1, 2)], [2, 1], 4), 1.0, 2)
    program = build_program(plan, graph)
    names = {(stream.rank, stream.name) for stream in program.streams}
    assert {rank for rank, name in names if name == "load"} == {0, 1}


@pytest.mark.parametrize(("seconds", "depth"), [(-1.0, 2), (float("nan"), 2), (float("inf"), 1), (1.0, 0)])
def test_a_loader_that_cannot_be_is_refused(seconds, depth):
    with pytest.raises(PlanError, match="A loader with"):
        Loader(seconds_per_sample=seconds, depth=depth)
