"""The whole search on small graphs: against every plan there is, and what it says about its answer."""

import itertools
import math
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner import Setting, evaluate_plan
from meshwright.planner.methods.slicing import PlanCandidate
from meshwright.planner.methods.slicing.slicing_method import choose
from meshwright.planner.ranking import MOST_DIFFERENCE, is_as_fast
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    Cluster,
    DeviceGroup,
    DeviceKind,
    Extent,
    GradientExchange,
    Graph,
    GraphMismatchError,
    Link,
    Node,
    NoFeasiblePlanError,
    Plan,
    PlanError,
    StagePlan,
    Workload,
    check_plan,
    load_cluster,
    load_shipped_graph,
)
from tests.graphs import chain_graph
from tests.marks import examples
from tests.planner.searching import search_plans

GIB = 2**30


def cluster_of(*counts, memory=GIB, slow_nic=1e9, rates=(1e12,)):
    """Nodes of so many devices; kind k has peak rate ``rates[k]`` and node n has kind n mod len(rates)."""
    kinds = tuple(
        DeviceKind(
            name=f"kind{k}",
            memory_bytes=memory,
            memory_bandwidth_bytes_per_s=1e12,
            peak_flops_per_s={"float32": rate},
            source="made up",
        )
        for k, rate in enumerate(rates)
    )
    nodes = tuple(
        Node(
            name=f"node{n}",
            devices=(DeviceGroup(kind=f"kind{n % len(rates)}", count=count),),
            host_memory_bytes=GIB,
            num_cores=8,
            device_link=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11),
            pcie=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10),
            nic=Link(latency_s=1e-5, bandwidth_bytes_per_s=slow_nic),
        )
        for n, count in enumerate(counts)
    )
    return Cluster(name="made up", device_kinds=kinds, nodes=nodes)


def weighted_graph(flops, *, width=64, mode="training"):
    """A chain whose layers need these FLOPs per sample, twice as many backward."""
    graph = chain_graph(len(flops), width=width)
    ops = tuple(
        op_with(op, flops=Extent(0, amount), backward_flops=Extent(0, 2 * amount))
        for op, amount in zip(graph.ops, flops, strict=True)
    )
    return graph_with(graph, ops=ops, mode=mode)


def op_with(op, **changes):
    return type(op)(**{name: getattr(op, name) for name in op.__dataclass_fields__} | changes)


def graph_with(graph, **changes):
    fields = {name: getattr(graph, name) for name, item in Graph.__dataclass_fields__.items() if item.init}
    return Graph(**fields | changes)


def search(graph, cluster, batch, **options):
    workload = options.pop("workload", None) or Workload(kind=graph.mode, global_batch=batch)
    options = {"method": "slicing", **options}
    return search_plans(lambda _: graph, cluster, workload, model="chain", **options)


def every_plan(graph, cluster, batch):
    """All plans with consecutive ranks, by counting."""
    num_layers, num_ranks = len(graph.layers), cluster.num_ranks
    for count in (c for c in range(1, batch + 1) if batch % c == 0):
        for parts in range(1, min(num_layers, num_ranks) + 1):
            for cuts in itertools.combinations(range(1, num_layers), parts - 1):
                for marks in itertools.combinations(range(1, num_ranks), parts - 1):
                    edges, ranks = (0, *cuts, num_layers), (0, *marks, num_ranks)
                    stages = tuple(
                        StagePlan(start=edges[s], stop=edges[s + 1], ranks=tuple(range(ranks[s], ranks[s + 1])))
                        for s in range(parts)
                    )
                    if max(len(stage.ranks) for stage in stages) > count:
                        continue
                    for schedule in ("gpipe", "1f1b"):
                        yield Plan(
                            model="chain",
                            graph_hash=graph.content_hash,
                            cluster=cluster.name,
                            workload=Workload(global_batch=batch),
                            stages=stages,
                            num_microbatches=count,
                            schedule=schedule,
                        )


