"""Published runs: every command parses, every run has its source, and the committed page is what the command writes."""

import re

import pytest

from meshwright.cli.main import invoke
from meshwright.cli.validate import plan_words, read_request
from meshwright.spec import DocumentError
from meshwright.validation.published import (
    SHAPES,
    Compared,
    Predicted,
    PublishedRun,
    cells,
    load_runs,
    published_page,
    rows,
    run_section,
    summarise,
)
from tests.project import ROOT

RUNS = load_runs()
PAGE = (ROOT / "docs" / "published.md").read_text()
MADE = Predicted(num_devices=8, tokens=8000, step_s=1.1, low_s=0.9, high_s=1.05)
RUN = PublishedRun(
    name="one",
    title="One",
    citation="somebody",
    place="Table 1",
    link="https://example.org",
    value=1000,
    unit="tokens/s/GPU",
    command="meshwright plan gpt2-small --cluster 8xA100",
)


@pytest.mark.parametrize("run", RUNS.runs, ids=lambda run: run.name)
def test_a_run_is_planned_in_one_layout(run):
    request = read_request(run.words)
    assert request.batch
    assert request.stages
    assert len(request.microbatch_size) == len(request.zero or [0]) == len(request.tensor or [1]) == 1
    assert len(request.recompute or ["none"]) == 1
    assert request.machine.num_ranks % (request.stages * (request.tensor or [1])[0]) == 0


@pytest.mark.parametrize("run", RUNS.runs, ids=lambda run: run.name)
def test_the_page_has_every_run_with_its_source_and_a_command_that_can_be_pasted(run):
    (section,) = re.findall(rf"^### {re.escape(run.title)}\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert f"[{run.citation}]({run.link}), {run.place}." in section
    (typed,) = re.findall(r"```bash\n(.*?)\n```", section, re.S)
    assert typed.replace("\\\n", " ").split() == run.command.split()


def test_shape_files_of_the_examples_are_those_that_ship():
    shipped = {path.name: path.read_text() for path in (ROOT / "src/meshwright/validation/data/published").iterdir()}
    shown = {path.name: path.read_text() for path in (ROOT / SHAPES).iterdir()}
    named = {word.removeprefix(SHAPES) for run in RUNS.runs for word in run.command.split() if SHAPES in word}
    assert shipped == shown
    assert set(shipped) == named


@pytest.mark.timeout(300)
def test_the_committed_page_says_what_the_command_predicts():
    (run,) = RUNS.named(["megatron-22b"])
    item = Compared(run=run, predicted=plan_words(run.words))
    assert run_section(item) in PAGE
    assert "| " + " | ".join(cells([item])[0]) + " |\n" in PAGE


def test_errors_are_of_the_step_whatever_was_published():
    item = Compared(run=RUN, predicted=MADE)
    assert item.published_s == pytest.approx(1.0)
    assert item.error == pytest.approx(10)
    assert item.inside
    (row,) = rows([item])
    assert row["step_interval_s"] == [0.9, 1.05]
    assert cells([item]) == [["One", "8", "1 s", "1.1 s", "900 ms–1.05 s", "+10.0 %", "yes"]]
    assert summarise([item]).startswith("1 run: mean error 10 %")
    assert "Published: **1,000 tokens/s per GPU**" in published_page(RUNS, [item])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": 0.0}, "value is 0.0; expected a figure above 0"),
        ({"citation": " "}, "citation is empty"),
        ({"link": "table 1"}, "link is 'table 1'; expected https://"),
        ({"command": "meshwright run plan.json"}, "expected a command `meshwright plan MODEL"),
        ({"command": "meshwright plan 'gpt"}, "cannot be read"),
    ],
)
def test_a_run_that_says_too_little_is_refused(change, message):
    said = {name: getattr(RUN, name) for name in RUN.__slots__}
    with pytest.raises(DocumentError, match=re.escape(message)):
        PublishedRun(**{**said, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('unit = "s"', "unit = 'hours'"),
        ('place = "', "unknown key 'palce'"),
        ('name = "llmc-124m"', "several are named llmc-1558m"),
    ],
)
def test_a_wrong_data_file_is_refused(tmp_path, text, message):
    shipped = (ROOT / "src/meshwright/validation/data/published_runs.toml").read_text()
    wrong = {'unit = "s"': 'unit = "hours"', 'place = "': 'palce = "', 'name = "llmc-124m"': 'name = "llmc-1558m"'}
    file = tmp_path / "runs.toml"
    file.write_text(shipped.replace(text, wrong[text], 1))
    with pytest.raises(DocumentError) as caught:
        load_runs(file)
    assert message.split(" = ")[0] in str(caught.value)


def test_what_cannot_be_asked_is_refused_before_anything_is_planned(capsys, tmp_path):
    assert invoke(["validate", "--published", "llmc-124"]) == 1
    assert "did you mean 'llmc-124m'" in capsys.readouterr().err
    assert invoke(["validate", "--published", "llmc-124m", "--out", str(tmp_path / "page.md")]) == 1
    assert "Give such a name, and no names of runs" in capsys.readouterr().err
    assert invoke(["validate", "--published", "--quick"]) == 2
