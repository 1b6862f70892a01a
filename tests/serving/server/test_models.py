"""Models of a server's workers: what they take and give, batches of several slabs, samples that fail, hooks."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.server.models import EmulatedModel, echo, open_model, run_batch, warm_up
from meshwright.serving.server.slabs import Slab
from meshwright.spec import (
    DATATYPES,
    Latency,
    MeshwrightError,
    ServedModel,
    ServingError,
    TensorSpec,
    read_deployment,
)

torch = pytest.importorskip("torch")
from meshwright.zoo import load_model  # noqa: E402 - which needs torch

EXAMPLES = Path(__file__).parents[3] / "examples" / "deployments"

OWN = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x, pairs, flag=None, *, scale):
        assert flag is None
        y = self.layer(x) * scale[:, None] + pairs["a"].sum(1, keepdim=True)
        return {"y": y, "more": (pairs["b"].to(torch.float64), None, [x > 0]), "loss": y.mean()}

def two(batch_size=5):
    pairs = {"a": torch.ones(batch_size, 2), "b": torch.zeros(batch_size, dtype=torch.int32)}
    return Two(), {"x": torch.randn(batch_size, 4), "pairs": pairs, "scale": torch.ones(batch_size)}

class Table(nn.Module):
    def forward(self, tokens):
        if (tokens >= 10).any():
            raise IndexError("token out of range")
        return tokens * 2

def table():
    return Table(), (torch.zeros(2, 3, dtype=torch.int64),)

class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def forward(self, x):
        return self.function(x)

def make(function, *shape, dtype=torch.float32):
    return Call(function), (torch.zeros(2, *shape, dtype=dtype),)

def half(): return make(lambda x: x + 1, 3, dtype=torch.bfloat16)
def unsigned(): return make(lambda x: x, 3, dtype=torch.uint16)
def alone(): return nn.Linear(4, 2)
def mean(): return make(lambda x: x.mean(0), 3)
def total(): return make(lambda x: x.mean(), 3)
def both(): return make(lambda x: (x.mean(0), x * 2, x * 3), 3)
def growing(): return make(lambda x: x[:, None].expand(-1, len(x), -1), 3)
def odd(): return make(lambda x: [x] * len(x), 3)
def text(): return make(lambda x: "text", 3)
def complex(): return make(lambda x: x * 1j, 3)
def uneven(): return Call(lambda x: x), {"x": torch.zeros(2, 3), "z": torch.zeros(4)}
def single():
    class Single(nn.Module):
        def forward(self, x):
            return x.view(2, 3)
    return Single(), (torch.zeros(2, 3),)
def values():
    return make(lambda x: x if x.max() < 1 else x.double(), 3)
def more():
    return make(lambda x: torch.cat([x, x[:1]]) if x.max() > 0 else x, 3)
def ends(how):
    def call(x):
        if x.max() > 1:
            raise how("enough")
        return x
    return make(call, 3)
def exits(): return ends(SystemExit)
def interrupted(): return ends(KeyboardInterrupt)
def lazy():
    def call(x):
        if x.max() > 0:
            import lazily_imported
            return x * lazily_imported.FACTOR
        return x
    return make(call, 3)
def wrong(): return 3

def flatten(inputs):
    return inputs["text"].to(torch.float32) / 2
def keywords(inputs):
    return {"x": inputs["text"].to(torch.float32)}
def best(outputs):
    return {"best": outputs.argmax(-1)}
def thrice(outputs):
    import lazily_imported
    return outputs * lazily_imported.FACTOR
def second(outputs):
    return outputs[1]
def broken(value):
    raise KeyError("nothing")
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def served(model, **changes):
    return ServedModel(**({"name": "m", "slo": 1.0, "model": model} | changes))


def described(specs):
    return [(item.name, item.datatype, item.shape) for item in specs]


def expected_of(reference, count, **sizes):
    """Outputs of the zoo's model for its own example, in torch."""
    source = load_model(reference, **sizes)
    source.model.eval()
    inputs = source.inputs if isinstance(source.inputs, tuple) else tuple(source.inputs.values())
    with torch.inference_mode():
        return [item[:count].numpy() for item in inputs], source.model(*[item[:count] for item in inputs])


