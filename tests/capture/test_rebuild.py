"""Modules rebuilt from graphs alone compute what the captured model computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.capture import capture_model, flatten_batch, part, rebuild
from meshwright.spec import GraphError, slice_graph
from meshwright.zoo import load_model

NAMES = ["llama-tiny", "t5-tiny", "resnet-tiny", "dlrm-tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_a_rebuilt_module_gives_the_same_loss_and_gradients(name):
    source = load_model(name)
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=name, verify=False
    )
    graph = captured.graph
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    size = graph.batch_size or len(source.targets)
    own = part(captured, stage.inputs, stage.outputs, batch_size=size, ops=stage.ops)
    made = rebuild(graph, stage.inputs, stage.outputs, stage.ops, batch_size=size, converters={})
    values = {name: torch.rand(value.shape).mul(0.1).to(value.dtype) for name, value in made.state_dict().items()}
    made.load_state_dict(values, assign=True)
    names = {name: graph.tensors[int(name.removeprefix("state_"))].name for name in values}
    for ours, theirs in names.items():
        holder, _, leaf = theirs.rpartition(".")
        module = own.get_submodule(holder)
        setattr(
            module,
            leaf,
            torch.nn.Parameter(values[ours].clone()) if leaf in module._parameters else values[ours].clone(),
        )
    for parameter in made.parameters():
        parameter.requires_grad_()
    given = dict(zip(graph.inputs, flatten_batch(captured, source.inputs, source.targets), strict=True))
    feeds = [given[i] for i in stage.inputs]
    expected, found = (run_seeded(module, feeds) for module in (own, made))
    assert found.item() == expected.item()
    expected.backward()
    found.backward()
    for ours, theirs in names.items():
        parameter = dict(made.named_parameters()).get(ours)
        if parameter is not None and parameter.grad is not None:
            assert torch.equal(parameter.grad, dict(own.named_parameters())[theirs].grad), theirs


def run_seeded(module, feeds):
    torch.manual_seed(0)
    return module(*feeds)[0]


def test_what_a_graph_does_not_say_is_refused():
    source = load_model("gpt-tiny")
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name="gpt", verify=False
    )
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
