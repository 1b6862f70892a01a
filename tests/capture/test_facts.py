"""The facts in a graph against independent oracles: real runs, closed forms, torch's own counters."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from meshwright.capture import capture_model, differentiate
from meshwright.capture.call_facts import count_flops
from meshwright.spec import Extent, Graph, decode_document, encode_document

from .models import CASES, Gpt, build, mean_square, numbers, token_loss, tokens

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    model, batch, loss = build(request.param)
    inputs, targets = batch(2)
    return request.param, model, batch, loss, capture_model(model, inputs, targets=targets, loss=loss, verify=False)


def run_eager(model, loss, inputs, targets):
    return loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.matrix
def test_saved_bytes_equal_a_real_run(case, size):
    _, model, batch, loss, captured = case
    inputs, targets = batch(size)
    state = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def keep(tensor):
        # While torch.cond compiles itself, tensors without data pass by.
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() not in state:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = run_eager(model, loss, inputs, targets)
    assert held.requires_grad
    expected = sum(saved.values())
    assert captured.graph.saved_bytes(captured.graph.ops, size) == expected


@pytest.mark.matrix
def test_joint_graph_counts_the_same_operations(case):
    graph = case[4].graph
    joint = differentiate(case[4])
    for size in (2, 7):
        assert joint.flops(size) == graph.flops(size)
    forward = sum(op.flops.at(3) for op in joint.ops if op.phase == "forward")
    assert forward == sum(op.flops.at(3) for op in graph.ops)
    trainable = [i for i in graph.parameters if graph.tensors[i].requires_grad]
    assert len(joint.outputs) == 1 + len(trainable)
    for i, gradient in zip(trainable, joint.outputs[1:], strict=True):
        assert joint.tensors[gradient].role == "gradient"
        assert joint.tensors[gradient].shape == graph.tensors[i].shape


@pytest.mark.matrix
def test_documents_keep_the_graph(case):
    graph = case[4].graph
    again = decode_document(Graph, encode_document(graph), "a test")
    assert again == graph
    assert again.content_hash == graph.content_hash


def test_flops_of_attention_are_those_of_torch():
    query, key, value, gradient = (torch.empty(2, *size) for size in ((8, 16, 4), (2, 32, 4), (2, 32, 6), (8, 16, 6)))
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_flash_attention{end}").default for end in ("", "_backward")
    )
    shapes = [tensor.shape for tensor in (query, key, value)]
    assert count_flops(forward, (query, key, value), {}, None) == sdpa_flop_count(*shapes)
    counted = count_flops(backward, (gradient, query, key, value), {}, None)
    assert counted == sdpa_backward_flop_count(gradient.shape, *shapes)


def test_flops_of_a_gpt_in_closed_form():
    width, length, vocabulary, layers = 16, 8, 23, 4
    graph = capture_model(Gpt().double(), tokens(3), targets=tokens(3), loss=token_loss, verify=False).graph
    per_token = (
        layers * (2 * width * 3 * width + 2 * width * width + 2 * 2 * width * 2 * width) + 2 * width * vocabulary
    )
    attention = layers * 2 * 2 * length * length * width
    assert sum(op.flops.at(5) for op in graph.ops) == 5 * (length * per_token + attention)
    # Two products per product; torch's count of fused attention has five for the backward pass's two.
    backward = 5 * (length * 2 * per_token + attention * 5 // 2)
    assert sum(op.backward_flops.at(5) for op in graph.ops) == backward


def test_names_roles_and_ties():
    model = Gpt().double()
    graph = capture_model(model, tokens(3), targets=tokens(3), loss=token_loss, verify=False).graph
    names = [graph.tensors[i].name for i in graph.parameters]
    assert names == [name for name, _ in model.named_parameters()]
    assert [graph.tensors[i].aliases for i in graph.parameters if graph.tensors[i].aliases] == [("head.weight",)]
    assert graph.num_parameters() == sum(p.numel() for p in model.parameters())
    assert [graph.tensors[i].name for i in graph.inputs] == ["tokens", "target"]
    assert graph.tensors[graph.outputs[0]].shape == ()
    assert graph.has_loss
    assert [layer.name for layer in graph.layers] == ["embedding", "h.0", "h.1", "h.2", "h.3", "head"]
    assert len({layer.block for layer in graph.layers[1:5]}) == 1
    assert len({layer.block for layer in graph.layers}) == 3
    assert {op.module for op in graph.ops} >= {"h.2.qkv", "h.2.mlp.1", "loss", ""}
    arange = next(op for op in graph.ops if op.kind == "aten.arange.default")
    assert arange.replicable
    assert not any(op.replicable for op in graph.ops if op is not arange)


def test_frozen_parameters_have_no_backward_below_the_first_trainable_op():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).double()
    for parameter in (*model[0].parameters(), *model[1].parameters(), model[3].weight):
        parameter.requires_grad_(False)
    captured = capture_model(model, numbers(4, 6), targets=numbers(4, 6, 1), loss=mean_square)
    graph = captured.graph
    linears = [op for op in graph.ops if op.kind == "aten.linear.default"]
    assert [op.backward_flops.per_sample for op in linears] == [0, 0, 72, 72, 144]
    assert [graph.tensors[op.outputs[0]].requires_grad for op in linears] == [False, False, True, True, True]
    # Frozen weights need no input kept; a trainable one does.
    kept = [{graph.tensors[i].role for i in op.saved} for op in linears]
    assert kept == [set(), set(), {"activation"}, {"parameter"}, {"activation", "parameter"}]
    assert graph.num_parameters(trainable_only=True) == 2 * 42 + 6
    joint = differentiate(captured)
    assert len(joint.outputs) == 1 + 5
    assert joint.flops(3) == graph.flops(3)


def test_attributes_tell_the_work():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(64, 2))
    graph = capture_model(model, torch.zeros(2, 3, 8, 8), mode="inference").graph
    convolution = next(op for op in graph.ops if op.kind == "aten.conv2d.default")
    assert dict(convolution.attributes) == {"stride": "[2, 2]", "padding": "[1, 1]"}
    assert convolution.flops == Extent(0, 2 * 4 * 16 * 27)
    assert convolution.saved == ()
    assert convolution.backward_flops == Extent()


@pytest.mark.long
def test_random_ops_are_known():
    graph = capture_model(Gpt(dropout=0.3).double(), tokens(2), targets=tokens(2), loss=token_loss, verify=False).graph
    assert {op.kind for op in graph.ops if op.random} == {
        "aten.dropout.default",
        "aten.scaled_dot_product_attention.default",
    }
    quiet = capture_model(Gpt().double(), tokens(2), targets=tokens(2), loss=token_loss, verify=False).graph
    assert not any(op.random for op in quiet.ops)