@pytest.mark.parametrize(
    ("name", "sizes", "inputs"),
    [
        ("resnet-tiny", {"image_size": 16}, [("FP32", (3, 16, 16))]),
        ("gpt-tiny", {"sequence_length": 8}, [("INT64", (8,))]),
        ("dlrm-tiny", {}, None),
        ("t5-tiny", {}, None),
    ],
)
def test_models_of_the_zoo_answer_as_they_do_in_torch(name, sizes, inputs):
    model = open_model(served(name, **sizes, latency=Latency(beta=0.1, largest=4)))
    assert (model.platform, model.largest) == ("torch", 4)
    if inputs is not None:
        assert [(item.datatype, item.shape) for item in model.inputs] == inputs
    for count in (1, 3):
        arrays, outputs = expected_of(name, count, **sizes)
        (found,) = model.run([array.copy() for array in arrays])
        assert described(model.outputs) == [("output", "FP32", tuple(outputs.shape[1:]))]
        np.testing.assert_allclose(found, outputs.numpy(), rtol=1e-4, atol=1e-5)


def test_shape_files_and_bert(tmp_path):
    (tmp_path / "small.toml").write_text(
        'schema = "meshwright/bertshape/1"\nsource = "own"\nnum_layers = 1\nwidth = 8\nnum_heads = 2\nvocabulary = 20\n'
        "context = 6\nbatch_size = 4\nsequence_length = 6\n"
    )
    model = open_model(served(str(tmp_path / "small.toml")))
    arrays, outputs = expected_of(str(tmp_path / "small.toml"), 2)
    assert model.largest == 1024
    assert len(model.inputs) == len(arrays)
    found = model.run(arrays)
    assert [item.name for item in model.outputs] == [f"output{place}" for place in range(len(outputs))]
    for array, tensor in zip(found, outputs, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_configurations_of_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 11}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | sizes)
    )
    model = open_model(served(str(tmp_path), sequence_length=4))
    assert described(model.inputs) == [("input_ids", "INT64", (4,))]
    assert described(model.outputs) == [("logits", "FP32", (4, 11))]
    answers = model.run([np.array([[1, 2, 3, 4], [4, 3, 2, 1]])])[0]
    again = model.run([np.array([[4, 3, 2, 1]])])[0]
    np.testing.assert_allclose(answers[1:], again, rtol=1e-4, atol=1e-5)


def test_nested_arguments_and_outputs_have_names(own):
    model = open_model(served(own("two")))
    assert described(model.inputs) == [
        ("x", "FP32", (4,)),
        ("pairs.a", "FP32", (2,)),
        ("pairs.b", "INT32", ()),
        ("scale", "FP32", ()),
    ]
    assert described(model.outputs) == [("y", "FP32", (3,)), ("more.0", "FP64", ()), ("more.2.0", "BOOL", (4,))]
    arrays = model.sample(7)
    assert [array.shape for array in arrays] == [(7, 4), (7, 2), (7,), (7,)]
    arrays[2][:] = np.arange(7)
    answers = model.run(arrays)
    assert answers[1].tolist() == list(range(7))
    assert answers[2].dtype == np.bool_


def test_the_deployment_renames_and_chooses(own):
    names = ("p", "q", "r", "s")
    found = open_model(served(own("two")))
    given = tuple(
        TensorSpec(name=name, datatype=item.datatype, shape=item.shape)
        for name, item in zip(names, found.inputs, strict=True)
    )
    model = open_model(served(own("two"), inputs=given, outputs=(found.outputs[2], found.outputs[0])))
    assert described(model.inputs) == described(given)
    assert [item.name for item in model.outputs] == ["more.2.0", "y"]
    positive, y = model.run(model.sample(2))
    assert (positive.shape, y.shape) == ((2, 4), (2, 3))
    turned = open_model(served(own("two"), inputs=found.inputs[::-1]))
    assert described(turned.inputs) == described(found.inputs[::-1])
    np.testing.assert_array_equal(turned.run(turned.sample(2))[0], found.run(found.sample(2))[0])
    chosen = open_model(served(own("both"), outputs=(TensorSpec(name="output2", shape=(3,)),)))
    assert chosen.run([np.ones((2, 3), np.float32)])[0].tolist() == [[3.0] * 3] * 2


def test_bfloat16_is_carried_by_its_bits(own):
    model = open_model(served(own("half")))
    assert described(model.inputs + model.outputs) == [("x", "BF16", (3,)), ("output", "BF16", (3,))]
    values = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.0, 8.0]])
    bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    (found,) = model.run([bits.copy()])
    assert found.dtype == np.uint16
    assert torch.equal(torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).float(), values + 1)
    (same,) = open_model(served(own("unsigned"))).run([bits.copy()])
    np.testing.assert_array_equal(same, bits)


