"""Words for what is computed again, what they mean for graphs, and what is refused."""

from dataclasses import replace

import pytest

from meshwright.spec import (
    Graph,
    GraphError,
    Plan,
    PlanError,
    Recompute,
    computed_again,
    load_shipped_graph,
    passed_again,
    read_recompute,
    recompute_choices,
    recompute_layers,
    with_recompute,
)
from meshwright.spec.codec import decode, encode
from meshwright.spec.recompute import name_recompute
from tests.spec.examples import PLAN

GPT, LLAMA = load_shipped_graph("gpt-tiny"), load_shipped_graph("llama-tiny")
GNMT, RESNET = load_shipped_graph("gnmt-tiny"), load_shipped_graph("resnet-tiny")
BLOCKS = range(1, 5)


def kinds(graph, ops):
    return [graph.ops[op].kind.split(".")[1] for op in ops]


def test_op_keeps_attention_and_every_second_product_of_a_block():
    found = read_recompute(LLAMA, "op")
    assert found.ranges == recompute_layers(LLAMA, BLOCKS)
    first = LLAMA.layers[1]
    kept = [op for op in found.keeps if first.start <= op < first.stop]
    products = [op for op in range(first.start, first.stop) if LLAMA.ops[op].kind.startswith("aten.linear")]
    assert len(products) == 7
    attention = [op for op in range(first.start, first.stop) if "attention" in LLAMA.ops[op].kind]
    assert kept == sorted([*products[::2], *attention])


def test_op_keeps_every_product_with_a_bias_and_every_convolution():
    found = read_recompute(GPT, "op")
    assert kinds(GPT, found.keeps).count("linear") == 4 * len(BLOCKS)
    assert set(kinds(RESNET, read_recompute(RESNET, "op").keeps)) == {"conv2d"}


def test_attention_is_what_lies_between_the_products_or_the_scores_alone():
    for start, stop in read_recompute(LLAMA, "attention").ranges:
        inside = kinds(LLAMA, range(start, stop))
        assert "scaled_dot_product_attention" in inside
        assert "linear" not in inside
        assert kinds(LLAMA, [start - 1, stop]) == ["linear", "linear"]
    for start, stop in read_recompute(GNMT, "attention").ranges:
        assert set(kinds(GNMT, range(start, stop))) <= {"softmax", "dropout"}
    assert read_recompute(GPT, "selective") == read_recompute(GPT, "attention")


def test_every_second_block_layers_and_stages():
    assert read_recompute(GPT, "every-2").ranges == recompute_layers(GPT, (2, 4))
    assert read_recompute(GPT, "1:3,4").ranges == recompute_layers(GPT, (1, 2, 4))
    bounds = [(0, 3), (3, 6)]
    found = read_recompute(GPT, "full@0,op@1", bounds)
    assert found.ranges == recompute_layers(GPT, BLOCKS)
    op = recompute_choices(GPT)["op"]
    assert found.keeps == tuple(item for item in op.keeps if item >= GPT.layers[3].start)
    assert read_recompute(GPT, "full@0", bounds).ranges == recompute_layers(GPT, (1, 2))
    assert read_recompute(GPT, "op@0:2", bounds) == op


@pytest.mark.parametrize("graph", [GPT, LLAMA])
def test_words_for_layers(graph):
    op, found = read_recompute(graph, "op"), read_recompute(graph, "op[1:3],full[3:5]")
    assert found.ranges == op.ranges
    assert found.keeps == tuple(item for item in op.keeps if item < graph.layers[3].start)
    # In any order; layers that are not blocks have nothing that is computed again.
    assert read_recompute(graph, "full[3:6],op[0:3]") == found
    assert read_recompute(graph, "full[1,3]").ranges == recompute_layers(graph, (1, 3))
    assert read_recompute(graph, "op[1:3],none[3:5]") == read_recompute(graph, "op[1:3]")
    # Their meaning does not depend on where the model is cut.
    assert read_recompute(graph, "op[1:3],full[3:5]", [(0, 2), (2, 6)]) == found


def test_own_lists_of_ops():
    kept = read_recompute(LLAMA, "keep=silu_*+aten.scaled_dot*").keeps
    assert set(kinds(LLAMA, kept)) == {"silu", "scaled_dot_product_attention"}
    assert len(kept) == 2 * len(BLOCKS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("opp", "did you mean 'op'"),
        ("every-0", "is not a choice of what to recompute"),
        ("every-7", "has no 7 repeated blocks"),
        ("keep=aten.lineax", "did you mean 'aten.linear'"),
        ("keep=", "names no op whose result is kept"),
        ("keep=aten.view", "no op in the repeated blocks"),
        ("keep=aten.transpose", "it is a view of another op's result"),
        ("full@0,op@0:2", "names stage 0 twice"),
        ("full@0,none@1", "here the model is not cut into stages"),
        ("3:2", "start below stop"),
        ("op[1:3],full[2:5]", "names a layer twice"),
        ("op[3:1]", "start below stop"),
        ("op[1:30]", "the graph has layers 0 to 5"),
        ("opp[1:3]", "did you mean 'op'"),
        ("op[1::3]", "'1::3' is not a choice of what to recompute"),
        ("op[]", "words for layers as op"),
        ("op[1:3],full", "words for layers as op"),
        ("op[1:3]full[3:5]", "words for layers as op"),
        ("every-2[1:3]", "did you mean 'every-2'"),
    ],
)
def test_what_means_nothing_is_refused(text, words):
    with pytest.raises(PlanError, match=words):
        read_recompute(LLAMA, text)


