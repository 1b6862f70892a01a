"""Own schedules in the search: true counts in flight, true times, and plans that they cannot order left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import StageMemory
from meshwright.cost.memory import MemoryLimit, count_phases
from meshwright.planner import compare_schedules, schedule_rows
from meshwright.planner.methods.slicing.assemble import assume_in_flight
from meshwright.program import with_schedule
from meshwright.simulator.stage_bytes import MAX_GRADIENT_SENDS
from meshwright.spec import (
    DeadlockError,
    Extent,
    NoFeasiblePlanError,
    Plan,
    ScheduleError,
    ScheduleReferenceError,
    Tensor,
    Workload,
)
from meshwright.spec.memory import SAVED
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.planner.searching import search_plans
from tests.program.own import ALL, write_schedule
from tests.simulator.plans import FixedCost, small_cluster

# Every microbatch in flight takes 1,000 bytes, and nothing else takes any.
FLIGHT_BYTES = 1000
MEMORY = StageMemory(
    parameter_bytes=0,
    buffer_bytes=0,
    gradient_bytes=0,
    optimizer_bytes=0,
    saved_bytes=FLIGHT_BYTES,
    received_bytes=0,
    input_bytes=0,
    sent_bytes=0,
    phases=count_phases({SAVED: FLIGHT_BYTES}, gradient_bytes=0, sent_bytes=0, workspace_bytes=0),
)
THRIFTY = """
def thrifty(plan, rank):
    (stage,) = plan.stages_of(rank)
    return in_turn(plan, rank, at_most=min(2, num_active(plan, stage)))


def picky(plan, rank):
    (stage,) = plan.stages_of(rank)
    if len(plan.stages) != 2:
        raise ValueError("for two stages only")
    yield from thrifty(plan, rank)


def never(plan, rank):
    (stage,) = plan.stages_of(rank)
    raise ValueError("for no plan")
    yield
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(ALL + THRIFTY)
    return path


def search(mine, *schedules, graph=None, cost=None, global_batch=16, **options):
    graph = graph or chain_graph(8)
    references = [
        schedule if schedule in ("gpipe", "1f1b") or ":" in schedule else f"{mine}:{schedule}" for schedule in schedules
    ]
    cluster = small_cluster(devices=4)
    return search_plans(
        lambda size: graph,
        cluster,
        Workload(global_batch=global_batch),
        cost=cost or FixedCost(cluster=cluster, optimizer=1e-6),
        schedules=references,
        **options,
    )


@pytest.mark.parametrize(("own", "named"), [("one_f_one_b", "1f1b"), ("gpipe", "gpipe")])
@pytest.mark.matrix
def test_an_own_schedule_that_equals_a_named_one_is_worth_the_same(mine, own, named):
    ours = search(mine, f"{mine}:{own}", max_plans=100, num_stages=4)
    theirs = search(mine, named, max_plans=100, num_stages=4)
    key = lambda item: (str(item.plan.stages), item.plan.num_microbatches, item.step_time_s)
    pairs = list(zip(sorted(ours.ranked, key=key), sorted(theirs.ranked, key=key), strict=True))
    assert all(key(item) == key(other) for item, other in pairs)
    for item, other in pairs:
        # Under an own schedule the runtime waits for no sent gradient before the step's end (runtime/messages.py).
        size = max(tensor.num_bytes(item.plan.microbatch_size) for tensor in chain_graph(8).tensors)
        more = np.subtract(item.peak_memory_bytes, other.peak_memory_bytes)
        assert (more >= 0).all()
        assert (more <= item.plan.num_microbatches * size).all()
    assert {item.plan.schedule for item in ours.ranked} == {f"{mine}:{own}"}


def test_the_closed_form_of_the_named_ones_is_not_told_of_own_ones(mine):
    plans = search(mine, "1f1b", "eager", num_stages=4, method="slicing")
    assert {item.plan.schedule: item.estimate_s is None for item in plans.ranked} == {
        "1f1b": False,
        f"{mine}:eager": True,
    }


def test_plans_that_an_own_schedule_cannot_order_are_left_out_and_told(mine):
    plans = search(mine, "picky", max_plans=4)
    assert {len(item.plan.stages) for item in plans.ranked} == {2}
    assert plans.refused
    assert "cannot be used" in plans.explain()
    assert "ValueError: for two stages only" in plans.explain()
    with pytest.raises(ScheduleError, match="ValueError: for no plan"):
        search(mine, "never")
    assert search(mine, "never", "1f1b").best.plan.schedule == "1f1b"


def test_what_is_no_schedule_ends_the_search(mine):
    with pytest.raises(ScheduleReferenceError, match="no function 'missing'"):
        search(mine, "missing", "1f1b")


