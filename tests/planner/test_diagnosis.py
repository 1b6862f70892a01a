"""When there is no plan: the constraint that binds is named, and the advice is true."""

import re

import pytest

from meshwright.spec import NoFeasiblePlanError, PlanError, Workload
from tests.planner.searching import search_plans
from tests.planner.test_search import cluster_of, search, weighted_graph

GRAPH = weighted_graph([10**9] * 4, width=64)


def refusal(*args, **options):
    with pytest.raises(NoFeasiblePlanError) as caught:
        search(*args, **options)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_more_stages_than_layers():
    text = refusal(GRAPH, cluster_of(8), 8, num_stages=5)
    assert "5 stages were asked for, but there are only 4 layers" in text
    assert len(search(GRAPH, cluster_of(8), 8, num_stages=4).best.plan.stages) == 4


def test_more_stages_than_ranks():
    assert "only 2 ranks" in refusal(GRAPH, cluster_of(2), 8, num_stages=3)


@pytest.mark.parametrize(("shard_size", "stages"), [(8, None), (3, 1), (4, 2)])
def test_groups_that_no_stage_can_have(shard_size, stages):
    options = {} if stages is None else {"num_stages": stages}
    text = refusal(GRAPH, cluster_of(4), 8, zero=(3,), shard_sizes=(shard_size,), **options)
    words = {None: "any number of stages", 1: "one stage", 2: "2 stages"}[stages]
    assert f"A shard size of {shard_size} was given for 4 ranks in {words}" in text


def test_groups_that_some_stage_can_have():
    found = search(GRAPH, cluster_of(4), 8, zero=(3,), shard_sizes=(2,)).ranked
    assert any(len(item.plan.stages) == 1 for item in found)


def test_more_ranks_than_there_is_work():
    text = refusal(GRAPH, cluster_of(8), 1)
    assert "8 ranks cannot all have work" in text
    ranks, samples = map(
        int, re.search(r"at most (\d+) ranks, or a global batch of at least (\d+) samples", text).groups()
    )
    search(GRAPH, cluster_of(8), 1, num_devices=ranks)
    search(GRAPH, cluster_of(8), samples)
    with pytest.raises(NoFeasiblePlanError):
        search(GRAPH, cluster_of(8), 1, num_devices=ranks + 1)
    with pytest.raises(NoFeasiblePlanError):
        search(GRAPH, cluster_of(8), samples - 1)


def test_memory_binds_and_the_limit_that_is_named_works():
    text = refusal(GRAPH, cluster_of(2, memory=2 * 10**4), 8)
    assert "No plan fits into memory" in text
    assert "19.5 KiB" in text
    needed = float(re.search(r"needs ([\d.]+) KiB on rank", text)[1]) * 1024
    assert search(GRAPH, cluster_of(2, memory=round(needed * 1.01)), 8).best.fits
    # The named plan is about the smallest there is.
    refusal(GRAPH, cluster_of(2, memory=round(needed * 0.97)), 8)


def test_memory_is_dominated_by_what_is_largest():
    text = refusal(GRAPH, cluster_of(2, memory=2 * 10**4), 8)
    assert re.search("the largest part: (optimizer states|parameters)", text)


@pytest.mark.parametrize(
    ("options", "advice", "relaxed"),
    [
        ({"schedules": ("gpipe",), "microbatch_sizes": (1,)}, "Allow the schedule 1f1b", {"microbatch_sizes": (1,)}),
        ({"microbatch_sizes": (64,)}, "Allow microbatches of 1 sample", {}),
        ({"num_stages": 1}, "Allow any number of stages", {}),
        ({"num_devices": 1}, "Use all 4 devices", {}),
    ],
)
def test_the_nearest_relaxation_works(options, advice, relaxed):
    graph, batch = (weighted_graph([10**6] * 4, width=64), 256)
    cluster = cluster_of(4, memory=180_000)
    text = refusal(graph, cluster, batch, **options)
    assert f"{advice}" in text
    assert "then the best plan takes" in text
    assert search(graph, cluster, batch, **relaxed).best.fits


def test_arguments_out_of_range():
    cluster = cluster_of(2)
    for options, words in (
        ({"microbatch_sizes": (3,)}, r"8 samples does not divide into microbatches of 3.*1, 2, 4, 8.*6 or 9"),
        ({"num_devices": 3}, "has 2 devices"),
        ({"num_devices": 0}, "has 2 devices"),
        ({"max_plans": 0}, "at least 1"),
        ({"schedules": ("1f2b",)}, "did you mean '1f1b'"),
        ({"schedules": ()}, "No schedule"),
    ):
        with pytest.raises(PlanError, match=words):
            search_plans(lambda _: GRAPH, cluster, Workload(global_batch=8), **options)
