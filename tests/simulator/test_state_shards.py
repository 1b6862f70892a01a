"""Sharded parameters inside of passes: waits against streams played step by step, memory against shares by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import parameter_groups
from meshwright.program.sharding import find_units
from meshwright.simulator import simulate_plan
from meshwright.simulator.state_shards import StateShards, gather_waits
from meshwright.spec import GradientExchange, Link, Opcode, load_cluster, load_shipped_graph, slice_graph
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.simulator.plans import FixedCost, fast_cluster, small_cluster

GPT = load_shipped_graph("gpt-tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost(FixedCost):
    """Collectives take what is given for the layer of their (single) parameter, by its number of bytes."""

    gathers: dict[int, float] = field(default_factory=dict)
    scatters: dict[int, float] = field(default_factory=dict)
    copies: dict[int, float] = field(default_factory=dict)
    across: dict[int, float] = field(default_factory=dict)

    def bucket_seconds(self, graph, parameter_ids, device_kind):
        return sum(self.copies.get(i, 0.0) for i in parameter_ids)

    def collective_seconds(self, op, ranks, num_bytes, concurrent=(), algorithm=None, axes=()):
        return {"all_gather": self.gathers, "reduce_scatter": self.scatters, "all_reduce": self.across}[op][num_bytes]


def play(order, compute, gather, scatter, across=None):
    """Streams played one event after the other: a gather may begin when the unit before it does."""
    streams = {"gather": 0.0, "compute": 0.0, "scatter": 0.0, "across": 0.0}
    allowed = 0.0
    for unit in order:
        streams["gather"] = max(streams["gather"], allowed) + gather[unit]
        begin = max(streams["compute"], streams["gather"])
        allowed, streams["compute"] = begin, begin + compute[unit]
        if scatter is not None:
            streams["scatter"] = max(streams["scatter"], streams["compute"]) + scatter[unit]
        if across is not None:
            streams["across"] = max(streams["across"], streams["scatter"]) + across[unit]
    return max(streams.values())


SECONDS = st.lists(st.floats(0, 1), min_size=5, max_size=5)


@settings(max_examples=examples(200))
@given(SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from([2, 3]))
def test_passes_take_what_their_streams_take(forward, backward, gathers, scatters, zero):
    waits = wait(forward, backward, gathers, scatters, zero, fast_cluster("A100"))
    expected = (
        play(range(5), forward, gathers, None),
        play(range(4, -1, -1), backward, gathers if zero == 3 else [0.0] * 5, scatters),
    )
    for found, own, total in zip(waits[:2], (forward, backward), expected, strict=True):
        assert (found >= -1e-12).all()
        assert sum(own) + found.sum() == pytest.approx(total, abs=1e-9)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from([2, 3]), st.sampled_from(["A100", "2xcpu"]))
def test_groups_sum_behind_the_scatters_of_the_last_backward(forward, backward, gathers, scatters, across, zero, name):
    cluster = fast_cluster(name)
    found = wait(forward, backward, gathers, scatters, zero, cluster, across)
    own = wait(forward, backward, gathers, scatters, zero, cluster)
    assert own.last_s == 0.0
    np.testing.assert_array_equal(found.backward, own.backward)
    again = gathers if zero == 3 else [0.0] * 5
    last = play(range(4, -1, -1), backward, again, scatters, across) if name == "A100" else None
    expected = sum(across) if last is None else last - sum(backward) - own.backward.sum()
    assert found.last_s == pytest.approx(expected, abs=1e-9)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from([2, 3]))
def test_processors_wait_for_every_gather_and_scatter(forward, backward, gathers, scatters, zero):
    waits = wait(forward, backward, gathers, scatters, zero, fast_cluster("2xcpu"))
    assert waits[0] == pytest.approx(gathers)
    again = gathers if zero == 3 else [0.0] * 5
    assert waits[1] == pytest.approx([a + b for a, b in zip(again, scatters, strict=True)])


@settings(max_examples=examples(200))
@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from([2, 3]), st.sampled_from(["A100", "2xcpu"]))
def test_the_root_unit_comes_first_and_goes_last(forward, backward, gathers, scatters, copies, zero, cluster):
    """Layers 0 and 4 share the table, which is the root unit. Copies go to the ops' stream, the root's twice."""
    graph = wide_chain(tied=True)
    (stage,) = slice_graph(graph, [(0, 5)])
    (root, *units), kind = graph.parameters, load_cluster(cluster).device_kind(0)
    sizes = [graph.tensors[i].num_bytes(0) for i in (root, *units)]
    cost = UnitCost(
        gathers=dict(zip(sizes, gathers, strict=False)),
        scatters=dict(zip(sizes, scatters, strict=False)),
        copies=dict(zip((root, *units), copies, strict=False)),
    )
    waits = gather_waits(graph, stage, np.array(forward), np.array(backward), StateShards(zero, (0, 1), ()), kind, cost)
    root_s, again = gathers[0], [gathers[u] if zero == 3 else 0.0 for u in range(4)]
    twice = 2 if zero == 3 else 1
    ahead = [forward[0] + copies[0], *(forward[u] + copies[u] for u in (1, 2, 3)), forward[4]]
    back = [backward[0] + copies[0], *(backward[u] + twice * copies[u] for u in (1, 2, 3)), backward[4]]
    if cluster == "2xcpu":
        expected = (
            sum(ahead) + root_s + sum(gathers[1:4]),
            sum(back) + sum(again[1:]) + sum(scatters[:4]),
        )
    else:
        expected = (
            root_s + play([0, 1, 2, 3, 4], ahead, [0.0, *gathers[1:4], 0.0], None),
            play([4, 3, 2, 1, 0], back, [0.0, *again[1:], 0.0], [0.0, *scatters[1:4], 0.0]),
        )
        last_scatter = play([4, 3, 2, 1], back, [0.0, *again[1:], 0.0], [0.0, *scatters[1:4], 0.0])
        expected = (expected[0], max(expected[1], last_scatter) + scatters[0])
    for found, own, total in zip(waits[:2], (forward, backward), expected, strict=True):
        assert found.sum() + sum(own) == pytest.approx(total, abs=1e-9)


def wait(forward, backward, gathers, scatters, zero, cluster, across=None):
    """Waits of a stage with one op and one parameter in every unit; ``across``: of two groups of replicas."""
    graph = wide_chain()
    (stage,) = slice_graph(graph, [(0, 5)])
    sizes = [graph.tensors[i].num_bytes(0) for i in graph.parameters]
    cost = UnitCost(
        gathers=dict(zip(sizes, gathers, strict=True)),
        scatters=dict(zip(sizes, scatters, strict=True)),
        across=dict(zip([size // 2 for size in sizes], across or [], strict=False)),
    )
    kind, shards = cluster.device_kind(0), StateShards(zero, (0, 1), (), across=(0, 2) if across else ())
    return gather_waits(graph, stage, np.array(forward), np.array(backward), shards, kind, cost)


def wide_chain(*, tied=False):
    """Five layers, each with a weight of another size; ``tied``: but for the last, which has the first one's."""
    graph = chain_graph(5, tied=tied)
    tensors = list(graph.tensors)
    for width, i in enumerate(graph.parameters, 1):
        tensors[i] = replace(tensors[i], shape=(*tensors[i].shape, type(tensors[i].shape[0])(width)))
    return replace(graph, tensors=tuple(tensors))


