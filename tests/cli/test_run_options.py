"""Options of `meshwright run`: what goes together, plans for several nodes, and tables that a run corrects."""

import json
from dataclasses import replace

import pytest

from meshwright.records import load_measurements, save_measurements
from meshwright.spec import Plan, StagePlan, Workload, load_cluster, load_shipped_graph, write_document
from meshwright.training import measure_here


def write_plan(folder, cluster, ranks):
    graph = load_shipped_graph("resnet-tiny")
    plan = Plan(
        model="resnet-tiny",
        graph_hash=graph.content_hash,
        cluster=cluster,
        workload=Workload(global_batch=2 * ranks),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=tuple(range(ranks))),),
        num_microbatches=ranks,
    )
    return write_document(plan, folder / "plan.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--process 1", "give --dry, too"),
        ("--dry --save-model m.pt", "trains nothing and measures no times"),
        ("--dry --checkpoint kept", "trains nothing and measures no times"),
        ("--dry --steps 3 --check", "leave out --steps and --check"),
        ("--dry --record 3", "leave out --record"),
        ("--resume", "need a folder: give --checkpoint"),
        ("--checkpoint-every 3", "need a folder: give --checkpoint"),
        ("--calibrate", "corrects the table of --measurements"),
        ("--steps 4 --record 5", "expected a step of 1 to 4, or two with a dash"),
        ("--steps 4 --record 3-2", "expected a step of 1 to 4, or two with a dash"),
        ("--steps 4 --record x", "expected a step of 1 to 4, or two with a dash"),
    ],
)
def test_options_that_say_nothing_are_refused(run, tmp_path, words, said):
    _, _, error = run("run", write_plan(tmp_path, "2xcpu", 2), *words.split(), code=2)
    assert said in " ".join(error.replace("│", " ").split())


def test_a_plan_for_several_nodes_comes_with_the_line_that_starts_it(run, tmp_path):
    _, out, _ = run(
        "run", write_plan(tmp_path, "2x2xcpu", 4), "--steps", 2, "--seed", 3, "--out", "its results", code=1
    )
    words = " ".join(out.split())
    assert "torchrun --nnodes=2 --node-rank=N --nproc-per-node=2 --master-addr=HOST" in words
    assert "--module meshwright run" in words
    assert "plan.json --steps 2 --out 'its results' --seed 3" in words
    assert "N being 0 to 1" in words
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(180)
def test_a_run_corrects_the_table_that_it_went_by(run, tmp_path, monkeypatch, warm_ranks):
    """A table that is far too slow gets better by the run's own steps, however busy the machine is."""
    monkeypatch.chdir(tmp_path)
    path, cluster = write_plan(tmp_path, "2xcpu", 2), load_cluster("2xcpu")
    table = measure_here("resnet-tiny", [2], num_ranks=2, repeats=3)
    slow = tuple(replace(op, forward_s=30 * op.forward_s, backward_s=30 * op.backward_s) for op in table.ops)
    save_measurements(replace(table, ops=slow), tmp_path / "table.json")
    before = load_measurements(tmp_path / "table.json", cluster)
    options = ("--steps", 16, "--record", "5-16", "--measurements", "table.json", "--calibrate", "--json")
    found = json.loads(run("run", path, *options, code=0)[1])
    assert found["calibration"]["why_kept"] is None
    assert abs(found["calibration"]["error_after"]) < abs(found["calibration"]["error_before"])
    assert load_measurements(tmp_path / "table.json", cluster) != before
