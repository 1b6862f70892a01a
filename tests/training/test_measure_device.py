"""A model measured op by op for a GPU, without one: which rows come, their costs, and what a second call does."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.cost import CostModel, load_cost_model, other_torch
from meshwright.cost.host_issue import load_host_calls
from meshwright.records import make_records
from meshwright.spec import (
    MeasurementError,
    Measurements,
    Optimizer,
    OptimizerMeasurement,
    load_cluster,
    read_document,
    write_document,
)
from meshwright.spec.measurements import BUCKET_COPY, read_move_key
from meshwright.training import device_measuring as device_table
from meshwright.training import device_measuring as measure_device
from meshwright.training.device_measuring import capture_unallocated, device_table_on, index_bounds, measure_on
from tests.measurement.clocks import FakeClock
from tests.measurement.test_device_ops import SIZES

ROOT = Path(__file__).parents[2]
EMPTY = Measurements(device="H100", software="torch 2.13.0, Python 3.11", date="today", conditions="a GPU")
ADAMW = Optimizer(kind="adamw")
STEPS = tuple(
    OptimizerMeasurement(kind=kind, dtype="float32", num_elements=64, num_tensors=2, seconds=2e-3, issue_s=1e-4)
    for kind in ("adamw", "adamw.fused")
)


@pytest.fixture(autouse=True)
def few_optimizers(monkeypatch):
    asked = []

    def measure(_clock, **options):
        asked.append(options)
        steps = [replace(row, dtype=dtype) for dtype in options["states"] for row in STEPS]
        copies = [replace(STEPS[0], kind=BUCKET_COPY, dtype=dtype, issue_s=0.0) for dtype in options["gradients"]]
        return (*steps, *copies)

    for module in (measure_device, device_table):
        monkeypatch.setattr(module, "measure_device_optimizers", measure)
    return asked


def measured(reference="gpt-tiny", precisions=("amp",), clock=None, **options):
    clock = clock or FakeClock(seconds=lambda number: number * 1e-6)
    return measure_on(clock, EMPTY, reference, [2], precisions=precisions, repeats=1, **options)


@pytest.mark.parametrize("precision", ["amp", "mixed", "float32", "bfloat16", "amp-float16"])
def test_every_op_is_estimated_by_its_row_and_the_host_by_its_own(precision, few_optimizers):
    run = measured(precisions=[precision])
    assert run.left_out == {}
    graph = capture_unallocated("gpt-tiny", (), 2).graph
    cluster = load_cluster("1xH100")
    cost = CostModel(cluster=cluster, measurements=run.table, precision=precision)
    costs = cost.estimate_ops(graph, 2, cluster.device_kind(0))
    assert set(costs.basis) == {"measured"}
    rows = {row.key: row for row in run.table.ops}
    views = [row for row in rows.values() if row.key.startswith("aten.transpose")]
    assert {row.forward_s for row in views} == {0.0}
    assert all(row.forward_issue_s > 0 for row in views), "a view costs the host a call"
    # The host of the table took 6 µs for a call, and so does every host that does not say otherwise.
    factor = cost.host_factor(0)
    assert factor == pytest.approx(6e-6 / load_host_calls().call_s)
    linear = next(i for i, op in enumerate(graph.ops) if op.kind == "aten.linear.default")
    assert any(
        costs.issue_s[linear, 0] * factor == pytest.approx(row.forward_issue_s)
        for row in rows.values()
        if row.key.startswith("aten.linear")
    )
    assert few_optimizers[0]["states"] == ("bfloat16" if precision == "bfloat16" else "float32",)


def test_device_seconds_follow_the_rows_and_issue_seconds_do_not():
    run = measured(clock=FakeClock(seconds=1e-5))
    slower = replace(run.table, ops=tuple(replace(row, forward_s=2 * row.forward_s) for row in run.table.ops))
    graph, cluster = capture_unallocated("gpt-tiny", (), 2).graph, load_cluster("1xH100")
    kind = cluster.device_kind(0)
    one, two = (
        CostModel(cluster=cluster, measurements=table, precision="amp").estimate_ops(graph, 2, kind)
        for table in (run.table, slower)
    )
    assert np.allclose(two.forward_s, 2 * one.forward_s), "casts around ops are rows, too"
    assert np.array_equal(one.issue_s, two.issue_s)


def test_other_batches_have_the_issue_times_of_the_measured_one():
    run = measured()
    graph, cluster = capture_unallocated("gpt-tiny", (), 2).graph, load_cluster("1xH100")
    cost = CostModel(cluster=cluster, measurements=run.table, precision="amp")
    two, eight = (cost.estimate_ops(graph, size, cluster.device_kind(0)) for size in (2, 8))
    depends = [i for i, op in enumerate(graph.ops) if op.kind == "aten.linear.default"]
    assert np.array_equal(two.issue_s[depends], eight.issue_s[depends])


def test_optimizers_are_estimated_by_the_loop_that_runs():
    table = replace(EMPTY, optimizers=STEPS, host_call_s=6e-6)
    graph, cluster = capture_unallocated("gpt-tiny", (), 2).graph, load_cluster("1xH100")
    cost = CostModel(cluster=cluster, measurements=table, precision="amp")
    step = cost.estimate_optimizer(graph, graph.parameters[:1], ADAMW, cluster.device_kind(0))
    assert step.basis == "transferred"
    elements = graph.tensors[graph.parameters[0]].num_elements(0)
    assert step.seconds == pytest.approx(1e-3 * elements / 32)
    assert cost.optimizer_issue_s(2, ADAMW) * cost.host_factor(0) == pytest.approx(1e-4)
    plain = CostModel(cluster=cluster, precision="amp")
    foreach = cost.estimate_optimizer(graph, graph.parameters[:1], ADAMW, cluster.device_kind(0), loop="foreach")
    usual = plain.estimate_optimizer(graph, graph.parameters[:1], ADAMW, cluster.device_kind(0), loop="foreach")
    assert foreach == usual, "a loop that was not measured is predicted"


def test_rows_are_saved_as_they_come_and_a_second_call_takes_the_missing_ones(few_optimizers, monkeypatch):
    saved, clock = [], FakeClock()
    monkeypatch.setattr(measure_device._Writer.__init__, "__defaults__", (0.0,))

    def stop(table):
        saved.append(table)
        if len(table.ops) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(clock=clock, save=stop)
    left = saved[-1]
    assert len(left.ops) == 9
    again = measured(known=left)
    assert again.num_kept == 9
    assert again.table.ops[:9] == left.ops
    third = FakeClock()
    whole = measured(known=again.table, clock=third)
    assert (third.timed, whole.table.ops) == ([], again.table.ops)
    assert len(few_optimizers) == 1, "nor are optimizers timed again"
    other = replace(again.table, software="torch 2.12.0, Python 3.11")
    assert measured(known=other).num_kept == 0, "another torch keeps nothing"


def test_another_precision_gets_optimizers_of_its_own(few_optimizers):
    first = measured(precisions=["mixed"])
    measured(precisions=["bfloat16"], known=first.table)
    types = [(asked["states"], asked["gradients"]) for asked in few_optimizers]
    assert types == [(("float32",), ("float32",)), (("bfloat16",), ("bfloat16",))]


def test_conversions_that_an_interrupt_left_out_come_later():
    whole = measured(precisions=["amp"]).table
    ops = tuple(row for row in whole.ops if read_move_key(row.key) is None)
    assert len(ops) < len(whole.ops)
    again = measured(precisions=["amp"], known=replace(whole, ops=ops)).table
    assert {row.key for row in again.ops} == {row.key for row in whole.ops}


def test_issue_times_that_failed_once_are_taken_again():
    whole = measured(precisions=["amp"]).table
    first = whole.ops[0]
    lost = replace(whole, ops=(replace(first, forward_issue_s=0.0, backward_issue_s=0.0), *whole.ops[1:]))
    again = {row.key: row for row in measured(precisions=["amp"], known=lost).table.ops}
    assert again[first.key].forward_issue_s > 0


def test_a_table_of_another_device_is_refused_before_anything_is_timed():
    with pytest.raises(MeasurementError, match="tables are for devices 'A100' and 'H100'"):
        measure_device._refuse_other(replace(EMPTY, device="A100"), EMPTY)


def test_a_table_of_another_device_or_torch_is_told_when_it_is_used(tmp_path):
    path = write_document(EMPTY, tmp_path / "table.json")
    with pytest.raises(
        MeasurementError, match=r"was measured on H100 \(torch 2.13.0, Python 3.11\); the devices .* A100"
    ):
        load_cost_model(load_cluster("1xA100"), path, "amp")
    assert other_torch(None) == ""
    assert other_torch(replace(EMPTY, software=f"torch {torch.__version__}, Python 3")) == ""
    told = other_torch(replace(EMPTY, software="torch 1.0.0+cu999, Python 3"))
    assert told.startswith("The measurements were taken with torch 1.0.0+cu999 on H100; the installed torch is ")


def test_indices_stay_within_what_they_are_looked_up_in():
    graph = capture_unallocated("gpt-tiny", (), 2).graph
    bounds = index_bounds(graph, 2)
    vocabulary = next(t.shape[0].at(1) for t in graph.tensors if t.role == "parameter")
    assert {bounds[i] for i in graph.inputs} == {vocabulary}


@pytest.mark.parametrize("word", ["tf32", "float8", "mixed-float16"])
def test_what_torch_does_not_multiply_in_by_itself_is_refused(word):
    with pytest.raises(MeasurementError, match=f"Ops cannot be timed in precision '{word}'"):
        measure_device._check_precision(word)


def test_layers_that_do_not_run_leave_the_rest(monkeypatch):
    def broken(segments, *args, **options):
        raise RuntimeError("does not run")

    monkeypatch.setattr(measure_device, "measure_issue", broken)
    run = measured()
    assert all(name.startswith("issuing of layer ") for name in run.left_out)
    assert run.left_out
    assert {row.forward_issue_s for row in run.table.ops} == {0.0}


@pytest.mark.timeout(300)
def test_models_are_measured_on_an_accelerator():
    command = [sys.executable, "-m", "tests.training.device_worker", "mixed", "gpt-tiny", "mixtral-tiny", "resnet-tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["left_out"] for item in found] == [{}] * 3, "an op that mixes devices would be left out"
    assert all(item["issued"] > 20 for item in found)


def test_a_table_of_a_device_is_written_as_it_grows():
    saved = []
    rows, left_out = device_table_on(FakeClock(), EMPTY, sizes=SIZES, save=saved.append, every_s=0.0)
    assert left_out == {}
    assert len(saved[0]) == 1
    assert len(saved) > 100
    assert set(rows.device) == {"H100"}
    assert {"host.call", "optimizer.adamw.fused"} <= set(rows.op)
    clock = FakeClock()
    again, _ = device_table_on(clock, EMPTY, sizes=SIZES, known=rows)
    assert (clock.timed, set(again.op)) == ([], {"host.call"})
    newer = replace(EMPTY, software="torch 9, Python 3")
    assert len(device_table_on(clock, newer, sizes=SIZES, known=rows)[0]) == len(rows)
    assert len(make_records(seconds=())) == 0


def test_a_document_without_the_new_figures_is_read(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(
        json.dumps(
            {
                "schema": "meshwright/measurements/1",
                "device": "cpu",
                "software": "torch 2.13.0",
                "date": "",
                "ops": [{"key": "k", "forward_s": 1.0, "backward_s": 2.0, "num_samples": 3}],
            }
        )
    )
    table = read_document(Measurements, path)
    assert (table.host_call_s, table.ops[0].forward_issue_s) == (0.0, 0.0)
