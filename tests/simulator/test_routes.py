"""Which links transfers hold: a link per pair inside a node, NICs between nodes."""

from __future__ import annotations

import numpy as np

from meshwright.simulator.routes import Routes
from meshwright.simulator.unroll import find_shared_links
from tests.simulator.plans import small_cluster


def links_of(routes: Routes, route: int) -> set[int]:
    offsets, links, _ = routes.table()
    return set(links[offsets[route] : offsets[route + 1]].tolist())


def test_pairs_inside_a_node_are_apart_and_directed():
    routes = Routes(small_cluster(devices=4))
    numbers = [routes.send(a, b) for a, b in ((0, 1), (1, 0), (0, 2), (2, 1))]
    assert [len(links_of(routes, number)) for number in numbers] == [1, 1, 1, 1]
    assert len(set.union(*(links_of(routes, number) for number in numbers))) == 4
    assert routes.send(0, 1) == numbers[0]
    assert routes.send(3, 3) == -1


def test_devices_share_the_nics_of_their_node():
    """Four devices and two NICs: devices 0 and 1 share one, 2 and 3 the other; out and in are apart."""
    routes = Routes(small_cluster(num_nodes=2, devices=4, num_nics=2))
    send = lambda a, b: links_of(routes, routes.send(a, b))
    first = send(0, 4)
    assert len(first) == 2
    assert first == send(1, 5)
    assert not first & send(2, 6)
    assert len(first & send(0, 6)) == 1
    assert not first & send(4, 0)


def test_a_ring_holds_the_links_between_neighbours():
    routes = Routes(small_cluster(num_nodes=2, devices=2))
    inside = links_of(routes, routes.ring((1, 0)))
    assert inside == links_of(routes, routes.send(0, 1)) | links_of(routes, routes.send(1, 0))
    across = links_of(routes, routes.ring((0, 1, 2, 3)))
    hops = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert across == set.union(*(links_of(routes, routes.send(*hop)) for hop in hops))
    assert routes.ring((3, 1, 0, 2)) == routes.ring((0, 1, 2, 3))


def test_a_link_is_private_when_one_stream_is_in_every_request():
    """Link 0: two streams. Link 1: one stream. Link 2: a collective of both streams and a request of one of them."""
    resource = np.array([0, 1, 3, 2, 0, 3], np.int32)
    shared = find_shared_links(
        np.array([0, 4, 6]),
        resource,
        np.array([2], np.int32),
        np.array([0, 1, 2, 3]),
        np.array([0, 1, 2], np.int32),
        3,
    )
    assert shared.tolist() == [True, False, False]
