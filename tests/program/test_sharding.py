"""Shardings as documents, what they refuse, and local graphs cut into stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.program import shard_graph
from meshwright.spec import (
    OpPlacement,
    PlanError,
    Sharding,
    decode_document,
    encode_document,
    load_shipped_graph,
    slice_graph,
)
from meshwright.spec.graph import Extent
from tests.graphs import even_bounds

PLACEMENTS = st.builds(
    OpPlacement,
    op=st.text(max_size=4),
    axis=st.sampled_from(("tensor", "context")),
    output_dim=st.none() | st.integers(),
)


@given(st.integers(2, 9), st.integers(2, 9), st.booleans(), st.lists(PLACEMENTS, max_size=2).map(tuple))
def test_a_sharding_is_read_as_it_was_written(tensor, context, sequence_parallel, placements):
    sharding = Sharding(
        tensor=tensor,
        context=context,
        sequence_parallel=sequence_parallel,
        regather=sequence_parallel,
        placements=placements,
    )
    assert decode_document(Sharding, encode_document(sharding), "text") == sharding
    assert sharding.width == tensor * context


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": 0}, "tensor axis has size 0"),
        ({"sequence_parallel": True}, "expected tensor > 1"),
        ({"tensor": 2, "regather": True}, "sequence_parallel is false"),
        ({"placements": (OpPlacement(op="x"),)}, "tensor axis, which has size 1"),
    ],
)
def test_shardings_that_contradict_themselves_are_refused(given, message):
    with pytest.raises(PlanError, match=message):
        Sharding(**given)


def test_a_placement_is_along_one_dim():
    with pytest.raises(PlanError, match="expected one of them"):
        OpPlacement(op="x", output_dim=0, input_dim=0)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gpt-tiny", {"tensor": 8}, "has 4 heads; expected a divisor of 4"),
        ("llama-tiny", {"tensor": 4}, "has 2 heads of keys; expected a divisor of 2"),
        ("gpt-tiny", {"context": 5}, "none of tokens_BT"),
        ("resnet-tiny", {"context": 2}, "has no attention"),
        ("gpt-tiny", {"expert": 2}, "no batched product with a matrix per expert"),
        ("mixtral-tiny", {"expert": 3}, r"has \[4\] experts"),
        ("gpt-tiny", {"tensor": 2, "placements": (OpPlacement(op="blocks.0.mpl"),)}, "did you mean 'blocks.0.mlp"),
        (
            "gpt-tiny",
            {"tensor": 2, "placements": (OpPlacement(op="blocks.0.mlp_norm", output_dim=2),)},
            "cannot take the placement .* It can be split along output_dim 1",
        ),
    ],
)
def test_what_a_graph_cannot_take_is_refused(name, given, message):
    with pytest.raises(PlanError, match=message):
        shard_graph(load_shipped_graph(name), Sharding(**given))


def test_a_graph_of_one_batch_size_has_no_samples_of_several_ranks():
    graph = load_shipped_graph("mixtral-tiny")
    fixed = replace(
        graph,
        tensors=tuple(replace(t, shape=tuple(Extent(e.at(2)) for e in t.shape)) for t in graph.tensors),
        batch_size=2,
    )
    with pytest.raises(PlanError, match="symbolic batch"):
        shard_graph(fixed, Sharding(expert=2))


def test_what_crosses_stages_is_split_with_sequence_parallelism():
    graph = load_shipped_graph("gpt-tiny")
    bounds = even_bounds(len(graph.layers), 2)
    whole = slice_graph(graph, bounds)[0].outgoing[0].forward_bytes(graph, 4)
    for sharding, share in (
        (Sharding(tensor=2), 1),
        (Sharding(tensor=2, sequence_parallel=True), 2),
        (Sharding(context=4), 4),
    ):
        local = shard_graph(graph, sharding).graph
        sent = slice_graph(local, bounds)[0].outgoing[0]
        assert sent.forward_bytes(local, 4) * share == whole == sent.backward_bytes(local, 4) * share


def test_regathering_keeps_what_is_split_and_gathers_it_again():
    graph = load_shipped_graph("gpt-tiny")
    kept, again = (
        shard_graph(graph, Sharding(tensor=4, sequence_parallel=True, regather=regather)) for regather in (False, True)
    )
    gathers = [sum(c.kind == "all_gather" and c.phase == "backward" for c in s.collectives) for s in (kept, again)]
    inputs = sum(c.kind == "all_gather" and c.phase == "forward" for c in kept.collectives)
    assert gathers[1] - gathers[0] == inputs
    whole = next(c.num_bytes(kept.graph, 8) for c in kept.collectives if c.kind == "all_gather")
    # Instead of the whole input of each product, the part that the norm before it has made.
    saved = [s.graph.saved_bytes(s.graph.ops, 8) for s in (kept, again)]
    assert saved[0] - saved[1] == inputs * (whole - whole // 4)