@pytest.mark.parametrize("flops", [(4, 4, 4, 4, 4), (1, 2, 12, 2, 1), (9, 1, 1, 1, 3)])
@pytest.mark.parametrize("memory", [GIB, 170_000])
@pytest.mark.matrix
def test_finds_the_best_of_all_plans(flops, memory):
    """The search simulates a few of some hundred plans; the best of them is within 1 % of the best of all."""
    graph = weighted_graph([10**9 * amount for amount in flops])
    cluster = cluster_of(4, memory=memory)
    cost = CostModel(cluster=cluster)
    best = math.inf
    for plan in every_plan(graph, cluster, 8):
        result = simulate_plan(plan, graph, cluster, cost=cost)
        if max(result.peak_memory_bytes) <= memory:
            best = min(best, result.step_time_s)
    found = search(graph, cluster, 8).best
    assert best <= found.step_time_s <= 1.01 * best


@st.composite
def tasks(draw):
    num_layers = draw(st.integers(1, 6))
    flops = draw(st.lists(st.integers(10**6, 10**9), min_size=num_layers, max_size=num_layers))
    counts = draw(st.sampled_from([(1,), (3,), (4,), (2, 2), (4, 4), (3, 2)]))
    rates = draw(st.sampled_from([(1e12,), (1e12, 3e11)]))
    memory = draw(st.sampled_from([GIB, 10**6, 2 * 10**5, 10**5, 5 * 10**4]))
    return weighted_graph(flops), cluster_of(*counts, memory=memory, rates=rates), draw(st.sampled_from([4, 8, 12]))


@settings(max_examples=examples(30), deadline=None)
@given(tasks())
def test_every_answer_is_legal_sorted_and_fits(task):
    graph, cluster, batch = task
    try:
        plans = search(graph, cluster, batch)
    except NoFeasiblePlanError:
        return
    fastest = min(plans.ranked, key=lambda item: item.step_time_s)
    equal = [is_as_fast(item, fastest) for item in plans.ranked]
    assert equal == sorted(equal, reverse=True)
    # No plan stands before one that is faster and needs less; a per cent of memory is nothing.
    for item, later in combinations(plans.ranked, 2):
        needs_more = max(item.reserved_bytes) > max(later.reserved_bytes) + 0.01 * max(item.memory_limit_bytes)
        assert not (needs_more and item.step_time_s >= later.step_time_s)
    assert plans.best.step_time_s <= (1 + MOST_DIFFERENCE) * fastest.step_time_s
    assert len({item.plan for item in plans.ranked}) == len(plans.ranked) <= 8
    for item in plans.ranked:
        check_plan(item.plan, graph, cluster)
        assert item.plan.num_ranks == cluster.num_ranks
        assert item.plan.workload.global_batch == batch
        assert item.fits
        assert sum(item.breakdown.terms().values()) == pytest.approx(item.step_time_s, rel=1e-9)
    assert 0 < plans.bound_s <= fastest.step_time_s
    # What slicing admits by its lower bounds, the simulator decides.
    assert not any(item.fits for item in plans.rejected)


