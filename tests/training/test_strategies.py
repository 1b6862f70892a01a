"""Strategies of single layers as placements: the model in parts, on one process and on two."""

import json
import random
from dataclasses import replace

import pytest
import torch

from meshwright.capture import capture_model
from meshwright.planner.methods.flexflow.layers import find_layers
from meshwright.planner.methods.flexflow.lowering import split_graph
from meshwright.spec import PlanError
from meshwright.training.split_model import split_source
from meshwright.zoo import load_model
from tests.processes import run_ranks
from tests.training.strategy_worker import BATCH, CASES, draw

pytestmark = pytest.mark.long
MODELS = ("ddpm-tiny", "dlrm-tiny", "gpt-tiny", "mixtral-tiny", "vgg-tiny")


@pytest.fixture
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def in_parts(name, seed):
    torch.manual_seed(0)
    source = load_model(name, batch_size=BATCH)
    result = draw(name, splits=True, seed=seed)
    return source, result, split_source(source, result.degrees, "training")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_parts_has_the_loss_and_gradients_of_the_model(name, in_float64):
    source, result, parts = in_parts(name, 0)
    assert result.is_split
    losses = []
    for item in (source, parts):
        item.model.zero_grad()
        torch.manual_seed(3)
        loss = item.compute_loss()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = {
            key: value.grad
            for key, value in item.model.named_parameters(remove_duplicate=False)
            if value.grad is not None
        }
        if item is source:
            wanted = {key: value.clone() for key, value in gradients.items()}
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    found = parts.model.whole_state(gradients)
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-9), key


def test_the_state_of_parts_is_that_of_the_model():
    source, _, parts = in_parts("t5-tiny", 0)
    found, wanted = parts.model.whole_state(parts.model.state_dict()), source.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_batch_norm_in_parts_writes_statistics_of_its_own():
    source, _, parts = in_parts("resnet-tiny", 1)
    assert parts.model.writes_copies
    before = parts.model.whole_state(parts.model.state_dict())
    parts.compute_loss()
    after = parts.model.whole_state(parts.model.state_dict())
    assert after.keys() == source.model.state_dict().keys()
    moved = [key for key, value in after.items() if not torch.equal(value, before[key])]
    assert moved
    assert all("running" in key or "num_batches" in key for key in moved)


class Masked(torch.nn.Module):
    """Reads a buffer through views alone, and returns what a product made, in another order of its channels."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def forward(self, x):
        y = self.down(torch.relu(self.mask[:3, :3] @ self.up(x)))
        return y.reshape(-1, 3, 2, 4).transpose(2, 3).reshape(-1, 3, 8)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_in_parts_are_those_of_the_model(seed, in_float64):
    torch.manual_seed(seed)
    model, inputs = Masked(), (torch.randn(BATCH, 3, 6),)
    graph = capture_model(model, inputs, mode="inference", verify=False).graph
    choose = random.Random(seed)
    layers = find_layers(graph, BATCH, can_run=True)
    assert any(dim.kind == "parameter" for layer in layers for dim in layer.dims)
    degrees = [[choose.choice([1, 2]) if dim.size % 2 == 0 else 1 for dim in layer.dims] for layer in layers]
    source = replace(load_model("gpt-tiny", batch_size=BATCH), model=model, inputs=inputs, targets=(), loss=None)
    parts = split_source(source, degrees, "inference")
    with torch.no_grad():
        assert torch.allclose(parts.model(*parts.inputs), model(*inputs), rtol=1e-12, atol=1e-12)


def test_what_cannot_run_in_parts_is_no_dim():
    def dims(name):
        source = load_model(name, batch_size=BATCH, fake=True)
        captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
        graph = captured.graph
        return {graph.ops[layer.ops[0]].kind.split(".")[1]: layer for layer in find_layers(graph, BATCH, can_run=True)}

    convolution = dims("vgg-tiny")["conv2d"]
    assert [dim.kind for dim in convolution.dims] == ["sample", "parameter"]
    assert dims("vgg-tiny")["dropout"].dims == []
    # Samples, and heads that keys have, too: neither queries under a causal mask.
    assert [dim.size for dim in dims("mixtral-tiny")["scaled_dot_product_attention"].dims] == [BATCH, 2]


def test_degrees_of_another_model_are_refused():
    source = load_model("gpt-tiny", batch_size=BATCH, fake=True)
    graph = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False).graph
    with pytest.raises(PlanError, match="do not match"):
        split_graph(graph, BATCH, ((1,),))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("strategies") / "results.json"
    run_ranks("tests.training.strategy_worker", 2, str(path), timeout_s=300)
    return json.loads(path.read_text())


@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_does(trained, name):
    result = trained[name]
    assert all(result["ops"])
    assert result["missing"] == []
    assert result["moved"] > 1e-3, "training must change the model, or equality says nothing"
    assert result["difference"] < 1e-9
    assert result["losses"][1] < result["losses"][0]
