"""Operators of the captured graph against those that the model calls by itself."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.zoo import load_model

CONFIGS = sorted(Path(__file__).parents[1].joinpath("zoo/configs").glob("*.json"))
FAMILIES = ("bert", "ddpm", "dlrm", "gnmt", "gpt", "llama-lora", "llama", "mixtral", "resnet", "t5", "unet", "vgg")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 34,
}
GROUPED = {"num_key_value_heads": 2}
# Families of transformers beside those of the configurations, by their class.
MORE = {
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "roberta": ("RobertaForMaskedLM", {}),
}
BART = {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in {"layers": 1, "ffn_dim": 48, "attention_heads": 4}.items()
}


class Block(nn.Module):
    """One product; while ``is_traced``, as several."""

    def __init__(self, is_traced):
        super().__init__()
        self.is_traced = is_traced
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        if self.is_traced(x):
            rows = x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 8)
            return (rows @ self.weight).view(-1, 2, 8)[:, 0]
        return x @ self.weight


class Model(nn.Module):
    def __init__(self, is_traced):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), Block(is_traced)

    def forward(self, x):
        return self.block(self.first(x)).square().mean()


def capture(is_traced):
    return capture_model(Model(is_traced), (torch.randn(4, 8),))


def test_a_branch_that_only_exporting_takes_is_not_taken():
    for asked, name in (
        (torch.compiler, "is_exporting"),
        (torch.compiler, "is_compiling"),
        (torch._dynamo, "is_compiling"),
    ):
        captured = capture(lambda _, asked=asked, name=name: getattr(asked, name)())
        assert captured.remark == ""
        assert [op.kind for op in captured.graph.ops if "expand" in op.kind] == []


def test_another_branch_of_tracing_is_told_with_its_module():
    remark = capture(lambda x: isinstance(x.shape[0], torch.SymInt)).remark
    assert "by other operators in 'block' (mm became clone, mm): while it was traced" in remark
    assert "first" not in remark


def test_checks_that_the_graph_leaves_out_are_no_difference():
    class Checks(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 4)

        def forward(self, tokens):
            if not isinstance(tokens.shape[0], torch.SymInt):
                (tokens - 1).cumsum(0)
            return self.embedding(tokens).mean()

    assert capture_model(Checks(), (torch.randint(16, (4, 3)),)).remark == ""


@pytest.mark.parametrize("name", [f"{family}-tiny" for family in FAMILIES])
@pytest.mark.matrix
def test_graphs_of_the_zoo_call_what_the_models_call(name):
    source = load_model(name)
    captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss)
    assert captured.remark == ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.matrix
def test_graphs_of_transformers_call_what_training_calls(path):
    assert capture_configuration(path).remark == ""


def capture_configuration(path):
    pytest.importorskip("transformers")
    source = load_model(str(path))
    return capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss)


def write_configuration(path, family, model_class, **sizes):
    path.write_text(json.dumps({"model_type": family, "architectures": [model_class], **SIZES, **sizes}))
    return path


@pytest.mark.parametrize("family", MORE)
@pytest.mark.matrix
def test_graphs_of_more_families_do(family, tmp_path):
    model_class, sizes = MORE[family]
    assert capture_configuration(write_configuration(tmp_path / "c.json", family, model_class, **sizes)).remark == ""


@pytest.mark.long
def test_a_mask_of_ones_that_the_model_makes_is_told(tmp_path):
    """In training its values are looked at, and attention is causal; without values a mask is computed."""
    path = write_configuration(tmp_path / "c.json", "bart", "BartForConditionalGeneration", d_model=32, **BART)
    assert "by other operators in 'model.decoder' (nothing became arange" in capture_configuration(path).remark