@pytest.mark.parametrize("flops", [(4, 4, 4, 4), (1, 9, 1, 1, 3)])
@pytest.mark.matrix
def test_nothing_fits_is_said_only_where_nothing_does(flops):
    """Memory is set to the peak of a plan, and to a byte less than that of the smallest one."""
    graph = weighted_graph([10**9 * amount for amount in flops])
    cost = CostModel(cluster=cluster_of(3))
    results = [simulate_plan(plan, graph, cost.cluster, cost=cost) for plan in every_plan(graph, cost.cluster, 4)]
    peaks = sorted({max(result.peak_memory_bytes) for result in results})
    for memory in (*peaks[:4], peaks[len(peaks) // 2]):
        found = search(graph, cluster_of(3, memory=memory), 4).best
        assert max(found.peak_memory_bytes) <= memory
    with pytest.raises(NoFeasiblePlanError):
        search(graph, cluster_of(3, memory=peaks[0] - 1), 4)


@pytest.mark.long
def test_estimates_are_close_to_simulated_steps():
    """On equal devices; what the closed form leaves out is waiting that only a schedule shows."""
    rng = np.random.default_rng(7)
    ratios = []
    for _ in range(20):
        flops = [int(amount) for amount in rng.integers(10**7, 10**9, rng.integers(2, 7))]
        counts = [(3,), (4,), (2, 2), (4, 4)][rng.integers(4)]
        plans = search(weighted_graph(flops), cluster_of(*counts), int(rng.choice([8, 12])))
        ratios += [item.estimate_s / item.step_time_s for item in plans.ranked]
    assert len(ratios) > 50
    assert abs(np.median(ratios) - 1) < 0.005
    assert min(ratios) > 0.75
    assert max(ratios) < 1.25


@settings(max_examples=10, deadline=None)
@given(tasks())
@pytest.mark.long
def test_the_same_question_has_the_same_answer(task):
    graph, cluster, batch = task

    def answer():
        try:
            plans = search(graph, cluster, batch)
        except NoFeasiblePlanError as error:
            return str(error)
        return plans.ranked, plans.rows(), plans.explain()

    assert answer() == answer()


def test_data_parallelism_wins_where_exchange_is_cheap():
    plans = search(weighted_graph([10**9] * 4, width=4), cluster_of(4), 8)
    assert plans.best.plan.stages == (StagePlan(start=0, stop=4, ranks=(0, 1, 2, 3)),)
    assert plans.best.estimate_s == pytest.approx(plans.best.step_time_s, rel=0.01)


def test_a_pipeline_wins_where_weights_are_heavy_and_links_slow():
    graph = weighted_graph([10**8] * 4, width=2048)
    plans = search(graph, cluster_of(1, 1, 1, 1, slow_nic=1e8), 64, memory=MemoryLimit(num_bytes=GIB))
    assert len(plans.best.plan.stages) == 4
    assert plans.best.plan.num_microbatches > 4


def test_pipelines_stay_in_a_node_where_activations_are_heavy_and_replicas_where_gradients_are():
    """Two nodes of two: what is exchanged most must not cross the slow NIC."""
    cluster = cluster_of(2, 2, slow_nic=1e8)
    heavy_weights = weighted_graph([10**8] * 2, width=2048)
    plans = search(heavy_weights, cluster, 8, num_stages=2)
    assert {tuple(stage.ranks) for stage in plans.best.plan.stages} == {(0, 1), (2, 3)}
    light_weights = weighted_graph([10**8] * 2, width=8)
    wide = graph_with(
        light_weights,
        tensors=tuple(
            op_with(tensor, shape=(Extent(0, 1), Extent(2 * 10**5)))
            if tensor.role == "activation" and tensor.shape
            else tensor
            for tensor in light_weights.tensors
        ),
    )
    plans = search(wide, cluster, 8, num_stages=2)
    assert {tuple(stage.ranks) for stage in plans.best.plan.stages} == {(0, 2), (1, 3)}


def test_slower_devices_get_less_work():
    graph = weighted_graph([10**9] * 8, width=2048)
    plans = search(graph, cluster_of(1, 1, rates=(3e12, 1e12), slow_nic=1e10), 32, num_stages=2)
    layers = {stage.ranks[0]: stage.stop - stage.start for stage in plans.best.plan.stages}
    assert layers == {0: 6, 1: 2}


def test_fewer_ranks_than_devices():
    plans = search(weighted_graph([10**9] * 4), cluster_of(4), 8, num_devices=3)
    assert {item.plan.num_ranks for item in plans.ranked} == {3}


def test_inference_needs_neither_exchange_nor_optimizer():
    plans = search(weighted_graph([10**9] * 4, mode="inference"), cluster_of(4), 8)
    assert plans.best.breakdown.exchange_s == plans.best.breakdown.optimizer_s == 0
    # Batches follow each other without a flush, so every device is always busy: 8 samples · 4 GFLOP on 4 TFLOP/s.
    assert plans.best.step_time_s == pytest.approx(8e-3, rel=0.01)
    assert plans.best.estimate_s == pytest.approx(8e-3, rel=0.01)


def test_graphs_that_fix_their_batch_are_asked_for_by_size():
    asked = []

    def graph_for(size):
        asked.append(size)
        graph = chain_graph(4, width=8)
        tensors = tuple(
            op_with(tensor, shape=tuple(Extent(extent.at(size)) for extent in tensor.shape)) for tensor in graph.tensors
        )
        return graph_with(graph, tensors=tensors, batch_size=size)

    plans = search_plans(graph_for, cluster_of(2), Workload(global_batch=4))
    assert set(asked) == {1, 2, 4}
    for item in plans.ranked:
        check_plan(item.plan, graph_for(item.plan.microbatch_size))


def test_exchange_and_names_are_noted_in_the_plan():
    exchange = GradientExchange(bucket_bytes=1000, overlap=False)
    plan = search(weighted_graph([10**9] * 2), cluster_of(2), 4, exchange=exchange, model_sizes=(("n", 3),)).best.plan
    assert (plan.exchange, plan.model, plan.cluster, plan.model_sizes) == (exchange, "chain", "made up", (("n", 3),))


def test_places_go_to_the_cheapest_and_then_to_new_shapes():
    search = SimpleNamespace(space=SimpleNamespace(setting=Setting(9)))

    def candidate(estimate, *replicas):
        ranks = iter(range(9))
        stages = tuple(
            StagePlan(start=k, stop=k + 1, ranks=tuple(next(ranks) for _ in range(r))) for k, r in enumerate(replicas)
        )
        plan = Plan(
            model="",
            graph_hash="",
            cluster="",
            workload=Workload(global_batch=9),
            stages=stages,
            num_microbatches=9,
        )
        return PlanCandidate(plan=plan, estimate_s=estimate, found_in=None, search=search)

    candidates = [candidate(1, 2), candidate(2, 2), candidate(3, 2), candidate(4, 1, 1), candidate(5, 2)]
    assert [item.estimate_s for item in choose(candidates, 4)] == [1, 2, 4, 3, 5]


def test_explain_names_terms_and_numbers():
    plans = search(weighted_graph([10**9] * 4, width=512), cluster_of(4), 8)
    text = plans.explain()
    assert plans.best.plan.describe() in text
    assert "compute" in text
    assert f"rank {plans.best.fullest_rank}" in text
    assert f"{plans.coverage.num_simulated} simulated" in text
    assert plans.bound_s <= plans.best.step_time_s
    assert "By these costs, no " in text
    other = plans.ranked[-1]
    assert plans.why_not(other.plan) in plans.explain(other.plan)


def test_why_not_gives_the_difference_of_the_step_times():
    graph, cluster = weighted_graph([10**9] * 4, width=64), cluster_of(4)
    plans = search(graph, cluster, 8)
    best = plans.best.plan
    assert plans.why_not(best) == "This is the best plan found."
    other = Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="made up",
        workload=best.workload,
        stages=(StagePlan(start=0, stop=3, ranks=(0, 1)), StagePlan(start=3, stop=4, ranks=(2, 3))),
        num_microbatches=4,
        schedule="gpipe",
    )
    assert other not in {item.plan for item in plans.ranked}
    loss = plans.evaluate(other).step_time_s - plans.best.step_time_s
    text = plans.why_not(other)
    assert f"loses {loss * 1e3:.3g} ms per step" in text
    assert "decides" in text


def test_why_not_names_the_rank_that_does_not_fit():
    graph, cluster = weighted_graph([10**9] * 4, width=64), cluster_of(4, memory=110_000)
    plans = search(graph, cluster, 8)
    other = Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="made up",
        workload=plans.best.plan.workload,
        stages=(StagePlan(start=0, stop=4, ranks=(0, 1, 2, 3)),),
        num_microbatches=4,
    )
    peak = max(simulate_plan(other, graph, cluster, cost=CostModel(cluster=cluster)).peak_memory_bytes)
    text = plans.why_not(other)
    assert "does not fit: rank 0 (stage 0)" in text
    assert f"{(peak - 110_000) / 1024:.3g} KiB more" in text


