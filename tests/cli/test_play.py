"""``show --play`` as it is typed: a server that says where it is, ends by Ctrl-C, and refuses in one paragraph."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest

from meshwright.cli.main import invoke
from meshwright.playground import from_query
from meshwright.spec import GradientExchange, load_cluster, load_shipped_graph, write_document
from meshwright.spec.own_code import source_hash
from tests.graphs import even_bounds, make_plan

# A busy machine takes long to start a process; a server that hangs would take for ever.
WAIT_S = 60


@contextmanager
def playing(*arguments, **environment):
    """The command in a process of its own; yields its first line. Afterwards it has ended by Ctrl-C, in words."""
    command = [sys.executable, "-m", "meshwright", "show", "--play", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            yield process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=WAIT_S)
            assert (process.returncode, out, errors.strip()) == (0, "", "playground ended")
        finally:
            process.kill()


def options(line):
    url = line.split()[2]
    with urllib.request.urlopen(f"{url}options", timeout=WAIT_S) as reply:
        return json.load(reply)


def plan_of_gpt(tmp_path, **changes):
    graph = load_shipped_graph("gpt-tiny")
    plan = make_plan(
        graph, even_bounds(len(graph.layers), 2), [2, 1], 12, exchange=GradientExchange(bucket_bytes=2**20)
    )
    changed = replace(plan, **{"model": "gpt-tiny", "cluster": "3xcpu", **changes})
    return write_document(changed, tmp_path / "plan.json")


@pytest.mark.long
def test_without_a_model_the_page_offers_the_shipped_ones():
    with playing() as line:
        assert line.startswith("playground at http://127.0.0.1:")
        offered = options(line)
        assert {"gpt2-small", "resnet50", "llama3-8b"} <= set(offered["models"])
        assert from_query(offered["start"]).model == "gpt2-small"


@pytest.mark.long
def test_a_plan_is_what_the_page_starts_with_on_its_own_cluster(tmp_path):
    path = plan_of_gpt(tmp_path)
    with playing(str(path)) as line:
        state = from_query(options(line)["start"])
    assert (state.model, state.kind, state.num_nodes, state.devices_per_node) == ("gpt-tiny", "cpu", 1, 3)
    assert (state.replicas, state.num_stages, state.bucket_mib, state.microbatch_size) == ((2, 1), 2, 1.0, 2)


@pytest.mark.long
def test_the_cluster_of_a_file_is_offered_beside_the_shipped_kinds(tmp_path):
    cluster = load_cluster("3xcpu")
    slow = replace(cluster.nodes[0], num_nics=1, device_link=replace(cluster.nodes[0].device_link, latency_s=1.0))
    mine = write_document(replace(cluster, name="mine", nodes=(slow,)), tmp_path / "mine.toml")
    path = plan_of_gpt(tmp_path, cluster=str(mine))
    with playing(str(path)) as line:
        offered = options(line)
        url = line.split()[2]
        with urllib.request.urlopen(f"{url}plan.json?{offered['start']}", timeout=WAIT_S) as reply:
            saved = json.load(reply)
    assert from_query(offered["start"]).kind == str(mine)
    assert offered["kinds"][-1]["fixed"] == {"nodes": 1, "devices": 3}
    # What is saved is the plan that was given: `meshwright run` finds the same cluster by the same name.
    assert saved == json.loads(path.read_text())
    assert saved["cluster"] == str(mine)


def test_ctrl_c_ends_it_and_the_browser_is_opened_or_named(tmp_path):
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > "{tmp_path}/opened"\n')
    program.chmod(0o755)
    with playing("gpt-tiny", "--open", BROWSER=f"{program} %s") as line:
        assert options(line)["models"]
    assert (tmp_path / "opened").read_text().strip() == line.split()[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--play", "gpt2-smal"], "gpt2-small"),
        (["--play", "nothing.json"], "nothing.json"),
        (["--play", "--json"], "--play shows a page of its own"),
        (["--play", "--cluster", "4xA100", "--collectives"], "--play shows a page of its own"),
        (["--play", "--schedule"], "there is no such schedule here"),
        (["--play", "gpt-tiny", "--precision", "mixed"], "go with --cluster of --play"),
        (["--play", "gpt-tiny", "--cluster", "4xA1000"], "A1000"),
        (["--port", "80", "3xcpu"], "--port belongs to the page of --play"),
        ([], "No document was given"),
    ],
)
def test_what_cannot_be_played_is_told_in_one_paragraph(arguments, words, capsys):
    assert invoke(["show", *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_a_port_that_is_taken_is_told(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert invoke(["show", "--play", "gpt-tiny", "--port", str(port)]) == 1
    assert f"Port {port} is in use" in capsys.readouterr().err


def test_a_port_out_of_range_is_a_usage_error(capsys):
    assert invoke(["show", "--play", "--port", "70000"]) == 2


def test_a_plan_of_another_graph_is_told(tmp_path, capsys):
    assert invoke(["show", "--play", str(plan_of_gpt(tmp_path, graph_hash="0" * 16))]) == 1
    assert "make the plan again" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_with_ranks_in_no_layout_is_shown_and_saved_as_it_is(tmp_path):
    path = plan_of_gpt(tmp_path)
    data = json.loads(path.read_text())
    data["stages"][0]["ranks"], data["stages"][1]["ranks"] = [0, 2], [1]
    path.write_text(json.dumps(data))
    with playing(str(path)) as line:
        start = options(line)["start"]
        with urllib.request.urlopen(f"{line.split()[2]}plan.json?{start}", timeout=WAIT_S) as reply:
            assert json.load(reply) == data
    assert from_query(start).layout == "as-planned"


@pytest.mark.long
def test_a_model_on_a_cluster_starts_with_the_best_plan_of_a_search(tmp_path):
    with playing("gpt-tiny", "--cluster", "4xH100") as line:
        start = options(line)["start"]
        with urllib.request.urlopen(f"{line.split()[2]}plan.json?{start}", timeout=WAIT_S) as reply:
            shown = json.load(reply)
    out = tmp_path / "plan.json"
    assert invoke(["plan", "gpt-tiny", "--cluster", "4xH100", "--out", str(out)]) == 0
    best = json.loads(out.read_text())
    best.pop("made_with")
    assert shown == best


def test_a_plan_of_a_python_file_asks_for_the_model_by_name(tmp_path, capsys):
    path = plan_of_gpt(tmp_path, model="mine.py:build")
    assert invoke(["show", "--play", str(path)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "--play --graph mine.py:build" in error
    assert "meshwright capture mine.py:build --out graph.json" in error


def test_a_schedule_that_only_the_plan_names_is_not_run_unless_it_is_asked_for(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('it was run')\n")
    path = plan_of_gpt(tmp_path, schedule=f"{mine}:order", schedule_hash=source_hash(mine.read_bytes()))
    assert invoke(["show", "--play", str(path)]) == 1
    error = capsys.readouterr().err
    assert "--play --schedule" in " ".join(error.split())
    assert "it was run" not in error
    assert invoke(["show", "--play", str(path), "--schedule"]) == 1
    assert "it was run" in capsys.readouterr().err
