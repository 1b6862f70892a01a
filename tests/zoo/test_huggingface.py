"""Hugging Face configurations as model references: classes, batches, losses, sizes, and what is refused."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.spec import DocumentError, MeshwrightError, ModelReferenceError, write_document
from meshwright.spec.model_files import MAX_CONFIG_BYTES, read_model_file
from meshwright.zoo import load_model
from tests.graphs import chain_graph
from tests.marks import examples

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).parent / "configs"
TINY = sorted(path.stem for path in CONFIGS.glob("*.json"))
PUBLISHED = Path(__file__).resolve().parents[2] / "examples" / "huggingface"

# Parameters of the published checkpoints, each tensor counted once.
SIZES = {
    "gpt2": 124_439_808,
    "bert-base": 109_514_298,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "t5-small": 60_506_624,
    "vit-base": 86_567_656,
    "mixtral-8x7b": 46_702_792_704,
    "whisper-small": 241_734_912,
}


def tiny(name):
    return str(CONFIGS / f"{name}.json")


@pytest.fixture
def config(tmp_path):
    """Writes a tiny GPT-2's configuration with some keys changed (None removes one); returns the file."""

    def write(**changes):
        data = json.loads((CONFIGS / "gpt2.json").read_text()) | changes
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
        return str(path)

    return write


# --- what is built ---


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_the_one_that_transformers_computes_from_labels(name):
    source = load_model(tiny(name), seed=3)
    source.model.eval()
    inputs, (targets,) = dict(source.inputs), source.targets
    # Without its inputs, a decoder makes them from the labels.
    inputs.pop("decoder_input_ids", None)
    extra = {} if name in ("bert", "t5", "vit", "whisper") else {"shift_labels": targets}
    with torch.no_grad():
        wanted = source.model(**inputs, labels=targets, **extra).loss
        assert source.compute_loss().item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_the_class_is_the_one_that_the_configuration_names(name):
    source = load_model(tiny(name))
    assert type(source.model).__name__ == json.loads(Path(tiny(name)).read_text())["architectures"][0]
    assert source.model.training
    assert {parameter.dtype for parameter in source.model.parameters()} == {torch.float32}
    assert not getattr(source.model.config, "use_cache", False)


@pytest.mark.parametrize("name", sorted(SIZES))
def test_published_sizes_without_a_weight(name):
    model = load_model(str(PUBLISHED / f"{name}.json"), fake=True).model
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]


def test_the_seed_decides_weights_and_batch():
    first, second, third = (load_model(tiny("gpt2"), seed=seed) for seed in (1, 1, 2))
    for one, two, other in zip(
        first.model.parameters(), second.model.parameters(), third.model.parameters(), strict=True
    ):
        assert torch.equal(one, two)
        if one.ndim == 2:
            assert not torch.equal(one, other)
    assert torch.equal(first.inputs["input_ids"], second.inputs["input_ids"])
    assert not torch.equal(first.inputs["input_ids"], third.inputs["input_ids"])


def test_tied_weights_are_one_tensor_also_without_memory():
    for fake in (True, False):
        model = load_model(tiny("gpt2"), fake=fake).model
        assert model.lm_head.weight is model.transformer.wte.weight


def test_masked_tokens_are_the_same_number_in_every_sample():
    source = load_model(tiny("bert"), batch_size=6)
    (targets,) = source.targets
    assert ((targets != -100).sum(dim=1) == round(0.15 * 32)).all()
    masked = targets != -100
    assert (source.inputs["input_ids"][masked] != targets[masked]).any()


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("gpt2", {"sequence_length": 8, "batch_size": 3}, {"input_ids": (3, 8)}),
        ("t5", {"sequence_length": 6}, {"input_ids": (4, 6), "decoder_input_ids": (4, 6)}),
        ("t5", {}, {"input_ids": (4, 512), "decoder_input_ids": (4, 512)}),
        ("vit", {"image_size": 32}, {"pixel_values": (4, 3, 32, 32)}),
        ("whisper", {"sequence_length": 4}, {"input_features": (4, 8, 32), "decoder_input_ids": (4, 4)}),
    ],
)
def test_sizes_that_are_asked_for(name, options, shapes):
    source = load_model(tiny(name), **options)
    assert {key: tuple(value.shape) for key, value in source.inputs.items()} == shapes
    assert source.compute_loss().isfinite()