def test_plans_of_other_graphs_and_workloads_are_refused():
    graph, cluster = weighted_graph([10**9] * 4), cluster_of(4)
    plans = search(graph, cluster, 8)
    alien = search(weighted_graph([10**9] * 3), cluster, 8).best.plan
    with pytest.raises(GraphMismatchError):
        plans.why_not(alien)
    with pytest.raises(PlanError, match="a plan for the same workload"):
        plans.why_not(search(graph, cluster, 16).best.plan)


def test_evaluate_agrees_with_the_simulator():
    graph, cluster = weighted_graph([10**9] * 4), cluster_of(4)
    cost = CostModel(cluster=cluster)
    plan = search(graph, cluster, 8).best.plan
    item = evaluate_plan(plan, graph, cluster, cost, memory=MemoryLimit(num_bytes=12345))
    result = simulate_plan(plan, graph, cluster, cost=cost)
    assert item.step_time_s == result.step_time_s
    assert item.peak_memory_bytes == result.peak_memory_bytes
    assert set(item.memory_limit_bytes) == {12345}
    assert item.excess_bytes == max(result.peak_memory_bytes) - 12345
    assert not item.fits


@pytest.mark.long
def test_gathers_of_passes_count_when_plans_are_ranked():
    """With zero 3, every microbatch gathers all parameters: few large ones win, which no table of ops alone shows."""
    graph, cluster = load_shipped_graph("gpt-tiny"), load_cluster("2x4xV100")
    workload = Workload(global_batch=32, precision="bfloat16")

    def best(sizes):
        found = search_plans(
            lambda _: graph,
            cluster,
            workload,
            exchange=GradientExchange(zero=3),
            num_stages=2,
            microbatch_sizes=sizes,
            max_plans=1,
        )
        return found.best.step_time_s

    assert best(None) <= min(best((size,)) for size in (1, 2, 4, 8))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("method", ["slicing", "grid", "pipedream", "flexflow", "alpa"])
