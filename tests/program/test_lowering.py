"""Lowered plans: the local graph of one device, with what it exchanges and what it computes again."""

from dataclasses import replace

import pytest

from meshwright.program import build_program, lower_graph, lower_plan
from meshwright.spec import PlanError, Sharding, content_hash, load_shipped_graph, read_recompute
from meshwright.spec.sharding import UNSHARDED
from tests.graphs import make_plan

GPT = load_shipped_graph("gpt-tiny")
LAYERS = len(GPT.layers)


def plan_of(**settings):
    return replace(make_plan(GPT, [(0, 2), (2, LAYERS)], [2, 2], 4), **settings)


def test_a_plan_that_splits_and_recomputes_nothing_is_its_own():
    plan = plan_of()
    assert lower_plan(plan, GPT) == (plan, GPT)
    assert lower_plan(plan, GPT)[1] is GPT


def test_the_lowered_plan_is_one_of_the_local_graph():
    plan = plan_of(sharding=Sharding(tensor=2), recompute=read_recompute(GPT, "full").ranges)
    lowered, local = lower_plan(plan, GPT)
    assert (lowered.graph_hash, lowered.sharding, lowered.recompute) == (local.content_hash, UNSHARDED, ())
    assert lowered.stages == plan.stages
    assert lower_plan(lowered, local) == (lowered, local)
    program = build_program(plan, GPT)
    assert program.plan_hash == content_hash(plan)
    assert program.num_ranks == plan.num_ranks == 4
    assert plan.num_devices == 8


@pytest.mark.parametrize(
    "sharding", [Sharding(tensor=2), Sharding(tensor=2, sequence_parallel=True), Sharding(context=2)]
)
def test_the_same_parts_are_computed_again_however_ops_are_split(sharding):
    chosen = (GPT.layers[1].start + 3, GPT.layers[1].start + 9)
    for ranges in (read_recompute(GPT, "full").ranges, (chosen,)):
        local = lower_graph(GPT, sharding, ranges)
        assert len(local.recompute) == len(ranges)
        for (start, stop), (first, last) in zip(ranges, local.recompute, strict=True):
            names = [op.name for op in local.ops[first:last] if not op.kind.startswith("mesh.")]
            assert names == [op.name for op in GPT.ops[start:stop]]


def test_messages_between_stages_are_those_of_the_local_graph():
    """Tokens that are split over the tensor axis cross to the next stage in parts."""
    sizes = {}
    for name, sharding in (
        ("whole", UNSHARDED),
        ("tensor", Sharding(tensor=2)),
        ("sequence", Sharding(tensor=2, sequence_parallel=True)),
        ("context", Sharding(context=2)),
    ):
        program = build_program(plan_of(sharding=sharding), GPT)
        sent = program.body.num_bytes[program.body.opcode == 2]
        sizes[name] = int(sent.max())
    assert sizes["tensor"] == sizes["whole"] == 2 * sizes["sequence"] == 2 * sizes["context"]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="heads"):
        lower_graph(GPT, Sharding(tensor=3), ())


def test_a_router_has_no_scores_of_attention():
    """Both have a softmax: the one weighs values, the other chooses experts."""
    attending, routing = load_shipped_graph("gnmt-tiny"), load_shipped_graph("mixtral-tiny")
    assert read_recompute(attending, "selective").ranges
    attention = read_recompute(routing, "attention").ranges
    kinds = {routing.ops[op].kind for start, stop in attention for op in range(start, stop)}
    assert "aten.scaled_dot_product_attention.default" in kinds
    assert not any("softmax" in kind for kind in kinds)
    with pytest.raises(PlanError, match="has no attention"):
        read_recompute(load_shipped_graph("resnet-tiny"), "attention")
