"""The notebook among the examples runs in a real kernel, and shows results as tables."""

import pytest

from tests.project import ROOT

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
NOTEBOOK = ROOT / "examples" / "plan.ipynb"


@pytest.mark.long
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    tables = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) == 3
    assert all(table.startswith("<table") for table in tables)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "tokens/s" in printed
    assert (tmp_path / "layout" / "plan.json").exists()
    assert (tmp_path / "plan.html").exists()


def test_the_notebook_holds_no_outputs():
    """Outputs would be of another version of the program than the one that is read."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
