"""Modules rebuilt from graphs alone compute what the captured model computes."""

from dataclasses import replace

import pytest
import torch

from meshwright.capture import capture_model, flatten_batch, part, rebuild
from meshwright.spec import GraphError, slice_graph
from meshwright.zoo import load_model

NAMES = ["llama-tiny", "t5-tiny", "resnet-tiny", "dlrm-tiny", "gnmt-tiny", "unet-tiny"]


def capture_zoo(name):
    source = load_model(name)
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=name, verify=False
    )
    return source, captured


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.matrix
def test_a_rebuilt_module_gives_the_same_loss_and_gradients(name):
    source, captured = capture_zoo(name)
    graph = captured.graph
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    given = dict(zip(graph.inputs, flatten_batch(captured, source.inputs, source.targets), strict=True))
    feeds = [given[i] for i in stage.inputs]
    size = graph.batch_size or len(feeds[0])
    own = part(captured, stage.inputs, stage.outputs, batch_size=size, ops=stage.ops)
    made = rebuild(graph, stage.inputs, stage.outputs, stage.ops, batch_size=size, converters={})
    values = {name: torch.rand(value.shape).mul(0.1).to(value.dtype) for name, value in made.state_dict().items()}
    made.load_state_dict(values, assign=True)
    for name, value in values.items():
        holder, _, leaf = name.rpartition(".")
        module = own.get_submodule(holder)
        setattr(module, leaf, torch.nn.Parameter(value.clone()) if leaf in module._parameters else value.clone())
    for parameter in made.parameters():
        parameter.requires_grad_()
    expected, found = (run_seeded(module, feeds) for module in (own, made))
    assert found.item() == expected.item()
    expected.backward()
    found.backward()
    wanted = dict(own.named_parameters())
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, wanted[name].grad), name


@pytest.mark.long
def test_state_is_given_and_modules_stand_in_for_ops():
    source, captured = capture_zoo("llama-tiny")
    graph = captured.graph
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    product = next(i for i, op in enumerate(graph.ops) if op.kind == "aten.linear.default")
    seen = []

    class Linear(torch.nn.Module):
        def forward(self, x, weight):
            seen.append(weight)
            return torch.nn.functional.linear(x, weight)

    state = {graph.tensors[i].name: item for i, item in held(captured).items()}
    made = rebuild(
        graph,
        stage.inputs,
        stage.outputs,
        stage.ops,
        batch_size=8,
        converters={},
        modules={product: Linear()},
        state=lambda i: state[graph.tensors[i].name],
    )
    feeds = dict(zip(graph.inputs, flatten_batch(captured, source.inputs, source.targets), strict=True))
    own = part(captured, stage.inputs, stage.outputs, batch_size=8, ops=stage.ops)
    given = [feeds[i] for i in stage.inputs]
    assert torch.equal(made(*given)[0], own(*given)[0])
    assert seen[0] is captured.trace.attribute(graph.tensors[graph.ops[product].inputs[1]].name)
    assert all(item is state[name] for name, item in made.named_parameters())


def held(captured):
    return {
        i: captured.trace.attribute(tensor.name)
        for i, tensor in enumerate(captured.graph.tensors)
        if tensor.role in ("parameter", "buffer", "constant")
    }


def run_seeded(module, feeds):
    torch.manual_seed(0)
    return module(*feeds)[0]


def test_what_a_graph_does_not_say_is_refused():
    _, captured = capture_zoo("gpt-tiny")
    graph = captured.graph
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    with pytest.raises(GraphError, match="neither among the feeds"):
        rebuild(graph, stage.inputs[:1], stage.outputs, stage.ops, batch_size=2, converters={})
    for damaged, why in (
        (replace(graph.ops[1], kind="aten.nothing.default"), "no such operator"),
        (replace(graph.ops[1], inputs=graph.ops[1].inputs[:1]), "has no input"),
        (replace(graph.ops[1], attributes=(("x", "1"),)), "have no argument"),
    ):
        other = replace(graph, ops=(graph.ops[0], damaged, *graph.ops[2:]))
        with pytest.raises(GraphError, match=why):
            rebuild(other, stage.inputs, stage.outputs, stage.ops, batch_size=2, converters={})
