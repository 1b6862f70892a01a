"""Layouts: which ranks stages get, and what the groups cost."""

import pytest

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner.rank_layouts import Layout, find_places
from tests.planner.test_search import cluster_of


@pytest.mark.parametrize(
    ("layout", "asked", "ranks"),
    [
        (Layout(name="stage-major", num_ranks=6), ((0, 1), (1, 3), (4, 2)), [(0,), (1, 2, 3), (4, 5)]),
        (
            Layout(name="replica-major", num_ranks=6, num_stages=3),
            ((0, 2), (2, 2), (4, 2)),
            [(0, 3), (1, 4), (2, 5)],
        ),
        (Layout(name="reversed", num_ranks=6), ((0, 1), (1, 3), (4, 2)), [(5,), (4, 3, 2), (1, 0)]),
    ],
    ids=["consecutive ranks", "pipelines side by side", "from the last rank"],
)
def test_layouts_give_stages_their_ranks(layout, asked, ranks):
    assert [layout.ranks(before, take) for before, take in asked] == ranks


@pytest.mark.parametrize("counts", [(4, 4), (3, 5)])
@pytest.mark.parametrize("rates", [(1e12,), (1e12, 3e11)])
@pytest.mark.parametrize(
    "layout", [Layout(name="stage-major", num_ranks=8), Layout(name="replica-major", num_ranks=8, num_stages=4)]
)
def test_places_agree_with_cluster_and_cost_model(counts, rates, layout):
    """Whatever is shared among groups must be what each group would be told by itself."""
    cluster = cluster_of(*counts, rates=rates)
    cost = CostModel(cluster=cluster)
    choices = (2,) if layout.name == "replica-major" else tuple(range(1, 9))
    places = find_places(layout, cluster, cost, replicas=choices, bucket_bytes=10**6, memory=MemoryLimit())
    for take in choices:
        for before in range(0, 9 - take, take if layout.name == "replica-major" else 1):
            ranks = layout.ranks(before, take)
            kinds = {cluster.device_kind(rank).name for rank in ranks}
            assert set(places.kind_sets[places.kind_of[before, take]]) == kinds
            assert places.latency_s[before, take] == cost.collective_seconds("all_reduce", ranks, 1)
            assert places.bucket_s[before, take] == cost.collective_seconds("all_reduce", ranks, 10**6)
            if before:
                previous = layout.ranks(before - take, take)[-1] if layout.name == "replica-major" else before - 1
                pairs = [(previous, rank) for rank in ranks]
                if layout.name == "replica-major":
                    pairs = list(zip(layout.ranks(before - take, take), ranks, strict=True))
                slowest = max(cost.collective_seconds("send", pair, 10**6) for pair in pairs)
                assert cost.collective_seconds("send", places.links[places.link_of[before, take]], 10**6) == slowest
            else:
                assert places.link_of[before, take] == 0


def test_a_given_limit_replaces_the_memory_of_devices():
    cluster = cluster_of(2, memory=1000)
    layout = Layout(name="stage-major", num_ranks=2)
    for limit, expected in ((None, 1000), (77, 77)):
        places = find_places(
            layout,
            cluster,
            CostModel(cluster=cluster),
            replicas=(1, 2),
            bucket_bytes=1,
            memory=MemoryLimit(num_bytes=limit),
        )
        assert places.memory_limit[0, 2] == places.memory_limit[1, 1] == expected
