"""Rings, trees and hierarchies of all-reduces, on the links that they use."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.program import build_program
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.simulator.routes import Routes
from meshwright.spec import GradientExchange, Link, Opcode, PlanError, load_cluster
from tests.graphs import chain_graph, make_plan
from tests.program.check import check_program
from tests.simulator.plans import small_cluster

WIDTH = 1024
M = 4 * WIDTH * WIDTH
ALPHA, B = 1e-6, 1e9


def summed(num_nodes, devices, *, num_nics=1, **exchange):
    """The program, its costs and the seconds from the backward's end to the optimizer's step; one layer of M bytes."""
    graph = chain_graph(1, width=WIDTH)
    count = num_nodes * devices
    plan = make_plan(graph, [(0, 1)], [count], count, exchange=GradientExchange(overlap=False, **exchange))
    cluster = small_cluster(num_nodes=num_nodes, devices=devices, num_nics=num_nics)
    program = build_program(plan, graph)
    timeline = simulate_plan(plan, graph, cluster).timeline
    backward = timeline.end_ps[timeline.opcode == Opcode.BACKWARD].max()
    seconds = (timeline.start_ps[timeline.opcode == Opcode.OPTIMIZER_STEP].max() - backward) / 1e12
    return program, estimate_program(program, plan, graph, CostModel(cluster=cluster)), seconds


@pytest.mark.parametrize(("num_nodes", "devices"), [(1, 4), (4, 1), (2, 2), (3, 4)])
def test_a_ring(num_nodes, devices):
    n = num_nodes * devices
    assert summed(num_nodes, devices, algorithm="ring")[2] == pytest.approx(
        2 * (n - 1) * ALPHA + 2 * (n - 1) / n * M / B, rel=1e-9
    )


@pytest.mark.parametrize(("num_nodes", "devices"), [(1, 4), (4, 1), (4, 2)])
def test_a_tree(num_nodes, devices):
    """A chain inside nodes, a binary tree of them across: what goes up comes down, through one port."""
    hops = 2 * (devices - 1) + 2 * np.log2(num_nodes)
    assert summed(num_nodes, devices, algorithm="tree")[2] == pytest.approx(hops * ALPHA + 2 * M / B, rel=1e-9)


@pytest.mark.parametrize("num_nics", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_hierarchy(num_nodes, num_nics):
    """Scatter and gather inside, 2 (N - 1) / N of a part across, and as many of these queue as share a card."""
    r = 4
    program, _, seconds = summed(num_nodes, r, num_nics=num_nics, algorithm="hierarchical", node_size=r)
    check_program(program)
    inside = 2 * ((r - 1) * ALPHA + (r - 1) / r * M / B)
    across = 2 * (num_nodes - 1) * ALPHA + 2 * (num_nodes - 1) / num_nodes * M / r / B
    assert seconds == pytest.approx(inside + (r / num_nics if num_nodes > 1 else 1) * across, rel=1e-6)


def test_a_hierarchy_moves_every_byte_once():
    program, costs, _ = summed(2, 3, algorithm="hierarchical", node_size=3, partition_bytes=100_000)
    body = program.body
    for kind, groups in (
        (Opcode.REDUCE_SCATTER, {(0, 1, 2), (3, 4, 5)}),
        (Opcode.ALL_GATHER, {(0, 1, 2), (3, 4, 5)}),
        (Opcode.ALL_REDUCE, {(0, 3), (1, 4), (2, 5)}),
    ):
        rows = np.flatnonzero(body.opcode == kind)
        assert {program.groups[group] for group in body.group[rows].tolist()} == groups
        each = M if kind != Opcode.ALL_REDUCE else M / 3
        assert body.num_bytes[rows].sum() == 6 * each
    # Parts overlap: while one crosses nodes, the next is scattered.
    lanes = {stream.lane for stream in program.streams if stream.name == "exchange"}
    assert lanes == {0, 1, 2}
    assert costs.num_links > 0


def test_the_links_of_a_tree():
    """Two nodes of two: inside over a pair of links, across over the cards, up and down."""
    even = small_cluster(num_nodes=2, devices=2)
    fast = Link(latency_s=ALPHA, bandwidth_bytes_per_s=10 * B)
    routes = Routes(replace(even, nodes=tuple(replace(node, device_link=fast) for node in even.nodes)))
    routes.tree((0, 1, 2, 3))
    assert sorted(routes.names()) == [
        "NIC 0 of node0, in",
        "NIC 0 of node0, out",
        "NIC 0 of node1, in",
        "NIC 0 of node1, out",
        "link 0→1",
        "link 1→0",
        "link 2→3",
        "link 3→2",
    ]


def test_automatic_is_the_faster_of_both_on_gpus():
    cost, ranks = CostModel(cluster=load_cluster("4x8xV100")), (0, 8, 16, 24)
    winners = set()
    for size in (1e3, 1e5, 1e7, 1e9):
        ring, tree = (cost.collective_seconds("all_reduce", ranks, size, algorithm=way) for way in ("ring", "tree"))
        assert cost.collective_seconds("all_reduce", ranks, size) == min(ring, tree)
        winners.add(ring < tree)
    assert winners == {False, True}


def test_what_does_not_fit_is_refused():
    graph = chain_graph(1)
    plan = make_plan(graph, [(0, 1)], [3], 3, exchange=GradientExchange(algorithm="hierarchical", node_size=2))
    with pytest.raises(PlanError, match="some nodes have 1 and some 2 of these ranks"):
        build_program(plan, graph)
    for wrong, message in (
        ({"algorithm": "rings"}, "did you mean 'ring'"),
        ({"algorithm": "ring", "node_size": 2}, "node_size is 2 with the algorithm ring"),
        ({"algorithm": "hierarchical"}, "node_size is 0 with the algorithm hierarchical"),
        ({"algorithm": "tree", "servers": (0,)}, "but an exchange with `servers` or `zero` has no all-reduces"),
    ):
        with pytest.raises(PlanError, match=message):
            GradientExchange(**wrong)
    assert replace(plan, exchange=GradientExchange()).is_runnable
    assert not plan.is_runnable
