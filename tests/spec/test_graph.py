"""Graphs and extents: the algebra of sizes, what a graph counts, and which graphs are refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import Extent, Graph, GraphError, Layer, Op, Tensor
from tests.spec.examples import GRAPH
from tests.strategies import graphs

whole = st.integers(-(10**12), 10**12)
any_extent = st.builds(Extent, whole, whole)
batches = st.integers(0, 10**6)


@given(any_extent, any_extent, batches)
def test_a_sum_of_extents_is_the_sum_of_their_values(left, right, batch):
    assert (left + right).at(batch) == left.at(batch) + right.at(batch)


@given(whole, whole, batches)
def test_an_extent_is_affine(fixed, per_sample, batch):
    assert Extent(fixed, per_sample).at(batch) == fixed + per_sample * batch


@given(any_extent)
def test_extents_come_back_from_text(extent):
    assert Extent.decode_scalar(extent.encode_scalar()) == extent


@pytest.mark.parametrize(
    ("text", "extent"),
    [(768, Extent(768)), ("b", Extent(0, 1)), ("4*b+1", Extent(1, 4)), ("b-2", Extent(-2, 1)), ("0*b+3", Extent(3))],
)
def test_written_forms(text, extent):
    assert Extent.decode_scalar(text) == extent


@pytest.mark.parametrize("text", ["", "B", "2b", "b*2", "4*b+", "b+1+1", "768", " b", "b\n", True, 1.0, None, "1e3*b"])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match="not a size"):
        Extent.decode_scalar(text)


# --- what a graph counts, on numbers worked out by hand (batch 3) ---


def test_counts_of_the_example():
    assert GRAPH.num_parameters() == 16
    assert GRAPH.parameters == (1,)
    assert GRAPH.flops(3) == 32 * 3 + (3 + 64 * 3)
    # x (48), the mask (1 + 4 * 3 of one byte), h (48); parameters are not counted
    assert GRAPH.saved_bytes(GRAPH.ops, 3) == 48 + 13 + 48
    assert GRAPH.saved_bytes(GRAPH.ops, 3, exclude=frozenset({0})) == 13 + 48
    assert GRAPH.tensors[3].num_bytes(3) == 13
    assert GRAPH.tensors[0].num_bytes(3, float_bytes=2) == 24
    assert GRAPH.tensors[3].num_bytes(3, float_bytes=2) == 13


def test_frozen_parameters_are_counted_apart():
    frozen = replace(GRAPH, tensors=tuple(replace(tensor, requires_grad=False) for tensor in GRAPH.tensors))
    assert frozen.num_parameters() == 16
    assert frozen.num_parameters(trainable_only=True) == 0


def test_views_share_what_is_saved():
    tensors = (
        *GRAPH.tensors[:4],
        Tensor(name="view", shape=GRAPH.tensors[2].shape, dtype="float32", role="activation", storage=2),
    )
    op = Op(name="view", kind="aten.view.default", inputs=(2,), outputs=(4,), saved=(2, 4))
    graph = replace(GRAPH, tensors=tensors, ops=(GRAPH.ops[0], op), outputs=(4,))
    assert graph.saved_bytes([op], 3) == 48


def test_the_batch_size_that_a_graph_is_for():
    GRAPH.check_batch_size(3)
    replace(GRAPH, batch_size=None).check_batch_size(17)
    with pytest.raises(GraphError, match="captured for batches of 3 samples only"):
        GRAPH.check_batch_size(4)


# --- identity ---


@given(graphs())
def test_the_hash_ignores_the_name_and_nothing_else(graph):
    renamed = replace(graph, name=graph.name + "x")
    assert renamed.content_hash == graph.content_hash
    assert hash(renamed) == hash(graph)
    assert renamed != graph
    first = graph.layers[0]
    relabelled = replace(graph, layers=(replace(first, block=first.block + "x"), *graph.layers[1:]))
    assert relabelled.content_hash != graph.content_hash


# --- what is refused ---


def changed(**changes):
    return lambda: replace(GRAPH, **changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (changed(tensors=(replace(GRAPH.tensors[0], dtype="float31"), *GRAPH.tensors[1:])), "unknown dtype 'float31'"),
        (
            changed(tensors=(replace(GRAPH.tensors[0], storage=9), *GRAPH.tensors[1:])),
            "has storage 9; expected the id of a tensor that owns its memory",
        ),
        (
            changed(tensors=(replace(GRAPH.tensors[0], storage=-1), *GRAPH.tensors[1:])),
            "has storage -1; expected the id of a tensor that owns its memory",
        ),
        (
            changed(
                tensors=(
                    GRAPH.tensors[0],
                    replace(GRAPH.tensors[1], storage=2),
                    replace(GRAPH.tensors[2], storage=0),
                    *GRAPH.tensors[3:],
                )
            ),
            "expected the id of a tensor that owns its memory",
        ),
        (changed(ops=GRAPH.ops[::-1]), "before any op has produced it"),
        (changed(ops=(GRAPH.ops[0], replace(GRAPH.ops[1], inputs=(9,)))), "refers to tensor 9"),
        (changed(ops=(GRAPH.ops[0], replace(GRAPH.ops[1], saved=(-1,)))), "refers to tensor -1"),
        (changed(ops=(GRAPH.ops[0], replace(GRAPH.ops[1], inputs=(3,)))), "reads mask before"),
        (changed(ops=(GRAPH.ops[0], replace(GRAPH.ops[1], outputs=(2,)))), "writes h, which has a value already"),
        (changed(ops=(GRAPH.ops[0], replace(GRAPH.ops[1], outputs=(0,)))), "writes x, which has a value already"),
        (changed(layers=GRAPH.layers[:1]), "cover 1 of 2 ops"),
        (changed(layers=()), "cover 0 of 2 ops"),
        (changed(layers=(*GRAPH.layers, Layer(name="c", start=2, stop=2))), "not be empty"),
        (changed(layers=GRAPH.layers[::-1]), "expected it to start at 0"),
        (changed(layers=(GRAPH.layers[0], replace(GRAPH.layers[1], stop=3))), "cover 3 of 2 ops"),
        (changed(outputs=(3,)), "tensor 3, which no op produces"),
        (changed(inputs=(17,)), "tensor 17, which no op produces"),
    ],
)
def test_graphs_that_contradict_themselves(build, message):
    with pytest.raises(GraphError, match=message):
        build()


def sized(*shape):
    return changed(tensors=(*GRAPH.tensors[:3], replace(GRAPH.tensors[3], shape=shape), *GRAPH.tensors[4:]))


@pytest.mark.parametrize(
    "shape",
    [(Extent(2**64),), (Extent(0), Extent(2**63)), (Extent(-(2**63)),), (Extent(0, 2**62),), (Extent(10**9),) * 3],
)
def test_sizes_that_no_machine_could_hold_are_refused(shape):
    with pytest.raises(GraphError, match="more than 1024 TiB for a batch of 3"):
        sized(*shape)()


def test_flops_that_no_machine_could_compute_are_refused():
    with pytest.raises(GraphError, match="FLOPs for a batch of 3"):
        changed(ops=(replace(GRAPH.ops[0], flops=Extent(2**63)), *GRAPH.ops[1:]))()


def test_a_batch_that_no_machine_could_hold_is_refused():
    graph = changed(batch_size=None)()
    with pytest.raises(GraphError, match="smaller microbatches"):
        graph.check_batch_size(2**60)
    graph.check_batch_size(2**20)


def test_a_graph_without_ops_is_a_graph():
    empty = Graph(name="", tensors=GRAPH.tensors[:1], ops=(), layers=(), inputs=(0,), outputs=(0,))
    assert empty.flops(5) == 0
    assert empty.num_parameters() == 0
