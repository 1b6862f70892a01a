"""``doctor`` and ``measure --cluster`` as a user types them: exit codes, JSON, files, with and without torch."""

import io
import json
import os
import subprocess
import sys
import tomllib

import pytest
from rich.console import Console

from meshwright.cli.doctor import _tables
from meshwright.cli.output import print_tables
from meshwright.host import Finding, Host
from meshwright.host.findings import HELP_PAGE
from meshwright.host.processor import find_processor
from meshwright.spec import load_cluster
from tests.processes import free_port

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
from meshwright.cli.main import invoke
sys.exit(invoke(sys.argv[1:]))
"""


@pytest.fixture
def quick(monkeypatch):
    """Without the processes that import torch: they have tests of their own."""
    monkeypatch.setattr("meshwright.host.torch_probe.importlib.util.find_spec", lambda name: None)


def run_without_torch(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.distributed
@pytest.mark.long
def test_the_exit_code_says_whether_there_is_a_problem(run):
    code, out, err = run("doctor", "--json")
    result = json.loads(out)
    problems = [row for row in result["findings"] if row["status"] == "problem"]
    assert result["num_problems"] == len(problems)
    assert code == (1 if problems else 0), err
    assert {row["name"] for row in result["findings"]} >= {"Python", "torch", "cores", "host memory", "loopback"}
    for row in result["findings"]:
        Finding(**row)


def test_an_address_where_nobody_listens_is_a_problem(run, quick):
    port = free_port()
    _, out, _ = run("doctor", f"127.0.0.1:{port}", code=1)
    line = next(line for line in out.splitlines() if f"127.0.0.1:{port}" in line)
    assert line.split()[0] == "problem"
    assert "docs/troubleshooting.md#another-host-is-not-reached" in out
    assert "1 problem" in out.splitlines()[-1]


@pytest.mark.parametrize("address", ["node1", "node1:99999", ":1", "[::1]"])
def test_what_is_no_address_is_a_mistake_of_usage(run, address):
    assert "HOST:PORT" in run("doctor", address, code=2)[2]


def test_markup_in_an_address_is_shown_as_it_is(run, quick):
    assert "::1:9" in run("doctor", "[::1]:9")[1]


def test_addresses_of_help_stay_whole_in_a_narrow_window(monkeypatch):
    console = Console(width=80, file=io.StringIO(), color_system=None)
    topic = "a-package-is-missing-or-of-another-version"
    finding = Finding(area="versions", name="transformers", found="x", status="note", remedy="Do it.", topic=topic)
    monkeypatch.setattr("meshwright.cli.output.PlainConsole", lambda **_: console)
    print_tables(*_tables([finding, finding]))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines.count(f"→ {HELP_PAGE}#{topic}") == 2


def test_doctor_works_without_torch(tmp_path):
    code, out, err = run_without_torch(tmp_path, "doctor", "--json")
    assert not err
    found = {row["name"]: row for row in json.loads(out)["findings"]}
    assert found["two ranks"]["found"] == "not tried without torch"
    assert found["two ranks"]["status"] == "note"
    assert found["loopback"]["status"] == "ok"
    assert code in (0, 1)


@pytest.mark.long
@pytest.mark.distributed
def test_the_cluster_file_loads_and_has_this_machine(run, tmp_path):
    result = json.loads(run("measure", "--cluster", "--repeats", 2, "-o", "here.toml", "--json", code=0)[1])
    assert result["file"] == "here.toml"
    cluster = load_cluster(tmp_path / "here.toml")
    assert cluster.num_ranks == find_processor(Host()).num_cores or cluster.device_kinds[0].name != "cpu"
    assert result["cluster"]["name"] == cluster.name
    kind = cluster.device_kinds[0]
    assert kind.peak_flops_per_s["float32"] > 1e8, "any core of this century"
    assert "Measured" in kind.source


@pytest.mark.long
def test_without_torch_the_shipped_rates_stand_in(tmp_path):
    code, out, err = run_without_torch(tmp_path, "measure", "--cluster")
    assert code == 0, err
    assert "Nothing was measured" in err
    assert "cluster written to cluster.toml" in out
    text = (tmp_path / "cluster.toml").read_text()
    tomllib.loads(text)
    found, shipped = load_cluster(tmp_path / "cluster.toml").device_kinds[0], load_cluster("cpu").device_kinds[0]
    if found.name == "cpu":
        assert found.peak_flops_per_s == shipped.peak_flops_per_s
        assert "# shipped: not measured here" in text
    plan = ["plan", "gpt-tiny", "--cluster", "cluster.toml", "--batch", "8", "--ranks", "1", "--precision", "float32"]
    assert run_without_torch(tmp_path, *plan)[0] == 0


def test_json_has_no_comments_and_loads_as_well(run, quick, tmp_path):
    assert run("measure", "--cluster", "--out", "here.json")[0] == 0
    assert load_cluster(tmp_path / "here.json").num_ranks >= 1


def test_a_file_that_is_there_is_kept_unless_force_is_given(run, quick, tmp_path):
    (tmp_path / "cluster.toml").write_text("mine")
    assert "--force" in run("measure", "--cluster", code=1)[2]
    assert (tmp_path / "cluster.toml").read_text() == "mine"
    assert run("measure", "--cluster", "--force")[0] == 0
    load_cluster(tmp_path / "cluster.toml")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["--cluster", "gpt-tiny"], 2, "describes the machine; give no MODEL"),
        (["--cluster", "-m", "2"], 2, "describes the machine; give no MODEL"),
        (["--cluster", "--sequence-length", "8"], 2, "describes the machine; give no MODEL"),
        (["--force"], 2, "belongs to --cluster"),
        (["--cluster", "--out", "cluster.txt"], 1, ".toml or .json"),
        (["--cluster", "--out", "/dev/null/cluster.toml"], 1, "cannot be written"),
        (["--cluster", "--out", f"{'long' * 80}.toml"], 1, "cannot be written"),
    ],
)
def test_mistakes_are_told_and_leave_no_file(run, quick, tmp_path, command, code, words):
    found, _, err = run("measure", *command)
    assert found == code, err
    assert words in " ".join(err.split())
    assert not list(tmp_path.iterdir())
