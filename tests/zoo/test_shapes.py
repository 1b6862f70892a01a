"""Shape files: what is shipped, published sizes, other sizes, and what is refused."""

import re
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from typing import get_args

import pytest

from meshwright.spec import DocumentError, MeshwrightError, ModelReferenceError
from meshwright.zoo import Shape, load_model, load_shape, zoo_names
from meshwright.zoo.references import building

# Published numbers of parameters: the GPT-2, BERT (uncased, both heads), T5 and Mixtral checkpoints as distributed, the
# Llama 3 model cards' files, torchvision's table of pre-trained weights, the training log of MLPerf's GNMT, the DDPM
# checkpoints as converted for diffusers.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "mixtral-8x7b": 46_702_792_704,
    "gnmt": 159_593_523,
    "ddpm-cifar10": 35_746_307,
    "ddpm-lsun": 113_673_219,
}


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_numbers_of_parameters(name):
    assert num_parameters(load_model(name, fake=True).model) == PUBLISHED[name]


def unet_parameters(num_levels, width, num_classes):
    """Biases and weights of figure 1, level by level, for three colours."""

    def convolution(inputs, outputs, size):
        return outputs * (inputs * size**2 + 1)

    total, channels = convolution(width, num_classes, 1), 3
    for level in range(num_levels + 1):
        wide = width * 2**level
        total += convolution(channels, wide, 3) + convolution(wide, wide, 3)
        channels = wide
    for level in range(num_levels):
        wide = width * 2**level
        total += convolution(2 * wide, wide, 2) + convolution(2 * wide, wide, 3) + convolution(wide, wide, 3)
    return total


@pytest.mark.parametrize("name", ["unet", "unet-tiny"])
def test_the_u_net_has_the_parameters_of_its_figure(name):
    shape = load_shape(name)
    expected = unet_parameters(shape.num_levels, shape.width, shape.num_classes)
    assert num_parameters(load_model(name, fake=True).model) == expected


@pytest.mark.parametrize(
    ("name", "rows"),
    # Rows of all embeddings together: the Kaggle data set's categories; NVIDIA's count for the Terabyte one.
    [("dlrm", 33_762_577), ("dlrm-mlperf", 187_767_399)],
)
def test_a_dlrm_has_the_parameters_of_its_layers(name, rows):
    shape = load_shape(name)
    assert sum(shape.categories) == rows
    bottom = [13, *shape.bottom_widths, shape.width]
    top = [shape.width + 27 * 26 // 2, *shape.top_widths, 1]
    layers = [*pairwise(bottom), *pairwise(top)]
    expected = rows * shape.width + sum(outputs * (inputs + 1) for inputs, outputs in layers)
    assert num_parameters(load_model(name, fake=True).model) == expected


def test_only_adapters_are_trained():
    model = load_model("llama3-8b-lora", fake=True).model
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # rank 16 for query, projection 4096×4096; key, value 4096×1024; gate, up, down 4096×14336; in 32 blocks
    assert sum(p.numel() for p in trainable) == 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432) == 41_943_040
    assert num_parameters(model) == PUBLISHED["llama3-8b"] + 41_943_040
    # PEFT's figure for query and value at rank 8
    few = replace(load_shape("llama3-8b-lora"), rank=8, adapted=("query", "value"))
    with building(fake=True):
        assert sum(p.numel() for p in few.build().parameters() if p.requires_grad) == 3_407_872


def test_every_family_has_a_tiny_and_a_published_shape():
    families = {name: type(load_shape(name)).__name__ for name in zoo_names()}
    tiny = {family for name, family in families.items() if name.endswith("-tiny")}
    assert tiny == {family.__name__ for family in get_args(Shape)}
    counted = {family for name, family in families.items() if name in PUBLISHED}
    # Counted by hand below.
    assert counted | {"UNetShape", "DLRMShape", "LoRAShape"} == tiny
    for name in zoo_names():
        assert load_shape(name).source
        if name.endswith("-tiny"):
            assert num_parameters(load_model(name, fake=True).model) < 10**6


