"""Activations on the host: copies against the ops that they wait for and that wait for them, bytes against sums."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright.simulator.plan_simulation as simulated
from meshwright.cost.memory import find_away, weigh_stage
from meshwright.cost.memory.kept import measure_tensors
from meshwright.program import build_program, max_in_flight
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    Link,
    Offload,
    Opcode,
    Plan,
    PlanError,
    StagePlan,
    Workload,
    load_cluster,
    load_shipped_graph,
    recompute_choices,
    slice_graph,
    with_recompute,
)
from meshwright.spec.memory import GRADIENTS
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.plans import FixedCost, small_cluster

GPT = load_shipped_graph("gpt-tiny")
SAVED = Offload(activations="host")
SHIPPED = ("gpt-tiny", "llama-tiny", "vgg-tiny", "gnmt-tiny")


def plan_of(graph, ranks, num_microbatches, *, schedule="1f1b", offload=SAVED, cluster="2xcpu", size=2):
    """Stages of equally many layers, with the replicas given."""
    count = len(graph.layers)
    ends = [count * place // len(ranks) for place in range(len(ranks) + 1)]
    return Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=cluster,
        workload=Workload(global_batch=size * num_microbatches),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=own)
            for (start, stop), own in zip(pairwise(ends), ranks, strict=True)
        ),
        num_microbatches=num_microbatches,
        schedule=schedule,
        offload=offload,
    )


def linked(cluster, bandwidth, latency_s=0.0):
    """The cluster with such links to its hosts."""
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    return replace(cluster, nodes=tuple(replace(node, pcie=link) for node in cluster.nodes))


def spans_of(timeline, rank, *opcodes):
    ranks = np.array([stream.rank for stream in timeline.tracks])[timeline.track]
    return np.flatnonzero((ranks == rank) & np.isin(timeline.opcode, opcodes)).tolist()


def ends_of_layers(result, graph, rank, opcode):
    """By microbatch and layer: when its ops begin, the first of them ends, and all have, in the passes of a rank."""
    timeline, ops = result.timeline, result.op_spans
    home = {op.name: layer for layer, item in enumerate(graph.layers) for op in graph.ops[item.start : item.stop]}
    found = {}
    spans = {span: int(timeline.microbatch[span]) for span in spans_of(timeline, rank, opcode)}
    for part in range(ops.num_parts):
        span = int(ops.span[part])
        if span in spans and ops.name(part) in home:
            key = spans[span], home[ops.name(part)]
            start, first, end = found.get(key, (2**62, 2**62, 0))
            own = int(ops.start_ps[part]), int(ops.end_ps[part])
            found[key] = min(start, own[0]), min(first, own[1]), max(end, own[1])
    return found


@settings(max_examples=examples(40), deadline=None)
@given(
    bandwidth=st.sampled_from([1e8, 1e9, 3e9, 1e10, 1e12]),
    ranks=st.sampled_from([((0,),), ((0,), (1,)), ((0, 1),)]),
    num_microbatches=st.sampled_from([2, 4]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_layers_and_their_copies_wait_for_each_other(bandwidth, ranks, num_microbatches, schedule):
    plan = plan_of(GPT, ranks, num_microbatches, schedule=schedule)
    cluster = linked(load_cluster("2xcpu"), bandwidth)
    check_program(build_program(plan, GPT))
    result = simulate_plan(plan, GPT, cluster, detail="ops")
    timeline = result.timeline
    for rank in range(plan.num_ranks):
        forward, backward = (ends_of_layers(result, GPT, rank, op) for op in (Opcode.FORWARD, Opcode.BACKWARD))
        passes = {
            int(timeline.microbatch[span]): (int(timeline.start_ps[span]), int(timeline.end_ps[span]))
            for span in spans_of(timeline, rank, Opcode.BACKWARD)
        }
        copies = {}
        for opcode in (Opcode.SAVED_DOWN, Opcode.SAVED_UP):
            for span in spans_of(timeline, rank, opcode):
                key = opcode, int(timeline.microbatch[span]), int(timeline.peer[span])
                copies[key] = int(timeline.start_ps[span]), int(timeline.end_ps[span])
        assert copies
        near = 10  # ps, for sums of seconds that are rounded one by one
        for (opcode, microbatch, layer), (start, end) in copies.items():
            if opcode == Opcode.SAVED_DOWN:
                assert start >= forward[microbatch, layer][2] - near
                if (microbatch, layer + 2) in forward:
                    assert forward[microbatch, layer + 2][1] >= end
                assert passes[microbatch][0] >= end - near
            else:
                assert start >= passes[microbatch][0]
                assert end <= backward[microbatch, layer][1] <= passes[microbatch][1]
                ahead = [other for code, m, other in copies if (code, m) == (opcode, microbatch) and other > layer]
                if ahead:
                    # It leaves with the layer behind it, and not before.
                    assert start >= backward[microbatch, min(ahead)][0] - near


def test_fast_links_cost_nothing_and_slow_ones_all_that_they_take():
    plan = plan_of(GPT, ((0,),), 2)
    plain = simulate_plan(replace(plan, offload=Offload()), GPT, load_cluster("2xcpu"))
    fast = simulate_plan(plan, GPT, linked(load_cluster("2xcpu"), 1e15))
    assert fast.step_time_s == pytest.approx(plain.step_time_s, rel=1e-6)
    slow = simulate_plan(plan, GPT, linked(load_cluster("2xcpu"), 1e6))
    away = find_away(GPT, slice_graph(GPT, plan.bounds)[0], plan.microbatch_size, 4, "cpu")
    moved = sum(unit.down_bytes + unit.up_bytes for unit in away.units)
    # Of each microbatch, both ways.
    assert slow.step_time_s == pytest.approx(2 * moved / 1e6, rel=0.02)
    assert slow.ranks[0].offload_s == pytest.approx(2 * moved / 1e6, rel=1e-6)


@pytest.mark.parametrize("again", ["none", "full", "op"])
@pytest.mark.parametrize("name", SHIPPED)
def test_all_goes_down_but_what_the_last_layer_saved(name, again):
    graph = load_shipped_graph(name)
    graph = with_recompute(graph, *recompute_choices(graph)[again])
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    workload = Workload(global_batch=2)
    away = find_away(graph, stage, 2, 4, "cpu")
    here, host = (weigh_stage(graph, stage, 2, workload, activations_away=is_away).phases for is_away in (False, True))
    left = here.forward.after_bytes - host.forward.after_bytes
    # Of what two layers in a row saved there is one copy; what the last one saved, too, stays.
    measured, _ = measure_tensors(graph, 2, 4, "cpu")
    sizes = {value.storage: measured[value.storage] for value in away.values}
    assert left == sum(size for storage, size in sizes.items() if storage not in away.needed)
    assert sum(unit.down_bytes for unit in away.units) == sum(unit.up_bytes for unit in away.units)
    assert away.units[-1].down_bytes == away.units[-1].up_bytes == 0
    assert host.forward.most_bytes <= here.forward.most_bytes
    for phases in (here, host):
        for backward in (phases.first, phases.later):
            assert phases.forward.after_bytes + backward.after_bytes == backward.after[GRADIENTS]


def test_a_window_of_layers_is_on_the_device():
    """However many layers there are, what a microbatch keeps does not grow, nor does the peak by more than states."""
    most = {}
    for depth in (4, 8, 16):
        graph = chain_graph(depth, width=64)
        (stage,) = slice_graph(graph, [(0, depth)])
        memory = weigh_stage(graph, stage, 32, Workload(global_batch=32), activations_away=True)
        most[depth] = memory.phases.forward.after_bytes, memory.phases.forward.most_bytes
    assert most[4] == most[8] == most[16]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_hosts_keep_what_is_under_way(schedule):
    plan = plan_of(GPT, ((0,), (1,)), 4, schedule=schedule)
    (node,) = simulate_plan(plan, GPT, load_cluster("2xcpu")).nodes
    stages = slice_graph(GPT, plan.bounds)
    kept = [max_in_flight(plan, stage.index) * find_away(GPT, stage, 2, 4, "cpu").num_bytes for stage in stages]
    assert node.host_bytes == sum(kept)
    assert [max_in_flight(plan, stage.index) for stage in stages] == ([2, 1] if schedule == "1f1b" else [4, 4])
    states = replace(plan, offload=Offload(optimizer="host", activations="host"))
    known = replace(load_cluster("2xcpu").nodes[0], host_memory_bandwidth_bytes_per_s=14e9)
    cluster = replace(load_cluster("2xcpu"), nodes=(known,))
    only = simulate_plan(replace(plan, offload=Offload(optimizer="host")), GPT, cluster).nodes[0].host_bytes
    assert simulate_plan(states, GPT, cluster).nodes[0].host_bytes == only + sum(kept)


@pytest.mark.parametrize("count", [2, 4])
def test_alike_replicas_copy_alike(count, monkeypatch):
    graph = chain_graph(6, width=32)
    plan = make_plan(graph, [(0, 3), (3, 6)], [count, count], 4 * count, microbatch_size=16)
    plan = replace(plan, offload=SAVED)
    folded = simulate_plan(plan, graph, small_cluster(), cost=FixedCost())
    assert folded.fold is not None
    monkeypatch.setattr(simulated, "find_fold", lambda *_: None)
    whole = simulate_plan(plan, graph, small_cluster(), cost=FixedCost())
    assert whole.fold is None
    assert folded.step_time_s == whole.step_time_s
    assert folded.peak_memory_bytes == whole.peak_memory_bytes
    assert folded.nodes == whole.nodes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "pipedream"}, "asynchronous schedule"),
        ({"compiled": True}, "compiles layers"),
        ({"workload": Workload(global_batch=8, kind="inference")}, "inference"),
    ],
)
def test_what_activations_on_the_host_do_not_go_with_is_refused(changes, words):
    plan = plan_of(GPT, ((0,), (1,)), 4)
    with pytest.raises(PlanError, match=words):
        replace(plan, **changes)


def test_backwards_in_two_parts_are_refused():
    plan = plan_of(GPT, ((0,), (1,)), 4, schedule="zb-h1")
    with pytest.raises(PlanError, match=r"backwards have two parts.*Choose 1f1b"):
        build_program(plan, GPT)
