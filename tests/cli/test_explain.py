"""`meshwright simulate --explain`: the path and what would help, for people and as JSON."""

import json
from itertools import pairwise

import pytest

STEP = ("--batch", "64", "--stages", "2", "--schedule", "1f1b", "-m", "4")


@pytest.fixture
def planned(run):
    assert run("plan", "gpt2-small", "--cluster", "2xA100", *STEP, "--out", "plan.json")[0] == 0
    return run


@pytest.mark.long
def test_the_path_adds_up_and_the_levers_help(planned):
    found = json.loads(planned("simulate", "plan.json", "--explain", "--json", code=0)[1])
    step_s, explained = found["step_time_s"], found["explanation"]
    assert explained["step_time_s"] == step_s
    path = explained["path"]
    assert path[0]["start_s"] == 0.0
    assert path[0]["bound"] == "begin"
    assert path[-1]["end_s"] == step_s
    assert all(before["end_s"] == after["start_s"] for before, after in pairwise(path))
    work = {item["name"]: item for item in explained["levers"] if item["kind"] == "work"}
    assert sum(item["path_share"] for item in work.values()) == pytest.approx(1)
    for item in work.values():
        assert item["step_if_free_s"] <= item["step_if_shorter_s"] <= step_s
    assert work["backwards"]["step_if_shorter_s"] < step_s


def test_the_steady_step_has_its_shares_and_its_utilisation(planned):
    found = json.loads(planned("simulate", "plan.json", "--json")[1])
    assert "explanation" not in found
    steady = found["steady"]
    assert steady["step_time_s"] == found["step_time_s"]
    assert 0 < steady["mfu_share"] <= steady["hfu_share"] < 1
    for rank in steady["ranks"]:
        assert rank["busy_share"] + rank["exposed_share"] + rank["waiting_share"] == pytest.approx(1)
        assert rank["busy_s"] == pytest.approx(rank["forward_s"] + rank["backward_s"] + rank["optimizer_s"])
    idle = sum(rank["idle_s"] for rank in steady["ranks"]) / len(steady["ranks"])
    assert steady["bubble_share"] == pytest.approx(idle / steady["step_time_s"])


def test_people_read_lines_and_a_table(planned):
    _, out, _ = planned("simulate", "plan.json", "--explain", code=0)
    for words in (
        "Steady step:",
        "MFU",
        "HFU",
        "Critical path of a steady step:",
        "What would help:",
        "A100 computing",
    ):
        assert words in out
    assert "Critical path" not in planned("simulate", "plan.json")[1]
