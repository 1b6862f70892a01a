"""Graphs of Hugging Face models: checked against the model itself, cut into stages, counted, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.capture import capture_model, flatten_batch, part
from meshwright.spec import CaptureError, slice_graph
from meshwright.zoo import load_model
from tests.marks import left_to_ci

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parent / "configs"
TINY = sorted(path.stem for path in CONFIGS.glob("*.json"))
# vit is an encoder, too, and t5 has one.
ALIKE = ("bert",)


def capture(reference, *, verify, **options):
    source = load_model(str(reference), fake=not verify, **options)
    return capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=verify)


def variant(tmp_path, name, **changes):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | changes))
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in TINY]
)
@pytest.mark.long
def test_the_graph_computes_what_the_model_computes(name):
    # Loss, gradients and buffers of two steps; raises otherwise.
    graph = capture(CONFIGS / f"{name}.json", verify=True).graph
    assert graph.batch_size is None, "the graph is symbolic in the batch"
    assert graph.has_loss
    first, second = slice_graph(graph, [(0, len(graph.layers) // 2), (len(graph.layers) // 2, len(graph.layers))])
    assert first.parameters
    assert second.parameters
    # Without memory the graph is the same.
    assert capture(CONFIGS / f"{name}.json", verify=False).graph.content_hash == graph.content_hash


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("gpt2", [f"transformer.h.{i}" for i in range(4)]),
        *left_to_ci(
            ("t5", [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(3)]),
            ("whisper", [f"model.{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in range(2)]),
            ("mixtral", [f"model.layers.{i}" for i in range(4)]),
        ),
    ],
)
def test_layers_are_the_models_blocks(name, blocks):
    names = [layer.name for layer in capture(CONFIGS / f"{name}.json", verify=False).graph.layers]
    assert [item for item in names if item in blocks] == blocks


@pytest.mark.parametrize("grouped", [True, False])
def test_attention_is_what_training_calls(grouped, tmp_path):
    heads = json.loads((CONFIGS / "llama.json").read_text())["num_attention_heads"]
    config = variant(tmp_path, "llama", num_key_value_heads=heads // 2 if grouped else heads)
    graph = capture(config, verify=False).graph
    calls = [op for op in graph.ops if "scaled_dot_product_attention" in op.kind]
    assert calls
    for call in calls:
        assert len(call.inputs) == 3, "no mask"
        assert ("is_causal", "True") in call.attributes
        assert (("enable_gqa", "True") in call.attributes) == grouped
    assert not [op for op in graph.ops if op.kind.startswith(("aten.cumsum", "aten.diff", "aten.le."))]


def test_positions_that_the_batch_brings_keep_their_mask():
    source = load_model(str(CONFIGS / "llama.json"))
    tokens = source.inputs["input_ids"]
    length = tokens.shape[1]
    # Two sequences in each row: the second one counts from 0 again.
    positions = (torch.arange(length) % (length // 2)).repeat(len(tokens), 1)
    inputs = {"input_ids": tokens, "position_ids": positions}
    graph = capture_model(source.model, inputs, targets=source.targets, loss=source.loss, verify=True).graph
    assert all(len(op.inputs) == 4 for op in graph.ops if "scaled_dot_product_attention" in op.kind)


def test_the_rest_of_an_image_that_fills_no_patch_is_left_out():
    graph = capture(CONFIGS / "vit.json", verify=True, image_size=18).graph
    (positions,) = (tensor for tensor in graph.tensors if tensor.name.endswith("position_embeddings"))
    assert positions.num_elements(1) == (4 * 4 + 1) * 32


LABELLED = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BatchEncoding

def build(batch_size: int = 2):
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0,
                                  eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    tokens = torch.randint(32, (batch_size, 8))
    return AutoModelForCausalLM.from_config(config), BatchEncoding({"input_ids": tokens, "labels": tokens})
"""


def test_a_batch_with_labels_is_given_once(tmp_path):
    (tmp_path / "model.py").write_text(LABELLED)
    source = load_model(f"{tmp_path / 'model.py'}:build")
    assert (source.loss, source.targets, source.loss_origin) == (None, (), "module")
    captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss)
    graph = captured.graph
    assert graph.has_loss
    values = flatten_batch(captured, source.inputs)
    (found,) = part(captured, graph.inputs, graph.outputs, batch_size=2)(*values)
    torch.testing.assert_close(found, source.model(**source.inputs).loss)
    torch.testing.assert_close(found, source.compute_loss())


@pytest.mark.long
def test_products_of_experts_are_counted():
    data = json.loads((CONFIGS / "mixtral.json").read_text())
    graph = capture(CONFIGS / "mixtral.json", verify=False).graph
    batch, length = 2, data["max_position_embeddings"]
    rows = batch * length * data["num_experts_per_tok"]
    one_layer = 2 * rows * 3 * data["hidden_size"] * data["intermediate_size"]  # gate, up and down
    products = [op for op in graph.ops if "grouped_mm" in op.kind]
    assert sum(op.flops.at(batch) for op in products) == one_layer * data["num_hidden_layers"]
    assert sum(op.backward_flops.at(batch) for op in products) == 2 * one_layer * data["num_hidden_layers"]


def test_experts_that_loop_over_data_are_refused_with_the_line(tmp_path, capfd):
    with pytest.raises(CaptureError, match=r"modeling_mixtral\.py:\d+: control flow, a size or .*depends on the data"):
        capture(variant(tmp_path, "mixtral", experts_implementation="eager"), verify=False)
    # Export would print the graph of what came before.
    assert capfd.readouterr() == ("", "")


def test_a_gradient_of_its_own_is_refused_with_the_module(tmp_path):
    path = tmp_path / "bloom.json"
    path.write_text(json.dumps({"model_type": "bloom", "n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 64}))
    with pytest.raises(CaptureError, match=r"modeling_bloom\.py:\d+: .*BloomGelu.* calls the custom autograd"):
        capture(path, verify=False, sequence_length=8)


@pytest.mark.long
def test_dropout_is_as_the_configuration_says(tmp_path):
    def num_dropouts(path):
        graph = capture(path, verify=False).graph
        return sum(op.random for op in graph.ops)

    assert num_dropouts(CONFIGS / "gpt2.json") > 0
    assert num_dropouts(variant(tmp_path, "gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)) == 0
