"""Rows measured on unequal links: groups on fast links and groups on slow ones get the times that they have."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from meshwright.cost.collectives.collective_costs import CollectiveCosts
from meshwright.cost.collectives.collective_groups import place_group
from meshwright.cost.collectives.datasheet import quote_collective
from meshwright.cost.collectives.uneven_links import as_on_even_links, even_links, fit_links
from meshwright.measurement.links import list_places
from meshwright.records import make_records, named_shapes
from meshwright.records.record_table import columns_of
from meshwright.spec import Link, Node, load_cluster
from meshwright.spec.cluster import NodePath
from meshwright.spec.measurements import TransferKind
from tests.project import ROOT

SIZES = (16, 2**12, 2**16, 2**19, 2**22)
# What a real link takes of what its datasheet says.
FACTOR = 1.4
LABS = load_cluster(ROOT / "examples" / "emulated" / "two-labs.toml")


def with_nodes(change) -> tuple[Node, ...]:
    return tuple(change(place, node) for place, node in enumerate(LABS.nodes))


PATH = NodePath(nodes=(1, 2), link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6))
UNEVEN = {
    "racks": LABS,
    "path": replace(LABS, racks=None, paths=(PATH,)),
    "NICs": replace(
        LABS,
        racks=None,
        nodes=with_nodes(
            lambda place, node: replace(node, nic=replace(node.nic, bandwidth_bytes_per_s=1e6 * (place + 1)))
        ),
    ),
}


def true_seconds(cluster, op, ranks, concurrent, num_bytes):
    tariff = quote_collective(cluster, op, ranks, place_group(cluster, ranks, concurrent), concurrent=concurrent)
    return FACTOR * tariff.estimate(np.array([float(num_bytes)]))[0]


def measured_on(cluster, more_s=0.0):
    """Rows as `measure_links` writes them: the mean over the groups of each place; sends are those of pairs."""
    places = list_places(cluster.num_ranks)
    rows = []
    for op in get_args(TransferKind):
        for place in [place for place in places if op != "send" or place.num_ranks == 2]:
            for size in SIZES:
                seconds = [true_seconds(cluster, op, group, place.groups, size) for group in place.groups]
                sizes = {"bytes": size, "ranks": place.num_ranks, "groups": len(place.groups), "stride": place.stride}
                shapes = named_shapes(**sizes, nodes=len(cluster.nodes), devices_per_node=1)
                rows.append({"op": op, "shapes": shapes, "seconds": float(np.mean(seconds)) + more_s})
    return make_records(**columns_of(rows, ("op", "shapes", "seconds")), device="cpu", dtype="float32")


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize(
    ("op", "ranks", "concurrent"),
    [
        ("send", (0, 1), ()),
        ("send", (1, 2), ()),
        ("all_reduce", (2, 3), ()),
        ("all_reduce", (1, 2), ()),
        ("all_reduce", (0, 1), ((0, 1), (2, 3))),
        ("all_gather", (1, 3), ((0, 2), (1, 3))),
        ("reduce_scatter", (0, 1, 2, 3), ()),
    ],
)
def test_each_group_has_the_time_of_its_own_links(name, op, ranks, concurrent):
    cluster = UNEVEN[name]
    own, _ = fit_links(measured_on(cluster), cluster)
    found = CollectiveCosts(cluster=cluster, dtype="float32", own=own).predict(
        op, ranks, np.array(SIZES, float), concurrent
    )
    wanted = [true_seconds(cluster, op, ranks, concurrent, size) for size in SIZES]
    assert found.seconds == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "concurrent"), [((0, 1), ((0, 1), (2, 3))), ((1, 3), ((0, 2), (1, 3))), ((0, 1, 2, 3), ())]
)
def test_measured_groups_have_their_own_time_whatever_the_datasheet_says(ranks, concurrent):
    own, _ = fit_links(measured_on(LABS, more_s=5e-3), LABS)
    found = CollectiveCosts(cluster=LABS, dtype="float32", own=own).predict(
        "all_reduce", ranks, np.array(SIZES, float), concurrent
    )
    wanted = [5e-3 + true_seconds(LABS, "all_reduce", ranks, concurrent, size) for size in SIZES]
    assert found.seconds == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("name", "factor"), [("racks", 2), ("path", 1)])
def test_concurrent_groups_share_uplinks_and_paths(name, factor):
    large, cluster = 1e9, UNEVEN[name]
    alone = true_seconds(cluster, "all_reduce", (1, 2), (), large)
    beside = true_seconds(cluster, "all_reduce", (1, 2), ((1, 2), (0, 3)), large)
    assert beside / alone == pytest.approx(factor, rel=0.01)
    pairs = replace(
        cluster, nodes=with_nodes(lambda _, node: replace(node, devices=(replace(node.devices[0], count=2),)))
    )
    # Two devices per node: devices 2 and 3 are on node 1, devices 4 and 5 on node 2.
    alone = true_seconds(pairs, "all_reduce", (2, 4), (), large)
    assert true_seconds(pairs, "all_reduce", (2, 4), ((2, 4), (3, 5)), large) / alone == pytest.approx(2, rel=0.01)


def test_groups_share_as_many_uplinks_as_a_rack_has():
    racks = replace(LABS.racks, nodes_per_rack=3, num_uplinks=2)
    cluster = replace(LABS, racks=racks, nodes=tuple(replace(LABS.nodes[0], name=f"node{n}") for n in range(6)))
    groups = ((0, 3), (1, 4), (2, 5))
    for op in ("all_reduce", "all_to_all"):
        alone, beside = (true_seconds(cluster, op, (0, 3), others, 1e9) for others in ((), groups))
        # Three groups on two uplinks; one group alone has one NIC.
        assert beside / alone == pytest.approx(1.5, rel=0.01)
    inside = true_seconds(cluster, "all_reduce", (0, 1), ((0, 1), (2, 5)), 1e9)
    assert inside == true_seconds(cluster, "all_reduce", (0, 1), (), 1e9)


def test_links_that_a_scenario_changes_are_scaled_once():
    own, _ = fit_links(measured_on(LABS), LABS)
    slower = replace(LABS, racks=replace(LABS.racks, uplink=replace(LABS.racks.uplink, bandwidth_bytes_per_s=1e6)))
    costs = CollectiveCosts(cluster=LABS, dtype="float32", own=own, changed=slower)
    for ranks in ((0, 1), (1, 2)):
        found = costs.predict("all_reduce", ranks, np.array(SIZES, float))
        wanted = [true_seconds(slower, "all_reduce", ranks, (), size) for size in SIZES]
        assert found.seconds == pytest.approx(wanted, rel=0.02)


def test_equal_links_stay_as_they_are():
    even = even_links(LABS)
    rows = measured_on(even)
    assert as_on_even_links(rows, even)[1.0].seconds.tolist() == rows.seconds.tolist()
    assert even_links(even) is even


def test_rows_of_another_cluster_stay_as_they_are():
    rows = measured_on(replace(LABS, nodes=LABS.nodes[:2], racks=None))
    found = as_on_even_links(rows, LABS)
    assert list(found) == [1.0]
    assert found[1.0].seconds.tolist() == rows.seconds.tolist()