def test_functions_are_taken_as_they_are(mine, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    monkeypatch.chdir(mine.parent)
    import mine as module

    found = search(mine, "1f1b", num_stages=4)
    again = search_plans(
        lambda size: chain_graph(8),
        small_cluster(devices=4),
        Workload(global_batch=16),
        cost=FixedCost(cluster=small_cluster(devices=4), optimizer=1e-6),
        num_stages=4,
        schedules=[module.one_f_one_b],
    )
    assert again.best.plan.schedule == "mine.py:one_f_one_b"
    assert again.best.step_time_s == found.best.step_time_s


def test_counts_in_flight_come_from_the_order_itself(mine):
    """Two microbatches at most fit where 1F1B's four do not, and where the memory of four is not asked for."""
    held = {"1f1b": [4, 3, 2, 1], "thrifty": [2, 2, 2, 1], "eager": [7, 5, 3, 1], "gpipe": [16] * 4}
    cost = FixedCost(cluster=small_cluster(devices=4), memory=MEMORY, optimizer=1e-6)
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 4), [1] * 4, 16, microbatch_size=1)
    named = [name if name in ("gpipe", "1f1b") else f"{mine}:{name}" for name in held]
    items = compare_schedules(plan, graph, cost.cluster, named, cost=cost)
    assert [item.plan.schedule for item in items] == named
    for row, name in zip(schedule_rows(items, graph, cost), held, strict=True):
        assert row["in_flight"] == held[name]
        assert row["activations_bytes"] == FLIGHT_BYTES * max(held[name])
    for item, name in zip(items, held, strict=True):
        for rank, count in enumerate(held[name]):
            # Beside them stand messages of four floats: those received per microbatch, two that come early, three
            # gradients that do, one that is made, and four that were sent: under own schedules all of the step's 16.
            sent = MAX_GRADIENT_SENDS if name in ("gpipe", "1f1b") else 16
            assert 0 <= item.peak_memory_bytes[rank] - FLIGHT_BYTES * count <= 16 * (count + 6 + sent)


def test_the_search_reaches_plans_that_only_the_true_counts_allow(mine):
    """The slicing of equal stages under a limit between two and four microbatches of the first stage."""
    graph = chain_graph(4)
    masks = [
        Tensor(name=f"mask{i}", shape=(Extent(0, 1000),), dtype="bool", role="saved", storage=len(graph.tensors) + i)
        for i in range(4)
    ]
    ops = tuple(replace(op, saved=(*op.saved, mask.storage)) for op, mask in zip(graph.ops, masks, strict=True))
    graph = replace(graph, tensors=(*graph.tensors, *masks), ops=ops)
    cost = FixedCost(cluster=small_cluster(devices=4), optimizer=1e-6)
    plan = make_plan(graph, even_bounds(4, 4), [1] * 4, 16, microbatch_size=64)
    ours, theirs = compare_schedules(with_schedule(plan, f"{mine}:thrifty"), graph, cost.cluster, ["1f1b"], cost=cost)
    limit = (max(ours.peak_memory_bytes) + max(theirs.peak_memory_bytes)) // 2
    options = {
        "graph": graph,
        "num_stages": 4,
        "microbatch_sizes": [64],
        "global_batch": 1024,
        "memory": MemoryLimit(num_bytes=limit),
    }
    found = search(mine, "thrifty", **options)
    assert found.best.plan.bounds == plan.bounds
    with pytest.raises(NoFeasiblePlanError):
        search(mine, "1f1b", **options)


def test_inference_asks_no_schedule_for_backwards(mine):
    graph = replace(chain_graph(4), mode="inference")
    cluster = small_cluster(devices=2)
    plans = search_plans(
        lambda size: graph,
        cluster,
        Workload(kind="inference", global_batch=8),
        cost=FixedCost(cluster=cluster, optimizer=1e-6),
        schedules=[f"{mine}:eager"],
    )
    assert plans.best.plan.schedule == f"{mine}:eager"


def test_deadlocks_are_left_out_of_a_search_and_told_when_there_is_nothing_else(mine, tmp_path):
    path = write_schedule(
        tmp_path,
        """
        def stuck(plan, rank):
            (stage,) = plan.stages_of(rank)
            mine = local_microbatches(plan, stage, rank)
            for m in mine if stage % 2 == 0 else mine[::-1]:
                yield Forward(stage=stage, microbatch=m)
                yield Backward(stage=stage, microbatch=m)
        """,
    )
    with pytest.raises(DeadlockError, match="stuck can never finish"):
        search(path, "stuck", num_stages=2, microbatch_sizes=[1])
    plans = search(path, "stuck", "1f1b", microbatch_sizes=[1], max_plans=100)
    assert any("can never finish" in reason for _, reason in plans.refused)


def test_what_the_slicing_assumes_of_the_named_schedules():
    for behind, take in ((0, 1), (0, 2), (1, 3), (3, 1)):
        kept = [assume_in_flight(name, 7, 4, "training")[behind, take] for name in ("gpipe", "1f1b")]
        rounds = int(np.ceil(7 / take))
        assert kept == [rounds, min(rounds, int(np.ceil((4 - behind) / take)))]


def test_a_plan_compared_with_its_own_schedule_is_simulated_once():
    graph = chain_graph(4)
    plan: Plan = make_plan(graph, even_bounds(4, 2), [1, 1], 4)
    assert len(compare_schedules(plan, graph, small_cluster(), ["1f1b", "gpipe", "1f1b"])) == 2
