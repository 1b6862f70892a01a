"""``meshwright show zoo``: one row per shipped model, the same as the page in the documentation shows."""

import json

import pytest

from meshwright.cli.main import invoke
from meshwright.spec import load_shipped_graph, shipped_graphs
from tests.docs.blocks import COLUMNS, ROOT, blocks_of
from tests.docs.renew import shown


@pytest.mark.long
def test_the_page_shows_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert invoke(["show", "zoo"]) == 0
    table = capsys.readouterr().out
    blocks = blocks_of((ROOT / "docs" / "concepts" / "zoo.md").read_text(encoding="utf-8"))
    block = next(block for block in blocks if block.commands == ["meshwright show zoo"])
    assert block.text == "$ meshwright show zoo\n" + shown(block, table), "run python -m tests.docs.renew"


@pytest.mark.long
def test_rows_say_what_the_graphs_hold(capsys):
    assert invoke(["show", "zoo", "--json"]) == 0
    rows = {row["model"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert tuple(rows) == shipped_graphs()
    assert rows["gpt2-small"]["num_parameters"] == 124_439_808
    assert rows["gpt2-small"]["trainable"] is None
    assert rows["llama3-8b-lora"]["trainable"] == 41_943_040
    assert rows["resnet50"]["inputs"] == "3×224×224, 1"
    assert rows["bert-base"]["graph_hash"] == load_shipped_graph("bert-base").content_hash


@pytest.mark.parametrize("options", [["--program"], ["--schedule"], ["--batch-size", "2"], ["--as", "megatron"]])
def test_other_options_do_not_go_with_the_list(options, capsys):
    assert invoke(["show", "zoo", *options]) == 1
    assert "no other option goes with it" in " ".join(capsys.readouterr().err.split())


def test_a_name_is_its_graph(capsys):
    assert invoke(["show", "gpt-tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "gpt-tiny"
