"""The memory of placements, by hand."""

from meshwright.planner import Constraints, place
from meshwright.simulator import simulate_plan
from meshwright.spec import Workload
from tests.planner.place_graphs import graph_of
from tests.simulator.plans import FixedCost, small_cluster

COST = FixedCost(cluster=small_cluster(devices=2), forward=10e-6, send=1e-6)


def simulate(graph, batch, **fixed):
    placement = place(
        graph,
        COST.cluster,
        Workload(kind=graph.mode, global_batch=batch),
        cost=COST,
        constraints=Constraints(fixed=fixed),
    )
    return simulate_plan(placement, graph, COST.cluster, cost=COST)


def test_a_value_stays_until_its_last_reader_on_the_rank():
    """Rank 0 makes a, sends it, and reads it again with what comes back; all tensors are T bytes.

    Rank 0: the input, the buffer for b, a, and c while it is made. Rank 1: the buffer for a, and b. Were a forgotten
    when its stage ends, rank 0 would need one T less.
    """
    graph = graph_of({"a": ("x",), "b": ("a",), "c": ("a", "b")}, width=256)
    found = simulate(graph, 8, a=0, b=1, c=0)
    each = 8 * 256 * 4
    assert found.peak_memory_bytes == (4 * each, 2 * each)


def test_what_a_rank_received_stays_for_its_later_stages():
    """Rank 1 reads a in two stages, between which it waits for c, made on rank 0 of its own b.

    Rank 1: buffers for a and for c, a handed on, d while it is made; b has been sent and is not counted.
    """
    graph = graph_of({"a": ("x",), "b": ("a",), "c": ("b",), "d": ("a", "c")}, width=256)
    found = simulate(graph, 8, a=0, b=1, c=0, d=1)
    each = 8 * 256 * 4
    assert found.peak_memory_bytes[1] == 4 * each


def test_parameters_and_inputs_of_several_stages_count_once():
    """Both stages of rank 0 read the input and the weight; rank 1 has neither."""
    graph = graph_of(
        {"a": ("x",), "b": ("a",), "c": ("x", "b")}, width=256, parameters={"a": "w", "c": "w"}, mode="inference"
    )
    found = simulate(graph, 8, a=0, b=1, c=0)
    assert found.memory[0].parts["parameters"] == 256 * 256 * 4
    assert found.memory[0].parts["inputs"] == 8 * 256 * 4
    assert found.memory[1].parts["parameters"] == 0


def test_shared_states_of_the_optimizer_count_once():
    graph = graph_of(
        {"a": ("x",), "b": ("a",), "c": ("b",)}, width=256, parameters={"a": "w", "c": "w"}, mode="training"
    )
    found = simulate(graph, 8, a=0, b=1)
    assert found.memory[0].parts["optimizer states"] == 2 * 256 * 256 * 4 + 4
