"""The whole table: two real ranks measure everything at once, the file is read back, and the cost model believes it."""

from dataclasses import replace

import pytest
import torch

from meshwright.cost import CostModel
from meshwright.measurement import measure_machine, merge_measurements
from meshwright.measurement.optimizer_timing import make_optimizer
from meshwright.spec import (
    MeasurementError,
    Measurements,
    OpMeasurement,
    Optimizer,
    OptimizerMeasurement,
    TransferMeasurement,
    load_cluster,
    read_document,
    write_document,
)
from tests.measurement.sources import perceptron

SIZES = (4, 2**17)


@pytest.mark.distributed
def test_a_machine_is_measured_stored_and_believed(tmp_path, warm_ranks):
    table = measure_machine(
        perceptron,
        (2, 8),
        num_ranks=2,
        repeats=3,
        optimizers=(Optimizer(kind="adamw"),),
        transfer_sizes=SIZES,
        overhead_s=1e-4,
        timeout_s=100,
    )
    assert [(row.kind, row.num_ranks, row.num_bytes) for row in table.transfers] == [
        (kind, 2, size) for size in SIZES for kind in ("send", "all_reduce")
    ]
    assert {row.kind for row in table.optimizers} == {"adamw", "bucket_copy"}
    assert "2 processes at once" in table.conditions
    assert "torch" in table.software
    assert read_document(Measurements, write_document(table, tmp_path / "table.json")) == table

    cluster = load_cluster("2xcpu")
    cost, kind = CostModel(cluster=cluster, measurements=table), cluster.device_kind(0)
    rows = {row.key: row for row in table.ops}
    for batch_size in (2, 8):
        graph = perceptron(batch_size).graph
        costs = cost.estimate_ops(graph, batch_size, kind)
        assert set(costs.basis) == {"measured"}
        assert set(costs.forward_s.tolist()) <= {row.forward_s for row in rows.values()}
    assert len(rows) == 2 * len(graph.ops)
    assert all(row.num_samples >= 2 * 3 for row in table.ops)
    assert cost.collective_seconds("send", (0, 1), 4) == pytest.approx(table.transfers[0].seconds)
    assert cost.collective_seconds("all_reduce", (0, 1), 4) == pytest.approx(table.transfers[1].seconds)
    assert cost.optimizer_seconds(graph, graph.parameters, Optimizer(), kind) > 0
    assert cost.overhead_s == 1e-4


def test_a_model_without_batch_sizes_is_refused():
    with pytest.raises(MeasurementError, match="batch sizes"):
        measure_machine(perceptron)


def table(seconds, device="cpu", **facts):
    return Measurements(
        device=device,
        software="s",
        date="d",
        ops=tuple(OpMeasurement(key=k, forward_s=v, backward_s=v, num_samples=1) for k, v in seconds.items()),
        **facts,
    )


def test_new_figures_replace_old_ones_and_the_rest_stays():
    send = TransferMeasurement(kind="send", num_ranks=2, num_bytes=4, seconds=1.0)
    step = OptimizerMeasurement(kind="sgd", dtype="float32", num_elements=1, num_tensors=1, seconds=1.0)
    old = table({"a": 1.0, "b": 2.0}, transfers=(send,), optimizers=(step,), overhead_s=1.0)
    new = table(
        {"b": 3.0, "c": 4.0}, transfers=(replace(send, seconds=9.0),), optimizers=(replace(step, kind="adamw"),)
    )
    merged = merge_measurements(old, new)
    assert {row.key: row.forward_s for row in merged.ops} == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert [row.seconds for row in merged.transfers] == [9.0]
    assert [row.kind for row in merged.optimizers] == ["sgd", "adamw"]
    assert merged.overhead_s == 1.0
    assert merge_measurements(old, replace(new, overhead_s=2.0)).overhead_s == 2.0


def test_tables_of_unlike_devices_do_not_mix():
    with pytest.raises(MeasurementError, match="'cpu' and 'gpu'"):
        merge_measurements(table({}), table({}, device="gpu"))


def test_every_optimizer_is_torchs_own():
    for optimizer in (Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True), Optimizer(kind="adamw")):
        parameter = torch.ones(4, requires_grad=True)
        parameter.grad = torch.ones(4)
        update = make_optimizer(optimizer, [parameter])
        update.step()
        states = [value for value in update.state[parameter].values() if value is not None and value.ndim]
        assert len(states) == optimizer.num_states