def test_the_default_length_is_one_that_people_train_with(tmp_path):
    """Llama 3.1 has positions for 131,072 tokens."""
    data = json.loads(Path(tiny("llama")).read_text()) | {"max_position_embeddings": 131_072}
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(data))
    assert load_model(str(path), fake=True).inputs["input_ids"].shape == (4, 8192)
    assert load_model(str(path), fake=True, sequence_length=16384).inputs["input_ids"].shape == (4, 16384)


def test_the_default_length_leaves_out_the_positions_that_a_table_keeps_for_itself(tmp_path):
    data = {"model_type": "roberta", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
    data |= {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 34}
    path = tmp_path / "roberta.json"
    path.write_text(json.dumps(data))
    source = load_model(str(path))
    assert source.inputs["input_ids"].shape == (4, 32)
    assert source.compute_loss().isfinite()  # a position out of range would raise


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, "BertForMaskedLM"),
        (["BertModel"], "BertForMaskedLM"),
        (["BertForPreTraining"], "BertForMaskedLM"),
        (["BertLMHeadModel"], "BertLMHeadModel"),
        (["BertForSequenceClassification"], "BertForSequenceClassification"),
    ],
)
def test_the_usual_class_where_none_with_a_loss_is_named(tmp_path, names, expected):
    data = json.loads((CONFIGS / "bert.json").read_text()) | {"architectures": names}
    path = tmp_path / "bert.json"
    path.write_text(json.dumps(data))
    source = load_model(str(path))
    assert type(source.model).__name__ == expected
    assert source.compute_loss().isfinite()


def test_a_folder_stands_for_its_configuration(config):
    path = Path(config())
    assert type(load_model(str(path.parent)).model) is transformers.GPT2LMHeadModel


def test_nothing_reaches_a_network(config, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(config(_name_or_path="gpt2", name_or_path="openai/gpt2"))


def test_transformers_keeps_quiet_and_gets_its_verbosity_back(config, capfd):
    level = transformers.logging.get_verbosity()
    load_model(config(num_labels=3, id2label={"0": "a", "1": "b"}, torch_dtype="bfloat16"))
    assert transformers.logging.get_verbosity() == level
    assert capfd.readouterr() == ("", "")


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt22"}, "no model type 'gpt22' .did you mean 'gpt2'"),
        ({"model_type": 5}, "'model_type' is 5; expected the name"),
        ({"model_type": None}, "'model_type' is None"),
        ({"auto_map": {"AutoModel": "evil--evil.Model"}}, "'auto_map' names code of its own.*never loaded"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"n_layer": 10**9}, "n_layer is 1000000000; expected at most 512"),
        ({"num_labels": 10**9}, "num_labels is 1000000000; expected at most"),
        ({"n_positions": 10**12}, "n_positions is 1000000000000"),
        ({"nested": {"list": [1, {"num_experts": 10**6}]}}, r"nested.list\[1\].num_experts is 1000000"),
        ({"n_layer": 500, "num_experts": 4000}, "layers times experts is 2000000; expected at most 100000"),
        ({"n_layer": "many"}, "transformers .* cannot build this configuration .*n_layer"),
        ({"n_head": 3}, "cannot build this configuration .ValueError"),
        ({"n_head": 0}, "n_head is 0; expected at least 1"),
        ({"vocab_size": -4}, "vocab_size is -4; expected at least 1"),
        ({"n_layer": -3}, r"config\.json: n_layer is -3; expected at least 1"),
        ({"n_positions": 0}, "n_positions is 0; expected at least 1"),
        ({"n_embd": -8}, "n_embd is -8; expected at least 1"),
        ({"num_attention_heads": -1}, "num_attention_heads is -1; expected at least 1"),
        ({"text_config": {"num_hidden_layers": 0}}, r"text_config\.num_hidden_layers is 0; expected at least 1"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "GPT2ForTokenClassification.*Name GPT2LMHeadModel"),
        ({"model_type": "wav2vec2"}, "'GPT2LMHeadModel' of 'architectures' has none of the tasks"),
        ({"model_type": "clip", "architectures": None}, "The model type 'clip' has none of the tasks"),
        ({"model_type": "speech_to_text", "architectures": None}, "speech to text is known here for whisper"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation is 'flash_attention_2'; expected sdpa or"),
        ({"attn_implementation": "kernels-community/x"}, "attn_implementation is 'kernels-community/x'; expected"),
    ],
)
def test_configurations_that_are_refused(config, changes, message):
    with pytest.raises(ModelReferenceError, match=message):
        load_model(config(**changes), fake=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"sequence_length": 33}, "this gpt2 has 32 positions; choose a sequence length from 1 to 32"),
        ("gpt2", {"image_size": 32}, "a CausalLanguageModel has no image size"),
        ("vit", {"image_size": 3}, "reads patches of 4 pixels; choose 4 or more"),
        ("vit", {"sequence_length": 4}, "has no sequence length"),
    ],
)
def test_sizes_that_are_refused(name, options, message):
    with pytest.raises(ModelReferenceError, match=message):
        load_model(tiny(name), fake=True, **options)


