"""``plan`` and ``simulate`` say how sure a step is, and whether anything but a datasheet says so."""

import json

import pytest

from meshwright.spec import Measurements, OpMeasurement, load_shipped_graph, op_key, write_document


@pytest.fixture
def table(tmp_path):
    """Every op of gpt-tiny, but those of one kind, measured in batches of two."""
    graph = load_shipped_graph("gpt-tiny")
    keys = dict.fromkeys(op_key(graph, op, 2) for op in graph.ops if "linear" not in op.kind)
    rows = tuple(OpMeasurement(key=key, forward_s=1e-3, backward_s=2e-3, num_samples=5, spread=0.1) for key in keys)
    return write_document(
        Measurements(device="cpu", software="none", date="never", ops=rows), tmp_path / "measurements.json"
    )


def test_an_interval_is_said_where_ops_were_measured(run, table):
    asked = ("gpt-tiny", "--cluster", "2xcpu", "--batch", 8, "-m", 2, "--measurements", table, "--out", "plan.json")
    report = json.loads(run("plan", *asked, "--json", code=0)[1])
    low, high = report["step_interval_s"]
    assert low < report["plans"][0]["step_time_s"] < high
    _, out, _ = run("simulate", "plan.json", "--measurements", table, "--json")
    assert json.loads(out)["step_interval_s"] == pytest.approx([low, high])
    said = run("simulate", "plan.json", "--measurements", table)[1]
    assert "80 % interval (from its ops, transfers and optimizer)" in " ".join(said.split())


def test_an_interval_of_datasheets_is_said_to_be_one(run):
    assert run("plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", 8, "--out", "plan.json")[0] == 0
    found = json.loads(run("simulate", "plan.json", "--json", code=0)[1])
    low, high = found["step_interval_s"]
    assert low < found["step_time_s"] < high
    assert found["step_interval_measured"] is False
    assert "80 % interval (from datasheets" in " ".join(run("simulate", "plan.json")[1].split())
