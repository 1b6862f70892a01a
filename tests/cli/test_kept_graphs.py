"""Graphs of Hugging Face configurations in the user's cache folder: captured once, and nothing damaged is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright import compiled
from meshwright.cli import model_arguments as kept_graphs
from meshwright.cli import model_arguments as models
from meshwright.cli.main import invoke
from meshwright.cli.model_arguments import MAX_FILES, keep, kept_file, read_kept
from meshwright.spec import load_shipped_graph
from meshwright.spec.shipped import SUFFIX, pack

CONFIGS = Path(__file__).parents[1] / "zoo" / "configs"
GRAPH = load_shipped_graph("gpt-tiny")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of the graphs that are kept; a folder ``model`` with a tiny GPT-2's config.json is in the current."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def captures(monkeypatch):
    """What was captured, for tests that are not about the capture: it gives a graph that is there."""
    asked: list[tuple[object, ...]] = []

    def capture(reference, sizes, *, mode="training", batch_size=None):
        asked.append((reference, sizes, mode, batch_size))
        return SimpleNamespace(graph=GRAPH, remark=capture.remark)

    capture.remark = ""
    capture.asked = asked
    monkeypatch.setattr(models, "capture_reference", capture)
    return capture


def no_capture(*_, **__):
    raise AssertionError("a graph that is kept was captured again")


@pytest.mark.long
def test_a_second_call_captures_nothing(kept, monkeypatch):
    pytest.importorskip("transformers")
    command = ["plan", "model", "--cluster", "2xcpu", "--batch", "8", "--sequence-length", "16"]
    assert invoke([*command, "--out", "first.json"]) == 0
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr(models, "capture_reference", no_capture)
    assert invoke([*command, "--out", "second.json"]) == 0
    assert Path("second.json").read_text() == Path("first.json").read_text()


def test_what_was_kept_is_what_was_captured(kept, captures):
    assert models.graphs_of("model", ())(1) == GRAPH
    assert models.graphs_of("model", ())(1) == GRAPH
    assert captures.asked == [("model", (), "training", None)]
    assert len(list(kept.glob(f"*{SUFFIX}"))) == 1


def test_another_configuration_size_or_mode_is_another_file(kept, captures):
    for sizes, mode in (((), "training"), ((("sequence_length", 8),), "training"), ((), "inference")):
        models.graphs_of("model", sizes, mode=mode)
    assert len(captures.asked) == len(list(kept.iterdir())) == 3
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "n_layer": config["n_layer"] + 1}))
    models.graphs_of("model", ())
    assert len(captures.asked) == len(list(kept.iterdir())) == 4


def test_other_libraries_and_other_code_are_other_files(kept, monkeypatch):
    found = [kept_file({"a": 1}, "model")]
    with monkeypatch.context() as patch:
        patch.setattr(kept_graphs.metadata, "version", lambda name: "0.0.1")
        found.append(kept_file({"a": 1}, "model"))
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "contents_digest", lambda module: f"another {module}")
        found.append(kept_file({"a": 1}, "model"))
    assert len(set(found)) == 3
    assert kept_file({"a": 1}, "model") == found[0]


def test_what_is_said_of_a_capture_is_said_each_time(kept, captures):
    captures.remark = "a block was captured as a whole"
    for _ in range(2):
        models.graphs_of("model", ())
    assert len(captures.asked) == 2
    assert not kept.exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "no gzip", "no graph", "folder"])
def test_a_damaged_file_counts_as_not_there(kept, captures, damage):
    models.graphs_of("model", ())
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        contents = {"empty": b"", "cut": whole[: len(whole) // 2], "no gzip": b"{}", "no graph": pack('{"schema": 3}')}
        path.write_bytes(contents[damage])
    assert read_kept(path) is None
    assert models.graphs_of("model", ())(1) == GRAPH
    assert len(captures.asked) == 2
    if damage != "folder":
        assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to_is_no_error(kept, captures, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder was to be")
    for _ in range(2):
        assert models.graphs_of("model", ())(1) == GRAPH
    assert len(captures.asked) == 2
    monkeypatch.setenv("MESHWRIGHT_CACHE", "/proc/nowhere")
    assert models.graphs_of("model", ())(1) == GRAPH


def test_the_oldest_files_go(kept):
    paths = [kept_file({"a": 1}, number) for number in range(MAX_FILES + 2)]
    for age, path in enumerate(paths[:MAX_FILES]):
        keep(GRAPH, path)
        os.utime(path, (age, age))
    assert len(list(kept.iterdir())) == MAX_FILES
    for path in paths[MAX_FILES:]:
        keep(GRAPH, path)
    assert {*kept.iterdir()} == {*paths[2:]}


def test_where_graphs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", "")
    assert kept_file({}) is None
    assert read_kept(None) is None
    keep(GRAPH, None)
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_file({}).parent == tmp_path / "meshwright" / "graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept_file({}).parent == tmp_path / "home" / ".cache" / "meshwright" / "graphs"
