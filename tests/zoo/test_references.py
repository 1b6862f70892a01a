"""References: seeds, sizes, fake tensors, a stranger's file, and what each mistake is told."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.spec import ModelReferenceError
from meshwright.zoo import load_model

STRANGER = """
import torch
from torch import nn
import helper

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", helper.SCALE)

    def forward(self, x, y=None):
        out = self.norm(self.last(self.first(x))) * self.scale
        return out if y is None else out + y

class Scalar(Net):
    def forward(self, x):
        return super().forward(x).square().sum()

class Pair(Net):
    def forward(self, x):
        out = super().forward(x)
        return {"out": out, "index": out.argmax(1), "more": (out.sum(),)}

def plain():
    return Net(), torch.ones(2, 4)

def keywords():
    return Net(), {"x": torch.ones(2, 4), "y": torch.ones(2, 4)}

def several():
    return [Net(), (torch.ones(2, 4), torch.zeros(2, 4))]

def scalar():
    return Scalar(), torch.ones(3, 4)

def pair():
    return Pair(), torch.arange(8.).reshape(2, 4)

def trained(batch_size=6):
    torch.rand(3)
    return Net(), (torch.randn(batch_size, 4), torch.randn(batch_size, 4)), nn.functional.mse_loss

def any_size(**sizes):
    return Net(), torch.ones(sizes["batch_size"], sizes["sequence_length"])

def two_targets():
    return Net(), ((torch.ones(2, 4),), (torch.ones(2, 4), 3.0)), lambda out, a, b: ((out - a) * b).mean()

def prebuilt():
    return NET, torch.ones(2, 4)

