"""Which pieces of a model are run, and with what tensors."""

from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.measurement import OpSource, build_segments, measure_ops
from meshwright.spec import GraphError, MeasurementError, op_key
from tests.graphs import chain_graph
from tests.measurement.sources import perceptron

MiB = 2**20


class Weights(nn.Module):
    def __init__(self, graph, make):
        super().__init__()
        for i in graph.parameters:
            tensor = graph.tensors[i]
            value = make([extent.at(0) for extent in tensor.shape])
            self.register_parameter(tensor.name.replace(".", "_"), nn.Parameter(value, tensor.requires_grad))


def chain_source(num_layers, cuts, *, make=torch.zeros, **facts):
    """`chain_graph` as runnable parts: ``y = x @ w.T``, the last one summed up; every cut is noted."""
    graph = chain_graph(num_layers, **facts)

    def cut(feeds, fetches, chosen, batch_size):
        cuts.append(chosen)
        code, values = fx.Graph(), {}
        for tensor in feeds:
            values[tensor] = code.placeholder(graph.tensors[tensor].name)
        for index in chosen:
            op = graph.ops[index]
            x, weight = op.inputs[:2]
            name = graph.tensors[weight].name.replace(".", "_")
            last = index == num_layers - 1
            target = (lambda x, w: nn.functional.linear(x, w).sum()) if last else nn.functional.linear
            values[op.outputs[0]] = code.call_function(target, (values[x], code.get_attr(name)), name=op.name)
        code.output(tuple(values[tensor] for tensor in fetches))
        return fx.GraphModule(Weights(graph, make), code)

    return OpSource(graph=graph, cut=cut, batch=lambda n: (torch.ones(n, 4),))


def test_a_model_that_fits_is_run_as_a_whole():
    cuts = []
    (segment,) = build_segments(chain_source(5, cuts), 2, max_bytes=MiB)
    assert cuts == [(0, 1, 2, 3, 4)]
    assert list(segment.keys) == [f"linear{i}" for i in range(5)]
    assert segment.differentiable == (True,)


def test_of_a_larger_model_each_distinct_op_is_run_once():
    cuts = []
    source = chain_source(50, cuts)
    segments = build_segments(source, 2, max_bytes=1000)
    # The first layer's input needs no gradient; all others are equal.
    assert cuts == [(0,), (1,)]
    covered = {key for segment in segments for key in segment.keys.values()}
    assert covered == {op_key(source.graph, op, 2) for op in source.graph.ops}
    first, second = segments
    assert not first.feeds[0].requires_grad
    assert second.feeds[0].requires_grad
    assert tuple(second.feeds[0].shape) == (2, 4)
    assert {row.key for row in measure_ops(source, 2, repeats=3, max_bytes=1000).ops} == covered


def test_a_model_whose_distinct_layers_do_not_fit_is_refused():
    with pytest.raises(MeasurementError, match="only 10 bytes may be used"):
        build_segments(chain_source(5, []), 2, max_bytes=10)


def test_frozen_layers_get_no_gradient_fed_back():
    segments = build_segments(chain_source(10, [], frozen=4), 2, max_bytes=1000)
    assert [list(segment.keys) for segment in segments] == [["linear0"], ["linear4"], ["linear5"]]
    assert [segment.training for segment in segments] == [False, True, True]
    assert [segment.differentiable for segment in segments] == [(False,), (True,), (True,)]
    assert [segment.feeds[0].requires_grad for segment in segments] == [False, False, True]


def test_weights_that_were_never_allocated_are_made_up():
    with FakeTensorMode():
        fake = torch.empty(4, 4)
    for make in (lambda _: fake, lambda shape: torch.empty(shape, device="meta")):
        (segment,) = build_segments(chain_source(2, [], make=make), 2, max_bytes=MiB)
        weights = list(segment.module.parameters())
        assert [(type(item), item.device.type, item.requires_grad) for item in weights] == [
            (nn.Parameter, "cpu", True)
        ] * 2
        assert float(segment.module(*segment.feeds)[0].detach().abs()) > 0


def test_a_part_that_cannot_be_run_op_by_op_is_refused():
    source = replace(chain_source(2, []), cut=lambda *_: nn.Linear(4, 4))
    with pytest.raises(MeasurementError, match="is a Linear"):
        build_segments(source, 2, max_bytes=MiB)


def test_a_batch_that_the_graph_does_not_describe_is_refused():
    with pytest.raises(GraphError, match="batch of 3"):
        build_segments(perceptron(4), 3, max_bytes=MiB)


def test_too_few_repetitions_are_refused():
    with pytest.raises(MeasurementError, match="at least 3"):
        measure_ops(perceptron(4), 4, repeats=2)


def test_a_part_whose_nodes_are_named_otherwise_is_refused():
    source = chain_source(3, [])

    def renamed(feeds, fetches, chosen, batch_size):
        module = source.cut(feeds, fetches, chosen, batch_size)
        next(node for node in module.graph.nodes if node.name == "linear1").name = "somebody"
        return module

    with pytest.raises(MeasurementError, match="no node named 'linear1'"):
        build_segments(replace(source, cut=renamed), 2, max_bytes=MiB)
