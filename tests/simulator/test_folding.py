"""Alike pipelines simulated once: the same in every figure as all of them, and not where they are not alike."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright.simulator.plan_simulation as simulate
from meshwright.cost import CostModel
from meshwright.program import SCHEDULES, with_schedule
from meshwright.simulator import explain_step, simulate_plan
from meshwright.simulator.pipeline_alike import find_fold
from meshwright.spec import GradientExchange, Opcode, PlanError, load_cluster, load_shipped_graph
from meshwright.spec.schedules import layout_of
from tests.graphs import chain_graph, even_bounds
from tests.graphs import make_plan as chain_plan
from tests.marks import examples
from tests.program.layouts import plan_of
from tests.simulator.plans import FixedCost, small_cluster
from tests.simulator.replicas import cases, grid, make_plan, with_kinds

US = 1_000_000  # ps


def simulate_both(plan, graph, cluster, **settings):
    """As it is, and with nothing folded."""
    found = simulate_plan(plan, graph, cluster, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "find_fold", lambda *_: None)
        whole = simulate_plan(plan, graph, cluster, **settings)
    assert whole.fold is None
    return found, whole


def assert_same(found, whole):
    assert found.timeline == whole.timeline
    for name in ("step_time_s", "samples_per_s", "ranks", "memory", "bubble_fraction", "mfu", "hfu"):
        assert getattr(found, name) == getattr(whole, name), name
    assert found.peak_memory_bytes == whole.peak_memory_bytes


@settings(max_examples=examples(150))
@given(case=cases(), contention=st.sampled_from(["queued", "queued", "fair"]))
def test_folded_is_unfolded(case, contention):
    plan, graph, cluster, options = case
    assert_same(*simulate_both(plan, graph, cluster, contention=contention, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_named_schedule_folds_exactly_or_not_at_all(schedule):
    plan, graph = plan_of(schedule, 2, 16, num_replicas=1 if layout_of(schedule) == "bidirectional" else 2)
    found, whole = simulate_both(plan, graph, small_cluster(2, 2, num_nics=2))
    assert_same(found, whole)
    assert (found.fold is None) == (layout_of(schedule) == "bidirectional")


@pytest.mark.long
@pytest.mark.parametrize(("zero", "size"), [(2, 2), (1, 2), (3, 2), (2, 4)])
def test_replicas_that_share_in_groups_are_as_unfolded(zero, size):
    """Groups of replicas that share states need whole groups in a fold, or no fold."""
    graph, cluster = load_shipped_graph("gpt2-large"), load_cluster("2x4xA100")
    plan = chain_plan(graph, even_bounds(len(graph.layers), 2), [4, 4], 8, schedule="zb-h1", microbatch_size=1)
    plan = replace(plan, exchange=GradientExchange(zero=zero, shard_size=size).suited_to("zb-h1"))
    found, whole = simulate_both(plan, graph, cluster)
    assert_same(found, whole)
    assert found.step_time_s > 0


def test_errors_name_the_ranks_of_the_plan():
    graph, places = chain_graph(6), grid(3, 2)
    wrong = make_plan(graph, places + places[::-1], 12, schedule="interleaved")
    with pytest.raises(PlanError, match=r"on ranks 0: \[0, 3\], 1: \[1, 4\]"):
        simulate_plan(wrong, graph, small_cluster())


@pytest.mark.parametrize(
    ("by_replica", "num_nodes", "classes"),
    # One node for all; one per pipeline, whose sums share its network card; one per stage with a card for each device.
    [(True, 1, 1), (True, 4, 1), (False, 3, 1)],
)
def test_one_pipeline_stands_for_all(by_replica, num_nodes, classes):
    graph = chain_graph(7)
    plan = make_plan(graph, grid(3, 4, by_replica=by_replica), 24, bucket_bytes=64)
    cluster = small_cluster(num_nodes, 12 // num_nodes, num_nics=1 if by_replica else 4)
    found, whole = simulate_both(plan, graph, cluster, num_steps=2)
    assert_same(found, whole)
    assert found.simulated.num_spans * 4 == whole.simulated.num_spans == found.timeline.num_spans
    assert len(set(found.fold.classes)) == classes
    sums = found.simulated.opcode == Opcode.ALL_REDUCE
    assert sums.sum() == 2 * 7


def test_microbatches_that_do_not_divide_make_two_classes():
    graph = chain_graph(4)
    plan = make_plan(graph, grid(2, 4), 10)
    found, whole = simulate_both(plan, graph, small_cluster(4, 2))
    assert_same(found, whole)
    assert found.fold.classes == (0, 0, 1, 1)
    assert found.fold.ranks == (0, 1, 4, 5)
    assert found.fold.plan.num_microbatches == 5


def test_other_devices_are_another_class():
    """Pipelines 1 and 3 of four lie on other devices."""
    graph = chain_graph(4, width=64)
    plan = make_plan(graph, grid(2, 4), 8)
    found, whole = simulate_both(plan, graph, with_kinds(small_cluster(4, 2), (1, 3)))
    assert_same(found, whole)
    assert found.fold.classes == (0, 1, 0, 1)
    assert len({item.busy_s for item in found.ranks[:4]}) == 2 * len({item.busy_s for item in found.ranks[:2]})


def test_another_link_is_another_class():
    graph = chain_graph(4)
    plan = make_plan(graph, grid(2, 3), 6)
    cluster = small_cluster(3, 2)
    link = replace(cluster.nodes[1].device_link, latency_s=1e-3)
    cluster = replace(cluster, nodes=(cluster.nodes[0], replace(cluster.nodes[1], device_link=link), cluster.nodes[2]))
    found, whole = simulate_both(plan, graph, cluster)
    assert_same(found, whole)
    assert found.fold.classes == (0, 1, 0)


NOT_ALIKE = {
    "pipelines send through one network card": (grid(2, 2, by_replica=False), small_cluster(2, 2)),
    "stages with unlike replicas": ([[0, 1, 2], [3]], small_cluster(1, 4)),
    "no replicas": ([[0], [1]], small_cluster(1, 4)),
    "ranks in two orders": ([[0, 3], [1, 2]], small_cluster(1, 4)),
    "all devices differ": (grid(1, 2), with_kinds(small_cluster(2, 1), (1,))),
}


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_what_is_not_alike_is_not_folded(name):
    places, cluster = NOT_ALIKE[name]
    graph = chain_graph(4)
    plan = make_plan(graph, places, 6)
    assert find_fold(plan, graph, cluster) is None
    assert simulate_plan(plan, graph, cluster).fold is None


def test_own_schedules_are_not_folded(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from meshwright.program import Backward, Forward, local_microbatches\n"
        "def mine(plan, rank):\n"
        "    stage = plan.stages_of(rank)[0]\n"
        "    own = list(local_microbatches(plan, stage, rank))\n"
        "    own = own[::-1] if rank == 1 else own\n"
        "    yield from (Forward(stage=stage, microbatch=m) for m in own)\n"
        "    yield from (Backward(stage=stage, microbatch=m) for m in own)\n"
    )
    graph = chain_graph(4)
    plan = with_schedule(make_plan(graph, grid(1, 2), 6), f"{path}:mine")
    found = simulate_plan(plan, graph, small_cluster())
    assert found.fold is None
    order = [found.timeline.microbatch[found.timeline.track == track][0] for track in (0, 2)]
    assert order == [0, 5]


def test_shared_links_are_not_folded_in_fair_shares():
    """Sums of gradients of three stages share the network card of a node."""
    graph = chain_graph(3)
    plan = make_plan(graph, grid(3, 2), 6)
    cluster = small_cluster(2, 3)
    assert simulate_plan(plan, graph, cluster).fold is not None
    assert simulate_plan(plan, graph, cluster, contention="fair").fold is None
    alone = small_cluster(2, 3, num_nics=3)
    assert simulate_plan(plan, graph, alone, contention="fair").fold is not None


def test_a_message_and_a_sum_at_one_moment_break_the_symmetry():
    """A pipeline per two nodes: its last gradient leaves when the sum of its second stage is ready, through one card.

    Both are wanted at one moment. The first pipeline's gradient goes before the sum, since its rank is lower than the
    rank of the sum; nothing else can be told of the second without simulating it.
    """
    graph = chain_graph(2)
    plan = make_plan(graph, grid(2, 2), 2)
    cluster = small_cluster(4, 1)
    cost = FixedCost(cluster=cluster, send=1e-6, all_reduce=4e-6)
    assert find_fold(plan, graph, cluster) is not None
    found, whole = simulate_both(plan, graph, cluster, cost=cost)
    assert found.fold is None
    assert_same(found, whole)
    gradients = whole.timeline.opcode == Opcode.SEND_GRADIENT
    assert whole.timeline.start_ps[gradients].tolist() != [12 * US] * 2


def test_explanations_name_all_ranks():
    graph = chain_graph(4)
    plan = make_plan(graph, grid(2, 3), 6)
    explained = explain_step(plan, graph, small_cluster())
    assert explained.path.num_ranks == 6
    assert explained.step_time_s == simulate_plan(plan, graph, small_cluster()).step_time_s


def test_what_is_alike_is_so_on_the_cluster_that_is_estimated():
    """The costs are those of another cluster than the one that the plan is for: one node is slow there."""
    graph = chain_graph(4, width=64)
    plan = make_plan(graph, grid(2, 4), 8)
    cost = CostModel(cluster=with_kinds(small_cluster(4, 2), (1,)))
    found, whole = simulate_both(plan, graph, small_cluster(4, 2), cost=cost)
    assert_same(found, whole)
    assert found.fold.classes == (0, 1, 0, 0)
