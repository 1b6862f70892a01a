"""Hosts that issue beside their devices: every end is that of a replay op by op, to the picosecond."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.cost.host_issue import host_factor, load_host_calls
from meshwright.program import gradient_buckets
from meshwright.simulator import (
    Bound,
    describe_steady_step,
    estimate_program,
    explain_step,
    simulate_plan,
    simulate_program,
)
from meshwright.simulator.critical_path import find_critical_path
from meshwright.simulator.engine import run_network
from meshwright.simulator.host_issue import issued_run, with_faster_hosts
from meshwright.simulator.network import durations, with_durations
from meshwright.simulator.plan_simulation import program_of
from meshwright.simulator.program_costs import IssueCosts
from meshwright.simulator.program_estimate import place_of_backward
from meshwright.simulator.simulate import run_program, run_unrolled
from meshwright.simulator.span_parts import SpanParts, issue_parts, list_parts
from meshwright.simulator.stage_costs import op_seconds
from meshwright.simulator.unroll import unroll
from meshwright.spec import ClusterError, Opcode, slice_stages, to_picoseconds
from meshwright.spec.instructions import COMPUTATIONS
from meshwright.spec.units import PICOSECONDS_PER_SECOND
from tests.graphs import chain_graph
from tests.marks import examples
from tests.simulator.builders import random_program
from tests.simulator.oracle import HAPPENING, Oracle
from tests.simulator.oracle_fair import FairOracle
from tests.simulator.plans import small_cluster
from tests.simulator.replicas import grid, make_plan
from tests.simulator.test_folding import assert_same, simulate_both

seeds = st.integers(0, 2**31)


def replay(device_ps, host_ps, ready, begin):
    """When each op ends: issued one after the other from ``begin`` on, run in that order from ``ready`` on."""
    ends = []
    for device, host in zip(device_ps, host_ps, strict=True):
        begin += host
        ready = max(ready, begin) + device
        ends.append(ready)
    return ends


class _ByOps:
    """An oracle in which what has a row in ``parts``, (device, host) per op, is replayed op by op."""

    parts: dict
    awaited: set

    def ends(self):
        self.clock = dict.fromkeys(range(len(self.queues)), 0)
        return super().ends()

    def _start(self, start, members):
        kind = self.kinds[members[0]]
        if kind not in self.parts:
            return super()._start(start, members)
        (key,), stream = members, self.stream_of[members[0]]
        device, host = self.parts[kind]
        begin = max(self.clock[stream], start) if kind in self.awaited else self.clock[stream]
        ends = replay(device, host, start, begin)
        self.clock[stream], self.began[key] = begin + sum(host), start
        heapq.heappush(self.events, (ends[-1], HAPPENING, 0, next(self.ticket), key))
        for offset, mark in self.marks[key]:
            # Behind the first part, which takes no time, each takes 1 ps.
            heapq.heappush(self.events, (ends[offset], HAPPENING, 0, next(self.ticket), mark))
        return None


def oracle_of(contention, program, costs, num_steps, parts, awaited):
    oracle = type("ByOps", (_ByOps, {"queued": Oracle, "fair": FairOracle}[contention]), {})(program, costs, num_steps)
    oracle.parts, oracle.awaited, oracle.kinds = parts, awaited, {}
    sections = [costs.prologue, *[costs.body] * num_steps, costs.epilogue]
    for k, part in enumerate(sections):
        oracle.kinds.update({(k, i): kind for i, kind in enumerate(part.cost_class.tolist())})
    return oracle


def with_random_hosts(program, costs, seed):
    """What the compute streams run gets classes of its own, of which each picosecond is an op that a host issues."""
    rng, count = random.Random(seed), len(costs.duration_ps)
    parts = {}
    for kind, duration in enumerate(costs.duration_ps.tolist()):
        parts[count + kind] = [0, *[1] * duration], [rng.choice([0, 0, 1, 2, 3]) for _ in range(duration + 1)]
    awaited = {kind for kind in parts if rng.random() < 0.2}
    earliest = {kind: replay(device, host, -(10**9), 0) for kind, (device, host) in parts.items()}
    none, hosts = [0] * count, [sum(host) for _, host in parts.values()]
    issue = IssueCosts(
        np.array(none + hosts),
        np.array(none + [ends[-1] for ends in earliest.values()]),
        np.array([kind in awaited for kind in range(2 * count)]),
    )
    changed = {}
    for name, section in program.sections():
        part, computes = getattr(costs, name), np.zeros(section.num_instructions, bool)
        for stream, facts in enumerate(program.streams):
            if facts.name == "compute":
                computes[np.array(section.stream_range(stream), int)] = True
        computes &= part.route < 0
        kinds = (part.cost_class + count * computes).astype(np.int32)
        moments = [
            earliest[kind][offset] if kind in earliest else 0
            for kind, offset in zip(kinds[section.mark_instruction].tolist(), part.mark_offset_ps.tolist(), strict=True)
        ]
        changed[name] = replace(part, cost_class=kinds, mark_earliest_ps=np.array(moments, np.int64))
    twice = {
        name: np.concatenate([getattr(costs, name)] * 2)
        for name in ("duration_ps", "host_ps", "allocate_bytes", "free_bytes")
    }
    return replace(costs, issue=issue, **twice, **changed), parts, awaited


@pytest.mark.parametrize("contention", ["queued", "fair"])
@settings(max_examples=examples(300))
@given(seed=seeds, size=st.integers(1, 25), num_steps=st.integers(1, 3), joins=st.booleans())
def test_all_ends_are_those_of_a_replay_op_by_op(contention, seed, size, num_steps, joins):
    program, costs = random_program(seed, size, joins=joins)
    costs, parts, awaited = with_random_hosts(program, costs, seed)
    oracle = oracle_of(contention, program, costs, num_steps, parts, awaited)
    expected = oracle.ends()
    found = simulate_program(program, costs, num_steps, contention=contention)
    assert found.end_ps.tolist() == expected
    computes = [program.streams[track].name == "compute" for track in found.track.tolist()]
    starts = zip(found.start_ps.tolist(), oracle.starts(), computes, strict=True)
    assert all(start == began for start, began, is_compute in starts if is_compute)


@settings(max_examples=examples(200))
@given(
    ops=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12),
    ready=st.integers(0, 300),
    begin=st.integers(0, 300),
)
def test_parts_of_a_span_follow_the_host(ops, ready, begin):
    device, host = zip(*ops, strict=True)
    scale = 1 / PICOSECONDS_PER_SECOND
    parts = SpanParts(np.arange(len(ops)), np.cumsum(device) * scale, np.cumsum(host) * scale, {})
    found = issue_parts(parts, sum(device), 1.0)
    ends = np.maximum(ready + found.done_ps, begin + found.earliest_ps)
    assert ends.tolist() == replay(device, host, ready, begin)
    assert found.issued_ps[-1] == sum(host)


def cuda_cluster(host_call_s=0.0, *, num_nodes=1, devices=8, rate=1e9):
    """Devices with a rate for float16, as CUDA's have: their hosts issue beside them."""
    cluster = small_cluster(num_nodes, devices)
    kind = replace(cluster.device_kinds[0], peak_flops_per_s={"float32": rate, "float16": rate})
    nodes = tuple(replace(node, host_call_s=host_call_s) for node in cluster.nodes)
    return replace(cluster, device_kinds=(kind,), nodes=nodes)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("host_call_s", [1e-9, 1e-6, 1e-4])
