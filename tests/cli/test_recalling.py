"""A plan's file remembers what it was estimated with; those who read it go by that without being told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.playground import Controls, MeasuredTable, Workbench
from meshwright.records import save_measurements
from meshwright.spec import Plan, load_cluster, read_document, write_document
from meshwright.spec.made_with import MadeWith, note_making, own_software, recall
from tests.cost.facts import make_table

PLAN = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "-m", "4", "--stages", "1"]


@pytest.fixture
def run(run):
    def call(*words, **ends):
        code, out, err = run(*words, **ends)
        return code, out, " ".join(err.split())

    return call


@pytest.fixture
def planned(run):
    """A plan in a folder, estimated with a table beside that."""
    save_table(0.5)
    assert run(*PLAN, "--measurements", "table.json", "--out", "plans/plan.json")[0] == 0
    return Path("plans/plan.json")


def save_table(overhead_s):
    save_measurements(replace(make_table(device="cpu"), overhead_s=overhead_s), Path("table.json"))


def step(out):
    return json.loads(out)["step_time_s"]


def test_what_it_was_estimated_with_is_used_again(run, planned):
    made_with = read_document(Plan, planned).made_with
    assert made_with.measurements == "../table.json"
    assert len(made_with.measurements_hash) == 16
    assert made_with.software == own_software()
    _, out, error = run("simulate", planned, "--json", code=0)
    assert error == "Costs are those of table.json, with which the plan was made."
    _, told, error = run("simulate", planned, "--measurements", "table.json", "--json")
    assert (step(told), error) == (step(out), "")
    _, plain, error = run("simulate", planned, "--cluster", "2x1xcpu", "--json")
    assert error == ""
    assert step(plain) < 0.5 < step(out), "half a second per instruction is from the table"


def test_another_table_and_none_are_told(run, planned):
    table = Path("table.json")
    _, before, _ = run("simulate", planned, "--json")
    save_table(0.25)
    _, out, error = run("simulate", planned, "--json", code=0)
    assert step(out) < step(before)
    assert error == "table.json, with which the plan was made, has changed since; costs are those of the changed table."
    table.unlink()
    _, out, error = run("simulate", planned, "--json", code=0)
    assert step(out) < 0.25
    assert error.startswith("The plan was made with table.json, which is missing: costs are estimated from datasheets.")


def test_other_software_is_told(run, planned):
    write_document(replace(read_document(Plan, planned), made_with=MadeWith(software="meshwright 0.0.1")), planned)
    assert run("simulate", planned)[2] == f"The plan was made with meshwright 0.0.1; installed here: {own_software()}."


def test_a_folder_that_moves_keeps_its_table(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    (before / "table.json").write_text("{}")
    made = note_making(before / "table.json", before / "plan.json")
    before.rename(after)
    assert recall(made, after / "plan.json").measurements == after / "table.json"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(180)
def test_a_run_is_judged_by_it(run, planned, warm_ranks):
    _, out, error = run("run", planned, "--steps", 2, code=0)
    assert "Costs are those of table.json" in error
    assert "outside of that interval" in " ".join(out.split()), "half a second per instruction was predicted"


def test_the_playground_goes_by_it(run, planned):
    made = {kind: Workbench({}, {}, MeasuredTable(kind, Path("table.json"))) for kind in ("cpu", "A100")}
    state = Controls(model="gpt-tiny", kind="cpu", num_nodes=1, devices_per_node=2, precision="float32")
    estimated = {kind: bench._usual(state, load_cluster("2xcpu")).overhead_s for kind, bench in made.items()}
    assert estimated == {"cpu": 0.5, "A100": 0.0}


def test_a_table_that_is_given_is_compared(run, planned, tmp_path):
    (tmp_path / "copy.json").write_bytes(Path("table.json").read_bytes())
    assert run("simulate", planned, "--measurements", tmp_path / "copy.json")[2] == ""
    save_table(0.25)
    _, _, error = run("simulate", planned, "--measurements", "table.json")
    assert error == "The plan was made with another measurement table than table.json."


def test_placements_remember_it_too(run, planned):
    save_table(0.5)
    options = ["--cluster", "2xcpu", "--batch", 4, "--method", "place", "--measurements", "table.json"]
    assert run("plan", "gpt-tiny", *options, "--out", "placed.json")[0] == 0
    _, out, error = run("simulate", "placed.json", "--json")
    assert error == "Costs are those of table.json, with which the plan was made."
    assert out == run("simulate", "placed.json", "--measurements", "table.json", "--json")[1]
