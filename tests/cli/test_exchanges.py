"""`simulate --exchange`: ways of exchanging gradients, the bound and the verdict.

`plan --exchange`: an own order, and policies.
"""

import json
import re
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
    _, _, error = planned("plan", *options[:-1], "other.json", "--exchange", "whole", code=1)
    assert "Unknown exchange policy 'whole'" in " ".join(error.split())
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


OWN = '''"""Controllers of an exchange."""
from dataclasses import replace

from meshwright.program.controllers import BackupWorkers
from meshwright.spec import OptimizerStep
from meshwright.spec.control import NOTHING, Started


class OneBackup(BackupWorkers):
    def __init__(self, *, num_workers, num_steps, num_bytes):
        super().__init__(num_workers=num_workers, num_backups=1, num_versions=num_steps, num_bytes=num_bytes)


class Silent:
    initial = None

    def __init__(self, *, num_workers, num_steps, num_bytes):
        pass

    def decide(self, state, event, now_ps):
        return state, NOTHING


class Twice(OneBackup):
    def decide(self, state, event, now_ps):
        state, decision = super().decide(state, event, now_ps)
        return state, replace(decision, issues=decision.issues * 2)


class Waiting(OneBackup):
    """Its update waits for itself."""

    def decide(self, state, event, now_ps):
        state, decision = super().decide(state, event, now_ps)
        own = event.next_handle + len(decision.issues) - 1
        issues = [
            replace(issue, waits=(own,), need=None) if isinstance(issue.instruction, OptimizerStep) else issue
            for issue in decision.issues
        ]
        return state, replace(decision, issues=tuple(issues))


class Broken(OneBackup):
    def decide(self, state, event, now_ps):
        return 1 / 0


class Ungrouped(OneBackup):
    """Its messages have no group."""

    def decide(self, state, event, now_ps):
        state, decision = super().decide(state, event, now_ps)
        return state, replace(decision, issues=tuple(replace(issue, group=()) for issue in decision.issues))


class Crowded(OneBackup):
    """Uses two ranks more than workers."""

    @property
    def num_ranks(self):
        return self.num_workers + 2


class Unfinished(OneBackup):
    def __init__(self):
        pass
'''
POLICY_OF = ("gpt-tiny", "--cluster", "4xA100", "--out", "policy.json", "--exchange")


@pytest.fixture
def with_own(run, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return run


def test_a_policy_is_planned_simulated_and_refused_elsewhere(with_own):
    _, out, _ = with_own("plan", *POLICY_OF, "backup:1", code=0)
    said = " ".join(out.split())
    assert "Under the exchange policy backup:1, a step takes" in said
    assert "Rank 3 holds the parameters." in said
    plan = read_document(Plan, Path("policy.json"))
    assert (plan.exchange.policy, plan.exchange.servers, plan.num_ranks, plan.num_devices) == ("backup:1", (3,), 3, 4)
    assert plan.workload.precision == "float32"
    found = json.loads(with_own("simulate", "policy.json", "--scenario", "jitter", "--json", code=0)[1])
    assert found["scenario"]["steps"]["num_steps"] == 100
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for command in (
        ("plan", "gpt-tiny", "--cluster", "4xA100", "--from", "policy.json"),
        ("simulate", "policy.json", "--exchange", "all"),
        ("simulate", "policy.json", "--explain"),
        ("show", "policy.json", "--program"),
        ("show", "policy.json", "--as", "deepspeed"),
    ):
        code, _, error = with_own(*command)
        assert code == 1, command
        assert "exchange policy backup:1" in " ".join(error.split()) or "exchange.policy" in error
    assert "--dry" in with_own("run", "policy.json", "--dry", code=2)[2]


def test_an_own_controller_is_planned_and_known_again(with_own, tmp_path):
    with_own("plan", *POLICY_OF, "own.py:OneBackup", code=0)
    with_own("plan", *POLICY_OF[:-2], "named.json", "--exchange", "backup:1", code=0)
    own, named = (json.loads(with_own("simulate", name, "--json", code=0)[1]) for name in ("policy.json", "named.json"))
    assert own["step_time_s"] == named["step_time_s"]
    (tmp_path / "own.py").write_text(OWN + "# changed\n")
    assert "own.py changed since the plan was made" in " ".join(with_own("simulate", "policy.json", code=1)[2].split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:Silent", "issued 0 updates in 24 steps"),
        ("own.py:Twice", "was issued twice"),
        ("own.py:Waiting", "waits for"),
        ("own.py:Broken", "own.py:45: return 1 / 0"),
        ("own.py:Ungrouped", "with the group (); expected two ranks, (sender, receiver)"),
        ("own.py:Crowded", "uses other than 4 ranks for 4 workers and for 3"),
        ("own.py:Unfinished", "own.py:Unfinished raised TypeError"),
        ("own.py:OneBackups", "did you mean 'OneBackup'"),
        ("backup:3", "for 3 replicas; expected a number of at most 2"),
        ("stopped", "did you mean 'stopped-backup'"),
    ],
)
def test_invalid_policies_are_refused(with_own, name, message):
    code, out, error = with_own("plan", *POLICY_OF, name)
    assert (code, out) == (1, "")
    assert message in " ".join(error.split())
    assert not Path("policy.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--zero", "1"), "Leave out --zero."),
        (("--precision", "mixed", "--tensor", "2"), "Leave out --tensor and --precision."),
        (("--ranks", "2", "--ranks", "4"), "Leave out all --ranks but one."),
        (("--batch", "10"), "the nearest is 9 or 12."),
        (("--ranks", "2"), "expected at least two devices that compute"),
        (("--virtual-stages", "4"), "--virtual-stages"),
        (("--top", "3"), "Leave out --top."),
        (("--prices", "1", "--max-price", "3"), "The plan uses 4 devices for 4 per hour"),
    ],
)
def test_options_against_a_policy_are_refused(with_own, options, message):
    code, _, error = with_own("plan", *POLICY_OF, "backup:1", *options)
    assert code in (1, 2, 3)
    assert re.search(message, " ".join(error.replace("│", " ").split()))


def test_the_rank_for_the_parameters_has_to_fit(run):
    """It holds the states and the gradients of an update, more than a replica."""
    options = (
        "plan",
        "gpt-tiny",
        "--cluster",
        "4xcpu",
        "--batch",
        "3",
        "--memory-margin",
        "0",
        "--exchange",
        "backup:1",
    )
    _, _, error = run(*options, "--memory-limit", "0.018", code=1)
    assert re.search(r"rank 3 needs 19.8 MiB of the 18.4 MiB that it may reserve", " ".join(error.split()))
    _, out, _ = run(*options, "--memory-limit", "0.02", code=0)
    assert "rank 3 has the least to spare" in " ".join(out.split())
