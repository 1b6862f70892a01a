"""``measure --batches`` as it is typed: real small models, tables that are there, what cannot be meant."""

import json
from dataclasses import replace

import pytest

from meshwright.records.parquet import read_records
from meshwright.spec import Measurements, OpMeasurement, read_document, write_document

OWN = """
import torch

def build(sequence_length=4):
    return torch.nn.Linear(sequence_length, 2), torch.ones(2, sequence_length)
"""


def read():
    return read_document(Measurements, "measurements.json")


def test_a_model_becomes_rows_and_a_line(run):
    _, out, _ = run("measure", "gpt-tiny", "--batches", "4,1,2", "--repeats", 5, "--device", "cpu", code=0)
    assert "batches of gpt-tiny: " in out
    assert all(heading in out for heading in ("batch size", "median", "p90", "p99", "samples per s"))
    assert "l(b) = " in out
    assert "largest relative error" in out
    assert "measurements written to measurements.json" in out
    table = read()
    assert [(row.model, row.batch_size, row.num_samples) for row in table.batches] == [
        ("gpt-tiny", 1, 5),
        ("gpt-tiny", 2, 5),
        ("gpt-tiny", 4, 5),
    ]
    assert "batches of whole models" in run("show", "measurements.json", code=0)[1]


def test_a_table_that_is_there_is_completed(run, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    op = OpMeasurement(key="k", forward_s=1.0, backward_s=1.0, num_samples=1)
    table = Measurements(device="cpu", software="s", date="d", conditions="2 processes", ops=(op,), overhead_s=1.0)
    write_document(table, "measurements.json")
    for typed in (["--batches", "1,2"], ["--batches", "2..3", "--sequence-length", 8], ["--batches", "2,4"]):
        run("measure", "own.py:build", *typed, "--repeats", 3, "--device", "cpu", code=0)
    found = read()
    assert (found.ops, found.overhead_s) == (table.ops, 1.0)
    assert found.conditions.startswith("2 processes; batches of own.py:build: ")
    assert {(row.model, row.batch_size) for row in found.batches} == {
        ("own.py:build", 1),
        ("own.py:build", 2),
        ("own.py:build", 4),
        ("own.py:build(sequence_length=8)", 2),
        ("own.py:build(sequence_length=8)", 3),
    }


def test_shapes_of_ones_own_go_into_a_table_of_many_devices(run, tmp_path):
    from importlib import resources

    shape = (resources.files("meshwright.zoo") / "shapes" / "gpt-tiny.toml").read_text()
    (tmp_path / "mine.toml").write_text(shape)
    given = ["--repeats", 3, "--device", "cpu", "--out", "t.parquet"]
    report = json.loads(run("measure", "mine.toml", "--batches", "1..4:3log", *given, "--json", code=0)[1])
    assert [row["batch_size"] for row in report["batches"]] == [1, 2, 4]
    assert report["left_out_batch_sizes"] == []
    (line,) = report["latency"]
    assert line["alpha_s"] >= 0
    assert line["beta_s"] >= 0
    assert set(read_records("t.parquet").op) == {"model.mine.toml"}
    assert len(read_records("t.parquet")) == 9
    assert run("measure", "mine.toml", "--batches", "4", *given)[0] == 0
    assert len(read_records("t.parquet")) == 9
    assert run("measure", "mine.toml", "--batches", "8", *given)[0] == 0
    assert len(read_records("t.parquet")) == 12


def test_one_size_has_no_line(run):
    _, out, _ = run(
        "measure", "resnet-tiny", "--image-size", 32, "--batches", "2", "--repeats", 3, "--device", "cpu", code=0
    )
    assert "l(b) =" not in out


def test_sizes_that_do_not_fit_are_named(run, monkeypatch):
    import meshwright.training as training

    real = training.measure_batches_here

    def first_only(*arguments, **options):
        table = real(*arguments, **options)
        return replace(table, batches=table.batches[:1])

    monkeypatch.setattr(training, "measure_batches_here", first_only)
    typed = ["measure", "resnet-tiny", "--batches", "1,2,3", "--repeats", 3, "--device", "cpu"]
    assert "Batches of 2 do not fit in memory; left out: 2, 3." in run(*typed, code=0)[2]
    assert json.loads(run(*typed, "--json")[1])["left_out_batch_sizes"] == [2, 3]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--batches", "1,2"], 2, "--batches times one whole MODEL: give it"),
        (["gpt-tiny", "--batches", ""], 2, "has ''; expected whole numbers of at least 1"),
        (["gpt-tiny", "--batches", "0,1"], 2, "has 0; expected whole numbers"),
        (["gpt-tiny", "--batches", "1,x"], 2, "has 'x'; expected whole numbers"),
        (["gpt-tiny", "--batches", "true"], 2, "has True; expected whole numbers"),
        (["gpt-tiny", "--batches", "1..64:6log"], 2, "expected whole numbers"),
        (["gpt-tiny", "--batches", "8..1"], 1, "'8..1' are not a range"),
        (["gpt-tiny", "--batches", "1", "-m", "2"], 2, "leave --microbatch-size out"),
        (["gpt-tiny", "--batches", "1", "--ranks", "2"], 2, "leave --ranks out"),
        (["gpt-tiny", "--batches", "1", "--calibrate"], 2, "--calibrate and --batches exclude each other"),
        (["gpt-tiny", "--batches", "1", "--links"], 2, "--links and --batches exclude each other"),
        (["gpt-tiny", "--batches", "1", "--force"], 2, "--force belongs to --cluster"),
        (
            ["gpt-tiny", "--batches", "1", "--device", "tpu"],
            1,
            "Device 'tpu' was given to time batches on; torch sees cpu",
        ),
        (["gpt-tiny", "--batches", "1", "--device", "cpu", "--repeats", "2"], 1, "needs at least 3"),
        (["gpt-tiny", "--batches", "1", "--device", "cpu", "--image-size", "8"], 1, "has no image size"),
        (["gtp-tiny", "--batches", "1", "--device", "cpu"], 1, "did you mean 'gpt-tiny'?"),
        (["gpt-tiny", "--batches", "1", "--out", "m.txt"], 1, "end in .json (one device) or .parquet (many)"),
    ],
)
def test_what_cannot_be_meant(run, tmp_path, words, code, told):
    found, _, err = run("measure", *words)
    assert told in " ".join(err.replace("│", " ").split())
    assert found == code
    assert not list(tmp_path.iterdir())


def test_a_name_that_no_table_can_have_is_refused_before_anything_is_timed(run, monkeypatch):
    import meshwright.training as training

    monkeypatch.setattr(training, "measure_here", lambda *_, **__: pytest.fail("timed"))
    assert run("measure", "gpt-tiny", "--out", "m.txt")[0] == 1
