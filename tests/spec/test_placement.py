"""Placements: what they say of themselves, which do not fit, and what their stages pass on."""

from dataclasses import replace

import pytest

from meshwright.spec import (
    GraphError,
    GraphMismatchError,
    PlacedStage,
    Placement,
    PlanError,
    Workload,
    check_placement,
    load_cluster,
    slice_placement,
)
from tests.planner.place_graphs import fork, graph_of
from tests.spec.examples import PLACEMENT


def placement_of(graph, *stages, **changes):
    """Stages as (rank, names of ops)."""
    number = {op.name: index for index, op in enumerate(graph.ops)}
    return Placement(
        model="",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(kind=graph.mode, global_batch=2),
        stages=tuple(PlacedStage(rank=rank, ops=tuple(number[name] for name in names)) for rank, names in stages),
        **changes,
    )


FORK = fork(1)
FITTING = placement_of(FORK, (0, ("stem",)), (0, ("a0",)), (1, ("b0",)), (0, ("join",)))


def test_the_line_for_people():
    assert PLACEMENT.describe() == "3 ops on 2 ranks (1, 2), 2 stages, 4 microbatches of 3"
    check_placement(FITTING, FORK, load_cluster("2xcpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "no stages"),
        ({"stages": (PlacedStage(rank=-1, ops=(0,)),)}, "on rank -1; expected 0 to"),
        ({"stages": (PlacedStage(rank=10**9, ops=(0,)),)}, "on rank 1000000000; expected 0 to 1024"),
        ({"stages": (PlacedStage(rank=0, ops=()),)}, "at least one, ascending"),
        ({"stages": (PlacedStage(rank=0, ops=(1, 0)),)}, "at least one, ascending"),
        ({"num_microbatches": 5}, "12 samples does not divide into 5"),
        ({"num_microbatches": 0}, "does not divide"),
    ],
)
def test_placements_that_contradict_themselves(changes, message):
    with pytest.raises(PlanError, match=message):
        replace(PLACEMENT, **changes)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((0, ("stem", "a0", "b0")),), "leaves out 1 ops of the graph, the first is 'join'"),
        (((0, ("stem", "a0", "b0", "join")), (1, ("join",))), "Stage 1 of the placement names op 3, a second time"),
        (((0, ("a0",)), (0, ("stem", "b0", "join"))), "'a0' is in stage 0 .* reads 'stem', which a later stage"),
    ],
)
def test_placements_that_do_not_fit_the_graph(stages, message):
    with pytest.raises(PlanError, match=message):
        check_placement(placement_of(FORK, *stages), FORK)


def test_random_ops_out_of_order():
    graph = fork(1, random=("a0", "b0"))
    late = placement_of(graph, (0, ("stem",)), (1, ("b0",)), (0, ("a0", "join")))
    with pytest.raises(PlanError, match="'b0' draws random numbers in an earlier stage"):
        check_placement(late, graph)


def test_other_graphs_clusters_and_workloads():
    with pytest.raises(GraphMismatchError, match="place it again"):
        check_placement(FITTING, fork(2))
    with pytest.raises(PlanError, match="uses rank 1, but cluster '1xcpu' has 1 devices"):
        check_placement(FITTING, FORK, load_cluster("1xcpu"))
    with pytest.raises(PlanError, match="for training, but the graph was captured for inference"):
        check_placement(replace(FITTING, workload=Workload(global_batch=2)), FORK)
    fixed = replace(FORK, batch_size=3)
    with pytest.raises(GraphError, match="batches of 3 samples only"):
        check_placement(replace(FITTING, graph_hash=fixed.content_hash), fixed)


def test_a_tensor_crosses_once_and_is_handed_on():
    """``a`` is read by three stages of rank 1: it is sent to the first, which hands it to the others."""
    graph = graph_of({"a": ("x",), "p": ("a",), "q": ("a", "p"), "r": ("a", "q")}, mode="training")
    placement = placement_of(graph, (0, ("a",)), (1, ("p",)), (1, ("q",)), (1, ("r",)))
    channels = [channel for stage in slice_placement(graph, placement) for channel in stage.outgoing]
    a, p, q = (next(i for i, t in enumerate(graph.tensors) if t.name == name) for name in "apq")
    found = {(channel.source, channel.target): (channel.tensors, channel.gradients) for channel in channels}
    assert found == {
        (0, 1): ((a,), (a,)),
        (1, 2): ((a, p), (a, p)),
        (1, 3): ((a,), (a,)),
        (2, 3): ((q,), (q,)),
    }


def test_gradients_flow_only_where_the_loss_needs_them():
    """``dead`` is computed from ``a`` and read by nobody: its stage has no backward and returns nothing."""
    graph = graph_of({"a": ("x",), "dead": ("a",), "loss": ("a",)}, mode="training")
    placement = placement_of(graph, (0, ("a",)), (1, ("dead",)), (0, ("loss",)))
    stages = slice_placement(graph, placement)
    assert [stage.has_backward for stage in stages] == [True, False, True]
    assert {(c.source, c.target): bool(c.gradients) for s in stages for c in s.outgoing} == {
        (0, 1): False,
        (0, 2): True,
    }