NET = Net()
"""


@pytest.fixture
def stranger(tmp_path):
    (tmp_path / "net.py").write_text(STRANGER)
    (tmp_path / "helper.py").write_text("import torch\nSCALE = torch.tensor(2.0)\n")
    return lambda function, **options: load_model(f"{tmp_path / 'net.py'}:{function}", **options)


# --- shipped names ---


def test_the_same_reference_gives_the_same_model_and_batch():
    first, second = load_model("gpt-tiny"), load_model("gpt-tiny")
    assert first.model is not second.model
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(first.inputs[0], second.inputs[0])
    assert not torch.equal(first.inputs[0], load_model("gpt-tiny", seed=1).inputs[0])


def test_the_users_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    for options in ({}, {"fake": True}):
        torch.manual_seed(5)
        load_model("resnet-tiny", **options)
        assert torch.equal(torch.rand(3), expected)


def test_sizes():
    source = load_model("llama-tiny", batch_size=3, sequence_length=17)
    assert [tuple(t.shape) for t in (*source.inputs, *source.targets)] == [(3, 17), (3, 17)]
    # what follows each token is what is to be predicted
    assert torch.equal(source.inputs[0][:, 1:], source.targets[0][:, :-1])
    assert (source.name, source.batch_size, source.loss_origin) == ("llama-tiny", 3, "given")
    images = load_model("unet-tiny", batch_size=1, image_size=24)
    assert [tuple(t.shape) for t in (*images.inputs, *images.targets)] == [(1, 3, 24, 24), (1, 24, 24)]


def test_byte_models_say_so():
    assert load_model("gpt-tiny", fake=True).reads_bytes
    assert not load_model("gpt2-small", fake=True).reads_bytes
    assert not load_model("resnet-tiny", fake=True).reads_bytes


def test_fake_models_hold_no_memory():
    source = load_model("llama3-70b", batch_size=5, fake=True)
    tensors = [*source.model.parameters(), *source.inputs, *source.targets]
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in source.model.parameters())
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert source.batch_size == 5


def test_a_fake_model_runs_forward_and_backward():
    source = load_model("gpt2-xl", batch_size=2, sequence_length=64, fake=True)
    with source.inputs[0].fake_mode:
        loss = source.compute_loss()
        loss.backward()
    assert loss.shape == ()
    assert all(p.grad.shape == p.shape for p in source.model.parameters())


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("gpt2-smal", {}, "No model 'gpt2-smal' is shipped .did you mean 'gpt2-small'"),
        ("zebra", {}, "known are bert-base, .*gpt2-large.*file.py:function"),
        ("net.py", {}, "no function in it. Give net.py:function"),
        ("gpt-tiny", {"batch_size": 0}, "batch_size=0 was given; expected at least 1"),
        ("gpt-tiny", {"sequence_length": 1000}, "choose a sequence length from 1 to 128"),
        ("gpt-tiny", {"image_size": 32}, "a GPT has no image size. Leave the option out"),
        ("unet-tiny", {"sequence_length": 32}, "a UNet has no sequence length"),
        ("unet-tiny", {"image_size": 33}, "choose a multiple of 8"),
        ("net.pyx:function", {}, "No model 'net.pyx:function'"),
    ],
)
def test_references_that_lead_nowhere(reference, options, message):
    with pytest.raises(ModelReferenceError, match=message):
        load_model(reference, **options)


# --- a stranger's file ---


def test_a_module_and_a_batch_get_the_stand_in_loss(stranger):
    source = stranger("plain")
    assert (source.loss_origin, source.targets) == ("stand-in", ())
    outputs = source.model(*source.inputs)
    torch.testing.assert_close(source.compute_loss(), outputs.pow(2).sum() / outputs.numel())


def test_the_stand_in_loss_takes_all_floating_outputs(stranger):
    source = stranger("pair")
    outputs = source.model(*source.inputs)
    expected = (outputs["out"].pow(2).sum() / 8 + outputs["more"][0] ** 2) / 2
    torch.testing.assert_close(source.compute_loss(), expected)
    assert source.compute_loss() > 0
    assert source.loss_origin == "stand-in"


def test_a_module_that_returns_its_loss(stranger):
    source = stranger("scalar")
    assert (source.loss, source.loss_origin) == (None, "module")
    assert torch.equal(source.compute_loss(), source.model(*source.inputs))


def test_batches_of_all_forms(stranger):
    assert set(stranger("keywords").inputs) == {"x", "y"}
    assert len(stranger("several").inputs) == 2
    for function in ("keywords", "several"):
        assert stranger(function).compute_loss().isfinite()


def test_a_given_loss(stranger):
    source = stranger("trained")
    assert (source.loss_origin, source.batch_size) == ("given", 6)
    expected = (source.model(*source.inputs) - source.targets[0]).pow(2).mean()
    torch.testing.assert_close(source.compute_loss(), expected)
    assert len(stranger("two_targets").targets) == 2


def test_sizes_are_passed_on(stranger):
    assert stranger("trained", batch_size=9).batch_size == 9
    assert stranger("any_size", batch_size=2, sequence_length=4).inputs[0].shape == (2, 4)
    with pytest.raises(ModelReferenceError, match=r"takes no argument 'batch_size'.*def plain"):
        stranger("plain", batch_size=9)
    with pytest.raises(ModelReferenceError, match="takes no argument 'image_size'"):
        stranger("trained", image_size=9)


def test_a_strangers_model_is_seeded_too(stranger):
    first, second = stranger("trained"), stranger("trained")
    assert torch.equal(first.inputs[0], second.inputs[0])
    assert torch.equal(first.model.first.weight, second.model.first.weight)
    assert not torch.equal(first.inputs[0], stranger("trained", seed=3).inputs[0])


def test_looking_at_the_outputs_leaves_no_trace(stranger):
    model = stranger("plain").model
    assert model.norm.num_batches_tracked == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(4))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("function", ["plain", "trained", "scalar", "prebuilt", "keywords"])
def test_a_strangers_fake_model(stranger, function):
    source = stranger(function, fake=True)
    model = source.model
    inputs = source.inputs.values() if isinstance(source.inputs, dict) else source.inputs
    assert all(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers(), *inputs, *source.targets))
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in model.parameters())
    assert model.last.weight is model.first.weight
    # what the file imported stays real
    assert not isinstance(stranger(function).model.scale, FakeTensor)
    with next(iter(inputs)).fake_mode:
        source.compute_loss().backward()
    assert model.first.weight.grad.shape == (4, 4)


def test_the_folder_of_a_file_is_importable_only_while_it_is_loaded(stranger, tmp_path):
    import sys

    stranger("plain")
    assert str(tmp_path) not in sys.path


def test_a_missing_file_names_a_near_one(stranger, tmp_path):
    stranger("plain")
    with pytest.raises(ModelReferenceError, match=r"There is no file .*nte\.py' .did you mean 'net\.py'"):
        load_model(f"{tmp_path / 'nte.py'}:plain")
    with pytest.raises(ModelReferenceError, match="There is no file"):
        load_model(f"{tmp_path / 'nowhere' / 'net.py'}:plain")


def test_a_missing_function_names_a_near_one(stranger):
    with pytest.raises(ModelReferenceError, match=r"no function 'plane' .did you mean 'plain'"):
        stranger("plane")
    with pytest.raises(ModelReferenceError, match="no function ''"):
        stranger("")
    with pytest.raises(ModelReferenceError, match="no function '__name__'"):
        stranger("__name__")


BAD_FILES = {
    "syntax": ("def make(:\n", r"SyntaxError.*bad\.py:1: def make\(:"),
    "import": (
        "import torch\nimport no_such_thing\n",
        r"ModuleNotFoundError.*no_such_thing.*bad\.py:2: import no_such",
    ),
    "exit": ("raise SystemExit('stop')\n", r"SystemExit: stop .*bad\.py:1"),
    "raises": (
        "def make():\n    return 1 / 0\n",
        r"make\(\) raised ZeroDivisionError: division by zero .*bad\.py:2: return 1 / 0",
    ),
    "deep": (
        "import json\ndef make():\n    return inner()\ndef inner():\n    return json.loads('{')\n",
        r"raised JSONDecodeError.*bad\.py:5: return json\.loads",
    ),
    "lines": ("def make():\n    raise ValueError('one\\n\\n  two')\n", "ValueError: one two "),
    "needs": ("def make(x):\n    pass\n", "missing 1 required positional argument: 'x'"),
    "none": ("def make():\n    pass\n", r"make returned None; expected \(module, batch\)"),
    "number": ("def make():\n    return 3, 4\n", r"returned a tuple of \(int, int\)"),
    "alone": ("import torch\ndef make():\n    return torch.nn.Linear(2, 2)\n", "returned a Linear; expected"),
    "batch": ("import torch\ndef make():\n    return torch.nn.Linear(2, 2), 7\n", "returned an int as the batch"),
    "keys": ("import torch\ndef make():\n    return torch.nn.Linear(2, 2), {1: torch.ones(1)}\n", "as the batch"),
    "empty": (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), (1, torch.tensor(2.))\n",
        "that has a batch dim",
    ),
    "three": (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(2), None\n",
        r"a float32 tensor of shape \(2,\) instead of \(inputs, targets\)",
    ),
    "no loss": (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2), 1), 'mse'\n",
        "a str instead of a loss function",
    ),
    "vector loss": (
        "import torch\ndef make():\n    loss = lambda out, _: out.sum(1)\n"
        "    return torch.nn.Linear(2, 2), (torch.ones(3, 2), 1), loss\n",
        r"The loss of .*returned a float32 tensor of shape \(3,\); expected a floating tensor without dims",
    ),
    "forward": (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(3, 5)\n",
        r"on its own batch, RuntimeError.*bad\.py:2: def make\(\):",
    ),
    "own forward": (
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x @ x\n"
        "def make():\n    return M(), torch.ones(3, 5)\n",
        r"on its own batch, RuntimeError.*bad\.py:4: return x @ x",
    ),
    "targets": (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), (torch.ones(3, 2), torch.ones(3, 2))\n",
        r"batch of 2, but forward of Linear takes 1.*loss is missing: return \(module, \(inputs, targets\), loss\)",
    ),
    "meta": (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2, device='meta'), torch.ones(3, 2)\n",
        r"bad\.py:2: def make\(\): returned a module whose 'weight' is on device meta.*to_empty",
    ),
    "integers": (
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x.argmax(1)\n"
        "def make():\n    return M(), torch.ones(3, 5)\n",
        r"returns an int64 tensor of shape \(3,\), from which no loss can be computed",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD_FILES))
@pytest.mark.parametrize("fake", [False, True])
def test_each_mistake_is_told_in_one_paragraph(tmp_path, case, fake, caplog):
    text, message = BAD_FILES[case]
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ModelReferenceError, match=message) as caught:
        load_model(f"{path}:make", fake=fake)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not caplog.records
    assert str(path) in str(caught.value)
