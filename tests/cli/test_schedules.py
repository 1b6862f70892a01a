"""Own schedules as a user types them: planned, drawn, simulated, compared; refused in one paragraph."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from meshwright.spec import GradientExchange, Plan, StagePlan, read_document, write_document
from tests.program.own import ALL, HEAD
from tests.simulator.plans import fast_cluster

WRONG = (
    HEAD
    + """
def stuck(plan, rank):
    (stage,) = plan.stages_of(rank)
    mine = local_microbatches(plan, stage, rank)
    for m in mine if stage == 0 else mine[::-1]:
        yield Forward(stage=stage, microbatch=m)
        yield Backward(stage=stage, microbatch=m)


def nothing(plan, rank):
    (stage,) = plan.stages_of(rank)
    pass
"""
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with a schedule and a plan made with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("mine.py").write_text(ALL)
    Path("wrong.py").write_text(WRONG)
    arguments = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "-m", "1"]
    assert invoke([*arguments, "--schedule", "mine.py:eager", "--out", "plan.json"]) == 0
    return tmp_path


def test_a_plan_keeps_reference_and_hash(folder):
    plan = read_document(Plan, "plan.json")
    assert plan.schedule == "mine.py:eager"
    assert plan.schedule_hash == hashlib.sha256(ALL.encode()).hexdigest()[:16]


def test_named_and_own_schedules_are_searched_together(folder, capsys):
    arguments = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "-m", "1", "--json"]
    capsys.readouterr()
    assert invoke([*arguments, "--schedule", "1f1b", "--schedule", f"{folder}/mine.py:eager"]) == 0
    rows = json.loads(capsys.readouterr().out)["plans"]
    assert {row["schedule"] for row in rows} == {"1f1b", f"{folder}/mine.py:eager"}
    assert {row["schedule"]: row["estimate_s"] is None for row in rows} == {
        "1f1b": False,
        f"{folder}/mine.py:eager": True,
    }


def test_show_draws_on_request_and_runs_nothing_else(folder, capsys):
    capsys.readouterr()
    assert invoke(["show", "plan.json", "--schedule"]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert drawn[1].split()[:2] == ["rank", "0"]
    assert drawn[1].split("rank 0 ")[1].startswith("F0 F1 F2 ")
    assert "27 slots" in drawn[3]
    assert drawn[4].endswith("In flight, by stage: 3, 1.")
    assert invoke(["show", "plan.json", "--schedule", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["num_slots"], data["in_flight"]) == (27, [3, 1])
    Path("mine.py").write_text("raise SystemExit('this file was run')")
    assert invoke(["show", "plan.json"]) == 0
    assert invoke(["show", "plan.json", "--json"]) == 0
    assert invoke(["show", "plan.json", "--schedule"]) == 1
    assert invoke(["show", "2xcpu", "--schedule"]) == 1
    assert "needs a plan, found a cluster" in capsys.readouterr().err


def test_simulate_holds_an_own_schedule_against_the_named_ones(folder, capsys):
    capsys.readouterr()
    assert invoke(["simulate", "plan.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert [row["schedule"] for row in rows] == ["mine.py:eager", "gpipe", "1f1b"]
    assert [row["in_flight"] for row in rows] == [[3, 1], [8, 8], [2, 1]]
    peaks = {row["schedule"]: row["peak_bytes"] for row in rows}
    assert peaks["1f1b"] < peaks["mine.py:eager"] < peaks["gpipe"]
    assert invoke(["simulate", "plan.json"]) == 0
    text = capsys.readouterr().out
    assert "mine.py:eager against " in text
    assert "Fits: 2 ranks" in text


def test_simulate_under_another_schedule(folder, capsys):
    capsys.readouterr()
    assert invoke(["simulate", "plan.json", "--schedule", "1f1b", "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert "schedules" not in named
    assert invoke(["simulate", "plan.json", "--schedule", "mine.py:one_f_one_b", "--against", "1f1b", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["step_time_s"] == named["step_time_s"]
    assert [row["schedule"] for row in own["schedules"]] == ["mine.py:one_f_one_b", "1f1b"]
    assert own["schedules"][0] == {**own["schedules"][1], "schedule": "mine.py:one_f_one_b"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "plan.json", "--schedule", "1f2b"], "did you mean '1f1b'"),
        (["simulate", "plan.json", "--schedule", "mine.py"], "names a file but no function"),
        (["simulate", "plan.json", "--schedule", "mine.py:egaer"], "did you mean 'eager'"),
        (["simulate", "plan.json", "--schedule", "missing.py:x"], "There is no file 'missing.py'"),
        (["simulate", "plan.json", "--against", "wrong.py:nothing"], "wrong.py:nothing returned None"),
        (["simulate", "plan.json", "--schedule", "wrong.py:stuck"], "rank 0 waits before B0.0 (wrong.py:12)"),
        (
            [
                "plan",
                "gpt-tiny",
                "--cluster",
                "2xcpu",
                "--batch",
                "8",
                "--stages",
                "2",
                "-m",
                "1",
                "--schedule",
                "wrong.py:stuck",
            ],
            "can never finish",
        ),
        (["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--schedule", "wrong.py:nothing"], "returned None"),
    ],
)
def test_wrong_schedules_end_in_one_paragraph(folder, capsys, arguments, words):
    capsys.readouterr()
    assert invoke([*arguments, *(["--out", "new.json"] if arguments[0] == "plan" else [])]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert shown.err.count("\n") == 1
    assert not Path("new.json").exists()


@pytest.mark.parametrize("verb", ["simulate", "run"])
def test_a_changed_schedule_is_refused_before_anything_happens(folder, capsys, verb):
    # Another batch, so that nothing is known of this plan in this process.
    plan = read_document(Plan, "plan.json")
    stages = (StagePlan(start=0, stop=2, ranks=(0,)), StagePlan(start=2, stop=6, ranks=(1,)))
    write_document(
        type(plan)(**{name: getattr(plan, name) for name in plan.__slots__} | {"stages": stages}), "plan.json"
    )
    Path("mine.py").write_text(ALL + f"\n# changed for {verb}\n")
    capsys.readouterr()
    assert invoke([verb, "plan.json"]) == 1
    assert "mine.py changed since the plan was made" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.long
def test_planning_with_an_own_schedule_needs_no_torch(folder, run_fresh):
    code = f"""
