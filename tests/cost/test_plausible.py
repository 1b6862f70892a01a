"""Tables that claim what no device can do are refused: other units, damaged rows, rows that contradict each other."""

import pytest

from meshwright.cost import CostModel, load_cost_model
from meshwright.cost.op_estimates import collect_traced
from meshwright.records import make_records
from meshwright.records.parquet import write_records
from meshwright.spec import (
    ClusterError,
    GraphError,
    MeasurementError,
    Optimizer,
    PlanError,
    load_cluster,
    load_shipped_graph,
)

GRAPH = load_shipped_graph("gpt-tiny")


def table(path, seconds, *, op="matmul", shapes="m=4096;n=4096;k=4096", device="H100", dtype="bfloat16"):
    count = len(seconds)
    return write_records(
        make_records(op=[op] * count, shapes=[shapes] * count, dtype=dtype, device=device, seconds=seconds), path
    )


@pytest.mark.parametrize(("seconds", "fits"), [(2e-4, True), (200.0, False), (3600.0, False), (1e-9, False)])
def test_products_in_another_unit(tmp_path, seconds, fits):
    path = table(tmp_path / "table.parquet", [seconds])
    cluster = load_cluster("2xH100")
    if fits:
        assert load_cost_model(cluster, path, "bfloat16").precision == "bfloat16"
    else:
        with pytest.raises(MeasurementError, match=r"expected about .*Check the unit"):
            load_cost_model(cluster, path, "bfloat16")


def test_rows_of_other_devices_are_not_judged(tmp_path):
    rows = make_records(
        op="matmul",
        shapes=["m=4096;n=4096;k=4096"] * 2,
        dtype="bfloat16",
        device=["H100", "abacus"],
        seconds=[2e-4, 3600.0],
    )
    load_cost_model(load_cluster("2xH100"), write_records(rows, tmp_path / "table.parquet"), "bfloat16")


def test_contradictory_rows(tmp_path):
    path = table(tmp_path / "table.parquet", [2e-4, 3e-4])
    with pytest.raises(MeasurementError, match=r"1 rows contradict another row .* Keep the right one"):
        load_cost_model(load_cluster("2xH100"), path, "bfloat16")


def test_the_backward_of_another_operator_is_not_taken():
    rows = make_records(
        op=["aten.log", "aten._log_softmax_backward_data", "aten.log_backward"],
        phase="forward",
        shapes=["4x8:float32|", "4x8:float32,4x8:float32|", "4x8:float32|"],
        dtype="float32",
        device="cpu",
        seconds=[1e-3, 5e-3, 2e-3],
    )
    traced = collect_traced(rows)
    assert traced._backward("log", ["4x8:float32"], ("4x8:float32",)) == 2e-3
    assert traced._backward("softmax", ["4x8:float32"], ("4x8:float32",)) is None


def test_odd_questions_are_refused():
    cost = CostModel(cluster=load_cluster("2xH100"))
    kind = cost.cluster.device_kind(0)
    for batch in (0, -1, 1.5):
        with pytest.raises(GraphError, match="at least 1"):
            cost.estimate_ops(GRAPH, batch, kind)
    with pytest.raises(MeasurementError, match="loop over the parameters is 'bogus'"):
        cost.estimate_optimizer(GRAPH, GRAPH.parameters, Optimizer(), kind, loop="bogus")
    with pytest.raises(PlanError, match="precision 'int3'"):
        CostModel(cluster=cost.cluster, precision="int3")
    with pytest.raises(MeasurementError, match="end 'middle'"):
        cost.at_end("middle")
    for rank in (-1, 99):
        with pytest.raises(ClusterError, match="ranks 0 to 1"):
            cost.host_transfer_seconds(rank, 1e6)
