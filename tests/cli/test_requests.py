"""Options of `plan` and `simulate`: each is refused, by name, where it has no effect, and taken where it has one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command

from meshwright.cli.main import invoke, load_verb
from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.planning import given_options
from meshwright.cli.requests import Of, as_command, option_rows, options_of
from meshwright.cli.simulate.simulate_request import SimulateRequest
from tests.cli.test_json_output import DEPLOYMENT
from tests.docs.option_pages import PAGES, make_page
from tests.project import ROOT

REQUESTS = {"plan": PlanRequest, "simulate": SimulateRequest}
LINES = {
    ("plan", "search"): "plan gpt-tiny --cluster 2xcpu",
    ("plan", "from"): "plan gpt-tiny --cluster 2xcpu --from plan.json",
    ("plan", "place"): "plan gpt-tiny --cluster 2xcpu --method place",
    ("simulate", "plan"): "simulate plan.json",
    ("simulate", "placement"): "simulate placed.json",
    ("simulate", "sweep"): "simulate plan.json --sweep plan.num_microbatches=4,8",
    ("simulate", "deployment"): "simulate served.toml",
}
# What stands behind an option; else by what it takes.
VALUES = {
    "--cluster": "2xcpu",
    "--precision": "float32",
    "--schedule": "1f1b",
    "--recompute": "none",
    "--offload": "",
    "--placement": "head=tensor",
    "--prices": "2",
    "--measurements": "table.json",
    "--software": "megatron@2022",
    "--scenario": "slow-device",
    "--sweep": "plan.num_microbatches=4,8",
    "--method": "slicing",
    "--from": "plan.json",
    "--fix": "head=1",
    "--policy": "eager",
    "--place": "packing",
    "--find-orders": "found.csv",
    "--out": "out.json",
    "--html": "page.html",
    "--trace": "trace.json",
    "--trace-ranks": "0",
    "--zero": "0",
    "--contention": "fair",
}
BY_KIND = {"N": "2", "X": "1.5", "TEXT": "any", "FILE": "any.json"}
# What others need that are meant to have an effect.
WITH = {
    "--virtual-stages": "--schedule interleaved",
    "--staleness": "--schedule hetpipe",
    "--sequence-parallel": "--tensor 2",
    "--placement": "--tensor 2",
    "--seed": "--method flexflow",  # of plan: a deployment always draws
}
CASES = [
    pytest.param(verb, form, name, id=f"{verb} {form} {name}")
    for verb, form in LINES
    for name in options_of(REQUESTS[verb])
]


def words_of(verb, name):
    option = options_of(REQUESTS[verb])[name]
    value = VALUES.get(name, BY_KIND.get(option.takes, option.takes.split("|")[0]))
    return [name] if not option.takes else [name, value]


def belongs(verb, form, name):
    """By what the fields say of forms alone; --from makes a search one that starts from a plan."""
    forms = options_of(REQUESTS[verb])[name].of.forms
    return not forms or form in forms or (form, name) == ("search", "--from")


REFUSED = [case for case in CASES if not belongs(*case.values)]
TAKEN = [case for case in CASES if belongs(*case.values)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("requests")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("served.toml").write_text(DEPLOYMENT)
        assert invoke(shlex.split("plan gpt-tiny --cluster 2xcpu --batch 8 --out plan.json")) == 0
        assert invoke(shlex.split("plan gpt-tiny --cluster 2xcpu --batch 4 --method place --out placed.json")) == 0
        yield place


def test_there_are_many_combinations_of_which_many_make_no_sense():
    assert len(REFUSED) >= 30
    assert len(TAKEN) >= 30


@pytest.mark.parametrize(("verb", "form", "name"), REFUSED)
def test_an_option_without_effect_is_refused_by_name(folder, monkeypatch, capsys, verb, form, name):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert invoke([*shlex.split(LINES[verb, form]), *words_of(verb, name)]) in (1, 2)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    if name == "--from":
        # It makes another form, in which the method is what has no effect.
        name = "--method"
    assert f"{name} has no effect" in said
    assert sorted(folder.iterdir()) == before


def request_of(line):
    verb, *words = line
    command = load_verb(verb)
    context = command.make_context(verb, words)
    return REQUESTS[verb](given=given_options(context), **context.params)


# A plan chooses among schedules and among teams, unless they are given.
ALONE = {("simulate", "--seed"), ("plan", "--virtual-stages"), ("plan", "--sequence-parallel")}


@pytest.mark.parametrize(("verb", "form", "name"), TAKEN)
def test_an_option_with_effect_is_taken(folder, monkeypatch, verb, form, name):
    monkeypatch.chdir(folder)
    option = options_of(REQUESTS[verb])[name]
    line = shlex.split(LINES[verb, form])
    if name not in line:
        line += words_of(verb, name)
    with_others = shlex.split(WITH.get(name, "") if (verb, name) not in ALONE else "")
    if option.of.needs:
        with_others += words_of(verb, option.of.needs)
    if not set(with_others) <= set(line):
        with pytest.raises(typer.BadParameter, match=f"{name} has no effect with"):
            request_of(line).check()
    request = request_of([*line, *(with_others if not set(with_others) <= set(line) else ())])
    if form == "sweep" and name == "--out":
        request = request_of([*shlex.split(LINES[verb, form]), "--out", "cases.csv"])
    if name == "--plot":
        request = request_of([*shlex.split(LINES[verb, form]), "--sweep", "seed=1,2", "--plot", "cases.svg"])
    request.check()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("plan gpt-tiny --cluster 2xcpu --inference --optimizer sgd", "--optimizer"),
        ("plan gpt-tiny --cluster 2xcpu --inference --recompute full", "--recompute"),
        ("plan gpt-tiny --cluster 2xcpu --tensor 1 --sequence-parallel", "--sequence-parallel"),
        ("plan gpt-tiny --cluster 2xcpu --schedule 1f1b --virtual-stages 4", "--virtual-stages"),
        ("simulate placed.json --explain --json", "--explain"),
        ("simulate plan.json --schedule gpipe --virtual-stages 3", "--virtual-stages"),
        ("simulate plan.json --seeds 3", "--seeds"),
    ],
)
def test_what_another_option_makes_void_is_refused(folder, monkeypatch, capsys, line, name):
    monkeypatch.chdir(folder)
    assert invoke(shlex.split(line)) == 2
    assert f"{name} has no effect" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_new_option_is_one_field():
    @dataclass(frozen=True, kw_only=True)
    class Larger(PlanRequest):
        colour: Annotated[str, typer.Option(help="A colour."), Of("search")] = "red"

    seen = []
    app = typer.Typer()
    app.command("plan")(as_command(Larger, seen.append))
    command = get_command(app)
    assert "--colour" in {name for parameter in command.params for name in parameter.opts}
    line = ["gpt-tiny", "--cluster", "2xcpu", "--colour", "blue"]
    command.main(line, standalone_mode=False)
    assert seen[0].colour == "blue"
    with pytest.raises(typer.BadParameter, match="--colour has no effect on a placement of ops"):
        command.main([*line, "--method", "place"], standalone_mode=False)
    rows = option_rows(Larger, {"search": "search", "from": "--from", "place": "--method place"})
    assert ("`--colour TEXT`", "A colour.", "search") in rows


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_of_a_command_has_its_options(name):
    """`python -m tests.docs.option_pages` renews it."""
    assert (ROOT / "docs" / "commands" / f"{name}.md").read_text() == make_page(name)
