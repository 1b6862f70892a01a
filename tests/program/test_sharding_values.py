"""What the ranks of a sharded graph compute together is what one device computes: losses and all gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from meshwright import capture_model
from meshwright.program import shard_graph
from meshwright.spec import OpPlacement, Partial, PlanError, Shard, Sharding, load_shipped_graph
from tests.marks import examples
from tests.program.random_graphs import random_graphs
from tests.program.sharded_oracle import BATCH, initial_values, join, run_ranks, run_whole

COLUMNS = (OpPlacement(op="embeddings.*", axis="expert", output_dim=1),)
ROWS = (OpPlacement(op="embeddings.[01]", axis="expert", input_dim=0),)
CASES = [
    *(
        (name, "tensor", 2, {})
        for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny", "dlrm-tiny")
    ),
    *(
        (name, "tensor", 2, {"sequence_parallel": True})
        for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny")
    ),
    *(
        (name, "tensor", 2, {})
        for name in ("resnet-tiny", "vgg-tiny", "unet-tiny", "ddpm-tiny", "gnmt-tiny", "llama-lora-tiny")
    ),
    ("gpt-tiny", "tensor", 4, {"sequence_parallel": True}),
    *((name, "context", 2, {}) for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny")),
    ("gpt-tiny", "context", 4, {"context_method": "all_gather"}),
    *(("mixtral-tiny", "expert", size, {}) for size in (2, 4)),
    *(("dlrm-tiny", "expert", 2, {"placements": own}) for own in (COLUMNS, ROWS)),
]


@pytest.mark.parametrize(("name", "axis", "size", "more"), CASES)
@pytest.mark.matrix
def test_ranks_together_compute_what_one_device_does(name, axis, size, more):
    sharded = shard_graph(load_shipped_graph(name), Sharding(**{axis: size}, **more))
    assert_equal(load_shipped_graph(name), sharded, axis, size)


def assert_equal(graph, sharded, axis: str, size: int) -> None:
    """Losses, and gradients once those are summed that each rank has in part."""
    values = initial_values(graph)
    loss = run_whole(graph, values)
    loss.backward()
    layouts, samples = sharded.layouts[axis], BATCH // size if axis == "expert" else BATCH
    losses, parameters = run_ranks(sharded, axis, size, values, samples)
    lies = layouts[sharded.graph.outputs[0]]
    assert float(join(losses, lies, samples, mean=True).detach()) == pytest.approx(float(loss.detach()), rel=1e-11)
    torch.autograd.backward([one / (size if lies == Partial() else 1) for one in losses])
    for i in graph.parameters:
        wanted = values[i].grad
        if wanted is None:
            continue
        gradients = [rank[i].grad for rank in parameters]
        if i in sharded.reduced_parameters[axis] or (axis == "expert" and not isinstance(layouts[i], Shard)):
            gradients = [sum(item for item in gradients if item is not None)] * size
        for found in [join(gradients, layouts[i], samples)] if isinstance(layouts[i], Shard) else gradients:
            # What vanishes by itself (of a key's bias) is rounding on both sides.
            assert (found - wanted).norm() <= 1e-8 * wanted.norm() + 1e-13, (graph.tensors[i].name, layouts[i])


class _Attending(torch.nn.Module):
    """torch's own attention, which stands tokens before samples, in a residual stream."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)
        self.norm, self.attention = torch.nn.LayerNorm(16), torch.nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.norm(x)
        return self.head(x + self.attention(y, y, y, need_weights=False)[0])


@pytest.mark.long
def test_tokens_that_stand_before_samples_are_scattered_where_they_stand():
    tokens = torch.randint(0, 32, (BATCH, 8))
    graph = capture_model(
        _Attending(),
        tokens,
        targets=tokens,
        loss=lambda y, t: torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()),
        verify=False,
    ).graph
    sharded = shard_graph(graph, Sharding(tensor=2, sequence_parallel=True))
    assert_equal(graph, sharded, "tensor", 2)
    # One gather before the attention, one before the head, and none where its scattered sum is added.
    kinds = Counter(item.kind for item in sharded.collectives if item.phase == "forward")
    assert (kinds["all_gather"], kinds["reduce_scatter"]) == (2, 1)


@settings(max_examples=examples(40))
@given(random_graphs(), st.booleans(), st.data())
def test_random_graphs_are_computed_alike_however_they_are_placed(graph, sequence_parallel, data):
    placements = tuple(
        OpPlacement(
            op=op.name, **{data.draw(st.sampled_from(("output_dim", "input_dim"))): data.draw(st.integers(0, 3))}
        )
        for op in data.draw(st.lists(st.sampled_from(graph.ops), max_size=3))
    )
    try:
        sharding = Sharding(tensor=2, sequence_parallel=sequence_parallel, placements=placements)
        sharded = shard_graph(graph, sharding)
    except PlanError:
        reject()
    assert_equal(graph, sharded, "tensor", 2)
    assert 2 * sharded.graph.flops(BATCH) >= graph.flops(BATCH)
    for i in graph.parameters:
        whole, local = (g.tensors[i].num_elements(1) for g in (graph, sharded.graph))
        assert local * (2 if isinstance(sharded.layouts["tensor"][i], Shard) else 1) == whole


@given(random_graphs())
def test_a_sharding_of_one_rank_is_the_graph_itself(graph):
    sharded = shard_graph(graph, Sharding())
    assert sharded.graph == graph
    assert not sharded.collectives
