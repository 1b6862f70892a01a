"""Costs of what teams exchange: who talks at once, and how it adds to the ops of a local graph."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.cost.team_costs import REPLICATING, axis_groups, ring_attention_seconds, spread_teams
from meshwright.program import lower_graph
from meshwright.spec import MeasurementError, Sharding, load_cluster, load_shipped_graph

GPT = load_shipped_graph("gpt-tiny")
CLUSTER = load_cluster("2x8xA100")


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
)
def test_devices_of_teams_talk_in_groups_that_hold_each_once(tensor, context, expert, teams):
    sharding = Sharding(tensor=tensor, context=context, expert=expert)
    width = tensor * context * expert
    members = {team * width + place for team in teams for place in range(width)}
    sends, experts, sums = (spread_teams(teams, sharding, axes) for axes in ((), ("context",), REPLICATING))
    for groups, size in ((sends, 1), (experts, context), (sums, context * expert)):
        assert len(groups) == width // size
        assert {len(group) for group in groups} == {len(teams) * size}
        assert {rank for group in groups for rank in group} == members
    # Gradients are summed by those who hold the same part of the parameters: the same place on the tensor axis, and of
    # experts on theirs.
    assert all(len({rank % tensor for rank in group}) == 1 for group in sums)
    assert all(len({(rank % tensor, rank % width // (tensor * context)) for rank in group}) == 1 for group in experts)


def test_groups_of_an_axis_lie_beside_each_other():
    both = Sharding(tensor=2, context=4)
    (tensor,) = axis_groups(CLUSTER, both, ("tensor",))
    (context,) = axis_groups(CLUSTER, both, ("context",))
    assert tensor[0] == (0, 1)
    assert sorted(tensor) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert sorted(context) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    (wide,) = axis_groups(CLUSTER, Sharding(context=16), ("context",))
    assert wide == [tuple(range(16))]
    (experts,) = axis_groups(CLUSTER, Sharding(tensor=2, context=2, expert=2), ("expert",))
    assert sorted(experts) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    (joint,) = axis_groups(CLUSTER, Sharding(tensor=2, context=2, expert=4), REPLICATING)
    assert joint == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]


def test_an_op_takes_its_own_time_and_that_of_its_exchanges():
    sharding = Sharding(tensor=4)
    local = lower_graph(GPT, sharding, ())
    cost = CostModel(cluster=CLUSTER, precision="bfloat16")
    teams = cost.for_teams(sharding)
    kind = CLUSTER.device_kind(0)
    found = teams.estimate_ops(local, 2, kind)
    silent = cost.estimate_ops(replace(local, collectives=()), 2, kind)
    expected = np.stack([silent.forward_s, silent.backward_s])
    for item in local.collectives:
        if item.phase != "step":
            ranks, beside = (0, 1, 2, 3), [(4, 5, 6, 7)]
            num_bytes = item.copies * local.tensors[item.tensor].num_bytes(2, 2)
            seconds = item.count * cost.collective_seconds(item.kind, ranks, num_bytes, beside)
            expected[int(item.phase == "backward"), item.at] += seconds
    assert np.stack([found.forward_s, found.backward_s]) == pytest.approx(expected, rel=1e-12)
    assert expected.sum() > silent.forward_s.sum() + silent.backward_s.sum()


def test_attention_waits_for_all_that_goes_round():
    """Keys and values forward; both once more and their gradients backward: together, beside the parts of attention."""
    size, batch = 4, 64
    sharding = Sharding(context=size)
    local = lower_graph(GPT, sharding, ())
    cost = CostModel(cluster=CLUSTER, precision="bfloat16")
    kind = CLUSTER.device_kind(0)
    found = cost.for_teams(sharding).estimate_ops(local, batch, kind)
    silent = cost.estimate_ops(replace(local, collectives=()), batch, kind)
    at = next(i for i, op in enumerate(local.ops) if op.kind.startswith("aten.scaled_dot_product"))
    part_bytes = local.tensors[local.ops[at].inputs[0]].num_bytes(batch, 2)
    (first, *beside) = axis_groups(CLUSTER, sharding, ("context",))[0]
    send_s = cost.collective_seconds("send", first[:2], part_bytes, [group[:2] for group in beside])
    for mine, alone, parts in (
        (found.forward_s[at], silent.forward_s[at], 2 * (size - 1)),
        (found.backward_s[at], silent.backward_s[at], 2 * (2 * size - 1)),
    ):
        assert mine == pytest.approx(ring_attention_seconds(alone, parts * send_s / (size - 1), size), rel=1e-12)
        assert mine >= alone * (1 - 1e-12)


def test_a_share_of_a_graph_has_no_cost_without_its_team():
    local = lower_graph(GPT, Sharding(tensor=2), ())
    with pytest.raises(MeasurementError, match="for_teams"):
        CostModel(cluster=CLUSTER).estimate_ops(local, 1, CLUSTER.device_kind(0))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(2, 16))
def test_a_ring_hides_its_messages_behind_the_parts_that_it_computes(alone_s, send_s, num_ranks):
    """Against the ring step by step: part k is computed once its operands are there, and then sent on."""
    part, there, done = alone_s / num_ranks, 0.0, 0.0
    for step in range(num_ranks):
        begin = max(there, done)
        done = begin + part
        there = begin + send_s if step == 0 else max(there, begin) + send_s
    assert ring_attention_seconds(alone_s, send_s, num_ranks) == pytest.approx(done, abs=1e-12)
