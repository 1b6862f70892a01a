"""Alpa's intra-operator pass: the integer program, its costs, repeated blocks, memory."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner.methods.alpa import Amounts, amounts_of, closed_form_mesh, mesh_of_cluster, place_ops
from meshwright.planner.methods.alpa.integer_program import RoutedTensor, StrategyNode, solve_choices
from meshwright.planner.methods.alpa.mesh import ConversionCosts, Have
from meshwright.planner.methods.alpa.op_groups import Want, fold
from meshwright.spec import MeshwrightError, NoFeasiblePlanError, PlanError, Workload, load_cluster, load_shipped_graph
from tests.marks import examples
from tests.planner.methods.alpa_oracle import SUM, Axis, cheapest, convert
from tests.planner.methods.stacks import product_chain, short_stack

pytest.importorskip("highspy")


def amounts(graph, batch_size, op_seconds=None, **facts):
    seconds = np.array([1e-12 * (op.flops + op.backward_flops).at(batch_size) for op in graph.ops])
    given_facts = {"num_microbatches": 1, "in_flight": 1, "float_bytes": 4, "parameter_bytes": 16.0} | facts
    return Amounts(
        graph=graph,
        batch_size=batch_size,
        op_seconds=seconds if op_seconds is None else np.array(op_seconds),
        **given_facts,
    )


@st.composite
def programs(draw):
    numbers = st.integers(0, 12).map(float)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    nodes = [
        StrategyNode(seconds=np.array(draw(row)), memory_bytes=np.array(draw(row)))
        for row in (st.lists(numbers, min_size=size, max_size=size) for size in sizes)
    ]
    tensors = []
    for _ in range(draw(st.integers(0, 4))):
        haves, wants = draw(st.integers(1, 3)), draw(st.integers(1, 3))

        def layouts(node, count):
            return np.array(draw(st.lists(st.integers(0, count - 1), min_size=sizes[node], max_size=sizes[node])))

        def matrix(haves, wants):
            cells = draw(st.lists(numbers, min_size=haves * wants, max_size=haves * wants))
            return np.array(cells).reshape(haves, wants)

        producer, *readers = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=2, max_size=4))
        tensors.append(
            RoutedTensor(
                producer=producer,
                have=layouts(producer, haves),
                readers=tuple((reader, layouts(reader, wants)) for reader in readers),
                seconds=matrix(haves, wants),
                memory_bytes=matrix(haves, wants),
            )
        )
    return nodes, tensors, draw(st.none() | st.integers(0, 60))


def estimate(nodes, tensors, chosen):
    """Seconds and bytes of a choice: a conversion of a tensor counts once for all that want it."""
    seconds = sum(node.seconds[k] for node, k in zip(nodes, chosen, strict=True))
    num_bytes = sum(node.memory_bytes[k] for node, k in zip(nodes, chosen, strict=True))
    for tensor in tensors:
        done = set()
        for reader, want in tensor.readers:
            pair = tensor.have[chosen[tensor.producer]], want[chosen[reader]]
            if pair not in done:
                done.add(pair)
                seconds += tensor.seconds[pair]
                num_bytes += tensor.memory_bytes[pair]
    return seconds, num_bytes


@settings(max_examples=examples(80), deadline=None)
@given(programs())
def test_the_integer_program_finds_what_trying_all_choices_finds(program):
    nodes, tensors, limit = program
    estimated = [estimate(nodes, tensors, c) for c in itertools.product(*(range(len(n.seconds)) for n in nodes))]
    fitting = [seconds for seconds, num_bytes in estimated if limit is None or num_bytes <= limit]
    if not fitting:
        with pytest.raises(NoFeasiblePlanError, match="memory does not suffice"):
            solve_choices(nodes, tensors, memory_limit_bytes=limit)
        return
    solution = solve_choices(nodes, tensors, memory_limit_bytes=limit)
    seconds, num_bytes = estimate(nodes, tensors, solution.chosen)
    assert seconds == pytest.approx(min(fitting), abs=1e-6)
    assert limit is None or num_bytes <= limit + 1e-6
    assert solution.objective_s == pytest.approx(seconds, abs=1e-6)
    assert solution.bound_s <= seconds + 1e-6


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.sampled_from([4, 6, 8, 16]), min_size=2, max_size=4),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([(1, 2), (2, 1), (1, 4), (2, 2), (2, 4)]),
    st.lists(st.floats(1e-6, 1e-3), min_size=2, max_size=2),
    st.lists(st.floats(1e-8, 1e-5), min_size=2, max_size=2),
    st.data(),
)
def test_chains_of_products_cost_what_the_oracle_finds(widths, batch, shape, alphas, betas, data):
    count = len(widths) - 1
    op_seconds = data.draw(st.lists(st.floats(1e-5, 1e-2), min_size=count, max_size=count))
    if shape[0] * shape[1] > 2 and count == 3:
        widths, op_seconds = widths[:3], op_seconds[:2]
    graph, num_microbatches = product_chain(tuple(widths)), data.draw(st.integers(1, 3))
    axes = [Axis(*facts) for facts in zip(shape, alphas, betas, strict=True)]
    mesh = closed_form_mesh(shape, alphas, betas)
    work = amounts(graph, batch, op_seconds, num_microbatches=num_microbatches)

    def best(limit=float("inf")):
        return cheapest(widths, batch, axes, op_seconds, num_microbatches=num_microbatches, limit=limit)

    found = place_ops(graph, mesh, work)
    assert found.seconds == pytest.approx(best(), rel=1e-6)
    assert found.gap == pytest.approx(0, abs=1e-6)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    limit = 0.7 * found.memory_bytes
    if best(limit) < float("inf"):
        limited = place_ops(graph, mesh, work, memory_limit_bytes=limit)
        assert limited.seconds == pytest.approx(best(limit), rel=1e-6)
        assert limited.memory_bytes <= limit * (1 + 1e-6)
    else:
        with pytest.raises(NoFeasiblePlanError):
            place_ops(graph, mesh, work, memory_limit_bytes=limit)


@given(st.lists(st.floats(1e-6, 1e-3), min_size=2, max_size=2), st.lists(st.floats(1e-9, 1e-5), min_size=2, max_size=2))
def test_conversions_over_two_axes_take_the_cheaper_order(alphas, betas):
    shape, size = (2, 4), 1000.0
    axes = [Axis(*facts) for facts in zip(shape, alphas, betas, strict=True)]
    costs = ConversionCosts(closed_form_mesh(shape, alphas, betas))
    places = (None, (0, 1), (1, 1))
    haves = [*itertools.product([Have(place) for place in places] + [Have(None, True)], repeat=2)]
    wants = [*itertools.product([Want(place) for place in places] + [Want(None, True)], repeat=2)]
    found = costs.convert(haves, wants, size, with_gradient=True)
    for (i, have), (j, want) in itertools.product(enumerate(haves), enumerate(wants)):
        lies = [SUM if item.sums else item.place and item.place[0] for item in have]
        reads = [item.place and item.place[0] for item in want]
        told = convert(axes, lies, reads, [item.sums for item in want], size)
        assert found[i, j] == pytest.approx(told)


@pytest.mark.parametrize(
    ("name", "num_blocks", "shape", "beta"),
    [
        ("llama3-8b", 4, (1, 8), 3e-11),
        ("bert-base", 4, (1, 8), 1e-11),
        # The best first block of this one differs from those behind it.
        ("bert-base", 4, (4, 2), 1e-12),
        ("gpt2-small", 6, (1, 8), 1e-11),
    ],
)
@pytest.mark.matrix
def test_equal_blocks_laid_out_alike_cost_what_free_ones_do(name, num_blocks, shape, beta):
    graph = short_stack(name, num_blocks)
    mesh = closed_form_mesh(shape, (2e-5, 5e-6), (10 * beta, beta))
    work = amounts(graph, 16, float_bytes=2)
    tiled, untiled = (place_ops(graph, mesh, work, tiled=tiled) for tiled in (True, False))
    assert tiled.seconds == pytest.approx(untiled.seconds, rel=1e-6)
    assert tiled.memory_bytes == pytest.approx(untiled.memory_bytes, rel=1e-6)
    assert tiled.solution.num_variables < untiled.solution.num_variables
    assert len(tiled.splits) == len(graph.ops)


@pytest.mark.long
def test_more_blocks_take_no_more_variables():
    mesh = closed_form_mesh((1, 8), (2e-5, 5e-6), (1e-10, 1e-11))
    found = []
    for count in (4, 5, 7):
        graph = short_stack("llama3-8b", count)
        found.append(place_ops(graph, mesh, amounts(graph, 16)))
    assert len({item.solution.num_variables for item in found}) == 1
    block_s = found[1].seconds - found[0].seconds
    assert found[2].seconds - found[1].seconds == pytest.approx(2 * block_s)


@pytest.mark.parametrize(("name", "gains"), [("llama3-8b", False), ("bert-base", True)])
def test_ops_that_choose_for_themselves_are_never_worse_than_those_that_follow(name, gains):
    graph, cost = short_stack(name, 2), CostModel(cluster=load_cluster("8xA100"))
    mesh = mesh_of_cluster(cost, (1, 8))
    work = amounts_of(graph, Workload(global_batch=8), cost, batch_size=8)
    following, choosing = (place_ops(graph, mesh, work, following=following) for following in (True, False))
    assert choosing.seconds <= following.seconds * (1 + 1e-9)
    assert choosing.num_groups > following.num_groups
    assert (choosing.seconds < 0.999 * following.seconds) == gains


def test_the_memory_limit_is_kept_and_costs_time():
    graph = short_stack("llama3-8b", 4)
    mesh = closed_form_mesh((1, 8), (2e-5, 5e-6), (1e-10, 1e-11))
    work = amounts(graph, 16, float_bytes=2)
    free = place_ops(graph, mesh, work)
    limited = place_ops(graph, mesh, work, memory_limit_bytes=0.85 * free.memory_bytes)
    assert limited.memory_bytes <= 0.85 * free.memory_bytes
    assert limited.seconds > free.seconds
    with pytest.raises(NoFeasiblePlanError, match="raise the limit or use a larger mesh"):
        place_ops(graph, mesh, work, memory_limit_bytes=2**20)


def test_an_axis_of_samples_splits_nothing_else_and_one_of_the_model_no_samples():
    graph = short_stack("llama3-8b", 2)
    mesh = closed_form_mesh((2, 4), (2e-5, 5e-6), (1e-10, 1e-11))
    found = place_ops(graph, mesh, amounts(graph, 16), uses=("samples", "model"))
    outer, inner = ({way[axis] for way in found.ways if way[axis]} for axis in (0, 1))
    assert outer == {"samples"}
    assert "samples" not in inner
    assert {"columns", "rows"} <= inner


def test_a_tied_weight_lies_one_way_and_counts_once():
    widths, mesh = (8, 8, 8), closed_form_mesh((1, 4), (1e-6, 1e-6), (1e-9, 1e-9))
    tied, untied = (product_chain(widths, tied=tied) for tied in (True, False))
    found = [place_ops(graph, mesh, amounts(graph, 3, parameter_bytes=1e6)) for graph in (tied, untied)]
    assert found[0].memory_bytes < found[1].memory_bytes
    # Three samples can not be split: both products want the weight split, and the same way costs no exchange of it.
    layouts = [found[0].layouts[i][1] for i in tied.parameters]
    assert len(layouts) == 1


@pytest.mark.long
def test_shipped_stacks_fold_to_one_block_between_the_ends():
    for name, kept, count in (("llama3-8b", 134, 30), ("gpt2-xl", 94, 45), ("resnet50", 228, 1)):
        folded = fold(load_shipped_graph(name))
        assert len(folded.ops) == kept
        assert max(map(len, folded.stands_for.values())) == count
        everything = sorted(op for same in folded.stands_for.values() for op in same)
        assert everything == list(range(len(load_shipped_graph(name).ops)))


def test_blocks_that_share_a_weight_are_not_folded():
    assert len(fold(product_chain((8,) * 7, tied=True)).ops) == 6
    assert len(fold(product_chain((8,) * 7)).ops) == 4


def test_the_same_question_has_the_same_answer():
    graph = short_stack("gpt2-small", 2)
    mesh = closed_form_mesh((1, 8), (2e-5, 5e-6), (1e-10, 1e-11))
    first, second = (place_ops(graph, mesh, amounts(graph, 16)) for _ in range(2))
    assert first == second
    assert first.explain() == second.explain()
    assert "gap 0.00%" in first.explain()


def test_without_highspy_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    graph = product_chain((4, 4))
    with pytest.raises(MeshwrightError, match=r"meshwright\[search\]"):
        place_ops(graph, closed_form_mesh((1, 2), (0, 0), (0, 0)), amounts(graph, 2))


def test_bad_input_is_named():
    graph = product_chain((4, 4))
    with pytest.raises(PlanError, match="at least one device along each axis"):
        closed_form_mesh((0, 2), (0, 0), (0, 0))
    with pytest.raises(PlanError, match="Seconds of 3 ops"):
        place_ops(graph, closed_form_mesh((1, 2), (0, 0), (0, 0)), amounts(graph, 2, [1.0, 1.0, 1.0]))