@pytest.mark.parametrize("text", ["full@2", "full@0,op@0", "full@", "@1", "0:3@1", "full@x", "full@1:1", "full@0,op"])
def test_stages_that_there_are_not_are_refused(text):
    with pytest.raises(PlanError, match="stages recompute"):
        read_recompute(GPT, text, [(0, 3), (3, 6)])


def test_unrepeated_models_have_no_blocks():
    flat = replace(GPT, layers=tuple(replace(layer, name=f"layer{i}") for i, layer in enumerate(GPT.layers)))
    for text in ("full", "op", "keep=aten.linear", "every-2"):
        with pytest.raises(PlanError, match=r"has no .*repeated blocks"):
            read_recompute(flat, text)


def test_what_a_plan_computes_again_has_its_word():
    in_layers = "op[1:3],full[3:5]", "full[1,3],op[2,4]", "op[2]", "full[1],op[2:4]"
    for word in ("none", "op", "attention", "full", "every-2", "1,3", *in_layers):
        assert name_recompute(GPT, read_recompute(GPT, word)) == word
    # Where a shorter word means the same, it is that.
    for text, word in (("op[1:5]", "op"), ("full[1:3],full[3:5]", "full"), ("full[1:3]", "1:3"), ("none[1:3]", "none")):
        assert name_recompute(GPT, read_recompute(GPT, text)) == word
    # Some of what op keeps of a block is no word.
    op = read_recompute(GPT, "op[1:3],full[3:5]")
    assert not name_recompute(GPT, Recompute(op.ranges, op.keeps[1:]))
    assert not name_recompute(GPT, read_recompute(GPT, "keep=aten.gelu"))
    assert not name_recompute(GPT, Recompute(((3, 5),)))


def test_what_runs_again_is_all_but_what_is_kept():
    graph = with_recompute(LLAMA, *read_recompute(LLAMA, "op"))
    start, stop = graph.recompute[0]
    again, passed = computed_again(graph, start, stop), passed_again(graph, start, stop)
    assert [op for op in passed if op not in again] == [op for op in graph.keeps if op in passed]
    # Of the last product only its input is read, and the sum behind it is no longer computed.
    assert kinds(graph, [passed.stop]) == ["linear"]
    assert computed_again(LLAMA, start, stop) == tuple(passed)


def test_equal_blocks_of_which_other_results_are_kept_have_another_name():
    some = read_recompute(GPT, "op@0", [(0, 3), (3, 6)])
    graph = with_recompute(GPT, recompute_choices(GPT)["full"].ranges, some.keeps)
    assert graph.layers[1].block == graph.layers[2].block != graph.layers[3].block


def test_what_cannot_be_kept_is_refused():
    full = recompute_choices(GPT)["full"].ranges
    first = GPT.layers[1].start
    linear = next(op for op in range(first, GPT.layers[1].stop) if "linear" in GPT.ops[op].kind)
    with pytest.raises(GraphError, match="within the recomputed ranges"):
        with_recompute(GPT, full, (0,))
    with pytest.raises(GraphError, match="within the recomputed ranges"):
        with_recompute(GPT, (), (linear,))
    ops = list(GPT.ops)
    ops[linear] = replace(ops[linear], random=True)
    with pytest.raises(GraphError, match="draws random numbers"):
        with_recompute(replace(GPT, ops=tuple(ops)), full, (linear,))
    ops[linear] = GPT.ops[linear]
    reader = next(op for op in range(linear + 1, len(ops)) if set(ops[linear].outputs) & set(ops[op].inputs))
    ops[reader] = replace(ops[reader], kind="aten.relu_.default")
    written = replace(GPT, ops=tuple(ops))
    with pytest.raises(GraphError, match="written in place later"):
        with_recompute(written, full, (linear,))
    assert linear not in read_recompute(written, "op").keeps


def test_older_plans_and_graphs_without_kept_results_are_read():
    plan = replace(PLAN, recompute=((0, 2),), compiled=False)
    data = encode(plan)
    assert "keeps" not in data
    assert decode(Plan, data) == plan
    kept = replace(plan, keeps=(1,))
    assert decode(Plan, encode(kept)) == kept
    graph = with_recompute(GPT, *read_recompute(GPT, "op"))
    assert decode(Graph, encode(graph)) == graph