def test_parameters_of_several_layers_are_the_root_unit():
    graph = chain_graph(4, tied=True)
    (stage,) = slice_graph(graph, [(0, 4)])
    root, units = find_units(graph, stage, frozenset())
    assert len(root.parameters) == 1
    assert [(unit.first, unit.last, len(unit.parameters)) for unit in units] == [(1, 1, 1), (2, 2, 1)]
    kept = find_units(graph, stage, frozenset(root.parameters))[0]
    assert kept.parameters == ()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_passes_wait_for_is_told_apart_from_computing(zero):
    plan = replace(make_plan(GPT, [(0, len(GPT.layers))], [4], 8), exchange=GradientExchange(zero=zero))
    # A replica alone has as many microbatches and exchanges nothing.
    single = make_plan(GPT, [(0, len(GPT.layers))], [1], 2)
    single = replace(single, workload=replace(single.workload, global_batch=2 * plan.microbatch_size))
    whole, alone = (simulate_plan(item, GPT, fast_cluster("4xA100")).ranks[0] for item in (plan, single))
    inside = whole.forward_s + whole.backward_s - alone.forward_s - alone.backward_s
    assert (whole.exchanged_inside_s > 0) == (zero >= 2)
    if zero >= 2:
        assert whole.exchanged_inside_s == pytest.approx(inside, rel=1e-6)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_keep_their_shares(zero):
    cluster = fast_cluster("4xA100")
    plan = replace(make_plan(GPT, [(0, len(GPT.layers))], [4], 8), exchange=GradientExchange(zero=zero))
    found = simulate_plan(plan, GPT, cluster).memory[0].parts
    alone = simulate_plan(replace(plan, exchange=GradientExchange()), GPT, cluster).memory[0].parts
    states = alone["optimizer states"]
    assert found["optimizer states"] == pytest.approx(states / (4 if zero else 1), abs=4)
    whole = alone["parameters"]
    if zero < 2:
        assert found["parameters"] == whole
    elif zero == 2:
        # The own part, and what was gathered of all.
        assert found["parameters"] == whole / 4 + whole
    else:
        root, *layers = (
            sum(GPT.tensors[i].num_bytes(0, 4) for i in group.parameters) for group in parameter_groups(GPT)
        )
        assert found["parameters"] == whole / 4 + root + 2 * max(layers)
    assert (found["gradient buckets"] == 0) == (zero >= 2)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_in_groups_keep_the_shares_of_a_group(zero):
    cluster = fast_cluster("4xA100")
    plan = replace(make_plan(GPT, [(0, len(GPT.layers))], [4], 8), exchange=GradientExchange(zero=zero, shard_size=2))
    pair = replace(make_plan(GPT, [(0, len(GPT.layers))], [2], 4), exchange=GradientExchange(zero=zero))
    found, wanted = (simulate_plan(item, GPT, cluster).memory[0].parts for item in (plan, pair))
    for part in ("optimizer states", "parameters", "gradients", "gradient buckets"):
        assert found[part] == wanted[part]
    whole = replace(plan, exchange=GradientExchange(zero=zero, shard_size=4))
    assert (
        simulate_plan(whole, GPT, cluster).step_time_s
        == simulate_plan(replace(plan, exchange=GradientExchange(zero=zero)), GPT, cluster).step_time_s
    )


