"""Scenarios: exactly what they name is changed, and the simulator feels it."""

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.playground.controls import base_cluster, scenario_cost, scenario_of
from meshwright.report import describe_scenario
from meshwright.spec import PlaygroundError, load_cluster
from tests.playground.examples import let_hosts_issue_at_once, make_bench, make_state

STATE = make_state(num_nodes=2, devices_per_node=4)


def scenario(**changes):
    state = replace(STATE, **changes)
    base = base_cluster(state, {})
    return base, scenario_cost(state, CostModel(cluster=base)).cluster


def test_the_base_is_the_short_form():
    assert base_cluster(STATE, {}) == load_cluster("2x4xA100")


def test_without_a_scenario_nothing_changes():
    base, cluster = scenario()
    assert cluster == base
    assert describe_scenario(scenario_of(STATE)) == ""


@pytest.mark.parametrize("rank", [0, 3, 4, 6, 7])
def test_a_slow_device_is_slow_and_no_other_is(rank):
    base, cluster = scenario(slow_rank=rank, slowdown=2.5)
    assert cluster.num_ranks == base.num_ranks
    for other in range(base.num_ranks):
        before, after = base.device_kind(other), cluster.device_kind(other)
        factor = 2.5 if other == rank else 1.0
        assert after.memory_bytes == before.memory_bytes
        assert after.slowdown == factor
        assert after.at_usual_speed() == before
        assert cluster.node_index(other) == base.node_index(other)


def test_slow_links_are_slow_where_they_are():
    base, cluster = scenario(link_slowdown=2.0, nic_slowdown=4.0)
    for pair, factor in (((0, 1), 2.0), ((0, 4), 4.0)):
        before, after = base.link_between(*pair), cluster.link_between(*pair)
        assert after.latency_s == pytest.approx(factor * before.latency_s)
        assert after.bandwidth_bytes_per_s == pytest.approx(before.bandwidth_bytes_per_s / factor)


def test_memory_and_nics_are_what_was_asked_for():
    _, cluster = scenario(memory_gib=0.5, num_nics=3)
    assert {cluster.device_kind(rank).memory_bytes for rank in range(8)} == {2**29}
    assert {node.num_nics for node in cluster.nodes} == {3}


def test_a_cluster_from_a_file_is_taken_as_it_is():
    mixed = replace(load_cluster("2x4xH100"), name="mine.toml")
    state = replace(STATE, kind="mine.toml")
    assert base_cluster(state, {"mine.toml": mixed}) is mixed
    with pytest.raises(PlaygroundError, match="2 nodes of at most 4 devices"):
        base_cluster(replace(state, num_nodes=3), {"mine.toml": mixed})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "a10"}, "Unknown kind of device 'a10'"),
        ({"num_nodes": 128, "devices_per_node": 64}, "up to 1024 devices"),
        ({"slow_rank": 8, "slowdown": 2.0}, "devices 0 to 7"),
    ],
)
def test_what_is_not_there_is_refused(changes, words):
    with pytest.raises(PlaygroundError, match=words):
        scenario(**changes)


def test_a_slow_device_or_link_makes_the_step_longer_and_a_fast_one_shorter(monkeypatch):
    let_hosts_issue_at_once(monkeypatch)
    bench = make_bench()
    plain = replace(STATE, num_stages=2)
    step = bench.answer(plain).simulation.step_time_s
    for changes in ({"slowdown": 3.0, "slow_rank": 5}, {"link_slowdown": 50.0}, {"nic_slowdown": 50.0}):
        assert bench.answer(replace(plain, **changes)).simulation.step_time_s > step, changes
    assert bench.answer(replace(plain, link_slowdown=0.1, nic_slowdown=0.1)).simulation.step_time_s < step


def test_devices_that_share_a_nic_wait_for_each_other():
    bench = make_bench()
    # Every rank of the first node sends to its neighbour on the second.
    plain = replace(STATE, num_stages=2, nic_slowdown=100.0)
    assert (
        bench.answer(replace(plain, num_nics=1)).simulation.step_time_s
        > 1.5 * bench.answer(replace(plain, num_nics=4)).simulation.step_time_s
    )
