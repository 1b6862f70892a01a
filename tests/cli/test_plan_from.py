"""``plan --from``: what the earlier plan decides is refused as an option, though it has its usual value."""

import json
from pathlib import Path

import pytest

ASKED = ["plan", "gpt-tiny", "--cluster", "2xcpu"]


@pytest.fixture
def earlier(run):
    run(*ASKED, "--out", "earlier.json", "--optimizer", "sgd", "--batch", "16", code=0)
    return json.loads(Path("earlier.json").read_text())


def test_the_earlier_plan_decides(run, earlier):
    _, out, _ = run(*ASKED, "--from", "earlier.json", "--out", "later.json", "--json", code=0)
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
    _, _, errors = run(*ASKED, "--from", "any.json", *typed.split(), code=2)
    assert f"{name} has no effect on a plan made with --from" in " ".join(errors.replace("│", " ").split())
