"""The portfolio: never worse than its parts, the same twice, and ended by deadlines, interrupts and bounds."""

import time

import pytest
from hypothesis import given, settings

from meshwright.cost import CostModel
from meshwright.planner import METHODS, Choices, Problem, Proposal, list_shardings
from meshwright.spec import (
    MeshwrightError,
    NoFeasiblePlanError,
    Plan,
    PlanError,
    StagePlan,
    Workload,
    check_plan,
    load_cluster,
    load_shipped_graph,
)
from tests.planner.searching import search_plans, solve
from tests.planner.test_search import cluster_of, search, tasks, weighted_graph


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(tasks())
def test_it_is_never_slower_than_slicing(task):
    graph, cluster, batch = task
    try:
        plans = search(graph, cluster, batch, method="auto")
    except NoFeasiblePlanError:
        with pytest.raises(NoFeasiblePlanError):
            search(graph, cluster, batch)
        return
    assert plans.best.step_time_s <= search(graph, cluster, batch).best.step_time_s
    assert 0 < plans.bound_s <= plans.best.step_time_s
    for item in plans.ranked:
        check_plan(item.plan, graph, cluster)
        assert item.fits


def test_the_same_twice():
    graph, cluster = weighted_graph([10**8 * amount for amount in (3, 1, 4, 1, 5, 9)]), cluster_of(3, 2)
    first, second = (search(graph, cluster, 12, method="auto", seed=4) for _ in range(2))
    assert first == second
    assert first.explain() == second.explain()


@pytest.mark.long
def test_settings_are_narrowed_down_by_the_grid():
    graph = load_shipped_graph("gpt2-xl")
    plans = search_plans(
        lambda _: graph,
        load_cluster("2x5xA100"),
        Workload(global_batch=20, precision="bfloat16"),
        shardings=list_shardings(tensor=(1, 5)),
        zero=(0, 1, 3),
        recompute=("none", "full"),
        max_plans=4,
    )
    assert "Uniform grid" in plans.explain()
    assert plans.best.fits
    assert plans.coverage.num_considered > 1000


def test_a_deadline_returns_the_best_so_far():
    graph, cluster = weighted_graph([10**8] * 12), cluster_of(4, 4)
    begun = time.monotonic()
    plans = search(graph, cluster, 4096, method=_endless, deadline_s=0.3)
    assert time.monotonic() - begun < 30
    assert plans.coverage.stopped == "the deadline"
    assert "ended by the deadline" in plans.explain()
    assert plans.best.fits


def test_an_interrupt_returns_the_best_so_far():
    plans = search(weighted_graph([10**8] * 4), cluster_of(2), 8, method=_interrupted)
    assert plans.coverage.stopped == "an interrupt"
    assert plans.best.fits


def test_an_interrupt_before_any_plan_is_one():
    with pytest.raises(KeyboardInterrupt):
        search(weighted_graph([10**8] * 4), cluster_of(2), 8, method=_interrupted_at_once)