@pytest.mark.parametrize("zero", [2, 3])
def test_groups_inside_of_nodes_spare_the_network(zero):
    """Of the bytes of a step a group's own eighth crosses between nodes, once."""
    cluster = fast_cluster("2x8xA100")
    slow = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    cluster = replace(cluster, nodes=tuple(replace(node, nic=slow, num_nics=1) for node in cluster.nodes))
    plan = make_plan(GPT, [(0, len(GPT.layers))], [16], 64)
    shared, grouped = (
        simulate_plan(replace(plan, exchange=GradientExchange(zero=zero, shard_size=size)), GPT, cluster)
        for size in (0, 8)
    )
    assert grouped.step_time_s < shared.step_time_s
    assert max(r.total_bytes for r in grouped.memory) > max(r.total_bytes for r in shared.memory)


@pytest.mark.parametrize("model", ["vgg-tiny", "resnet-tiny", "unet-tiny", "dlrm-tiny", "gpt-tiny"])
def test_no_more_than_all_parameters_are_gathered(model):
    graph = load_shipped_graph(model)
    plan = replace(make_plan(graph, [(0, len(graph.layers))], [4], 8), exchange=GradientExchange(zero=3))
    found = simulate_plan(plan, graph, fast_cluster("4xA100")).memory[0].parts["parameters"]
    whole = sum(graph.tensors[i].num_bytes(0, 4) for i in graph.parameters)
    assert found <= -(-whole // 4) + whole


def test_a_gather_that_takes_no_time_is_not_waited_for():
    graph = chain_graph(3)
    plans = [replace(make_plan(graph, [(0, 3)], [2], 2), exchange=GradientExchange(zero=zero)) for zero in (0, 2, 3)]
    times = [simulate_plan(plan, graph, small_cluster(), cost=FixedCost()).step_time_s for plan in plans]
    # An all-reduce takes a picosecond at least.
    assert times[0] - 1e-11 <= times[1] == times[2] <= times[0]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_step_together_even_if_one_is_done_earlier(zero):
    """One replica's last gradient comes last: the other cannot have scattered its own before it is there."""
    graph = chain_graph(3)
    plan = replace(make_plan(graph, [(0, 1), (1, 3)], [2, 1], 4), exchange=GradientExchange(zero=zero))
    timeline = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(all_reduce=1e-9)).timeline
    stepping = np.flatnonzero((timeline.opcode == Opcode.OPTIMIZER_STEP) & (timeline.stage == 0))
    backwards = np.flatnonzero((timeline.opcode == Opcode.BACKWARD) & (timeline.stage == 0))
    assert len(stepping) == 2
    assert min(timeline.start_ps[stepping]) >= max(timeline.end_ps[backwards])
