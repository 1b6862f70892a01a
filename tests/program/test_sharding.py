"""Shardings as documents, what they refuse, and local graphs cut into stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import capture_model
from meshwright.program import shard_graph
from meshwright.spec import (
    Extent,
    OpPlacement,
    PlanError,
    Shard,
    Sharding,
    decode_document,
    encode_document,
    load_shipped_graph,
    slice_graph,
    write_document,
)
from meshwright.zoo import load_model, load_shape
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
    with pytest.raises(PlanError, match="expected at most one of them"):
        OpPlacement(op="x", output_dim=0, input_dim=0)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gpt-tiny", {"tensor": 8}, "has 4 heads; expected a divisor of 4"),
        ("llama-tiny", {"tensor": 4}, "has 2 heads of keys; expected a divisor of 2"),
        ("gpt-tiny", {"context": 5}, "the inputs are tokens_BT"),
        ("resnet-tiny", {"context": 2}, "has no attention"),
        ("gpt-tiny", {"expert": 2}, "no batched product with a matrix per expert"),
        ("mixtral-tiny", {"expert": 3}, "'blocks.0.experts' has 4 experts; expected a divisor of 4"),
        ("mixtral-tiny", {"expert": 8}, "'blocks.0.experts' has fewer experts than ranks: 4"),
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


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_captured_block_exchanges_what_megatron_counts(sequence_parallel):
    """By hand, per block and 16 bits: Shoeybi et al. 2019, figure 4; Korthikanti et al. 2023, section 4.2.2.

    Without sequence parallelism an all-reduce of the hidden values behind attention and feed-forward, forward and back.
    With it a gather before and a scatter behind each, forward and back, and inputs gathered again for weight gradients.
    """
    graph, batch, tokens, hidden = load_shipped_graph("gpt2-small"), 4, 1024, 768
    each = 2 * batch * tokens * hidden * 2
    counted = {("all_reduce", False): each, ("all_reduce", True): each}
    if sequence_parallel:
        counted = {
            ("all_gather", False): each,
            ("reduce_scatter", False): each,
            ("all_gather", True): 2 * each,
            ("reduce_scatter", True): each,
        }
    sharded = shard_graph(graph, Sharding(tensor=4, sequence_parallel=sequence_parallel, regather=sequence_parallel))
    block = next(layer for layer in sharded.graph.layers if layer.name == "blocks.5")
    found: Counter[tuple[str, bool]] = Counter()
    for c in sharded.collectives:
        if block.start <= c.at < block.stop:
            found[c.kind, c.phase == "backward"] += c.num_bytes(sharded.graph, batch, 2)
    assert found == counted


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "t5-tiny"])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_axes_take_shares_of_each_other(name, method):
    """What one axis exchanges, the other has split; what ranks compute and hold is a share of a share."""
    graph = load_shipped_graph(name)
    both, tensor, context = (
        shard_graph(graph, Sharding(tensor=a, context=b, context_method=method)) for a, b in ((2, 2), (2, 1), (1, 2))
    )
    for axis, alone in (("tensor", tensor), ("context", context)):
        shared, whole = (
            Counter((c.kind, c.phase, c.count * c.num_bytes(s.graph, 2)) for c in s.collectives if c.axis == axis)
            for s in (both, alone)
        )
        assert Counter({(kind, phase, 2 * num_bytes): n for (kind, phase, num_bytes), n in shared.items()}) == whole
    assert 4 * both.graph.flops(2) == 2 * tensor.graph.flops(2) == 2 * context.graph.flops(2) == graph.flops(2)
    assert both.graph.num_parameters() == tensor.graph.num_parameters()


@pytest.mark.long
def test_what_travels_to_experts_and_what_they_compute_grow_with_their_capacity(tmp_path):
    found = {}
    for factor in (1.0, 2.0):
        path = write_document(replace(load_shape("mixtral-tiny"), capacity_factor=factor), tmp_path / "busy.toml")
        source = load_model(str(path), fake=True)
        graph = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False).graph
        local = shard_graph(graph, Sharding(expert=4))
        products = [op for op in local.graph.ops if op.module.endswith("experts")]
        found[factor] = (
            sum(item.num_bytes(local.graph, 1) for item in local.collectives),
            sum(op.flops.at(1) for op in products),
        )
    assert found[2.0] == tuple(2 * value for value in found[1.0])


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_of_all_ranks_travel_to_the_experts_and_back(size):
    """Of every sequence, 4 experts take 40 tokens of 64 numbers each (`zoo.mixtral`)."""
    batch = 3
    sharded = shard_graph(load_shipped_graph("mixtral-tiny"), Sharding(expert=size))
    sent = [c.num_bytes(sharded.graph, batch, 2) for c in sharded.collectives]
    assert sent == [size * batch * 4 * 40 * 64 * 2] * 4 * 4
    assert {c.kind for c in sharded.collectives} == {"all_to_all"}
    experts = [i for i in sharded.graph.parameters if isinstance(sharded.layouts["expert"][i], Shard)]
    assert {sharded.graph.tensors[i].name.split(".")[-1] for i in experts} == {"gate", "up", "down"}
    assert all(sharded.graph.tensors[i].shape[0] == Extent(4 // size) for i in experts)
