"""The tables of docs/concepts/captured.md are true: refusals as they are told, models of the zoo as their graphs."""

import re

import pytest

from meshwright.spec import load_shipped_graph
from tests.docs.blocks import ROOT

pytest.importorskip("transformers")


def table(name):
    """The rows of a table of the page, as cells."""
    text = (ROOT / "docs" / "concepts" / "captured.md").read_text(encoding="utf-8")
    inside = text.split(f"<!-- table {name} -->\n")[1].split(f"<!-- end of table {name} -->\n")[0]
    rows = [line for line in inside.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]


@pytest.fixture
def capture_table():
    import capture_table

    return capture_table


# What these models use makes torch warn of its own parts; as an error, that would be one more refusal.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_refusals_are_told_as_the_page_says(capture_table):
    found = [list(row) for row in capture_table.refusals()]
    assert found == table("refused")
    assert all(len(message) > 40 for _, message in found)


def test_rows_of_the_zoo_are_the_graphs_that_ship(capture_table):
    rows = {cells[0].strip("`"): cells for cells in table("captured") if cells[1] == "zoo"}
    assert set(rows) == set(capture_table.ZOO)
    for name, cells in rows.items():
        graph = load_shipped_graph(name)
        assert cells[2:5] == [f"{graph.num_parameters():,}", f"{len(graph.ops):,}", str(len(graph.layers))]


def test_every_published_configuration_has_its_row(capture_table):
    rows = {cells[0].strip("`") for cells in table("captured") if cells[1] == "Hugging Face"}
    files = {path.stem for path in (ROOT / "examples" / "huggingface").glob("*.json")}
    assert rows == files == set(capture_table.HUGGING_FACE)
    assert len(table("captured")) >= 14
