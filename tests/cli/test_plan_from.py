"""``plan --from``: what the earlier plan decides is refused as an option, though it has its usual value."""

import json
from pathlib import Path

import pytest

ASKED = ["plan", "gpt-tiny", "--cluster", "2xcpu"]


@pytest.fixture
def earlier(run):
    code, _, errors = run(*ASKED, "--out", "earlier.json", "--optimizer", "sgd", "--batch", "16")
    assert code == 0, errors
    return json.loads(Path("earlier.json").read_text())


def test_the_earlier_plan_decides(run, earlier):
    code, out, errors = run(*ASKED, "--from", "earlier.json", "--out", "later.json", "--json")
    assert code == 0, errors
    later = json.loads(Path("later.json").read_text())
    assert later["workload"] == earlier["workload"]
    assert later["cluster"] == "2xcpu"
    assert json.loads(out)["search"]["method"] == "replanning"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("--optimizer adamw", "--optimizer"),
        ("--method auto", "--method"),
        ("--virtual-stages 2", "--virtual-stages"),
        ("-m 2", "--microbatch-size"),
        ("--zero 0", "--zero"),
    ],
)
def test_what_it_decides_is_no_option(run, typed, name):
    code, _, errors = run(*ASKED, "--from", "any.json", *typed.split())
    assert code == 2
    assert f"{name} has no effect on a plan made with --from" in " ".join(errors.replace("│", " ").split())
