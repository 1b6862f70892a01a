"""A table of one device as rows and back: nothing is lost."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.records import concat_records, from_measurements, make_records, save_measurements, to_measurements
from meshwright.records.parquet import read_records, write_records
from meshwright.spec import (
    MIN_SECONDS,
    BatchMeasurement,
    MeasurementError,
    Measurements,
    OpMeasurement,
    OptimizerMeasurement,
    TransferMeasurement,
)
from meshwright.spec.measurements import TransferKind

times = st.just(0.0) | st.floats(MIN_SECONDS, 100)
keys = st.sampled_from(
    [
        "aten.linear.default(4x8:float32,8x8:float32|11)",
        "aten.sum.dim_IntList(4x8:bfloat16;dim=[0, -1];keepdim=False|1)",
        "aten.arange.default(|)",
        "aten.view.default(4x8:float32;size=(4, 8)|0)",
        "made up",
        "made(up",
        "m=4(3)",
    ]
)
ops = st.builds(
    OpMeasurement,
    key=keys,
    forward_s=times,
    backward_s=times,
    accumulate_s=times,
    num_samples=st.integers(0, 10**6),
    spread=times,
    forward_issue_s=times,
    backward_issue_s=times,
)
steps = st.builds(
    OptimizerMeasurement,
    kind=st.sampled_from(["sgd", "adamw", "adamw.fused", "bucket_copy"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    num_elements=st.integers(0, 10**12),
    num_tensors=st.integers(0, 10**6),
    seconds=times,
    issue_s=times,
)
transfers = st.builds(
    TransferMeasurement,
    kind=st.sampled_from(TransferKind.__args__),
    num_ranks=st.integers(2, 4096),
    num_bytes=st.integers(0, 2**50),
    seconds=st.floats(1e-9, 100),
    spread=times,
    host_s=times,
)
batches = st.builds(
    lambda seconds, **facts: BatchMeasurement(seconds=seconds[0], p90_s=seconds[1], p99_s=seconds[2], **facts),
    seconds=st.lists(st.floats(MIN_SECONDS, 100), min_size=3, max_size=3).map(sorted),
    model=st.sampled_from(["gpt-tiny", "gpt-tiny(sequence_length=64)", "a b/mine.py:f", "model.x", "m=1;n=2", "|"]),
    batch_size=st.integers(1, 10**6),
    num_samples=st.integers(0, 10**6),
)
tables = st.builds(
    Measurements,
    device=st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
    software=st.just("torch 2.13"),
    date=st.just("2026-01-01 10:00 UTC"),
    conditions=st.text(max_size=20).filter(lambda text: text.isprintable()),
    ops=st.lists(ops, max_size=5, unique_by=lambda row: row.key).map(tuple),
    optimizers=st.lists(
        steps, max_size=5, unique_by=lambda row: (row.kind, row.dtype, row.num_elements, row.num_tensors)
    ).map(tuple),
    transfers=st.lists(transfers, max_size=5, unique_by=lambda row: (row.kind, row.num_ranks, row.num_bytes)).map(
        tuple
    ),
    overhead_s=st.floats(1e-9, 1),
    host_call_s=times,
    batches=st.lists(batches, max_size=5, unique_by=lambda row: (row.model, row.batch_size)).map(tuple),
)


@given(tables)
def test_nothing_is_lost(table):
    assert to_measurements(from_measurements(table), table.device) == table


def test_every_field_is_carried():
    """A field that is added to the documents has to be added to the rows, and to the strategies above."""
    fields = {cls.__name__: len(dataclasses.fields(cls)) for cls in (OpMeasurement, OptimizerMeasurement)}
    assert fields == {"OpMeasurement": 8, "OptimizerMeasurement": 6}
    assert (len(dataclasses.fields(TransferMeasurement)), len(dataclasses.fields(BatchMeasurement))) == (6, 6)
    assert len(dataclasses.fields(Measurements)) == 10


def test_nothing_is_lost_in_a_file(tmp_path):
    op = OpMeasurement(key="aten.relu.default(4:float32|1)", forward_s=0.1, backward_s=1 / 3, num_samples=7, spread=0.5)
    table = Measurements(device="cpu", software="torch", date="2026", conditions="2 cores", ops=(op,), overhead_s=1e-5)
    path = write_records(from_measurements(table), tmp_path / "t.parquet")
    assert to_measurements(read_records(path), "cpu") == table


def batch(model, batch_size, seconds):
    return BatchMeasurement(
        model=model, batch_size=batch_size, seconds=seconds, p90_s=2 * seconds, p99_s=3 * seconds, num_samples=20
    )


def test_newer_batches_renew_those_of_the_same_model_and_size_in_a_file(tmp_path):
    path = tmp_path / "t.parquet"
    old = Measurements(device="cpu", software="s", date="d", batches=(batch("a", 1, 1.0), batch("a", 2, 2.0)))
    save_measurements(old, path)
    save_measurements(replace(old, device="H100"), path)
    save_measurements(replace(old, date="e", software="t", batches=(batch("a", 2, 9.0), batch("b", 1, 3.0))), path)
    records = read_records(path)
    found = to_measurements(records, "cpu").batches
    assert {(row.model, row.batch_size): row for row in found} == {
        ("a", 1): batch("a", 1, 1.0),
        ("a", 2): batch("a", 2, 9.0),
        ("b", 1): batch("b", 1, 3.0),
    }
    assert to_measurements(records, "H100").batches == old.batches


def test_batches_without_percentiles_are_left_aside():
    records = make_records(
        op="model.m",
        shapes=["batch_size=1", "batch_size=1;percentile=90", "batch_size=2", "batch_size=2;percentile=99"],
        device="d",
        seconds=[1.0, 2.0, 3.0, 4.0],
    )
    table = to_measurements(records, "d")
    assert (table.batches, table.ops) == ((), ())


def test_one_device_is_taken_out_of_many():
    tables = [
        Measurements(device=name, software="s", date="d", overhead_s=overhead)
        for name, overhead in (("H100", 1e-5), ("A100", 2e-5))
    ]
    public = make_records(op="matmul", shapes="m=1;n=2;k=3", device="A100", seconds=[1.0])
    records = concat_records([*map(from_measurements, tables), public])
    assert to_measurements(records, "A100").overhead_s == 2e-5
    assert to_measurements(records, "H100").overhead_s == 1e-5
    with pytest.raises(MeasurementError, match=r"no rows of device 'H10' \(did you mean 'H100'\?\)"):
        to_measurements(records, "H10")


def test_rows_that_such_a_table_cannot_hold_are_left_aside():
    group = "bytes=4;ranks=2;groups=4;stride=2;nodes=2;devices_per_node=4"
    records = make_records(
        op=["all_reduce", "matmul", "optimizer.odd", "attention_decode"],
        shapes=[group, "m=1;n=1;k=1", "m=3", "batch=1"],
        phase=["", "", "step", ""],
        device="d",
        seconds=np.ones(4),
    )
    table = to_measurements(records, "d")
    assert (table.ops, table.optimizers, table.transfers) == ((), (), ())


def test_a_group_that_is_alone_on_a_larger_node_is_a_transfer():
    shapes = "bytes=64;ranks=2;groups=1;stride=1;nodes=1;devices_per_node=8"
    records = make_records(op="all_gather", shapes=shapes, phase=["", "host"], device="d", seconds=[2.0, 1.0])
    (row,) = to_measurements(records, "d").transfers
    assert row == TransferMeasurement(kind="all_gather", num_ranks=2, num_bytes=64, seconds=2.0, host_s=1.0)


def test_a_table_of_no_device_is_refused():
    with pytest.raises(MeasurementError, match="no device"):
        from_measurements(Measurements(device="", software="s", date="d", overhead_s=1.0))
