"""`meshwright simulate --detail ops`: what happens inside of computations, in the trace."""

import json
from pathlib import Path


def test_ops_are_in_the_trace_and_change_no_figure(run):
    assert run("plan", "gpt-tiny", "--cluster", "2xA100", "--batch", "4", "--stages", "2", "-o", "plan.json")[0] == 0
    plain = run("simulate", "plan.json", "--trace", "plain.json", "--json")
    found = run("simulate", "plan.json", "--trace", "ops.json", "--detail", "ops", "--json")
    assert plain[0] == found[0] == 0
    assert json.loads(found[1]) == json.loads(plain[1]) | {"trace": "ops.json"}
    events = [json.loads(Path(name).read_text())["traceEvents"] for name in ("plain.json", "ops.json")]
    ops = [event for event in events[1] if event.get("cat") == "op"]
    assert {event["name"].rstrip("_0123456789") for event in ops} >= {"linear", "gelu", "layer_norm"}
    assert [event for event in events[1] if event.get("cat") != "op"] == events[0]


def test_ops_without_a_trace_are_refused(run):
    assert run("plan", "gpt-tiny", "--cluster", "2xA100", "--batch", "4", "--stages", "2", "-o", "plan.json")[0] == 0
    assert "without --trace" in run("simulate", "plan.json", "--detail", "ops", code=2)[2]
