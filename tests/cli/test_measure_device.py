"""``measure`` on a GPU as it is typed: with a GPU that is made up, and on a machine that has none."""

import json

import pytest

from meshwright import training
from meshwright.records.parquet import read_records
from meshwright.spec import MeasurementError, Measurements, load_shipped_graph, read_document, write_document
from meshwright.training import device_measuring as device_table
from meshwright.training import device_measuring as measure_device
from tests.measurement.clocks import FakeClock
from tests.measurement.test_device_ops import SIZES

EMPTY = Measurements(device="H100", software="torch 2.13.0, Python 3.11", date="today", conditions="a GPU")


@pytest.fixture
def gpu(monkeypatch):
    """Every measurement on a device is made by a clock that has none."""
    clock = FakeClock()

    def measure(model, microbatch_sizes, *, precisions, device, known, save, events, **options):
        assert device == "cuda:0"
        measure_device._refuse_other(known, EMPTY)
        run = measure_device.measure_on(
            clock,
            EMPTY,
            model,
            microbatch_sizes,
            precisions=precisions or ["mixed"],
            known=known,
            save=save,
            **{**options, "repeats": 1},
        )
        return measure_device.replace(run, warnings=("The GPU was busy for 87%",))

    def table(*, device, repeats, known, save, events):
        assert (device, repeats) == ("cuda:0", 10)
        return (*device_table.device_table_on(clock, EMPTY, sizes=SIZES, known=known, save=save), ())

    monkeypatch.setattr(measure_device.torch.cuda, "is_available", lambda: True)
    for module in (measure_device, device_table):
        monkeypatch.setattr(module, "measure_device_optimizers", lambda *_, **__: ())
    monkeypatch.setattr(training, "measure_device_here", measure)
    monkeypatch.setattr(training, "device_table_here", table)
    return clock


def test_a_model_is_measured_planned_with_and_taken_up_again(run, gpu):
    _, out, err = run("measure", "gpt-tiny", "-m", 2, "--precision", "amp", "--precision", "mixed", code=0)
    assert "H100" in out
    assert "measurements written to measurements.json" in out
    assert "The GPU was busy for 87%" in err
    timed = len(gpu.timed)
    _, out, err = run("measure", "gpt-tiny", "-m", 2, "--precision", "amp", "--json", code=0)
    told = json.loads(out)
    assert len(gpu.timed) == timed
    assert told["num_kept"] > 20
    assert told["left_out"] == {}
    given = ["--cluster", "1xH100", "--measurements", "measurements.json", "-m", 2]
    for precision in ("amp", "mixed"):
        _, out, err = run("plan", "gpt-tiny", *given, "--precision", precision, "--batch", 4, code=0)
        assert f"{len(load_shipped_graph('gpt-tiny').ops)} measured" in out
    _, _, err = run("plan", "gpt-tiny", "--cluster", "1xA100", "--measurements", "measurements.json", "-m", 2, code=1)
    assert "measurements.json was measured on H100 (torch 2.13.0, Python 3.11)" in " ".join(err.split())


def test_a_table_of_another_torch_is_told(run, gpu):
    write_document(measure_device.replace(EMPTY, software="torch 1.0.0, Python 3.11"), "measurements.json")
    _, _, err = run(
        "plan", "gpt-tiny", "--cluster", "1xH100", "--measurements", "measurements.json", "-m", 2, "--batch", 4, code=0
    )
    assert "The measurements were taken with torch 1.0.0 on H100; the installed torch is" in err


def test_a_table_of_another_device_is_not_measured_into(run, gpu):
    write_document(measure_device.replace(EMPTY, device="cpu"), "measurements.json")
    _, _, err = run("measure", "gpt-tiny", "-m", 2, code=1)
    assert "The tables are for devices 'cpu' and 'H100'" in " ".join(err.split())
    assert gpu.timed == []
    assert read_document(Measurements, "measurements.json").device == "cpu"


def test_a_device_is_measured_without_a_model(run, gpu):
    assert "rows written to measurements.parquet" in run("measure", "--device-table", code=0)[1]
    first = read_records("measurements.parquet")
    assert {"matmul", "aten.scaled_dot_product_attention", "aten.lstm"} <= set(first.op)
    timed = len(gpu.timed)
    _, out, _ = run("measure", "--device-table", "--json", code=0)
    assert len(gpu.timed) == timed
    assert json.loads(out)["left_out"] == {}
    assert len(read_records("measurements.parquet")) == len(first)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["gpt-tiny", "--device-table"], 2, "--device-table times operators of many sizes; give no MODEL"),
        (["--device-table", "--links"], 2, "--links and --device-table exclude each other"),
        (["--device-table", "--precision", "amp"], 2, "--precision belongs to timing the ops of a MODEL"),
        (["gpt-tiny", "--precision", "amp", "--device", "cpu"], 2, "--precision belongs to GPUs"),
        (["--device-table"], 1, "Device 'cpu' was given to time ops on; torch sees 0 CUDA devices here"),
        (["gpt-tiny", "--device", "cuda:3"], 1, "Device 'cuda:3' was given to time ops on; torch sees 0 CUDA"),
        (["gpt-tiny", "--device", "cuda", "--ranks", 2], 2, "--ranks are processes that share processors"),
    ],
)
def test_what_cannot_be_meant(run, tmp_path, monkeypatch, words, code, told):
    monkeypatch.setattr(measure_device.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure_device.torch.cuda, "device_count", lambda: 0)
    found, _, err = run("measure", *words)
    assert found == code, err
    assert told in " ".join(err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_torch_does_not_know_is_refused(monkeypatch):
    with pytest.raises(MeasurementError, match="Device 'gpu' was given to time ops on"):
        measure_device.measure_device_here(None, [], device="gpu")