def test_replicas_that_gather_in_every_pass_have_as_many_passes(zero, method):
    """Of 8 microbatches three replicas cannot have as many each: no such plan is offered from ZeRO 2 on."""
    graph = weighted_graph([1e9] * 6)
    found = search_plans(
        lambda _: graph, cluster_of(3), Workload(global_batch=8), method=method, exchange=GradientExchange(zero=zero)
    )
    uneven = [item.plan for item in found.ranked if any(8 % len(stage.ranks) for stage in item.plan.stages)]
    if zero < 2 and method == "grid":
        assert uneven, "the grid has three replicas of all layers"
    if zero >= 2:
        assert found.ranked
        assert uneven == []


def test_one_check_refuses_replicas_with_unequal_numbers_of_passes():
    graph = chain_graph(4)
    plan = Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="made up",
        workload=Workload(global_batch=8),
        stages=(StagePlan(start=0, stop=4, ranks=(0, 1, 2)),),
        num_microbatches=8,
        exchange=GradientExchange(zero=2),
    )
    words = (
        r"stage 0 compute 2 and 3 microbatches; .* ZeRO 2 gathers .*\. Choose a number of microbatches that 3 divides"
    )
    for check in (lambda: check_plan(plan, graph), lambda: simulate_plan(plan, graph, cluster_of(3))):
        with pytest.raises(PlanError, match=words):
            check()
    check_plan(replace(plan, exchange=GradientExchange(zero=1)), graph)
    shares = StagePlan(start=0, stop=4, ranks=(0, 1, 2), shares=(4, 2, 2))
    with pytest.raises(PlanError, match="stage 0 compute 2 and 4 microbatches"):
        check_plan(replace(plan, stages=(shares,)), graph)
