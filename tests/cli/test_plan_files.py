"""What `plan` ends with: a verdict per rank, the files asked for, and settings of other systems by `show --as`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.spec import Plan, read_document

PLAN = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8"]
# What other systems have settings for.
PLAIN = ["--stages", "2", "--schedule", "gpipe", "--recompute", "none", "--zero", "0"]


@pytest.fixture
def run(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "96")
    return run


def files():
    return sorted(path.relative_to(Path.cwd()).as_posix() for path in Path.cwd().rglob("*") if path.is_file())


def test_a_folder_gets_the_plan_and_its_script(run):
    _, out, _ = run(*PLAN, "--out", "my [red] layout", code=0)
    assert files() == ["my [red] layout/launch.sh", "my [red] layout/plan.json"]
    assert os.access("my [red] layout/launch.sh", os.X_OK)
    assert "Fits: 2 ranks; rank" in out
    assert "plan written to my [red] layout/plan.json" in out
    assert "start it with: bash 'my [red] layout/launch.sh'" in out
    assert read_document(Plan, "my [red] layout/plan.json").cluster == "2xcpu"


def test_slurm_instead_and_names_of_ones_own(run):
    assert run(*PLAN, "--out", "job", "--slurm")[0] == 0
    assert run(*PLAN, "--out", "p.json", "--launch", "start.sh")[0] == 0
    assert files() == ["job/launch.sbatch", "job/plan.json", "p.json", "start.sh"]
    assert "#SBATCH" in Path("job/launch.sbatch").read_text()
    assert "run p.json" in Path("start.sh").read_text()


def test_who_asks_for_no_file_is_told_how(run):
    assert "--out FOLDER writes the plan and the script" in run(*PLAN)[1]
    assert files() == []


def test_json_has_every_rank_and_the_files(run):
    code, out, _ = run(*PLAN, "--out", "lay", "--json")
    data = json.loads(out)
    assert code == 0
    assert [row["rank"] for row in data["ranks"]] == [0, 1]
    assert all(row["fits"] for row in data["ranks"])
    assert (data["file"], data["script"]) == ("lay/plan.json", "lay/launch.sh")


def test_nothing_fits_says_which_rank_is_over(run):
    layout = ("--tensor", "1", "--context", "1", "--zero", "0", "--recompute", "none", "--method", "slicing")
    _, out, err = run(*PLAN, *layout, "--memory-limit", "0.01", "--out", "lay", code=3)
    assert "Nearest plan: 2 stages" in out
    assert "Does not fit: 1 of 2 ranks over; rank 0" in out
    assert err.startswith("error: No plan fits into memory")
    assert "too much" in err
    assert files() == []
    code, out, _ = run(*PLAN, *layout, "--memory-limit", "0.01", "--json")
    data = json.loads(out)
    assert code == 3
    assert data["plans"] == []
    assert any(not row["fits"] for row in data["ranks"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "p.json", "--slurm"], "Add --launch launch.sbatch"),
        (["--out", "taken"], "taken is a file, not a folder"),
    ],
)
def test_options_that_do_not_go_together(run, options, words):
    Path("taken").write_text("")
    code, out, err = run(*PLAN, *options)
    assert (code, out) == (1, "")
    assert words in err
    assert files() == ["taken"]


def test_a_stored_graph_has_nothing_to_start(run):
    assert run("capture", "gpt-tiny", "--out", "graph.json")[0] == 0
    _, _, err = run("plan", "graph.json", "--cluster", "2xcpu", "--batch", "8", "--out", "lay", code=1)
    assert "cannot be started" in err
    assert run("plan", "graph.json", "--cluster", "2xcpu", "--batch", "8", "--out", "p.json")[0] == 0
    assert files() == ["graph.json", "p.json"]


def test_settings_go_to_standard_output_and_what_is_missing_beside_it(run):
    assert run(*PLAN, *PLAIN, "--out", "p.json")[0] == 0
    _, out, err = run("show", "p.json", "--as", "deepspeed", code=0)
    assert json.loads(out)["train_batch_size"] == 8
    assert "Fill in: the learning rate" in err
    assert "Not expressed:" in err
    code, out, _ = run("show", "p.json", "--as", "megatron", "--json")
    data = json.loads(out)
    assert data["values"]["--num-layers"] == 4
    assert all(item["reason"] for item in data["not_expressed"])
    code, out, err = run("show", "p.json", "--as", "accelerate")
    assert (code, out) == (1, "")
    assert "GPUs" in err
    assert run("show", "2xcpu", "--as", "megatron")[0] == 1
    assert run("show", "p.json", "--as", "megatronn")[0] == 2


def test_settings_of_a_shipped_model_need_no_torch(run):
    assert run(*PLAN, *PLAIN, "--out", "p.json")[0] == 0
    code = (
        "import sys; sys.modules['torch'] = None; from meshwright.cli.main import invoke; "
        "sys.exit(invoke(['show', 'p.json', '--as', 'torchtitan']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "pipeline_parallel_degree = 2" in done.stdout
