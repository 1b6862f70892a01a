"""`meshwright simulate --contention`: every figure of one output is of the same model."""

import json

import pytest


@pytest.fixture
def planned(run):
    """Two nodes with one network card each, and sends of two replicas through it."""
    step = ("--batch", "64", "--stages", "2", "-m", "2", "--schedule", "1f1b", "--tensor", "1", "--context", "1")
    step += ("--zero", "0", "--recompute", "none")
    assert run("plan", "gpt2-small", "--cluster", "2x4xV100", *step, "--out", "plan.json")[0] == 0
    return run


@pytest.mark.long
def test_the_model_of_contention_reaches_every_figure(planned):
    steps = {}
    for contention in ("queued", "fair"):
        options = ("--contention", contention, "--explain", "--against", "1f1b", "--json")
        found = json.loads(planned("simulate", "plan.json", *options, code=0)[1])
        steps[contention] = found["step_time_s"]
        assert found["contention"] == contention
        assert found["explanation"]["step_time_s"] == found["step_time_s"]
        assert {row["step_s"] for row in found["schedules"]} == {found["step_time_s"]}
        low, high = found["step_interval_s"]
        assert low <= found["step_time_s"] <= high
    assert steps["fair"] != steps["queued"]


def test_queued_is_the_default(planned):
    default = json.loads(planned("simulate", "plan.json", "--json")[1])
    assert default == json.loads(planned("simulate", "plan.json", "--contention", "queued", "--json")[1])


def test_another_word_is_refused(planned):
    _, _, err = planned("simulate", "plan.json", "--contention", "fare", code=2)
    assert "fare" in err
    assert "fair" in err
