"""`simulate --exchange`: ways of exchanging gradients, the bound and the verdict; `plan --exchange`: an own order."""

import json
from pathlib import Path

import pytest

from meshwright.spec import Plan, read_document

MINE = '''"""Orders of an exchange."""


def small_first(parts):
    return [part.index for part in sorted(parts, key=lambda part: (part.num_bytes, part.ready_ps))]


def half(parts):
    return [part.index for part in parts[::2]]


def broken(parts):
    return parts[0].nothing
'''


@pytest.fixture
def planned(run, tmp_path):
    facts = ("--batch", "64", "--stages", "1", "-m", "2", "--schedule", "1f1b", "--zero", "0", "--out", "plan.json")
    assert run("plan", "gpt-tiny", "--cluster", "2xA100", *facts)[0] == 0
    (tmp_path / "mine.py").write_text(MINE)
    return run


@pytest.mark.long
def test_people_read_a_table_and_a_verdict(planned):
    _, out, _ = planned("simulate", "plan.json", "--exchange", "all", "--exchange", "mine.py:small_first", code=0)
    for words in (
        "Other ways to exchange gradients:",
        "as planned",
        "priorities",
        "sharded",
        "servers",
        "No compared exchange beats",
    ):
        assert words in out
    assert "mine.py:small_first" in out
    assert "hierarchical" not in out  # one node
    assert "Other ways" not in planned("simulate", "plan.json")[1]


def test_programs_read_json(planned):
    found = json.loads(planned("simulate", "plan.json", "--exchange", "whole", "--json", code=0)[1])
    exchanges = found["exchanges"]
    assert [row["exchange"] for row in exchanges["ways"]] == ["as planned", "whole"]
    assert exchanges["bound_s"] <= max(exchanges["computation_s"], exchanges["communication_s"])
    assert exchanges["bound_s"] <= min(row["step_time_s"] for row in exchanges["ways"])
    assert exchanges["ways"][0]["step_time_s"] == found["step_time_s"]
    assert exchanges["is_worth_it"] is (exchanges["gain_share"] >= 0.03)
    assert "exchanges" not in json.loads(planned("simulate", "plan.json", "--json")[1])


def test_the_best_plan_follows_an_own_order(planned):
    options = ("gpt-tiny", "--cluster", "2xA100", "--batch", "64", "--stages", "1", "--out", "own.json")
    _, out, error = planned("plan", *options, "--exchange", "mine.py:small_first", code=0)
    plan = read_document(Plan, Path("own.json"))
    count = len(plan.exchange.sequence)
    assert sorted(plan.exchange.sequence) == list(range(count))
    assert f"Gradients leave as mine.py:small_first says, in {count} part" in " ".join(out.split())
    _, _, error = planned("plan", *options[:-1], "other.json", "--exchange", "whole", code=2)
    assert "is not a function in a file; give path/to/file.py:function" in " ".join(error.replace("│", " ").split())
    _, _, error = planned("plan", *options[:-1], "other.json", "--exchange", "mine.py:half", code=1)
    assert "expected the `index` of each of its" in " ".join(error.split())
    assert not Path("other.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("priority", "did you mean 'priorities'"),
        ("gone.py:order", "There is no file 'gone.py'"),
        ("mine.py:smal_first", "did you mean 'small_first'"),
        ("mine.py:half", "expected the `index` of each of its"),
        ("mine.py:broken", "mine.py:13: return parts[0].nothing"),
    ],
)
def test_what_is_no_exchange_is_refused(planned, name, message):
    code, out, err = planned("simulate", "plan.json", "--exchange", name)
    assert code != 0
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err
