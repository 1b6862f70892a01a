"""`plan --method flexflow`: the strategy of single layers beside the plans, and the placement that it writes."""

import json
from pathlib import Path

import pytest

from meshwright.spec import write_document
from tests.graphs import chain_graph

PLAN = "plan dlrm-tiny --cluster 2xcpu --batch 8 --method flexflow"
pytestmark = pytest.mark.long


def test_it_compares_the_strategy_with_the_best_plan_and_writes_it_as_a_placement(run):
    _, out, _ = run(*PLAN.split(), "--out", "placed.json", code=0)
    assert "Searched by flexflow" in out
    assert "Strategy of single layers" in out
    assert "under the best plan above" in out
    assert "placement written to placed.json" in out
    assert "plan written" not in out
    assert json.loads(Path("placed.json").read_text())["schema"] == "meshwright/placement/2"
    assert json.loads(run("simulate", "placed.json", "--json", code=0)[1])["median_step_s"] > 0
    assert run("show", "placed.json")[0] == 0


def test_a_folder_holds_the_plan_too(run):
    found = json.loads(run(*PLAN.split(), "--seed", "3", "--out", "made", "--json", code=0)[1])
    assert {item.name for item in Path("made").iterdir()} == {"plan.json", "launch.sh", "placement.json"}
    strategy = found["strategy"]
    assert strategy["file"] == "made/placement.json"
    assert strategy["refusal"] is None
    assert strategy["plan_step_time_s"] == found["plans"][0]["step_time_s"]
    assert strategy["step_time_s"] > 0
    assert {"layer", "degrees", "devices"} == set(strategy["layers"][0])


def test_a_stored_graph_has_only_an_estimate(run):
    write_document(chain_graph(4, width=2048), "graph.json")
    line = "plan graph.json --cluster 4xA100 --batch 16 --method flexflow --out found.json"
    _, out, _ = run(*line.split(), code=0)
    assert "The strategy is an estimate alone" in out
    assert "strategy written to found.json" in out
    assert json.loads(Path("found.json").read_text())["schema"] == "meshwright/soap-strategy/1"
    for verb in ("simulate", "run"):
        assert "its step time is only an estimate" in run(verb, "found.json", code=1)[2]


def test_it_has_as_many_devices_as_plans_may_have(run):
    line = "plan dlrm-tiny --cluster 2xcpu --batch 4 -m 4 --method flexflow --ranks 1 --deadline 4"
    _, out, _ = run(*line.split(), code=0)
    assert "layers on 1 devices" in out
    assert "No file was asked for" in out
