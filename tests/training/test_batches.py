"""`measure --batches` from a model reference on: which inputs, which name, which device, how many threads."""

import pytest
import torch

from meshwright.spec import MeasurementError, Measurements, ModelReferenceError
from meshwright.training import feed as module
from meshwright.training import measure_batches_here

FIXED = """
import torch
CALLS = []

class Noted(torch.nn.Module):
    def forward(self, rows, scale):
        CALLS.append((rows, scale, torch.get_num_threads()))
        return rows * scale

def fixed():
    return Noted(), (torch.arange(3.0).reshape(3, 1), torch.tensor(2.0))

def sized(batch_size=2):
    return Noted(), (torch.arange(float(batch_size)).reshape(batch_size, 1), torch.tensor(2.0))

def one_size(batch_size=2):
    class One(torch.nn.Module):
        def forward(self, rows):
            return rows.reshape(batch_size, 2)
    return One(), torch.ones(batch_size, 2)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """What the model in the user's file was called with, of the last call at each size."""
    import sys

    (tmp_path / "own.py").write_text(FIXED)
    monkeypatch.chdir(tmp_path)

    def calls():
        # The fake run, which checks the file's model, was no call of ours.
        (module,) = (one for one in sys.modules.values() if getattr(one, "__file__", None) == str(tmp_path / "own.py"))
        noted = [call for call in module.CALLS if type(call[0]) is torch.Tensor]
        return {len(rows): (rows.flatten().tolist(), scale.item(), threads) for rows, scale, threads in noted}

    return calls


@pytest.mark.parametrize(
    ("function", "largest"), [("fixed", [0.0, 1.0, 2.0, 0.0, 1.0]), ("sized", [0.0, 1.0, 2.0, 3.0, 4.0])]
)
def test_batches_are_samples_of_the_example_on_one_thread(own, function, largest):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        table = measure_batches_here(f"own.py:{function}", [5, 2], repeats=3, device="cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [(row.model, row.batch_size) for row in table.batches] == [
        (f"own.py:{function}", 2),
        (f"own.py:{function}", 5),
    ]
    assert own() == {2: ([0.0, 1.0], 2.0, 1), 5: (largest, 2.0, 1)}
    assert (table.device, table.ops, table.overhead_s) == ("cpu", (), 0.0)
    assert table.conditions.startswith(f"batches of own.py:{function}: ")


def test_a_model_for_one_size_of_batch_is_refused_with_the_size(own):
    with pytest.raises(MeasurementError, match=r"one_size raised RuntimeError for a batch of 1: shape .* invalid"):
        measure_batches_here("own.py:one_size", [1, 4], repeats=3, device="cpu")


def test_sizes_that_were_given_are_part_of_the_name():
    table = measure_batches_here("gpt-tiny", [2], sizes=(("sequence_length", 8),), repeats=3, device="cpu")
    assert [row.model for row in table.batches] == ["gpt-tiny(sequence_length=8)"]
    with pytest.raises(ModelReferenceError, match="has no image size"):
        measure_batches_here("gpt-tiny", [2], sizes=(("image_size", 8),), repeats=3)
    with pytest.raises(ModelReferenceError, match="No model 'gtp-tiny'"):
        measure_batches_here("gtp-tiny", [2], repeats=3)


def test_a_table_of_another_device_is_refused_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("loaded"))
    known = Measurements(device="H100", software="s", date="d")
    with pytest.raises(MeasurementError, match="'H100' and 'cpu'"):
        measure_batches_here("gpt-tiny", [2], known=known, device="cpu")


def test_devices_that_are_not_here():
    with pytest.raises(MeasurementError, match=r"Device 'tpu' .*torch sees cpu.* Give one of these"):
        measure_batches_here("gpt-tiny", [2], device="tpu")
    with pytest.raises(MeasurementError, match="'cuda:99'"):
        measure_batches_here("gpt-tiny", [2], device="cuda:99")


@pytest.mark.gpu
def test_a_gpu_is_called_as_clusters_call_it():
    table = measure_batches_here("gpt-tiny", [1, 2], repeats=3)
    assert table.device != "cpu"
    assert torch.cuda.get_device_name(0) in table.conditions
