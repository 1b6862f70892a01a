"""What bounds a step, and what would help: closed forms, and simulation with other costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import build_program
from meshwright.simulator import (
    Bound,
    estimate_program,
    explain_program,
    explain_step,
    simulate_plan,
    simulate_program,
)
from meshwright.simulator.critical_path import shorten
from meshwright.simulator.simulate import run_unrolled
from meshwright.simulator.unroll import unroll
from meshwright.spec import GradientExchange, Opcode
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.marks import examples
from tests.simulator.builders import random_program
from tests.simulator.plans import FixedCost, small_cluster
from tests.simulator.test_plan import US, free_transfers


def in_ps(seconds: float) -> int:
    return round(seconds * 1e12)


def lever(explanation, name):
    return next(item for item in explanation.levers if item.name == name)


@settings(max_examples=examples(60))
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 16),
    forward=st.integers(1, 9),
    backward=st.integers(1, 20),
)
def test_the_path_of_equal_stages(schedule, num_stages, num_microbatches, forward, backward):
    """(m + p - 1)(f + b), and so much shorter when all computation is."""
    graph = chain_graph(num_stages)
    plan = make_plan(graph, even_bounds(num_stages, num_stages), [1] * num_stages, num_microbatches, schedule=schedule)
    cost = FixedCost(forward=forward * 1e-6, backward=backward * 1e-6)
    program = build_program(plan, graph)
    costs = free_transfers(program, estimate_program(program, plan, graph, cost))
    explained = explain_program(program, costs, ["small"] * num_stages)
    expected = (num_microbatches + num_stages - 1) * (forward + backward) * US
    assert int((explained.path.end_ps - explained.path.start_ps).sum()) == expected
    assert set(explained.path.opcode[explained.path.end_ps > explained.path.start_ps].tolist()) == {
        Opcode.FORWARD,
        Opcode.BACKWARD,
    }
    everything = lever(explained, "small computing")
    assert in_ps(everything.path_s) == expected
    assert in_ps(everything.step_if_shorter_s) == expected * 9 // 10
    assert everything.step_if_free_s == 0.0


@settings(max_examples=examples(60), deadline=None)
@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    num_microbatches=st.integers(3, 12),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    num_nics=st.integers(1, 2),
    send=st.integers(0, 9),
    host=st.sampled_from([0.0, 1e-6]),
    contention=st.sampled_from(["queued", "fair"]),
)
def test_work_adds_up_to_the_step(replicas, num_microbatches, schedule, num_nics, send, host, contention):
    """Kinds of work share the path among them, to the picosecond, and the step is the one of `simulate_plan`."""
    graph = chain_graph(8)
    plan = make_plan(graph, even_bounds(8, len(replicas)), replicas, num_microbatches, schedule=schedule)
    cluster = small_cluster(num_nodes=3, devices=4, num_nics=num_nics)
    cost = FixedCost(cluster=cluster, send=send * 1e-6, all_reduce=4e-6, optimizer=2e-6, host=host)
    explained = explain_step(plan, graph, cluster, cost=cost, contention=contention)
    simulated = simulate_plan(plan, graph, cluster, cost=cost, contention=contention)
    assert explained.step_time_s == simulated.step_time_s
    work = [item for item in explained.levers if item.kind == "work"]
    assert sum(in_ps(item.path_s) for item in work) == in_ps(explained.step_time_s)
    assert explained.bounds[0] is Bound.BEGIN
    assert Bound.BEGIN not in explained.bounds[1:]


@pytest.mark.parametrize("share", [0.9, 0.0])
@settings(max_examples=examples(150))
@given(seed=st.integers(0, 2**31), size=st.integers(1, 25), cheaper=st.integers(0, 5))
def test_shorter_instructions_are_those_of_a_lower_cost(share, seed, size, cheaper):
    program, costs = random_program(seed, size)
    least = int(cheaper >= 3)  # classes with links
    duration_ps = costs.duration_ps.copy()
    duration_ps[cheaper] = max(round(share * int(duration_ps[cheaper])), least)
    sections = {}
    for name, section in program.sections():
        part = getattr(costs, name)
        offsets = part.mark_offset_ps.copy()
        for mark, instruction in enumerate(section.mark_instruction.tolist()):
            if part.cost_class[instruction] == cheaper:
                offsets[mark] = max(round(share * int(offsets[mark])), least)
        sections[name] = replace(part, mark_offset_ps=offsets)
    expected = simulate_program(program, replace(costs, duration_ps=duration_ps, **sections), 2)
    unrolled = unroll(program, costs, 2)
    shorter = shorten(unrolled, unrolled.cost_class == cheaper, share)
    assert run_unrolled(program, shorter, costs.host_ps)[2].tolist() == expected.end_ps.tolist()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("forwards", ("forward",)),
        ("backwards", ("backward",)),
        ("optimizer", ("optimizer",)),
        ("sums of gradients", ("all_reduce",)),
        ("small computing", ("forward", "backward", "optimizer")),
    ],
)
def test_what_would_help_is_what_other_costs_give(name, fields):
    graph = chain_graph(9)
    cluster = small_cluster(num_nodes=2, devices=3)
    plan = make_plan(graph, [(0, 3), (3, 5), (5, 9)], [2, 1, 2], 6, exchange=GradientExchange(bucket_bytes=64))
    cost = FixedCost(cluster=cluster, send=2e-6, all_reduce=7e-6, optimizer=5e-6)
    found = lever(explain_step(plan, graph, cluster, cost=cost), name)
    for share, step_s in ((0.9, found.step_if_shorter_s), (0.0, found.step_if_free_s)):
        cheaper = replace(cost, **{field: share * getattr(cost, field) for field in fields})
        assert step_s == simulate_plan(plan, graph, cluster, cost=cheaper).step_time_s


@pytest.mark.parametrize("bounds", [[(0, 1), (1, 4), (4, 6)], [(0, 3), (3, 4), (4, 6)], [(0, 2), (2, 3), (3, 6)]])
def test_seconds_on_the_path_are_the_derivative(bounds):
    """A thousandth less of a class shortens the step by a thousandth of its seconds on a path that is unique."""
    graph = chain_graph(6)
    plan = make_plan(graph, bounds, [1, 1, 1], 7)
    cost = FixedCost(forward=3.1e-6, backward=5.3e-6, send=1.7e-6, optimizer=0.9e-6)
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, cost)
    explained = explain_program(program, costs, ["small"] * 3)
    total = 0
    for opcode, name in ((Opcode.FORWARD, "forwards"), (Opcode.BACKWARD, "backwards")):
        chosen = np.unique(costs.body.cost_class[program.body.opcode == opcode])
        duration_ps = costs.duration_ps.copy()
        duration_ps[chosen] = np.rint(0.999 * duration_ps[chosen]).astype(np.int64)
        offsets = np.minimum(
            costs.body.mark_offset_ps, duration_ps[costs.body.cost_class[program.body.mark_instruction]]
        )
        cheaper = replace(costs, duration_ps=duration_ps, body=replace(costs.body, mark_offset_ps=offsets))
        gained = explained.step_time_s - float(simulate_program(program, cheaper, 3).step_seconds()[-1])
        assert gained == pytest.approx(lever(explained, name).path_s / 1000, rel=1e-6)
        total += gained
    assert total > 0


def test_waiting_for_a_link_stands_on_the_path():
    """Two replicas send over one NIC at once: the later transfer starts when the other one lets go."""
    graph = chain_graph(2)
    plan = make_plan(graph, even_bounds(2, 2), [2, 2], 2, schedule="gpipe")
    cluster = small_cluster(num_nodes=2, devices=2)
    explained = explain_step(plan, graph, cluster, cost=FixedCost(cluster=cluster, send=4e-6))
    behind = [k for k, bound in enumerate(explained.bounds) if bound is Bound.LINK]
    assert behind
    for k in behind:
        assert explained.path.opcode[k - 1] in (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)
        assert explained.path.track[k - 1] != explained.path.track[k]
    nic = lever(explained, "NIC 0 of node0, out")
    assert nic.path_s == pytest.approx(8e-6)
    # Both messages forward are 0.4 us shorter. But then the last gradient waits for the one before it, which gained
    # from one message only: another path has become the longest.
    assert explained.step_time_s - nic.step_if_shorter_s == pytest.approx(0.4e-6)
