"""Scalars that TensorBoard reads, and gauges that a scrape sees while a run goes on; both from `meshwright run`."""

import socket
import sys
import urllib.request

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.cli.main import invoke
from meshwright.spec import Plan, RunError, StagePlan, Workload, load_shipped_graph, write_document
from meshwright.training import watching
from meshwright.training.worker import PrometheusSink, TensorBoardSink
from tests.events import SeenEvents


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def scalars(folder):
    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(item.step, item.value) for item in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_what_is_told_is_seen_by_all(tmp_path):
    port, collector = free_port(), SeenEvents()
    with watching(collector, tmp_path, port) as events:
        for step in (1, 2, 3):
            events.metric("loss", 1.0 / step, step)
            events.metric("samples_per_s", 10.0 * step, step)
            events.progress("steps", step, 3)
        assert scrape(port) == {
            "meshwright_loss": pytest.approx(1 / 3),
            "meshwright_samples_per_s": 30.0,
            "meshwright_step": 3.0,
            "meshwright_steps": 3.0,
        }
    assert len(collector.seen) == 9
    assert scalars(tmp_path) == {
        "training/loss": [(step, pytest.approx(1.0 / step)) for step in (1, 2, 3)],
        "training/samples_per_s": [(step, 10.0 * step) for step in (1, 2, 3)],
    }
    with socket.socket() as again:
        # Connections that were closed linger a while.
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_said():
    first = PrometheusSink(0)
    with pytest.raises(RunError, match=rf"Port {first.port} was given for metrics, but cannot be used"):
        PrometheusSink(first.port)
    first.close()


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardSink("here"), "tensorboard"),
        ("prometheus_client", lambda: PrometheusSink(0), "metrics"),
    ],
)
def test_an_extra_that_is_missing_is_named(monkeypatch, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=rf"pip install 'meshwright\[{extra}\]'"):
        make()


@pytest.mark.long
@pytest.mark.distributed
def test_a_run_is_watched(tmp_path, monkeypatch, capsys, warm_ranks):
    monkeypatch.chdir(tmp_path)
    graph = load_shipped_graph("resnet-tiny")
    plan = Plan(
        model="resnet-tiny",
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=4),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0, 1)),),
        num_microbatches=2,
    )
    write_document(plan, tmp_path / "plan.json")
    words = f"run plan.json --steps 4 --tensorboard board --prometheus {free_port()} --json"
    assert invoke(words.split()) == 0
    assert '"inside"' in capsys.readouterr().out
    found = scalars(tmp_path / "board")
    assert [step for step, _ in found["training/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["training/samples_per_s"]] == [1, 2, 3, 4]
