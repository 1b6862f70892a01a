"""`place`: against closed forms, a paper's example, and oracles that count on the graph alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Constraints, place
from meshwright.planner.placing.op_tasks import Tasks, find_choices, find_tasks
from meshwright.planner.placing.placement_search import TaskCosts, schedule_tasks
from meshwright.program import build_placed_program
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    RNG_STATE_BYTES,
    GraphError,
    NoFeasiblePlanError,
    Opcode,
    Plan,
    PlanError,
    StagePlan,
    Workload,
    slice_placement,
)
from tests.marks import examples
from tests.planner.place_graphs import crossings, fork, generator_hops, graph_of
from tests.program.check import check_program
from tests.simulator.plans import FixedCost, small_cluster
from tests.strategies import graphs

COST = FixedCost(cluster=small_cluster(devices=4), forward=10e-6, backward=20e-6, send=1e-6)


def put(graph, *, cost=COST, batch=4, **options):
    return place(graph, cost.cluster, Workload(kind=graph.mode, global_batch=batch), cost=cost, **options)


def duration_s(placement, graph, cost=COST):
    return simulate_plan(placement, graph, cost.cluster, cost=cost).timeline.duration_s


def ranks_by_name(placement, graph):
    return {graph.ops[op].name: stage.rank for stage in placement.stages for op in stage.ops}


def test_list_scheduling_gives_the_published_schedule():
    """Topcuoglu et al. 2002, fig. 2 and 3(a): ten tasks on three processors, HEFT's makespan is 80."""
    seconds = """14 16 9  13 19 18  11 13 19  13 8 17  12 13 10  13 16 9  7 15 11  5 11 14  18 12 20  21 7 16"""
    edges = """1 2 18  1 3 12  1 4 9  1 5 11  1 6 14  2 8 19  2 9 16  3 7 23  4 8 27  4 9 23  5 9 13  6 8 15  7 10 17
        8 10 11  9 10 13"""
    rows = np.array(edges.split(), int).reshape(-1, 3)
    tasks = Tasks(
        ops=tuple((task,) for task in range(10)),
        reads=tuple(tuple((int(a) - 1, k) for k, (a, b, _) in enumerate(rows) if b == task + 1) for task in range(10)),
    )
    costs = TaskCosts(
        seconds=np.array(seconds.split(), float).reshape(10, 3),
        num_bytes=np.zeros((10, 3)),
        limit_bytes=np.zeros(3),
        send_s=lambda edge, source, target: float(rows[edge, 2]),
    )
    found = schedule_tasks(tasks, costs, [(0, 1, 2)] * 10, range(10))
    # Who computes what, in the paper's figure: P3 runs 1, 3, 5, 7; P2 runs 4, 6, 9, 10; P1 runs 2, 8.
    assert [device + 1 for device in found.devices] == [3, 1, 3, 2, 3, 2, 3, 1, 2, 2]
    ends = [
        start + costs.seconds[task, device]
        for task, (start, device) in enumerate(zip(found.starts, found.devices, strict=True))
    ]
    assert max(ends) == 80


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("num_branches", [2, 3, 4])
def test_branches_run_side_by_side(depth, num_branches):
    """Stem, one branch and join one after the other; the stem's value leaves to one device after the other.

    The join is where the last one arrived, and has all other branches by then.
    """
    graph = fork(depth, num_branches)
    placement = put(graph)
    ranks = ranks_by_name(placement, graph)
    assert len({ranks[f"{branch}0"] for branch in "abcd"[:num_branches]}) == num_branches
    assert duration_s(placement, graph) == pytest.approx((depth + 2) * 10e-6 + (num_branches - 1) * 1e-6, rel=1e-9)


def test_training_branches_run_side_by_side():
    """Forward, then backward at twice the time; one message of each is not hidden."""
    graph = fork(3, mode="training")
    assert duration_s(put(graph), graph) == pytest.approx(5 * 30e-6 + 2 * 1e-6, rel=1e-9)


def test_where_sending_is_dear_all_stays_on_one_device():
    """Eight ops, of which two devices would save three, at the cost of a message."""
    graph = fork(3)
    dear = FixedCost(cluster=small_cluster(devices=4), forward=10e-6, send=31e-6)
    placement = put(graph, cost=dear)
    assert placement.num_ranks == 1
    assert len(placement.stages) == 1