import os, sys
sys.modules["torch"] = None
os.chdir({str(folder)!r})
from meshwright.cli.main import invoke
arguments = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "--schedule", "mine.py:eager"]
assert invoke([*arguments, "--out", "again.json"]) == 0
assert invoke(["simulate", "again.json"]) == 0
assert invoke(["show", "again.json", "--schedule"]) == 0
"""
    assert "In flight, by stage: 3, 1." in run_fresh(code)


def test_a_plan_that_cannot_be_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        invoke(
            [
                "plan",
                "resnet-tiny",
                "--cluster",
                "2xcpu",
                "--batch",
                "8",
                "-m",
                "1",
                "--stages",
                "1",
                "--out",
                "plan.json",
            ]
        )
        == 0
    )
    plan = read_document(Plan, tmp_path / "plan.json")
    write_document(replace(plan, exchange=GradientExchange(servers=(0,))), tmp_path / "plan.json")
    assert invoke(["run", "plan.json", "--steps", "1"]) == 1
    assert "which can only be simulated" in " ".join(capsys.readouterr().err.split())


PLAN_OF_FOUR = "plan gpt-tiny --cluster 2xcpu --batch 8 -m 1 --stages 2 --schedule"


def test_orders_go_out_as_a_file_and_come_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert invoke([*PLAN_OF_FOUR.split(), "zb-v", "--out", "plan.json"]) == 0
    assert "only what options name is searched" in " ".join(capsys.readouterr().out.split())
    assert invoke(["show", "plan.json", "--as", "torch-csv"]) == 0
    shown = capsys.readouterr()
    assert "usual name of the file: orders.csv" in shown.err
    Path("orders.csv").write_text(shown.out)
    assert invoke(["show", "plan.json", "--as", "torch-csv", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["text"].splitlines(), data["not_expressed"]) == (shown.out.splitlines(), [])
    assert data["values"] == {"num_stages": 4, "num_ranks": 2, "num_microbatches": 8}

    # The same order has the same step, whether the plan already has its layout or is laid out anew.
    assert invoke(["simulate", "plan.json", "--json"]) == 0
    named = json.loads(capsys.readouterr().out)["step_time_s"]
    assert invoke(["simulate", "plan.json", "--schedule", "orders.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == named
    assert invoke([*PLAN_OF_FOUR.split(), "orders.csv", "--out", "read.json"]) == 0
    plan = read_document(Plan, "read.json")
    assert plan.stages == read_document(Plan, "plan.json").stages
    assert (plan.schedule, plan.schedule_hash) == (
        "orders.csv",
        hashlib.sha256(shown.out.encode()).hexdigest()[:16],
    )
    capsys.readouterr()
    assert invoke(["show", "read.json", "--program"]) == 0
    assert invoke(["show", "read.json", "--schedule"]) == 0
    assert "orders.csv" in capsys.readouterr().out

    # Nothing but a plan of as many microbatches follows it.
    other = [*PLAN_OF_FOUR.split(), "orders.csv"]
    other[other.index("8")] = "4"
    assert invoke(other) == 1
    assert "is not for rank 0; expected stage 0 and a microbatch of 0, 1, 2, 3" in capsys.readouterr().err
    assert invoke(["simulate", "plan.json", "--cluster", "4xcpu", "--schedule", "missing.csv"]) == 1
    assert "There is no file 'missing.csv'" in capsys.readouterr().err


def test_orders_are_found_and_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Hosts that issue at once: links and devices decide, however small the model is.
    write_document(fast_cluster("2x1xA100"), Path("fast.json"))
    command = [*PLAN_OF_FOUR.split(), "1f1b", "--cluster", "fast.json", "--out", "plan.json", "--json"]
    assert invoke([*command, "--find-orders", "found.csv", "--whole-backwards"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["orders"] == "found.csv"
    schedules = [row["schedule"] for row in data["plans"]]
    # The plan follows the found order, or a named one that is as fast.
    assert schedules[0] in ("found.csv", "gpipe")
    assert set(schedules[1:]) == {"1f1b"}
    assert data["plans"][0]["step_time_s"] <= data["plans"][1]["step_time_s"]
    plan = read_document(Plan, "plan.json")
    assert plan.schedule == schedules[0]
    assert plan.is_runnable
    assert invoke(["simulate", "plan.json", "--find-orders", "parts.csv", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    steps = {row["schedule"]: row["step_s"] for row in data["schedules"]}
    # With backwards in parts a named one may be the fastest; the plan follows whichever it is.
    assert data["step_time_s"] == min(steps.values()) <= steps[plan.schedule]
    assert Path("parts.csv").exists()
    assert {schedules[0], "1f1b", "zb-h1"} <= set(steps)
    assert data["orders"] == "parts.csv"
    for wrong, words in (
        (["--find-orders", "found.txt"], "does not end in .csv"),
        (["--find-orders", "."], "does not end in .csv"),
    ):
        assert invoke(["simulate", "plan.json", *wrong]) == 1
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_schedule_is_drawn_into_a_file(folder, capsys):
    capsys.readouterr()
    assert invoke(["show", "plan.json", "--schedule", "--out", "drawn.svg"]) == 0
    assert "drawing written to drawn.svg" in capsys.readouterr().out
    text = Path("drawn.svg").read_text()
    assert text.startswith("<svg ")
    assert text.count("<rect ") == 2 * 2 * 8
    assert "In flight, by stage: 3, 1." in text
    assert invoke(["show", "plan.json", "--schedule", "--out", "drawn.svg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drawing"] == "drawn.svg"
    for arguments, words in (
        (["--out", "drawn.svg"], "--out writes the drawing of --schedule"),
        (["--schedule", "--out", "drawn.png"], "does not end in .svg"),
    ):
        assert invoke(["show", "plan.json", *arguments]) == 1
        assert words in " ".join(capsys.readouterr().err.split())