def test_ops_of_a_pipeline_wait_for_their_hosts(schedule, host_call_s):
    graph, cluster = chain_graph(8), cuda_cluster(host_call_s)
    plan = make_plan(graph, grid(2, 2), 12, schedule=schedule, bucket_bytes=64)
    cost = CostModel(cluster=cluster)
    result = simulate_plan(plan, graph, cluster, cost=cost, detail="ops", num_steps=2)
    timeline, ops = result.timeline, result.op_spans
    program = program_of(plan, graph, cluster)
    costs = estimate_program(program, plan, graph, cost)
    run = run_program(program, costs, 2)
    assert np.array_equal(run.end_ps, timeline.end_ps)
    assert np.array_equal(run.start_ps, timeline.start_ps)
    usual_ps, clock, late = durations(run.unrolled.network), {}, False
    moments = run.end_ps[run.network.mark_instruction] + run.network.mark_shift_ps
    held = gradient_buckets(graph, plan)
    stages = slice_stages(graph, plan)
    places = place_of_backward(program.body)[run.unrolled.source]
    for span, (track, opcode) in enumerate(zip(timeline.track.tolist(), timeline.opcode.tolist(), strict=True)):
        start, end, begin = timeline.start_ps[span], timeline.end_ps[span], clock.get(track, 0)
        if opcode == Opcode.OPTIMIZER_STEP:
            host_ps = int(costs.issue.host_ps[run.unrolled.cost_class[span]])
            clock[track] = begin + host_ps
            assert end == max(start, clock[track]) + usual_ps[span]
        if opcode not in COMPUTATIONS:
            continue
        stage = stages[timeline.stage[span]]
        buckets = tuple(bucket for bucket in held if stage.index in bucket.stages)
        seconds = op_seconds(graph, plan, stage, buckets, cluster.device_kinds[0], cost)
        parts = list_parts(seconds, Opcode(opcode), int(places[span]))
        factor = host_call_s / load_host_calls().call_s
        device, host = (
            np.diff(np.rint(item * PICOSECONDS_PER_SECOND), prepend=0).astype(int).tolist()
            for item in (parts.done_s, parts.issued_s * factor)
        )
        ends = replay(device, host, start, begin)
        clock[track] = begin + sum(host)
        late = late or end > start + usual_ps[span]
        assert ends[-1] == end
        marks = np.flatnonzero(run.network.mark_instruction == span)
        assert set(moments[marks].tolist()) <= {ends[place] for place in parts.filled.values()}
        mine = np.flatnonzero(ops.span == span)
        issued = (begin + np.cumsum(host)).tolist()
        whole = [
            (max(before, moment), after)
            for before, moment, after, device_ps in zip([start, *ends], issued, ends, device, strict=False)
            if device_ps
        ]
        assert list(zip(ops.start_ps[mine].tolist(), ops.end_ps[mine].tolist(), strict=True)) == whole
    # The first ones of a cold start at least.
    assert late


