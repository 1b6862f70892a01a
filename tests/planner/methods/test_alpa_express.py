"""Alpa's placements as a plan's sharding: its program exchanges what the integer program has paid for."""

import numpy as np
import pytest

from meshwright.planner.methods.alpa import Amounts, closed_form_mesh, express, place_ops
from meshwright.program import shard_graph
from meshwright.spec import Extent, OpPlacement, PlanError, Sharding, load_shipped_graph
from meshwright.spec.sharding import UNSHARDED
from tests.planner.methods.alpa_oracle import Axis

pytest.importorskip("highspy")
KINDS = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}
BATCH = 4


def place(name, shape, alpha, beta, *, uses=("samples", "model"), flop_s=1e-12, following=True):
    graph = load_shipped_graph(name)
    work = Amounts(
        graph=graph,
        batch_size=BATCH,
        num_microbatches=1,
        in_flight=1,
        float_bytes=4,
        parameter_bytes=16.0,
        op_seconds=np.array([flop_s * (op.flops + op.backward_flops).at(BATCH) for op in graph.ops]),
    )
    return place_ops(graph, closed_form_mesh(shape, (alpha, alpha), (beta, beta)), work, uses=uses, following=following)


@pytest.mark.parametrize(
    ("name", "size", "alpha", "beta"),
    [
        ("llama-tiny", 2, 1e-7, 1e-10),
        ("llama-tiny", 4, 1e-7, 1e-10),  # two heads of keys: attention over tokens
        ("gpt-tiny", 2, 1e-7, 1e-10),  # a tied weight
        ("gpt-tiny", 4, 1e-9, 1e-12),
        ("bert-tiny", 4, 1e-7, 1e-10),
        ("t5-tiny", 4, 1e-7, 1e-10),
        ("vgg-tiny", 2, 1e-7, 1e-10),
        ("dlrm-tiny", 4, 1e-9, 1e-12),
        ("gnmt-tiny", 2, 1e-9, 1e-12),
        ("bert-tiny", 2, 2e-5, 1e-9),  # so dear that nothing is split
    ],
)
@pytest.mark.parametrize("following", [True, False])
@pytest.mark.matrix
def test_the_program_exchanges_what_was_paid_for(name, size, alpha, beta, following):
    found = place(name, (1, size), alpha, beta, following=following)
    told = express(found)
    assert told.replicas == 1
    sharded = shard_graph(found.graph, told.sharding)
    axis = Axis(size, alpha, beta)
    passes = sum(
        axis.seconds(KINDS[item.kind], item.num_bytes(sharded.graph, BATCH, 4)) for item in sharded.collectives
    )
    summed = sharded.reduced_parameters["tensor"]
    gradients = sum(axis.seconds("AR", sharded.graph.tensors[i].num_bytes(BATCH, 4)) for i in summed)
    assert passes == pytest.approx(found.terms["exchange"] + found.terms["conversions"], abs=1e-15)
    assert gradients == pytest.approx(found.terms["gradients"], abs=1e-15)


def test_an_axis_of_samples_is_replicas():
    told = express(place("llama-tiny", (2, 2), 1e-7, 1e-10))
    assert told.replicas == 2
    assert told.sharding.tensor == 2
    everywhere = express(place("llama-tiny", (2, 2), 1e-9, 1e-12, uses=("samples", "samples")))
    assert everywhere == (4, UNSHARDED)


def test_what_a_plan_cannot_say_is_named():
    two = place("llama-tiny", (2, 2), 1e-9, 1e-12, uses=("model", "model"))
    with pytest.raises(PlanError, match="Both axes"):
        express(two)
    with pytest.raises(PlanError, match="A plan cannot express these placements: Tensor 'conv2d_5' has layout Shard"):
        express(place("vgg-tiny", (1, 4), 1e-7, 1e-10))


def test_an_op_that_the_user_placed_is_told_nothing_else():
    """Rows looked up by tokens are made in parts where parts are wanted, but not where a placement says whole."""
    graph = load_shipped_graph("llama-tiny")
    table = next(op for op in graph.ops if op.kind.startswith("aten.embedding"))
    reader = next(op for op in graph.ops if table.outputs[0] in op.inputs)
    others = (OpPlacement(op=reader.name, output_dim=1),)
    for placements, tokens in ((others, "64"), ((OpPlacement(op=table.name), *others), "128")):
        local = shard_graph(graph, Sharding(tensor=2, placements=placements)).graph
        whole = graph.tensors[table.outputs[0]].shape[1]
        assert whole == Extent(128)
        assert str(local.tensors[table.outputs[0]].shape[1]) == tokens
