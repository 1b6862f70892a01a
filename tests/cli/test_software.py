"""``--software``: a step is predicted as other training software would take it."""

import json

import pytest


def step_s(run, *options):
    """Seconds of the plan of one device and one microbatch, by ``plan`` and by ``simulate``."""
    asked = ("gpt2-small", "--cluster", "1xA100", "--batch", 1, "-m", 1, "--out", "plan.json", "--json")
    _, planned, _ = run("plan", *asked, *options, code=0)
    _, simulated, _ = run("simulate", "plan.json", "--json", *options, code=0)
    return json.loads(planned)["plans"][0]["step_time_s"], json.loads(simulated)["step_time_s"]


def test_older_attention_makes_a_longer_step(run):
    plain, older = step_s(run), step_s(run, "--software", "llm-foundry@2023")
    newer = step_s(run, "--software", "llm-foundry@2024")
    assert older[0] > plain[0]
    assert newer[0] == plain[0]
    for planned, simulated in (plain, older, newer):
        assert simulated == pytest.approx(planned)


def test_a_slower_host_makes_a_longer_step(run):
    assert step_s(run, "--software", "megatron@2022")[0] > 1.5 * step_s(run)[0]


def test_a_plan_remembers_what_it_was_estimated_for(run):
    asked = ("gpt2-small", "--cluster", "1xA100", "--batch", 1, "-m", 1, "--out", "plan.json", "--json")
    _, planned, _ = run("plan", *asked, "--software", "megatron@2022", code=0)
    _, simulated, said = run("simulate", "plan.json", "--json", code=0)
    assert "Estimated for megatron@2022, as the plan was made." in said
    assert json.loads(simulated)["step_time_s"] == pytest.approx(json.loads(planned)["plans"][0]["step_time_s"])


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_unknown_software_is_refused(run, verb):
    asked = ("gpt-tiny", "--cluster", "2xcpu", "--batch", 8)
    if verb == "simulate":
        assert run("plan", *asked, "--out", "plan.json")[0] == 0
        asked = ("plan.json",)
    _, _, error = run(verb, *asked, "--software", "deepspeed", code=1)
    assert "'deepspeed'" in error
    assert "alpa, llm-foundry, megatron, torchtitan" in error
