"""``plan`` for inference, under a latency, within a budget; and the front."""

import json
from pathlib import Path

import pytest

PLANNED = ["plan", "gpt2-small", "--batch", "64", "--json"]


@pytest.mark.long
def test_a_budget_and_the_front(run):
    # So few settings that each number of devices is looked at closely.
    layout = ("--tensor", "1", "--context", "1", "--zero", "0", "--recompute", "none")
    _, out, _ = run(*PLANNED, *layout, "--cluster", "2x4xL40S", "--prices", "1.5", "--max-price", "7", code=0)
    found = json.loads(out)
    assert all(row["price_per_hour"] <= 7 for row in found["plans"])
    assert {row["price_per_hour"] for row in found["search"]["front"]} >= {1.5, 6.0}
    _, out, _ = run(
        *PLANNED[:-1], "--cluster", "4xL40S", "--prices", "spot", "--ranks", "2", "--ranks", "4", "--pareto", code=0
    )
    assert "Pareto front" in out
    assert "USD per hour" in out


@pytest.mark.long
def test_inference_under_a_latency(run):
    asked = [*PLANNED, "--cluster", "4xL40S", "--inference", "--max-latency"]
    _, out, errors = run(*asked, "0.02", "--out", "plan.json", code=0)
    assert all(row["latency_s"] <= 0.02 for row in json.loads(out)["plans"])
    _, out, errors = run("simulate", "plan.json", "--json", code=0)
    _, _, errors = run(*asked, "0.0001", code=1)
    assert "takes" in errors
    assert "allow a longer --max-latency" in errors


@pytest.mark.long
def test_the_least_latency(run):
    rows = json.loads(run(*PLANNED, "--cluster", "4xL40S", "--inference", "--aim", "latency", code=0)[1])["plans"]
    # Plans as fast as each other are ordered by memory.
    assert rows[0]["makespan_s"] <= 1.01 * min(row["makespan_s"] for row in rows)


@pytest.mark.long
def test_unlike_devices_and_layers_that_take_no_time(run):
    cluster = Path(__file__).resolve().parents[2] / "benchmarks" / "clusters" / "l40s-a100-ethernet.toml"
    run("plan", "vgg-tiny", "--cluster", cluster, "--inference", "--batch", "8", code=0)


@pytest.mark.long
def test_a_found_order_has_its_cost_and_is_on_the_front(run):
    asked = [*PLANNED, "--cluster", "4xL40S", "--stages", "4", "-m", "8", "--prices", "1", "--top", "2"]
    found = json.loads(run(*asked, "--find-orders", "found.csv", code=0)[1])
    first = found["plans"][0]
    assert len(found["plans"]) == 2
    assert first["price_per_step"] == pytest.approx(4 * first["step_time_s"] / 3600)
    assert found["search"]["front"][0]["step_time_s"] == first["step_time_s"]


@pytest.mark.long
def test_a_graph_that_was_captured_for_inference_is_planned_so(run):
    assert run("capture", "gpt-tiny", "--inference", "--out", "graph.json")[0] == 0
    _, out, _ = run("plan", "graph.json", "--cluster", "2xcpu", "--out", "plan.json", "--json", code=0)
    assert all(row["optimizer_s"] == 0 for row in json.loads(out)["plans"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--prices nan", "per_hour is nan"),
        ("--prices 1e12", "expected 0 to 1e+09"),
        ("--prices slow-network", "has no prices"),
        ("--prices absent", "No scenario 'absent' is shipped"),
        ("--inference --max-latency 0", "expected a positive number"),
        ("--method place --ranks 1 --ranks 2", "takes one --ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused(run, typed, words):
    assert words in run("plan", "gpt-tiny", "--cluster", "2xcpu", *typed.split(), code=1)[2]