def test_the_host_bounds_a_step_that_it_issues_slowly():
    graph = chain_graph(8)
    plan = make_plan(graph, [[0]], 4)
    fast, slow = (simulate_plan(plan, graph, cuda_cluster(host_call_s)) for host_call_s in (1e-9, 1e-3))
    assert fast.step_time_s > fast.ranks[0].host_s > 0
    assert slow.step_time_s == pytest.approx(slow.ranks[0].host_s, rel=1e-12)
    assert slow.ranks[0].host_s == pytest.approx(fast.ranks[0].host_s * 1e6, rel=1e-3)
    assert "which bounds the step" in describe_steady_step(slow)
    assert "The host issues kernels" in describe_steady_step(fast)
    own = simulate_plan(plan, graph, small_cluster())
    assert own.ranks[0].host_s == 0.0
    assert "host" not in describe_steady_step(own)
    # As long as the device alone takes where the host is ahead.
    free_hosts = CostModel(cluster=cuda_cluster(1e-9))
    ahead = estimate_program(program_of(plan, graph, cuda_cluster()), plan, graph, free_hosts)
    last = run_program(program_of(plan, graph, cuda_cluster()), ahead.with_hosts_ahead(), 1).end_ps.max()
    assert to_picoseconds(fast.step_time_s) == last