def test_a_module_alone_takes_what_the_deployment_says(own):
    model = open_model(served(own("alone"), inputs=(TensorSpec(name="x", shape=(4,)),)))
    assert described(model.outputs) == [("output", "FP32", (2,))]
    assert model.run(model.sample(3))[0].shape == (3, 2)
    with pytest.raises(ServingError, match="returned a module alone"):
        open_model(served(own("alone")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "mean",
            r"batches of 1, 2, 3, returned output \[3\], \[3\], \[3\]; expected tensors whose first dim is the batch",
        ),
        ("both", r"returned output0 \[3\]"),
        ("growing", r"returned output \[1, 1, 3\], \[2, 2, 3\]"),
        ("total", "returned no tensor with dims"),
        ("text", "returned no tensor with dims"),
        ("odd", "different tensors for different batch sizes"),
        ("complex", "complex64, which the protocol cannot carry"),
        ("uneven", "first dims of its inputs are x 2, z 4"),
        ("single", r"run on a batch of 1, raised RuntimeError: .*own.py:\d+: return x.view\(2, 3\)\)"),
        ("wrong", r"expected \(module, batch\)"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_model_that_cannot_be_served_says_why(own, name, words):
    with pytest.raises(MeshwrightError, match=words):
        open_model(served(own(name)))


def test_references_and_names_that_do_not_fit(own, tmp_path):
    with pytest.raises(MeshwrightError, match="did you mean"):
        open_model(served("gpt-tony"))
    with pytest.raises(ServingError, match="torch sees only cpu"):
        open_model(served("gpt-tiny"), "cuda:99")
    x, y = TensorSpec(name="x", shape=(3,)), TensorSpec(name="y", shape=(4,))
    for inputs in ((x, y), (y,), (TensorSpec(name="x", shape=(3,), datatype="FP16"),)):
        with pytest.raises(ServingError, match=r"has the inputs x FP32 \[3\]; the deployment says"):
            open_model(served(own("mean"), inputs=inputs))
    with pytest.raises(ServingError, match="are only scale"):
        open_model(served(own("two"), inputs=(TensorSpec(name="scale"),)))
    with pytest.raises(ServingError, match="has the outputs output1"):
        open_model(served(own("both"), outputs=(TensorSpec(name="output0", shape=(3,)),)))
    for name in ("absent.pt2", "own.pt2"):
        if name == "own.pt2":
            (tmp_path / name).write_text("no program")
        with pytest.raises(ServingError, match=f"{name} cannot be loaded as an exported program"):
            open_model(served(str(tmp_path / name)))


class Scaled(torch.nn.Module):
    def forward(self, x, pair, flag=True):
        return {"sum": x.sum(1) + pair["z"], "x": x * 2 if flag else x}


def export(path, dynamic, count=4):
    """A program of `Scaled` with a batch of any size, or of ``count``."""
    inputs = (torch.ones(count, 3), {"z": torch.ones(count)})
    sizes = {"x": {0: dynamic}, "pair": {"z": {0: dynamic}}} if dynamic else None
    torch.export.save(torch.export.export(Scaled(), inputs, dynamic_shapes=sizes), path)
    return str(path)


def test_programs_of_any_batch(tmp_path):
    model = open_model(served(export(tmp_path / "any.pt2", torch.export.Dim("batch", min=1, max=6))))
    assert (model.platform, model.largest) == ("torch_export", 6)
    assert [(item.datatype, item.shape) for item in model.inputs] == [("FP32", (3,)), ("FP32", ())]
    assert described(model.outputs) == [("sum", "FP32", ()), ("x", "FP32", (3,))]
    for count in (1, 2, 6):
        x, z = np.random.default_rng(0).random((count, 3), np.float32), np.arange(count, dtype=np.float32)
        total, doubled = model.run([x.copy(), z.copy()])
        np.testing.assert_allclose(total, x.sum(1) + z, rtol=1e-5)
        np.testing.assert_array_equal(doubled, x * 2)
    unbounded = open_model(served(export(tmp_path / "auto.pt2", torch.export.Dim.DYNAMIC)))
    assert unbounded.largest == 1024
    assert unbounded.run(unbounded.sample(9))[0].tolist() == [4.0] * 9


@pytest.mark.parametrize("count", [1, 4])
def test_programs_of_one_batch_are_filled_up(tmp_path, count):
    model = open_model(served(export(tmp_path / "one.pt2", None, count)))
    assert model.largest == count
    for rows in range(1, count + 1):
        x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
        total, doubled = model.run([x.copy(), np.ones(rows, np.float32)])
        np.testing.assert_allclose(total, x.sum(1) + 1)
        np.testing.assert_array_equal(doubled, x * 2)


def test_programs_without_a_batch_are_refused(tmp_path, own):
    class Plain(torch.nn.Module):
        def forward(self, x, y):
            return x.sum() + y

    for inputs in ((torch.ones(3), torch.ones(())), (torch.ones(3), torch.ones(2))):
        torch.export.save(torch.export.export(Plain(), inputs), tmp_path / "plain.pt2")
        with pytest.raises(ServingError, match="expected one size, the batch size, for all"):
            open_model(served(str(tmp_path / "plain.pt2")))
    with pytest.raises(ServingError, match="has its own sizes"):
        open_model(served(str(tmp_path / "plain.pt2"), image_size=3))


def test_hooks(own):
    text = (TensorSpec(name="text", datatype="UINT8", shape=(4,)),)
    hooks = {"inputs": text, "preprocess": own("flatten"), "postprocess": own("best")}
    model = open_model(served(own("alone"), **hooks))
    assert described(model.outputs) == [("best", "INT64", ())]
    plain = open_model(served(own("alone"), inputs=(TensorSpec(name="x", shape=(4,)),)))
    bytes_ = np.arange(20, dtype=np.uint8).reshape(5, 4)
    expected = plain.run([bytes_.astype(np.float32) / 2])[0].argmax(-1)
    assert model.run([bytes_.copy()])[0].tolist() == expected.tolist()
    named = (TensorSpec(name="text", datatype="INT64", shape=(3,)),)
    by_name = open_model(served(own("both"), inputs=named, preprocess=own("keywords"), postprocess=own("second")))
    assert by_name.run([np.array([[1, 2, 3]])])[0].tolist() == [[2.0, 4.0, 6.0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preprocess": "flatten"}, "the inputs of flatten cannot be found automatically"),
        ({"preprocess": "flatten", "inputs": True}, "'flatten' is not a reference to a function"),
        ({"postprocess": "OWN:broken"}, r"broken\(\) raised KeyError: 'nothing' .*own.py:\d+: raise KeyError"),
        ({"postprocess": "OWN:brken"}, "did you mean 'broken'"),
        ({"image_size": 0}, "image_size is 0; expected at least 1"),
        ({"model": None, "postprocess": "x.py:f"}, "no `model` for them"),
    ],
)
def test_hooks_and_sizes_that_do_not_fit(own, changes, words):
    changes = {key: own(item[4:]) if str(item).startswith("OWN:") else item for key, item in changes.items()}
    if changes.get("inputs"):
        changes["inputs"] = (TensorSpec(name="x", shape=(4,)),)
    with pytest.raises(ServingError, match=words):
        open_model(ServedModel(**({"name": "m", "slo": 1.0, "model": own("two")} | changes)))


def slab_of(path, model, slots):
    return Slab(path, model.inputs, model.outputs, slots)


def test_batches_of_two_slabs(own, tmp_path):
    model = open_model(served(own("table")))
    slabs = [slab_of(tmp_path / name, model, 8) for name in ("one", "two")]
    values = np.arange(24).reshape(8, 3) % 10
    for slab, change in zip(slabs, (0, 1), strict=True):
        slab.inputs[0][:] = (values + change) % 10
        slab.outputs[0][:] = -1
    groups = [(slabs[0], np.array([5, 0])), (slabs[1], np.array([7, 2, 3]))]
    failures = run_batch(model, groups)
    assert (failures.places, failures.error) == ((), "")
    for slab, slots in groups:
        others = [slot for slot in range(8) if slot not in slots]
        np.testing.assert_array_equal(slab.outputs[0][slots], slab.inputs[0][slots] * 2)
        assert (slab.outputs[0][others] == -1).all()
    # One slab, one sample.
    assert run_batch(model, [(slabs[0], np.array([6]))]).places == ()
    np.testing.assert_array_equal(slabs[0].outputs[0][6], slabs[0].inputs[0][6] * 2)


@pytest.mark.parametrize("bad", [(), (0,), (4,), (1, 2), (0, 3, 4), (0, 1, 2, 3, 4)])
def test_samples_that_fail_are_found_and_the_others_answered(own, tmp_path, bad):
    model = open_model(served(own("table")))
    slabs = [slab_of(tmp_path / name, model, 4) for name in ("one", "two")]
    groups = [(slabs[0], np.array([3, 1])), (slabs[1], np.array([0, 2, 1]))]
    places = [(slab, slot) for slab, slots in groups for slot in slots]
    for place, (slab, slot) in enumerate(places):
        slab.inputs[0][slot] = 10 + place if place in bad else place
        slab.outputs[0][slot] = -1
    failures = run_batch(model, groups)
    assert failures.places == bad
    assert failures.error == ("IndexError: token out of range" if bad else "")
    for place, (slab, slot) in enumerate(places):
        assert slab.outputs[0][slot].tolist() == [-1 if place in bad else 2 * place] * 3


def test_outputs_that_are_not_what_was_promised_fail(own, tmp_path):
    model = open_model(served(own("values")))
    slab = slab_of(tmp_path / "slab", model, 2)
    slab.inputs[0][1] = 1.0
    failures = run_batch(model, [(slab, np.array([0, 1]))])
    assert failures.places == (1,)
    assert "returned float64 [1, 3]; expected float32 [1, 3]" in failures.error
    slab.inputs[0][:] = np.nan
    assert run_batch(model, [(slab, np.array([0]))]).places == (0,)  # no NaN is below 1


def test_more_answers_than_samples_fail(own, tmp_path):
    model = open_model(served(own("more")))
    slab = slab_of(tmp_path / "slab", model, 3)
    slab.inputs[0][1] = 1.0
    failures = run_batch(model, [(slab, np.array([0, 1, 2]))])
    assert failures.places == (1,)
    assert "returned float32 [2, 3]; expected float32 [1, 3]" in failures.error


@pytest.mark.parametrize(("name", "kind"), [("exits", "SystemExit"), ("interrupted", "KeyboardInterrupt")])
def test_a_model_that_wants_to_end_the_process_fails_on_its_sample(own, tmp_path, name, kind):
    model = open_model(served(own(name)))
    slab = slab_of(tmp_path / "slab", model, 3)
    slab.inputs[0][:] = np.array([[0.0], [5.0], [1.0]])
    failures = run_batch(model, [(slab, np.array([0, 1, 2]))])
    assert (failures.places, failures.error) == ((1,), f"{kind}: enough")
    assert slab.outputs[0][2].tolist() == [1.0] * 3


def test_a_model_imports_from_its_folder_while_it_runs_as_it_was_loaded(own, tmp_path):
    (tmp_path / "lazily_imported.py").write_text("FACTOR = 3\n")
    ones = np.ones((1, 3), np.float32)
    before = open_model(served(own("lazy")))
    assert before.run([ones])[0].tolist() == [[3.0] * 3]
    (tmp_path / "lazily_imported.py").write_text("FACTOR = 4\n")
    assert open_model(served(own("lazy"))).run([ones])[0].tolist() == [[4.0] * 3]
    assert before.run([ones])[0].tolist() == [[3.0] * 3]
    hooked = served(own("lazy"), postprocess=own("thrice"))
    assert open_model(hooked).run([ones])[0].tolist() == [[16.0] * 3]


def test_tokens_beyond_a_vocabulary_fail_alone(tmp_path):
    model = open_model(served("gpt-tiny", sequence_length=4))
    slab = slab_of(tmp_path / "slab", model, 3)
    slab.inputs[0][1] = 10**6
    failures = run_batch(model, [(slab, np.array([0, 1, 2]))])
    assert failures.places == (1,)
    assert failures.error.startswith("IndexError: ")
    np.testing.assert_allclose(slab.outputs[0][0], slab.outputs[0][2], rtol=1e-4, atol=1e-5)


def test_an_emulation_answers_what_can_be_checked():
    inputs = (TensorSpec(name="x", shape=(2, 2)), TensorSpec(name="n", datatype="INT64"))
    outputs = tuple(
        TensorSpec(name=name, datatype=datatype, shape=shape)
        for name, datatype, shape in (("a", "FP32", (6,)), ("b", "INT8", ()), ("c", "FP64", (3, 1)))
    )
    line = Latency(alpha=1e-5, beta=1e-4, largest=7)
    model = open_model(ServedModel(name="m", slo=1.0, latency=line, inputs=inputs, outputs=outputs))
    assert isinstance(model, EmulatedModel)
    assert (model.inputs, model.outputs, model.largest, model.platform) == (inputs, outputs, 7, "emulated")
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    a, b, c = model.run([x, np.array([300, 5, -1])])
    assert a.tolist() == [[0, 1, 2, 3, 0, 1], [4, 5, 6, 7, 4, 5], [8, 9, 10, 11, 8, 9]]
    assert b.tolist() == [300 - 256, 5, -1]
    assert c[:, :, 0].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    plain = open_model(ServedModel(name="m", slo=1.0, latency=line))
    assert plain.run(plain.sample(2))[0].tolist() == [[0.0] * 4] * 2
    with pytest.raises(ServingError, match="has no latency"):
        open_model(ServedModel(name="m", slo=1.0))


def test_an_emulation_takes_no_less_than_its_time():
    from time import perf_counter

    model = EmulatedModel(ServedModel(name="m", slo=1.0, latency=Latency(alpha=1e-3, beta=2e-3, largest=8)))
    for count in (1, 8):
        begin = perf_counter()
        model.run(model.sample(count))
        assert perf_counter() - begin >= 1e-3 * count + 2e-3


@pytest.mark.parametrize("datatype", DATATYPES)
def test_an_echo_casts_to_every_type(datatype):
    rows = echo(np.array([[np.nan, 1.0, 1e30]]), TensorSpec(name="y", datatype=datatype, shape=(4,)))
    assert (rows.shape, rows.dtype) == ((1, 4), NUMPY_TYPES[datatype])


class Timed:
    """A model whose batches take what a table says, on a clock that only it moves."""

    outputs = (TensorSpec(name="y"),)
    platform = "test"

    def __init__(self, seconds, largest):
        self.seconds, self.largest, self.now, self.ran = seconds, largest, 0.0, []
        self.inputs = self.outputs

    def sample(self, count):
        return [np.zeros(count, np.float32)]

    def run(self, arrays):
        count = len(arrays[0])
        self.ran.append(count)
        self.now += self.seconds(count)
        return arrays

    def measure(self, **options):
        return warm_up(self, name="m", clock=lambda: self.now, **options)


def test_warming_up_tells_what_batches_take():
    model = Timed(lambda count: 0.001 * count + 0.01, 12)
    rows = model.measure(longest_s=1.0, repeats=5)
    assert [(row.batch_size, row.num_samples) for row in rows] == [(1, 5), (2, 5), (4, 5), (8, 5), (12, 5)]
    for row in rows:
        assert row.seconds == pytest.approx(0.001 * row.batch_size + 0.01)
        assert row.seconds <= row.p90_s <= row.p99_s
    assert model.ran == [1, 1, 2, 2, 4, 4, 8, 8, 12, 12] + [1, 2, 4, 8, 12] * 4
    latency = Latency.through((row.batch_size, row.seconds) for row in rows)
    assert (latency.largest, latency.of(6)) == (12, pytest.approx(0.016))


def test_warming_up_ends_where_it_should():
    long = Timed(lambda count: 0.01 * count, 64).measure(longest_s=0.03)
    assert [row.batch_size for row in long] == [1, 2, 4]

    slow = Timed(lambda count: 1.0, 1024)
    rows = slow.measure(longest_s=60.0, budget_s=10.0)
    assert [row.batch_size for row in rows] == [1, 2, 4]
    assert slow.now <= 11.0

    def full(count):
        if count > 8:
            raise MemoryError
        return 0.001

    assert [row.batch_size for row in Timed(full, 64).measure(longest_s=1.0)] == [1, 2, 4, 8]

    def broken(_):
        raise ValueError("no")

    with pytest.raises(ServingError, match="Model 'm' raised ValueError for a single sample: no"):
        Timed(broken, 64).measure(longest_s=1.0)


def test_the_examples_can_be_opened():
    (tiny,) = read_deployment(EXAMPLES / "tiny.toml").models
    model = open_model(tiny)
    assert described(model.inputs + model.outputs) == [("x", "FP32", (16,)), ("y", "FP32", (10,))]
    np.testing.assert_allclose(model.run(model.sample(5))[0].sum(1), 1.0, rtol=1e-5)
    rows = warm_up(model, name="tiny", longest_s=0.05, budget_s=0.5, repeats=3)
    assert rows[0].batch_size == 1
    deployment = read_deployment(EXAMPLES / "emulated.toml")
    (large,) = deployment.models
    assert deployment.devices == 8
    assert open_model(large).largest == 256


def test_what_needs_no_torch_loads_none():
    code = """
import sys
import meshwright.serving, meshwright.serving.server.gate
from meshwright.serving.server.models import open_model
from meshwright.spec import Latency, ServedModel
open_model(ServedModel(name="m", slo=1.0, latency=Latency(beta=0.001)))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