def test_a_size_that_a_key_merely_mentions_is_no_count(config):
    load_model(config(shared_expert_intermediate_size=20_480, rope_theta=10**9), fake=True)


def test_without_transformers_the_extra_is_named(config, monkeypatch):
    path = config()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "meshwright.zoo.huggingface_classes", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelReferenceError, match=r"needs transformers 5.*pip install 'meshwright\[hf\]'"):
        load_model(path)


def test_numbers_that_may_be_zero_or_negative_are_no_counts(config):
    load_model(config(type_vocab_size=0, pad_token_id=-1, num_experts=0, max_relative_positions=-1), fake=True)


# --- graph or configuration ---


def test_the_content_tells_a_graph_from_a_configuration(tmp_path, config):
    graph = chain_graph(3)
    path = tmp_path / "graph.json"
    write_document(graph, path)
    assert read_model_file(str(path)).content_hash == graph.content_hash
    assert read_model_file(config())["model_type"] == "gpt2"
    assert read_model_file("gpt2-small") is None
    with pytest.raises(ModelReferenceError, match="stored graph, which has no code"):
        load_model(str(path))


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"name": "gpt2"}'])
def test_what_is_neither_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"neither a stored graph .* nor the configuration of a Hugging Face model"):
        load_model(str(path))


def test_damaged_missing_and_endless_files_are_refused(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ModelReferenceError, match=r"holds no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(DocumentError, match="cannot be read"):
        load_model(str(path))
    path.write_text('{"model_type": "gpt2"')
    with pytest.raises(DocumentError, match="not valid JSON"):
        load_model(str(path))
    path.write_text(" " * MAX_CONFIG_BYTES + '{"model_type": "gpt2"}')
    with pytest.raises(DocumentError, match="the limit of configurations"):
        load_model(str(path))


# --- hostile configurations ---

VALUES = st.one_of(
    st.sampled_from([0, 1, -1, 3, 2**24, 10**9, 10**30, 1e308, -0.5, True, None, "x", "8", [], [1, 2], {}, {"a": 1}]),
    st.integers(),
    st.text(max_size=5),
)


@given(
    name=st.sampled_from(TINY),
    changes=st.dictionaries(st.sampled_from(range(100)), VALUES, min_size=1, max_size=3),
    extra=st.dictionaries(
        st.sampled_from(
            ["num_labels", "id2label", "rope_parameters", "layer_types", "architectures", "dtype", "head_dim"]
        ),
        VALUES,
        max_size=1,
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_value_is_built_or_refused_in_one_paragraph(tmp_path_factory, name, changes, extra):
    data = json.loads(Path(tiny(name)).read_text())
    keys = [key for key in data if not _many_layers(key)]
    data |= {keys[number % len(keys)]: value for number, value in changes.items()} | extra
    path = tmp_path_factory.mktemp("hostile") / "config.json"
    path.write_text(json.dumps(data))
    told = ""
    try:
        assert load_model(str(path), fake=True).model is not None
    except MeshwrightError as error:
        told = str(error)
    assert "\n" not in told


def _many_layers(key):
    """Up to 512 layers are built, which takes seconds; other tests reach for more."""
    return "layer" in key