def test_any_size_from_a_shape_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema = "meshwright/gptshape/1"\nsource = "mine"\nnum_layers = 3\nwidth = 8\nnum_heads = 2\n'
        "vocabulary = 11\ncontext = 6\nbatch_size = 2\nsequence_length = 5\n"
    )
    source = load_model(str(path))
    assert len(source.model.blocks) == 3
    assert [tuple(t.shape) for t in source.inputs] == [(2, 5)]
    # 11 tokens and 6 positions of 8; 3 blocks of 12 d² + 13 d; the last norm
    assert num_parameters(source.model) == (11 + 6) * 8 + 3 * (12 * 64 + 13 * 8) + 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schema None is not a model's shape.*meshwright/gptshape/1"),
        ('schema = "meshwright/plan/1"', "'meshwright/plan/1' is not a model's shape"),
        ("schema = 3", "schema 3 is not"),
        ('schema = "meshwright/gptshape/2"', "another version"),
        ('schema = "meshwright/gptshape/1"\nwidht = 3', "unknown key 'widht' .did you mean 'width'"),
        ("schema = ", "not valid TOML"),
    ],
)
def test_damaged_shape_files(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DocumentError, match=message):
        load_model(str(path))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-tiny", {"num_heads": 3}, "width that the number of heads divides"),
        ("gpt-tiny", {"num_layers": 0}, "at least one layer"),
        ("gpt-tiny", {"sequence_length": 129}, "choose a sequence length from 1 to 128"),
        ("llama-tiny", {"num_key_value_heads": 3}, "key-value heads divides"),
        ("llama-tiny", {"num_heads": 128}, "heads of even width"),
        ("llama-tiny", {"sequence_length": 0}, "choose a sequence length from 1 to 256"),
        ("resnet-tiny", {"blocks_per_stage": (2, 0)}, "one block in each"),
        ("resnet-tiny", {"blocks_per_stage": ()}, "at least one stage"),
        ("resnet50", {"image_size": 32}, "choose at least 64 pixels"),
        ("vgg-tiny", {"widths": ((16,), ())}, "at least one positive width"),
        ("vgg-tiny", {"image_size": 7}, "choose at least 8 pixels"),
        ("unet-tiny", {"num_levels": 0}, "expected both to be at least 1"),
        ("unet-tiny", {"image_size": 36}, "choose a multiple of 8 pixels"),
        ("bert-tiny", {"num_heads": 3}, "width that the number of heads divides"),
        ("bert-tiny", {"sequence_length": 129}, "choose a sequence length from 1 to 128"),
        ("t5-tiny", {"head_width": 0}, "expected at least 1 of each"),
        ("t5-tiny", {"num_buckets": 6}, "multiple of 4"),
        ("t5-tiny", {"max_distance": 8}, "distance of more than half"),
        ("t5-tiny", {"target_length": 0}, "choose at least 1"),
        ("mixtral-tiny", {"num_chosen": 5}, "1 to all experts chosen"),
        ("mixtral-tiny", {"capacity_factor": 0.0}, "a positive factor"),
        ("mixtral-tiny", {"sequence_length": 257}, "this Mixtral was made for up to 256"),
        ("llama-lora-tiny", {"rank": 0}, "Adapters of rank 0"),
        ("llama-lora-tiny", {"adapted": ()}, "for 0 linear layers"),
        ("llama-lora-tiny", {"adapted": ("ups",)}, "did you mean 'up'"),
        ("gnmt-tiny", {"num_layers": 1}, "expected at least 2 layers"),
        ("gnmt-tiny", {"sequence_length": 0}, "choose at least 1"),
        ("dlrm-tiny", {"categories": ()}, "and at least one table"),
        ("dlrm-tiny", {"top_widths": (4, 0)}, "expected numbers of at least 1"),
        ("ddpm-tiny", {"multiples": ()}, "at least one level"),
        ("ddpm-tiny", {"num_groups": 5}, "a number of groups that divides"),
        ("ddpm-tiny", {"image_size": 15}, "choose a multiple of 2 pixels"),
    ],
)
def test_shapes_that_cannot_be_built(name, changes, message):
    with pytest.raises(ModelReferenceError, match=message):
        replace(load_shape(name), **changes)


def test_the_smallest_images_that_are_allowed_work():
    for name, size in (("resnet-tiny", 8), ("vgg-tiny", 8), ("unet-tiny", 8), ("ddpm-tiny", 2)):
        loss = load_model(name, batch_size=1, image_size=size).compute_loss()
        assert loss.isfinite()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_layers", 10**9, "num_layers is larger than 10,000"),
        ("vocabulary", 2**64, "vocabulary is larger than 2,147,483,647"),
        ("vocabulary", -1, "torch cannot build"),
        ("width", 2**31 - 4, "torch cannot build"),
    ],
)
def test_sizes_that_torch_cannot_build_are_told(tmp_path, key, value, words):
    text = (files("meshwright.zoo") / "shapes" / "gpt-tiny.toml").read_text()
    path = tmp_path / "shape.toml"
    path.write_text(re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text))
    with pytest.raises(MeshwrightError, match=words):
        load_model(str(path), fake=True)