def test_a_chain_in_several_microbatches_is_a_pipeline():
    """m microbatches through two halves of three ops: (m + 1) halves and the first message."""
    graph = graph_of({name: (before,) for before, name in zip("xabcde", "abcdef", strict=True)})
    cost = FixedCost(cluster=small_cluster(devices=2), forward=10e-6, send=1e-6)
    placement = put(graph, cost=cost, batch=8, num_microbatches=8)
    assert duration_s(placement, graph, cost) == pytest.approx(9 * 30e-6 + 1e-6, rel=1e-9)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_one_device_is_the_plan_of_one_stage(mode, num_microbatches):
    """The same seconds and the same bytes as the plan of a single stage, whose simulation has oracles of its own."""
    graph = fork(2, mode=mode, parameters={"a0": "w", "b1": "v"})
    workload = Workload(kind=mode, global_batch=6)
    alone = place(graph, COST.cluster, workload, devices=(0,), cost=COST, num_microbatches=num_microbatches)
    plan = Plan(
        model="",
        graph_hash=graph.content_hash,
        cluster="",
        workload=workload,
        stages=(StagePlan(start=0, stop=1, ranks=(0,)),),
        num_microbatches=num_microbatches,
        schedule="gpipe",
    )
    one, other = (simulate_plan(item, graph, COST.cluster, cost=COST) for item in (alone, plan))
    assert one.step_time_s == other.step_time_s
    assert one.peak_memory_bytes == other.peak_memory_bytes
    assert one.timeline.num_spans == other.timeline.num_spans


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(graphs(max_ops=12), st.integers(1, 3), st.integers(1, 3), st.data())
def test_every_placement_keeps_the_rules(graph, num_devices, num_microbatches, data):
    placed = [op for op in range(len(graph.ops)) if not graph.ops[op].replicable]
    assume(placed)
    cost = FixedCost(cluster=small_cluster(devices=num_devices), forward=10e-6, backward=20e-6, send=3e-6)
    wanted = {
        graph.ops[op].name: data.draw(st.integers(0, num_devices - 1))
        for op in data.draw(st.sets(st.sampled_from(placed)))
    }
    size = graph.batch_size or 2
    options = {"cost": cost, "batch": size * num_microbatches, "num_microbatches": num_microbatches}
    try:
        placement = put(graph, constraints=Constraints(fixed=wanted), **options)
    except NoFeasiblePlanError:
        groups = find_choices(graph, find_tasks(graph), range(num_devices), Constraints()).groups
        assert len(groups) > len({*groups}) or any(len(ops) > 1 for ops in find_tasks(graph).ops)
        return
    program = build_placed_program(placement, graph)
    check_program(program)
    rank_of = {op: stage.rank for stage in placement.stages for op in stage.ops}
    assert sorted(op for stage in placement.stages for op in stage.ops) == placed
    assert all(rank_of[op] == wanted[graph.ops[op].name] for op in placed if graph.ops[op].name in wanted)
    _check_crossings(graph, placement, program, rank_of, size)
    runs = program.body.opcode == Opcode.FORWARD
    assert runs.sum() == len(placement.stages) * num_microbatches
    if not wanted:
        alone = num_microbatches * len(placed) * (30e-6 if graph.mode == "training" else 10e-6)
        replicated = num_microbatches * (len(graph.ops) - len(placed)) * 30e-6
        assert duration_s(placement, graph, cost) <= (alone + replicated) * (1 + 1e-9)


def _check_crossings(graph, placement, program, rank_of, size):
    """Each tensor goes to each rank that reads it once, and nothing else is sent but the generator's state."""
    expected = crossings(graph, rank_of)
    channels = [
        channel
        for stage in slice_placement(graph, placement)
        for channel in stage.outgoing
        if placement.stages[channel.source].rank != placement.stages[channel.target].rank
    ]
    carried = [(tensor, placement.stages[channel.target].rank) for channel in channels for tensor in channel.tensors]
    # Outputs that nobody makes (inputs, state) may be yielded anywhere; they are not sent.
    assert sorted(carried) == sorted(expected)
    sends = program.body.opcode == Opcode.SEND_ACTIVATION
    num_bytes = sum(graph.tensors[tensor].num_bytes(size, 4) for tensor, _ in expected)
    num_bytes += generator_hops(graph, rank_of) * RNG_STATE_BYTES
    assert program.body.num_bytes[sends].sum() == placement.num_microbatches * num_bytes


