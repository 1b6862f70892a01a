"""``plan --shares``: what each choice of the best plan gains."""

import json

import pytest

from meshwright.api import plan

ASKED = ["plan", "gpt-tiny", "--cluster", "4xL40S", "--batch", "32", "--zero", "0", "--zero", "3", "--shares"]


def test_shares_are_printed_and_are_those_of_python(run):
    shares = json.loads(run(*ASKED, "--json", code=0)[1])["shares"]
    assert shares["gain_s"] == pytest.approx(shares["plain_s"] - shares["best_s"])
    assert sum(row["gain_s"] for row in shares["choices"]) == pytest.approx(shares["gain_s"])
    assert "microbatch size" in {row["choice"] for row in shares["choices"]}
    assert json.loads(json.dumps(plan("gpt-tiny", "4xL40S", batch=32, zero=[0, 3]).shares().row())) == shares
    _, out, _ = run(*ASKED, "--html", "plan.html", code=0)
    assert "without it" in out
    assert "The plain plan takes" in out


def test_shares_are_only_there_when_asked_for(run):
    assert "shares" not in json.loads(run(*ASKED[:-1], "--json", code=0)[1])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--inference", "--aim", "latency"], "shares are of the time of a step"),
        (["--rewrite"], "for another graph"),
        (["--method", "place"], "belongs to a search for plans"),
    ],
)
def test_shares_of_what_has_none_are_refused(run, options, why):
    _, _, errors = run("plan", "gpt-tiny", "--cluster", "4xL40S", "--shares", *options, code=2)
    assert why in " ".join(errors.split())
