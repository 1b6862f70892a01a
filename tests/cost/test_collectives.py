"""Collectives by hand, by brute force and by their limits: bytes through a port, rings on links, datasheet, fits."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel, load_cost_model
from meshwright.cost.collectives import (
    COLLECTIVE_OPS,
    CollectiveGroup,
    CollectiveModel,
    Topology,
    fit_collectives,
    group_in_mesh,
    load_topology,
    place_group,
)
from meshwright.cost.collectives.algorithms import (
    best_ring,
    best_tree,
    count_rings,
    count_trees,
    link_matrix,
    parameter_server_seconds,
    port_share,
    ring_bottleneck,
    ring_seconds,
)
from meshwright.cost.collectives.datasheet import load_nccl, quote_collective
from meshwright.records import add_records, concat_records, make_records, named_shapes
from meshwright.spec import (
    ClusterError,
    MeasurementError,
    decode_document,
    encode_document,
    load_cluster,
    write_document,
)
from tests.cost.facts import make_cluster, make_table, never_measured, transfer_row
from tests.marks import examples

MIB = 2**20


def draw_links(count, seed, most=5):
    values = np.random.default_rng(seed).integers(0, most + 1, (count, count))
    upper = np.triu(values, 1)
    return upper + upper.T


# --- what moves ---


@given(st.integers(2, 64), st.floats(1, 1e12), st.floats(1e6, 1e12))
def test_no_spare_machine_is_the_ring_and_as_many_as_machines_is_the_tensor_once(machines, num_bytes, bandwidth):
    ring = ring_seconds(machines, num_bytes, 0.0, bandwidth)
    assert parameter_server_seconds(machines, 0, num_bytes, bandwidth) == pytest.approx(ring)
    assert parameter_server_seconds(machines, machines, num_bytes, bandwidth) == pytest.approx(num_bytes / bandwidth)


@given(st.integers(2, 64), st.data())
def test_more_spare_machines_never_slow_a_sum_down(machines, data):
    few, many = sorted(data.draw(st.tuples(st.integers(0, machines), st.integers(0, machines))))
    slower, faster = (parameter_server_seconds(machines, spare, 1e6, 1e9) for spare in (few, many))
    assert faster <= slower * (1 + 1e-12)


def test_spare_machines_beyond_the_machines_are_refused():
    with pytest.raises(MeasurementError, match="0 to 4 spare"):
        parameter_server_seconds(4, 5, 1e6, 1e9)


def count_bytes_through_nics(op, nodes, per_node, size):
    """Bytes out of the busiest node, message by message, of the ring in the order of the nodes or of all pairs."""
    ranks, out = nodes * per_node, np.zeros(nodes)
    if op == "all_to_all":
        for source in range(ranks):
            for target in range(ranks):
                if source // per_node != target // per_node:
                    out[source // per_node] += size / ranks**2
        return out.max()
    rounds = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "reduce_scatter": ranks - 1}[op]
    for rank in range(ranks):
        if rank // per_node != (rank + 1) % ranks // per_node:
            out[rank // per_node] += rounds * size / ranks
    return out.max()


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 8), (3, 2), (4, 4)])
def test_bytes_through_a_nic_are_those_of_the_messages(op, nodes, per_node):
    group = CollectiveGroup(num_ranks=nodes * per_node, num_nodes=nodes)
    assert port_share(op, group) * 1000 == pytest.approx(count_bytes_through_nics(op, nodes, per_node, 1000))
    crowded = CollectiveGroup(num_ranks=nodes * per_node, num_nodes=nodes, num_sharing=3)
    assert port_share(op, crowded) == pytest.approx(3 * port_share(op, group))


def test_groups_of_a_mesh_share_what_lies_between_them():
    assert group_in_mesh(16, 1, 8, 1, 2) == CollectiveGroup(num_ranks=16, num_nodes=2)
    assert group_in_mesh(4, 8, 8, 8, 4) == CollectiveGroup(num_ranks=4, num_nodes=4, num_sharing=8)
    assert group_in_mesh(2, 16, 8, 16, 4) == CollectiveGroup(num_ranks=2, num_nodes=2, num_sharing=8)
    assert group_in_mesh(16, 1, 8, 2, 4) == CollectiveGroup(num_ranks=16, num_nodes=2)
    assert group_in_mesh(4, 2, 8, 4, 2) == CollectiveGroup(num_ranks=4, num_sharing=2, stride=2)


def test_a_mesh_by_ranks_is_the_mesh_by_numbers():
    cluster = load_cluster("4x8xV100")
    columns = [tuple(range(start, 32, 8)) for start in range(8)]
    assert place_group(cluster, columns[3], columns) == group_in_mesh(4, 8, 8, 8, 4)
    pairs = [(start, start + 1) for start in range(0, 32, 2)]
    assert place_group(cluster, pairs[0], pairs) == group_in_mesh(2, 1, 8, 16, 4)
    # groups inside nodes take nothing from the NICs
    assert place_group(cluster, range(32), pairs).num_sharing == 1


@pytest.mark.parametrize("wrong", [{"num_ranks": 0}, {"num_ranks": 2, "num_nodes": 3}, {"num_ranks": 2, "stride": 0}])
def test_places_that_cannot_be_are_refused(wrong):
    with pytest.raises(ClusterError):
        CollectiveGroup(**wrong)


# --- rings and trees on links ---


@pytest.mark.parametrize("seed", range(12))
def test_the_best_ring_is_that_of_all_orders(seed):
    count = 4 + seed % 4
    links = draw_links(count, seed).astype(float)
    best = max(ring_bottleneck(links, (0, *rest)) for rest in permutations(range(1, count)))
    order = best_ring(links)
    assert sorted(order) == list(range(count))
    assert ring_bottleneck(links, order) == best


def test_a_ring_over_many_nodes_enters_each_once_whatever_the_numbering():
    shuffled = np.random.default_rng(0).permutation(32)
    node = shuffled // 8
    links = np.where(node[:, None] == node[None, :], 150e9, 3e9)
    order = best_ring(links)
    assert sorted(order) == list(range(32))
    assert sum(node[here] != node[there] for here, there in zip(order, (*order[1:], order[0]), strict=True)) == 4


def test_the_links_of_a_cluster_are_those_between_its_ranks():
    cluster, ranks = load_cluster("2x4xA100"), (6, 1, 5, 0, 2, 4)
    links = link_matrix(cluster, ranks)
    for row, here in enumerate(ranks):
        for column, there in enumerate(ranks):
            if here != there:
                assert links[row, column] == cluster.link_between(here, there).bandwidth_bytes_per_s
    order = [cluster.node_index(ranks[index]) for index in best_ring(links)]
    assert sum(here != there for here, there in zip(order, (*order[1:], order[0]), strict=True)) == 2


@pytest.mark.parametrize("seed", range(8))
def test_no_tree_has_a_faster_slowest_link(seed):
    count = 5
    links = draw_links(count, seed).astype(float)
    parents = best_tree(links)
    slowest = min(links[rank, parents[rank]] for rank in range(1, count))
    # by brute force: the fastest threshold at which the ranks still connect
    for speed in np.unique(links[np.triu_indices(count, 1)])[::-1]:
        reach = np.linalg.matrix_power((links >= speed).astype(int) + np.eye(count, dtype=int), count) > 0
        if reach[0].all():
            assert slowest == speed
            break


def test_a_hybrid_cube_mesh_holds_the_rings_that_nvidia_names():
    v100 = load_topology("dgx1-v100")
    links = np.array(v100.links)
    # 6 links per device, each used by one ring in each direction; quads of 4 links, neighbours of one.
    assert [count_rings(links[:count, :count]) for count in (2, 4, 8)] == [1, 4, 6]
    assert v100.lanes_among((0, 2, 4, 6)) == ("ring", 2.0)
    assert v100.lanes_among((0, 1, 2, 3, 4)) == ("tree", 2.0)
    assert v100.lanes_among((0, 5)) == ("ring", v100.host_share)


@pytest.mark.parametrize("seed", range(8))
def test_trees_are_as_many_as_can_be_taken_away(seed):
    links = draw_links(4, seed, most=2)
    rows, columns = np.triu_indices(4, 1)
    trees = [
        [edges]
        for edges in ((a, b, c) for a in range(6) for b in range(a + 1, 6) for c in range(b + 1, 6))
        if len({*rows[list(edges)], *columns[list(edges)]}) == 4 and _connects(rows, columns, edges)
    ]

    def most(free):
        best = 0
        for (edges,) in trees:
            if all(free[edge] for edge in edges):
                left = list(free)
                for edge in edges:
                    left[edge] -= 1
                best = max(best, 1 + most(left))
        return best

    assert count_trees(links) == most(links[rows, columns].tolist())


def _connects(rows, columns, edges):
    part = list(range(4))
    for edge in edges:
        old, new = part[rows[edge]], part[columns[edge]]
        part = [new if label == old else label for label in part]
    return len(set(part)) == 1


@pytest.mark.parametrize(
    "links", [np.ones((2, 3)), np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[0.0, -1.0], [-1.0, 0.0]])]
)
def test_links_that_are_no_graph_are_refused(links):
    with pytest.raises(ClusterError, match="symmetric"):
        best_ring(links)


def test_a_topology_that_is_not_symmetric_is_refused():
    with pytest.raises(ClusterError, match="symmetric"):
        Topology(name="odd", source="", links=((0, 1), (2, 0)), host_share=0.5)
    with pytest.raises(ClusterError, match="did you mean"):
        load_topology("dgx1-v10")


# --- by datasheet ---


@given(st.sampled_from(COLLECTIVE_OPS[:5]), st.sampled_from(["8xH100", "2x8xH100", "4x8xV100"]), st.floats(0, 1e10))
@settings(max_examples=examples(60))
def test_more_bytes_never_take_less_and_every_size_has_its_fastest_way(op, reference, num_bytes):
    """By datasheet; what was measured may fall with size, where NCCL changes the protocol."""
    cluster = never_measured(load_cluster(reference))
    cost, ranks = CostModel(cluster=cluster), tuple(range(cluster.num_ranks))
    few, many = cost.predict_collective(op, ranks, np.array([num_bytes, num_bytes * 1.5 + 1])).seconds
    assert 0 < few <= many


def with_device_link(reference, bandwidth_bytes_per_s=350e9):
    """A cluster of another link than the measured ones', so that the datasheet answers."""
    cluster = load_cluster(reference)
    link = replace(cluster.nodes[0].device_link, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return replace(cluster, nodes=tuple(replace(node, device_link=link) for node in cluster.nodes))


def test_small_messages_go_by_latency_and_large_ones_by_bandwidth():
    cluster = never_measured(with_device_link("8xH100"))
    cost, ranks = CostModel(cluster=cluster), tuple(range(8))
    fast, *_, plain = load_nccl().protocols
    link = cluster.nodes[0].device_link
    # LL: 2·(r-1) hops of a ring or a tree; Simple over a ring: 2·(n-1)/n of the bytes
    small = fast.base_s + 14 * fast.inside_latency_share * link.latency_s
    assert cost.collective_seconds("all_reduce", ranks, 1.0) == pytest.approx(small, rel=1e-3)
    large = 2 * 7 / 8 * 2**34 / link.bandwidth_bytes_per_s
    assert cost.collective_seconds("all_reduce", ranks, 2**34) == pytest.approx(large, rel=0.01)
    assert cost.collective_seconds("all_gather", ranks, 2**34) == pytest.approx(large / 2, rel=0.01)
    assert plain.bandwidth_share == 1.0


def bound_per_byte(op, cluster, counts):
    """Seconds per byte that no algorithm beats whose devices talk by their own link and whose nodes by their NICs.

    ``counts``: ranks by node. A sum of n tensors moves 2(n-1) of them (Patarasu and Yuan); of the rest a device must
    get, or give, what the others of its node hold, and a node what the other nodes hold.
    """
    ranks, found = sum(counts.values()), [0.0]
    for index, count in counts.items():
        node, outside = cluster.nodes[index], ranks - count
        inside = {"all_reduce": 2 * (count - 1) / count, "all_to_all": (count - 1) / ranks**2}
        inside |= dict.fromkeys(("broadcast", "send"), float(count > 1))
        found.append(inside.get(op, (count - 1) / ranks) / node.device_link.bandwidth_bytes_per_s)
        nodes = len(counts)
        across = {"all_reduce": 2 * (nodes - 1) / nodes, "all_to_all": count * outside / ranks**2}
        across |= dict.fromkeys(("broadcast", "send"), float(nodes > 1))
        found.append(across.get(op, outside / ranks) / (node.nic.bandwidth_bytes_per_s * node.num_nics))
    return max(found)


@pytest.mark.parametrize("op", COLLECTIVE_OPS)
@pytest.mark.parametrize(("num_nics", "device_bandwidth"), [(1, 300e9), (2, 300e9), (4, 10e9)])
def test_no_algorithm_is_faster_than_its_links(op, num_nics, device_bandwidth):
    cluster = load_cluster("3x4xA100")
    link = replace(cluster.nodes[0].device_link, bandwidth_bytes_per_s=device_bandwidth)
    nodes = tuple(replace(node, num_nics=num_nics, device_link=link) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes)
    sizes = np.array([1.0, 2**12, 2**20, 2**30])
    for counts in product(range(5), repeat=3):
        ranks = [4 * node + device for node, count in enumerate(counts) for device in range(count)]
        if len(ranks) == 2 or (len(ranks) > 2 and op != "send"):
            tariff = quote_collective(cluster, op, ranks, place_group(cluster, ranks))
            bound = bound_per_byte(op, cluster, {node: count for node, count in enumerate(counts) if count})
            assert (tariff.s_per_byte >= bound * (1 - 1e-12)).all(), counts
            assert (tariff.estimate(sizes) >= bound * sizes).all(), counts


@pytest.mark.parametrize("seed", range(12))
def test_no_lanes_carry_a_sum_faster_than_all_links_together(seed):
    links = draw_links(3 + seed % 4, seed)
    topology = Topology(name="drawn", source="", links=tuple(map(tuple, links.tolist())), host_share=1e-9)
    algorithm, lanes = topology.lanes_among(tuple(range(len(links))))
    share = port_share("all_reduce", CollectiveGroup(num_ranks=len(links)), num_lanes=lanes, algorithm=algorithm)
    # 2(n-1) tensors, over every link both ways
    assert share >= 2 * (len(links) - 1) / links.sum()


def test_a_sum_of_eight_a100s_takes_what_a_port_takes():
    cost = CostModel(cluster=load_cluster("8xA100"))
    assert cost.collective_seconds("all_reduce", range(8), 512 * MIB) >= 2 * 7 / 8 * 512 * MIB / 300e9


def test_groups_that_share_nics_wait_for_each_other_where_there_are_too_few():
    size = 2**32
    one_nic, eight_nics = (CostModel(cluster=load_cluster(name)) for name in ("2x8xV100", "2x8xH100"))
    columns = [(rank, rank + 8) for rank in range(8)]
    for cost, slower in ((one_nic, 8.0), (eight_nics, 1.0)):
        alone = cost.collective_seconds("all_reduce", columns[0], size)
        together = cost.collective_seconds("all_reduce", columns[0], size, concurrent=columns)
        assert together / alone == pytest.approx(slower, rel=0.01)


def test_the_order_of_the_ranks_does_not_matter():
    cost = CostModel(cluster=load_cluster("2x4xA100"))
    mixed = (0, 4, 1, 5, 2, 6, 3, 7)
    assert cost.collective_seconds("all_reduce", mixed, 10**8) == cost.collective_seconds(
        "all_reduce", tuple(range(8)), 10**8
    )


def test_nodes_that_are_joined_faster_than_their_devices_are_no_bottleneck():
    wide, slow = (
        CostModel(cluster=never_measured(with_device_link("2x8xH100", bandwidth))) for bandwidth in (350e9, 10e9)
    )
    everybody, first = tuple(range(16)), tuple(range(8))
    assert wide.collective_seconds("all_gather", everybody, 2**32) > wide.collective_seconds("all_gather", first, 2**32)
    ratio = slow.collective_seconds("all_gather", everybody, 2**32) / slow.collective_seconds(
        "all_gather", first, 2**32
    )
    # hierarchical: 7/8 of the bytes inside at 10 GB/s, then half of them out of each node over eight NICs
    assert ratio == pytest.approx(1 + (1 / 2 / 400) / (7 / 8 / 10), rel=1e-3)


# --- fitted ---

SIZES = tuple(4**power for power in range(3, 15))


def ring_rows(places, alpha=5e-6, bandwidth=2e11, ops=("all_reduce", "all_gather", "reduce_scatter"), **columns):
    """Rows of an exact ring: seconds = steps·α + share·S/B, for (ranks, groups, stride, nodes, devices_per_node)."""
    shapes, names, seconds = [], [], []
    for op in ops:
        for ranks, groups, stride, nodes, per_node in places:
            group = group_in_mesh(ranks, stride, per_node, groups, nodes)
            for size in SIZES:
                times = 2 if op == "all_reduce" else 1
                shapes.append(
                    named_shapes(
                        bytes=size, ranks=ranks, groups=groups, stride=stride, nodes=nodes, devices_per_node=per_node
                    )
                )
                names.append(op)
                seconds.append(
                    times
                    * (ranks - 1)
                    * (alpha + group.num_sharing ** (group.num_nodes > 1) * size / ranks / bandwidth)
                )
    return make_records(
        **{"op": names, "shapes": shapes, "dtype": "float32", "device": "box", "seconds": seconds, **columns}
    )


def test_what_was_measured_is_said_again_and_sizes_between_lie_between():
    model = fit_collectives(ring_rows([(8, 1, 1, 1, 8)]))
    found = model.predict("all_gather", CollectiveGroup(num_ranks=8), np.array([SIZES[5], 1.5 * SIZES[5]], float))
    exact = 7 * (5e-6 + np.array([SIZES[5], 1.5 * SIZES[5]]) / 8 / 2e11)
    assert found.basis == ("measured", "interpolated")
    assert found.seconds == pytest.approx(exact, rel=1e-9)
    assert (found.low_s <= found.seconds).all()
    assert (found.seconds <= found.high_s).all()


@pytest.mark.parametrize("asked", [3, 4, 6])
def test_a_ring_on_two_group_sizes_gives_large_messages_of_the_ring_between(asked):
    model = fit_collectives(ring_rows([(2, 1, 1, 1, 2), (8, 1, 1, 1, 8)]))
    for op, times in (("all_reduce", 2), ("all_gather", 1)):
        found = model.predict(op, CollectiveGroup(num_ranks=asked), np.array([2.0**28]))
        assert found.basis == ("transferred",)
        assert found.seconds[0] == pytest.approx(times * (asked - 1) * (5e-6 + 2**28 / asked / 2e11), rel=0.03)


def test_twice_the_nodes_of_a_ring_take_what_the_nic_takes():
    model = fit_collectives(ring_rows([(16, 1, 1, 2, 8), (8, 2, 2, 2, 8), (4, 4, 4, 2, 8)], bandwidth=3e9))
    found = model.predict("all_gather", CollectiveGroup(num_ranks=16, num_nodes=4, num_sharing=2), np.array([2.0**28]))
    assert found.seconds[0] == pytest.approx(2 * 15 / 16 * 2**28 / 3e9, rel=0.02)


def test_groups_inside_a_node_say_nothing_of_groups_across():
    model = fit_collectives(ring_rows([(8, 1, 1, 1, 8)]))
    assert model.predict("all_gather", CollectiveGroup(num_ranks=16, num_nodes=2), np.array([1e6])) is None
    assert model.predict("broadcast", CollectiveGroup(num_ranks=8), np.array([1e6])) is None


@given(st.integers(2, 40), st.integers(0, 2**34), st.integers(0, 2**34))
@settings(max_examples=examples(50))
@pytest.mark.long
def test_transfer_is_monotone_in_bytes(ranks, first, second):
    model = fit_collectives(ring_rows([(2, 1, 1, 1, 2), (4, 1, 1, 1, 4), (8, 1, 1, 1, 8)]))
    few, many = sorted((first, second))
    found = model.predict("all_reduce", CollectiveGroup(num_ranks=ranks), np.array([few, many], float))
    assert found.seconds[0] <= found.seconds[1] * (1 + 1e-12)


def test_a_fitted_model_is_plain_data():
    model = fit_collectives(ring_rows([(2, 1, 1, 1, 2), (8, 1, 1, 1, 8)]), load_topology("dgx1-v100"))
    again = decode_document(CollectiveModel, encode_document(model), "again")
    assert again == model
    assert len(again.row_hashes) == 2 * 3 * len(SIZES)


def test_the_cost_model_uses_what_was_fitted_on_its_kind_of_device():
    cluster = load_cluster("8xH100")
    model = fit_collectives(ring_rows([(8, 1, 1, 1, 8)], device="H100"))
    fitted, plain = CostModel(cluster=cluster, collectives={1.0: model}), CostModel(cluster=cluster)
    ranks = tuple(range(8))
    assert fitted.collective_seconds("all_gather", ranks, SIZES[5]) == pytest.approx(7 * (5e-6 + SIZES[5] / 8 / 2e11))
    assert fitted.collective_seconds("broadcast", ranks, 1e6) == plain.collective_seconds("broadcast", ranks, 1e6)
    assert fitted.predict_collective("broadcast", ranks, np.array([1e6])).basis == ("roofline",)
    other, alone = (CostModel(cluster=load_cluster("8xA100"), collectives=given) for given in ({1.0: model}, {}))
    assert other.collective_seconds("all_gather", ranks, 1e6) == alone.collective_seconds("all_gather", ranks, 1e6)


# --- shipped ---


def test_public_measurements_answer_for_the_same_device_and_link_inside_a_node():
    size, ranks = np.array([2.0**28]), range(8)
    public = CostModel(cluster=load_cluster("8xH100")).predict_collective("all_gather", ranks, size)
    assert public.basis == ("transferred",)
    # 400 GB/s and more of the 450 are what nccl-tests reach on such nodes
    assert 0.7 < 7 / 8 * size[0] / public.seconds[0] / 450e9 < 1.0
    assert public.low_s[0] < public.seconds[0] < public.high_s[0]
    for bandwidth, basis in ((450e9 * 1.09, "transferred"), (450e9 * 1.11, "roofline"), (8e9, "roofline")):
        cost = CostModel(cluster=with_device_link("8xH100", bandwidth))
        assert cost.predict_collective("all_gather", ranks, size).basis == (basis,)
    # Across nodes the datasheet answers, unless the ranks of one node alone take longer.
    for shape, basis in (("2x8xH100", "transferred"), ("16x1xH100", "roofline")):
        across = CostModel(cluster=load_cluster(shape))
        assert across.predict_collective("all_gather", range(16), size).basis == (basis,)
    assert CostModel(cluster=load_cluster("8xH100")).predict_collective("send", (0, 1), size).basis == ("roofline",)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_more_nodes_never_take_less_than_the_ranks_on_one_of_them(op):
    cost, sizes = CostModel(cluster=load_cluster("2x8xH100")), np.array([1.0, 2.0**20, 2.0**32])
    inside, across = (cost.predict_collective(op, range(count), sizes) for count in (8, 16))
    for name in ("seconds", "low_s", "high_s"):
        assert (getattr(across, name) >= getattr(inside, name)).all()


def test_points_that_say_nothing_are_not_fitted():
    good = ring_rows([(8, 1, 1, 1, 8)])
    flagged = ring_rows([(8, 1, 1, 1, 8)], alpha=1.0, flags="plateau")
    both = make_records(
        **{
            name: np.concatenate([getattr(good, name), getattr(flagged, name)])
            for name in ("op", "shapes", "dtype", "device", "seconds", "flags")
        }
    )
    assert fit_collectives(both).series == fit_collectives(good).series


def test_rows_of_two_devices_or_none_are_refused():
    with pytest.raises(MeasurementError, match="one device"):
        fit_collectives(ring_rows([(8, 1, 1, 1, 8)]).select(np.zeros(0, np.int64)))
    rows = ring_rows([(8, 1, 1, 1, 8)])
    names = np.where(np.arange(len(rows)) % 2, "a", "b").astype(object)
    with pytest.raises(MeasurementError, match="one device"):
        fit_collectives(make_records(op=rows.op, shapes=rows.shapes, device=names, seconds=rows.seconds))


@pytest.mark.parametrize("size", [-1.0, np.nan, np.inf])
def test_sizes_that_are_none_are_refused(size):
    model = fit_collectives(ring_rows([(8, 1, 1, 1, 8)]))
    with pytest.raises(MeasurementError, match="zero or more"):
        model.predict("all_gather", CollectiveGroup(num_ranks=8), np.array([size]))


# --- from a file ---


def test_a_table_of_many_devices_gives_its_collectives_across_nodes(tmp_path):
    cluster = load_cluster("2x8xV100")
    everybody = ring_rows([(8, 1, 1, 2, 8), (16, 1, 1, 2, 8)], bandwidth=3e9, device="V100")
    path = add_records(everybody, tmp_path / "links.parquet")
    cost = load_cost_model(cluster, path, "float32")
    found = cost.predict_collective("all_gather", range(16), np.array([SIZES[5]], float))
    assert found.basis == ("measured",)
    assert found.seconds[0] == pytest.approx(15 * (5e-6 + SIZES[5] / 16 / 3e9))
    assert cost.collective_seconds("all_reduce", tuple(range(16)), SIZES[5]) == pytest.approx(
        30 * (5e-6 + SIZES[5] / 16 / 3e9)
    )


def test_a_table_of_one_device_gives_what_it_has_and_none_gives_the_datasheet(tmp_path):
    cluster = make_cluster(num_nodes=2, num_devices=2)
    table = make_table(transfers=(transfer_row("all_reduce", 2, 4, 1.0), transfer_row("all_reduce", 2, 8, 2.0)))
    cost = load_cost_model(cluster, write_document(table, tmp_path / "box.json"), "float32")
    assert cost.collective_seconds("all_reduce", (0, 1), 8) == cost.collective_seconds("all_reduce", (0, 1), 8) == 2.0
    plain = load_cost_model(cluster, None, "float32")
    assert cost.collective_seconds("all_reduce", (0, 2), 8) == plain.collective_seconds("all_reduce", (0, 2), 8)


# --- between sizes ---


def test_dtypes_of_a_place_are_kept_apart_and_their_mean_is_what_nobody_asks_for():
    slow = ring_rows([(8, 1, 1, 1, 8)], alpha=8e-6, dtype="float32")
    fast = ring_rows([(8, 1, 1, 1, 8)], alpha=4e-6, dtype="float16")
    model, group, size = fit_collectives(concat_records([slow, fast])), CollectiveGroup(num_ranks=8), SIZES[5]
    wire = 7 * size / 8 / 2e11
    for dtype, latency_s in (("float32", 8e-6), ("bfloat16", 4e-6), ("float16", 4e-6), ("", 6e-6), ("int8", 6e-6)):
        found = model.predict("all_gather", group, np.array([size], float), dtype=dtype)
        assert found.seconds[0] == pytest.approx(7 * latency_s + wire, rel=1e-9), dtype


def test_groups_at_once_on_other_nodes_are_told_apart_where_both_were_measured():
    alone = ring_rows([(4, 1, 1, 1, 4)], alpha=4e-6)
    beside = ring_rows([(4, 2, 1, 2, 4)], alpha=8e-6)
    model, size = fit_collectives(concat_records([alone, beside])), np.array([float(SIZES[0])])
    times = [
        model.predict("all_gather", CollectiveGroup(num_ranks=4), size, num_groups=count).seconds[0]
        - 3 * size[0] / 4 / 2e11
        for count in (1, 2, 0)
    ]
    assert times == pytest.approx([3 * 4e-6, 3 * 8e-6, 3 * 6e-6])


def test_seconds_may_fall_between_sizes_but_not_beyond_them():
    """As NCCL does where it changes the protocol; on the last sizes the table itself falls."""
    sizes = 4.0 ** np.arange(3, 12)
    seconds = np.array([10, 10, 10, 14, 12, 13, 16, 15, 14]) * 1e-6
    shapes = [named_shapes(bytes=int(s), ranks=2, groups=1, stride=1, nodes=1, devices_per_node=2) for s in sizes]
    model = fit_collectives(make_records(op="all_gather", shapes=shapes, device="box", seconds=seconds))
    group = CollectiveGroup(num_ranks=2)
    assert model.predict("all_gather", group, sizes).seconds == pytest.approx(seconds)
    beyond = model.predict("all_gather", group, sizes[-1] * 2.0 ** np.arange(12)).seconds
    assert (np.diff(beyond) >= 0).all()
    before = model.predict("all_gather", group, sizes[0] / 2.0 ** np.arange(12)).seconds
    assert (np.diff(before) <= 0).all()


def test_sizes_closer_than_an_eighth_of_an_octave_count_as_one():
    shapes = [named_shapes(bytes=s, ranks=2, groups=1, stride=1, nodes=1, devices_per_node=2) for s in (1000, 1002)]
    (series,) = fit_collectives(make_records(op="send", shapes=shapes, device="box", seconds=[1e-6, 3e-6])).series
    assert series.measured == (1000.0, 1002.0)
    assert series.at(np.array([1001.0]))[0] == pytest.approx(2e-6)


def test_messages_smaller_than_a_series_knows_come_from_places_that_know_them():
    """The tables of 3, 5, 6 and 7 A100s begin at a megabyte; those of 2, 4 and 8 at a kilobyte."""
    cost = CostModel(cluster=load_cluster("8xA100"))
    small = {n: cost.predict_collective("all_reduce", range(n), np.array([1024.0])) for n in (4, 7, 8)}
    assert small[4].seconds[0] <= small[7].seconds[0] <= 2 * small[8].seconds[0]
    assert small[7].high_s[0] / small[7].seconds[0] > 2 > small[8].high_s[0] / small[8].seconds[0]


def test_a_link_of_another_latency_is_not_the_one_that_was_measured():
    cluster = load_cluster("8xH100")
    node = cluster.nodes[0]
    slow = replace(node, device_link=replace(node.device_link, latency_s=1.0))
    cost = CostModel(cluster=replace(cluster, nodes=(slow,)))
    assert cost.collective_seconds("all_reduce", range(8), 1024.0) > 1.0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_a_slower_link_never_takes_less(op):
    """The datasheet of a slowed link is faster than what was measured on the link at full speed."""
    sizes, ranks = np.array([1e4, 1e6, 1e8]), range(4)
    link = load_cluster("4xA100").nodes[0].device_link.bandwidth_bytes_per_s
    before = np.zeros(3)
    for slowdown in (1.0, 1.05, 1.2, 2.0, 3.36, 20.0):
        cost = CostModel(cluster=with_device_link("4xA100", link / slowdown))
        seconds = cost.predict_collective(op, ranks, sizes).seconds
        assert (seconds >= before * (1 - 1e-12)).all()
        before = seconds