def test_what_is_written_in_place_stays_together():
    """``r`` reads ``a`` before ``w`` writes into it: one task; what reads the result need not be with them."""
    graph = graph_of(
        {"a": ("x",), "r": ("a",), "w": ("a", "r"), "late": ("w",), "apart": ("x",)},
        kinds={"w": "aten.add_.Tensor"},
        storages={"w": "a"},
    )
    assert find_tasks(graph).ops == ((0, 1, 2), (3,), (4,))


def test_two_tasks_that_wait_for_each_other_are_one():
    """Writes to ``a`` and ``b`` each need what comes after the other's first use."""
    graph = graph_of(
        {"a": ("x",), "b": ("x",), "p": ("a",), "q": ("b",), "wa": ("a", "q"), "wb": ("b", "p")},
        kinds={"wa": "aten.add_.Tensor", "wb": "aten.add_.Tensor"},
        storages={"wa": "a", "wb": "b"},
    )
    assert find_tasks(graph).ops == ((0, 1, 2, 3, 4, 5),)


def test_shared_parameters_share_a_device():
    graph = fork(2, mode="training", parameters={"a0": "shared", "b1": "shared"})
    ranks = ranks_by_name(put(graph), graph)
    assert ranks["a0"] == ranks["b1"]


def test_random_ops_follow_the_order_of_the_graph():
    graph = fork(2, random=("a1", "b0", "b1"))
    placement = put(graph, constraints=Constraints(fixed={"a1": 0, "b0": 1, "b1": 0}))
    order = [graph.ops[op].name for stage in placement.stages for op in stage.ops if graph.ops[op].random]
    assert order == ["a1", "b0", "b1"]


def test_constraints_hold():
    graph = fork(2, num_branches=3)
    rules = Constraints(fixed={"join": 2}, forbidden={"a0": (0, 1)}, together=(("b0", "c1"),))
    ranks = ranks_by_name(put(graph, constraints=rules, devices=(0, 1, 2)), graph)
    assert ranks["join"] == 2
    assert ranks["a0"] == 2
    assert ranks["b0"] == ranks["c1"]
    assert set(ranks.values()) <= {0, 1, 2}


def test_only_the_devices_that_were_given():
    graph = fork(3)
    assert set(ranks_by_name(put(graph, devices=(1, 3)), graph).values()) == {1, 3}


def test_memory_forces_a_second_device():
    """Parameters of 4 MiB in each branch, devices that hold one of them, messages too dear to be worth it."""
    graph = fork(1, width=1024, parameters={"a0": "left", "b0": "right"})
    dear = FixedCost(cluster=small_cluster(devices=2), forward=10e-6, send=1.0)
    assert put(graph, cost=dear).num_ranks == 1
    placement = put(graph, cost=dear, memory=MemoryLimit(num_bytes=5 * 2**20))
    ranks = ranks_by_name(placement, graph)
    assert ranks["a0"] != ranks["b0"]
    assert max(simulate_plan(placement, graph, dear.cluster, cost=dear).peak_memory_bytes) <= 5 * 2**20
    with pytest.raises(NoFeasiblePlanError, match=r"needs 4.* and has 1 MiB; the largest part: parameters"):
        put(graph, cost=dear, memory=MemoryLimit(num_bytes=2**20))


def test_a_placement_is_found_again():
    graph = fork(3, num_branches=3)
    assert put(graph) == put(graph)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"constraints": Constraints(fixed={"jion": 0})}, PlanError, "did you mean 'join'"),
        ({"constraints": Constraints(fixed={"join": 7})}, PlanError, "names device 7; the devices are 0, 1, 2, 3"),
        ({"constraints": Constraints(forbidden={"join": (0, 1, 2, 3)})}, NoFeasiblePlanError, "leaves no device"),
        (
            {"constraints": Constraints(fixed={"join": 0, "stem": 1}, together=(("join", "stem"),))},
            NoFeasiblePlanError,
            "leaves no device",
        ),
        ({"devices": (0, 9)}, PlanError, "expected some of 0 to 3"),
        ({"devices": (1, 1)}, PlanError, "each once"),
        ({"num_microbatches": 3}, PlanError, "does not divide into 3 microbatches"),
        ({"max_simulated": 0}, PlanError, "expected at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        put(fork(1), **options)


def test_a_graph_for_another_workload_is_refused():
    with pytest.raises(PlanError, match="captured for inference"):
        place(fork(1), COST.cluster, Workload(global_batch=4), cost=COST)


def test_a_graph_with_nothing_to_place_is_refused():
    graph = fork(1)
    free = replace(graph, ops=tuple(replace(op, replicable=True) for op in graph.ops))
    with pytest.raises(GraphError, match="nothing to place"):
        put(free)