@pytest.mark.parametrize("contention", ["queued", "fair"])
@settings(max_examples=examples(100))
@given(seed=seeds, size=st.integers(1, 25), joins=st.booleans())
def test_paths_through_hosts_have_no_gaps(contention, seed, size, joins):
    program, costs = random_program(seed, size, joins=joins)
    costs, *_ = with_random_hosts(program, costs, seed)
    unrolled = unroll(program, costs, 2)
    ran, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps, contention)
    start_ps = np.where(unrolled.send_of >= 0, end_ps - durations(ran), start_ps)
    stop = int(end_ps.max(initial=0))
    path = find_critical_path(ran, start_ps, end_ps, (0, stop), issued_run(unrolled.network, ran, start_ps))
    assert np.array_equal(path.start_ps[1:], path.end_ps[:-1])
    assert not stop or (path.start_ps[0], path.end_ps[-1]) == (0, stop)
    assert (path.end_ps >= path.start_ps).all()
    assert path.on_host[path.bound == Bound.HOST].all()


def test_the_explanation_names_the_host():
    graph = chain_graph(8)
    plan = make_plan(graph, grid(2, 1), 4)
    explained = explain_step(plan, graph, cuda_cluster(1e-3))
    assert explained.step_time_s == simulate_plan(plan, graph, cuda_cluster(1e-3)).step_time_s
    (lever,) = [item for item in explained.levers if item.name == "issuing by the host"]
    assert lever.path_s == pytest.approx(explained.step_time_s, rel=0.01)
    assert lever.step_if_free_s < lever.step_if_shorter_s < explained.step_time_s
    assert lever.step_if_shorter_s == pytest.approx(0.9 * explained.step_time_s, rel=0.01)
    path = explained.path
    assert path.start_ps[0] == 0
    assert np.array_equal(path.start_ps[1:], path.end_ps[:-1])
    ahead = explain_step(plan, graph, cuda_cluster(1e-9))
    assert all(item.name != "issuing by the host" for item in ahead.levers)


@pytest.mark.parametrize("host_call_s", [1e-9, 1e-6, 1e-5, 1e-3])
def test_folded_is_unfolded(host_call_s):
    graph, cluster = chain_graph(7), cuda_cluster(host_call_s, num_nodes=4, devices=3)
    plan = make_plan(graph, grid(3, 4), 24, bucket_bytes=64)
    found, whole = simulate_both(plan, graph, cluster, num_steps=2)
    assert found.fold is not None
    assert_same(found, whole)


def test_the_device_part_of_what_follows_changes_in_proportion():
    program, costs = random_program(3, 20)
    network = unroll(program, with_random_hosts(program, costs, 3)[0], 1).network
    same = with_durations(network, durations(network), network.mark_shift_ps)
    assert np.array_equal(run_network(same, costs.num_links).end_ps, run_network(network, costs.num_links).end_ps)
    free, ahead = with_faster_hosts(network, 0.0), network.with_hosts_ahead()
    assert np.array_equal(run_network(free, costs.num_links).end_ps, run_network(ahead, costs.num_links).end_ps)


def test_a_scaled_loss_lets_the_host_wait_before_the_update():
    graph, cluster = chain_graph(8), cuda_cluster(1e-9)
    plan = make_plan(graph, [[0]], 4)
    scaled = replace(plan, exchange=replace(plan.exchange, loss_scale=True))
    costs, programs = [], []
    for each in (plan, scaled):
        programs.append(program_of(each, graph, cluster))
        costs.append(estimate_program(programs[-1], each, graph, CostModel(cluster=cluster)))
    assert not costs[0].issue.is_awaited.any()
    (awaited,) = np.flatnonzero(costs[1].issue.is_awaited)
    updates = programs[1].body.opcode == Opcode.OPTIMIZER_STEP
    assert set(costs[1].body.cost_class[updates].tolist()) == {awaited}


def test_a_node_says_how_fast_its_host_is():
    node, calls = cuda_cluster().nodes[0], load_host_calls()
    assert host_factor(node, None) == 1.0
    assert host_factor(replace(node, host_call_s=2 * calls.call_s), None) == pytest.approx(2.0)
    # A host that was measured is surer than one that is assumed.
    stated = replace(node, host_call_s=calls.call_s)
    assert host_factor(node, "low") < host_factor(stated, "low") < 1
    assert 1 < host_factor(stated, "high") < host_factor(node, "high")
    with pytest.raises(ClusterError, match=r"host_call_s = -1\.0"):
        replace(node, host_call_s=-1.0)