def test_a_strangers_method_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from meshwright.spec import Plan, StagePlan\n"
        "def halves(problem, state):\n"
        "    graph = problem.graph_for(1)\n"
        "    n = len(graph.layers)\n"
        "    stages = (StagePlan(start=0, stop=n // 2, ranks=(0,)), StagePlan(start=n // 2, stop=n, ranks=(1,)))\n"
        "    yield Plan(model='', graph_hash=graph.content_hash, cluster=problem.cluster.name, stages=stages,\n"
        "               workload=problem.workload, num_microbatches=problem.workload.global_batch)\n"
        "def wrong(problem, state):\n"
        "    yield 3\n"
        "def narrow(problem):\n"
        "    yield 3\n"
        "def none(problem, state):\n"
        "    return 3\n"
    )
    graph, cluster = weighted_graph([10**8] * 4), cluster_of(2)
    (found,) = search(graph, cluster, 8, method=f"{path}:halves").ranked
    assert found.plan.bounds == ((0, 2), (2, 4))
    for name, words in (
        ("wrong", "yielded int"),
        ("narrow", "cannot be called with two arguments"),
        ("none", "returned int"),
        ("hlves", "has no function 'hlves'"),
    ):
        with pytest.raises(PlanError, match=words):
            search(graph, cluster, 8, method=f"{path}:{name}")
    with pytest.raises(PlanError, match="did you mean 'slicing'"):
        search(graph, cluster, 8, method="slicin")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_one_op_on_one_device(method):
    """The smallest problem there is: one answer, or a reason why the method has none."""
    graph, cluster = weighted_graph([10**8]), cluster_of(1)
    if method == "unequal":
        with pytest.raises(PlanError, match="proposes no plan that fits"):
            search(graph, cluster, 1, method=method)
        return
    plans = search(graph, cluster, 1, method=method)
    assert plans.best.plan.stages == (StagePlan(start=0, stop=1, ranks=(0,)),)


@pytest.mark.long
def test_ten_thousand_devices():
    """Twenty layers cannot use so many devices with eight samples, and the error says how many they can use."""
    graph, cluster = weighted_graph([10**8] * 20), load_cluster("1250x8xA100")
    with pytest.raises(NoFeasiblePlanError, match="at most 160 ranks"):
        search(graph, cluster, 8, method="auto")
    plans = search(graph, cluster, 10_000, method="auto", max_plans=1, microbatch_sizes=(1,), num_stages=1)
    assert plans.best.plan.num_devices == 10_000
    with pytest.raises(PlanError, match="up to 4,096 ranks"):
        search(graph, cluster, 10_000, microbatch_sizes=(1,))


def test_contradictory_constraints():
    graph, cluster = weighted_graph([10**8] * 4), cluster_of(4)
    for options, words in (
        ({"num_stages": 4, "num_devices": 2}, "only 2 ranks"),
        ({"shardings": list_shardings(tensor=(3,))}, "divide a node"),
        ({"num_devices": 3, "shardings": list_shardings(tensor=(2,))}, "multiple"),
        ({"deadline_s": 0.0}, "positive number of seconds"),
        ({"shardings": ()}, "No sharding"),
        ({"recompute": ()}, "No word for recompute"),
    ):
        with pytest.raises(MeshwrightError, match=words):
            search(graph, cluster, 8, method="auto", **options)


def test_the_front_has_what_nothing_beats():
    graph = weighted_graph([10**8] * 6, width=512)
    cluster = cluster_of(4)
    problem = Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=Workload(global_batch=16),
        cost=CostModel(cluster=cluster),
        choices=Choices(num_devices=(1, 2, 4)),
    )
    plans = solve(problem, "slicing", max_plans=20)
    figures = {
        item.plan: (item.step_time_s, max(item.peak_memory_bytes), item.plan.num_devices * item.step_time_s)
        for item in plans.ranked
    }
    for item in plans.front:
        mine = figures.get(item.plan)
        if mine is not None:
            assert not any(
                all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in figures.values()
            )
    assert plans.front[0].plan == min(plans.ranked, key=lambda item: item.step_time_s).plan
    assert len({item.plan.num_devices for item in plans.front}) > 1


def _plan(problem, size):
    graph = problem.graph_for(size)
    return Plan(
        model="",
        graph_hash=graph.content_hash,
        cluster=problem.cluster.name,
        workload=problem.workload,
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=tuple(range(problem.cluster.num_ranks))),),
        num_microbatches=problem.workload.global_batch // size,
    )


def _endless(problem, state):
    size = 1
    while True:
        yield Proposal(_plan(problem, size))
        size = size * 2 if size < 512 else 1
        time.sleep(0.01)


def _interrupted(problem, state):
    yield Proposal(_plan(problem, 1))
    raise KeyboardInterrupt


def _interrupted_at_once(problem, state):
    raise KeyboardInterrupt
    yield
