"""--html and --open of every verb that has them: whole pages, clear refusals, nothing half-written."""

import json
import os
import webbrowser
from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from meshwright.cost.memory import MemoryLimit
from meshwright.spec import Timeline, load_cluster, read_document, write_document
from tests.report.page.decoding import Page, decode_spans, timeline_rows
from tests.report.timelines import as_measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plan, its predicted timeline and one as if measured."""
    path = tmp_path_factory.mktemp("user")
    previous = Path.cwd()
    os.chdir(path)
    try:
        search = ["plan", "gpt2-small", "--cluster", "2x2xA100", "--batch", "16", "--stages", "2", "--top", "3"]
        # What is followed op by op, and few choices, which take less time.
        search += ["--schedule", "gpipe", "--schedule", "1f1b", "--tensor", "1", "--context", "1", "--zero", "0"]
        search += ["--recompute", "none"]
        assert invoke([*search, "--out", "plan.json", "--html", "plan.html"]) == 0
        assert invoke(["simulate", "plan.json", "--out", "predicted.json", "--html", "simulation.html"]) == 0
        write_document(as_measured(read_document(Timeline, "predicted.json"), 1.1), "measured.json")
    finally:
        os.chdir(previous)
    return path


@pytest.fixture
def user(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def document_of(path):
    return Page(Path(path).read_text()).document


def test_the_page_of_a_search_has_every_plan_and_the_best_one_to_save(user, capsys):
    document = document_of("plan.html")
    assert [row["place"] for row in document["plans"]["rows"]] == [1, 2, 3]
    assert len(document["results"]) == 3
    assert all(result["timelines"] and result["memory"]["rows"] for result in document["results"])
    assert document["results"][0]["explanation"].startswith(document["results"][0]["name"])
    assert document["documents"]["plan.json"] == json.loads(Path("plan.json").read_text())
    assert len(document["provenance"]["graph"]) == 16
    assert "meshwright 0" in document["provenance"]["versions"]


def test_the_page_of_a_simulation_has_the_timeline_that_was_written(user):
    (result,) = document_of("simulation.html")["results"]
    timeline = read_document(Timeline, "predicted.json")
    assert sorted(decode_spans(result["timelines"][0])) == sorted(timeline_rows(timeline))
    assert [row["peak_bytes"] for row in result["memory"]["rows"]] == list(timeline.peak_memory_bytes)
    assert all(sum(row["parts"].values()) == row["peak_bytes"] for row in result["memory"]["rows"])


def test_a_plan_has_the_same_headline_after_a_search_and_after_a_simulation(user):
    (simulated,), searched = (document_of(page)["results"] for page in ("simulation.html", "plan.html"))
    assert simulated["facts"] == searched[0]["facts"]
    usable = MemoryLimit().usable_bytes(load_cluster("2x2xA100").device_kind(0))
    assert simulated["facts"]["memory_limit_bytes"] == usable
    assert simulated["memory"] == searched[0]["memory"]
    *words, allocated = simulated["explanation"].splitlines()
    assert searched[0]["explanation"].startswith("\n".join(words))
    assert searched[0]["explanation"].endswith(f"\n{allocated}")
    assert allocated.startswith("Op by op, rank ")


def test_the_page_of_a_comparison_has_both(user, capsys):
    assert invoke(["compare", "predicted.json", "measured.json", "--html", "both.html"]) == 0
    assert "page written to both.html" in capsys.readouterr().out
    document = document_of("both.html")
    assert [part["origin"] for part in document["results"][0]["timelines"]] == ["predicted", "measured"]
    assert document["comparison"]["step"]["relative_error"] == pytest.approx(-1 / 11)


@pytest.mark.parametrize(
    ("shown", "part"),
    [("plan.json", "cluster"), ("predicted.json", "results"), ("2x8xH100", "cluster"), ("graph.json", "tables")],
)
def test_every_document_has_a_page(user, shown, part):
    if shown == "graph.json" and not Path(shown).exists():
        from meshwright.spec import load_shipped_graph

        write_document(load_shipped_graph("gpt-tiny"), shown)
    assert invoke(["show", shown, "--html", "shown.html"]) == 0
    assert document_of("shown.html")[part]


def test_a_program_has_a_page_too(user):
    assert invoke(["show", "plan.json", "--program", "--html", "program.html"]) == 0
    rows = document_of("program.html")["tables"][0]["rows"]
    assert {row["rank"] for row in rows} == {0, 1, 2, 3}


def test_json_names_the_page(user, capsys):
    assert invoke(["simulate", "plan.json", "--html", "again.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == "again.html"


def test_a_plan_whose_cluster_is_gone_is_shown_without_it(user, capsys):
    plan = json.loads(Path("plan.json").read_text())
    Path("lost.json").write_text(json.dumps({**plan, "cluster": "gone.toml"}))
    assert invoke(["show", "lost.json", "--html", "lost.html"]) == 0
    assert "does not show the cluster" in capsys.readouterr().err
    assert document_of("lost.html")["cluster"] is None


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "plan.json", "--html", "page.txt"],
        ["show", "plan.json", "--html", "page"],
        ["compare", "predicted.json", "measured.json", "--html", "page.pdf"],
        ["plan", "gpt2-small", "--cluster", "2xA100", "--html", "page.json"],
        ["show", "plan.json", "--schedule", "--html", "page.html"],
    ],
)
def test_what_cannot_be_a_page_is_refused_before_anything_is_written(user, command, capsys):
    before = sorted(user.iterdir())
    assert invoke(command) == 1
    assert "--html" in capsys.readouterr().err
    assert sorted(user.iterdir()) == before


def test_a_page_that_cannot_be_written_leaves_nothing(user, capsys):
    before = sorted(user.iterdir())
    assert invoke(["show", "plan.json", "--html", "plan.json/page.html"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(user.iterdir()) == before


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_a_folder_that_is_missing_is_made_for_a_page_as_for_every_file(user, tmp_path, option, capsys):
    path = tmp_path / "new" / "folder" / ("x.html" if option == "--html" else "x.json")
    assert invoke(["simulate", "plan.json", option, str(path)]) == 0
    assert path.is_file()
    assert str(path) in "".join(capsys.readouterr().out.split())


def test_open_hands_the_page_to_the_browser(user, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert invoke(["show", "2x8xH100", "--html", "cluster.html", "--open"]) == 0
    assert opened == [(user / "cluster.html").as_uri()]
    # without a name, a page of its own that stays
    assert invoke(["simulate", "plan.json", "--open"]) == 0
    written = Path(opened[1].removeprefix("file://"))
    assert document_of(written)["title"] == "gpt2-small on 2x2xA100"
    assert str(written) in capsys.readouterr().out.replace("\n", "")
    written.unlink()
    written.parent.rmdir()


def test_without_a_browser_there_is_a_note_with_the_address(user, monkeypatch, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert invoke(["show", "2x8xH100", "--html", "cluster.html", "--open"]) == 0
    assert f"Open {(user / 'cluster.html').as_uri()} yourself" in capsys.readouterr().err.replace("\n", "")
