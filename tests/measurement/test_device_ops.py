"""Ops by themselves on a device, by a clock that has none: what is made, what is called, and what becomes a row."""

import pytest
import torch
from torch import fx, nn

from meshwright.measurement import (
    DeviceOp,
    InputSpec,
    TableSizes,
    make_move,
    measure_device_ops,
    measure_device_optimizers,
    measure_device_table,
)
from meshwright.records.one_device import read_device_row
from meshwright.spec import MeasurementError
from tests.measurement.clocks import FakeClock, HostClock

SIZES = TableSizes(
    rows=(8,),
    widths=(16, 32),
    scores=((2, 8),),
    depths=(4,),
    tokens=(8,),
    vocabularies=(11,),
    images=((2, 4, 8),),
    products=((8, 16),),
    attention=((2, 2, 8, 4),),
    recurrent=((2, 3, 8, 1),),
)


def op_of(call, *feeds, state=(), key="aten.test.default(|)", **facts):
    """An op whose module calls a function on its feeds, then on its parameters."""
    root, graph = nn.Module(), fx.Graph()
    values = [graph.placeholder(f"value_{place}") for place in range(len(feeds))]
    for name, value in dict(state).items():
        setattr(root, name, value)
        values.append(graph.get_attr(name))
    graph.output((graph.call_function(call, tuple(values)),))
    facts = {"state": {}, "differentiable": (True,), **facts}
    return DeviceOp(key=key, module=fx.GraphModule(root, graph), feeds=feeds, **facts)


def run(*ops, clock=None, **options):
    clock, rows = clock or FakeClock(), []
    left_out = measure_device_ops(ops, clock, rows.append, **options)
    return clock, rows, left_out


def noise(*shape, **facts):
    return InputSpec(**{"shape": shape, "strides": None, "dtype": "float32", "requires_grad": True, **facts})


def test_every_pass_is_timed_and_the_hosts_seconds_stay_apart():
    weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    linear = op_of(nn.functional.linear, noise(4, 8), state={"weight": weight}, key="k")
    clock, (row,), left_out = run(linear, clock=FakeClock(seconds=lambda n: n * 1e-5), issued={"k": (3e-6, 4e-6)})
    assert left_out == {}
    assert (row.key, row.forward_s, row.backward_s, row.accumulate_s) == pytest.approx(("k", 1e-5, 2e-5, 3e-5))
    assert (row.forward_issue_s, row.backward_issue_s) == (3e-6, 4e-6)
    assert clock.released == 1


def test_a_backward_reads_as_many_copies_as_exceed_the_cache():
    op = op_of(torch.tanh, noise(256))
    for cache_bytes, copies in ((0, 1), (256 * 4, 2), (256 * 10, 5), (10**9, 8)):
        clock, _, _ = run(op, clock=FakeClock(cache_bytes=cache_bytes))
        assert clock.timed == [1, copies]


def test_views_start_no_kernel_and_frozen_inputs_have_no_backward():
    clock, (row,), _ = run(op_of(lambda x: x.view(2, 4), noise(8), is_view=True))
    assert (row.forward_s, row.backward_s) == (0.0, 1e-5)
    clock, (row,), _ = run(op_of(torch.tanh, noise(8, requires_grad=False), differentiable=(False,)))
    assert (clock.timed, row.backward_s) == ([1], 0.0)


def test_an_op_may_write_into_its_input():
    _, rows, left_out = run(op_of(torch.relu_, noise(8), is_in_place=True), clock=HostClock())
    assert (len(rows), left_out) == (1, {})


def test_inputs_have_the_layout_and_range_that_the_model_gives_them():
    seen = []

    def look(table, places, grown):
        seen.append((places.max().item(), grown.stride()))
        return nn.functional.embedding(places, table)

    table, places = noise(5, 4), InputSpec(shape=(64,), strides=None, dtype="int64", bound=5)
    _, _, left_out = run(op_of(look, table, places, noise(3, 4, strides=(0, 1))))
    assert left_out == {}
    assert all(most < 5 for most, _ in seen)
    assert seen[0][1] == (0, 1)


def test_what_does_not_run_is_left_out_and_the_rest_goes_on():
    def fails(_):
        raise RuntimeError("no kernel for this\nmore")

    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    ops = [op_of(fails, noise(8), key="a"), op_of(full, noise(8), key="b"), op_of(torch.tanh, noise(8), key="c")]
    _, rows, left_out = run(*ops)
    assert left_out == {"a": "RuntimeError: no kernel for this", "b": "out of memory"}
    assert [row.key for row in rows] == ["c"]


def test_a_device_that_is_lost_ends_the_measurement():
    def fails(_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    rows = []
    with pytest.raises(MeasurementError, match="b left cpu unusable"):
        measure_device_ops(
            [op_of(torch.tanh, noise(8), key="a"), op_of(fails, noise(8), key="b")], FakeClock(), rows.append
        )
    assert [row.key for row in rows] == ["a"], "what was timed before is kept"


def test_conversions_and_sums_have_keys_of_their_own():
    ops = [make_move(6, "float32", "bfloat16"), make_move(6, "float32", "float32", adds=True)]
    _, rows, _ = run(*ops)
    assert [row.key for row in rows] == [
        "aten._to_copy.default(6:float32;dtype=torch.bfloat16|0)",
        "aten.add_.Tensor(6:float32,6:float32|00)",
    ]


def test_every_optimizer_is_timed_by_every_loop():
    rows = measure_device_optimizers(FakeClock(), states=("float32",), gradients=("float32", "bfloat16"), sizes=(16,))
    kinds = [row.kind for row in rows if row.dtype == "float32"]
    assert kinds == [
        *("adamw", "adamw.foreach", "adamw.fused"),
        *("sgd", "sgd.foreach", "sgd.fused"),
        *("sgd+momentum", "sgd+momentum.foreach", "sgd+momentum.fused"),
        "bucket_copy",
    ]
    assert [row.kind for row in rows if row.dtype == "bfloat16"] == ["bucket_copy"]
    assert {row.issue_s > 0 for row in rows if row.kind != "bucket_copy"} == {True}


def test_a_table_of_a_device_has_all_that_the_shipped_one_has_and_more():
    pytest.importorskip("pyarrow")
    from meshwright.validation import load_records

    rows = []
    assert measure_device_table(FakeClock(), rows.append, sizes=SIZES) == {}
    names = {row["op"] for row in rows} | {row["kernel"] for row in rows if row["op"] == "matmul"}
    shipped = load_records("h100_ops")
    known = {op for op in shipped.op if not op.startswith(("optimizer.", "rms_norm_written_out"))}
    assert known | set(shipped.kernel[shipped.op == "matmul"]) <= names
    assert names >= {"aten.scaled_dot_product_attention_backward", "aten.lstm", "aten.gru_backward"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    assert "aten.add_.widened" in {row["op"] for row in rows if row["dtype"] == "bfloat16"}
    told = [(row["op"], row["phase"], row["shapes"], row["dtype"], row["kernel"]) for row in rows]
    assert len(told) == len(set(told))
    assert read_device_row("matmul", "m=8;n=8;k=16", "aten.mm") == ("aten.mm", ((8, 16), (16, 8)))


def test_a_table_is_taken_up_where_it_was_left(monkeypatch):
    rows = []
    left_out = measure_device_table(FakeClock(), rows.append, sizes=SIZES, dtypes=("float32",), budget_s=-1.0)
    assert (rows, set(left_out)) == ([], {"the rest"})
    measure_device_table(FakeClock(), rows.append, sizes=SIZES, dtypes=("float32",))
    clock, again = FakeClock(), []
    known = {(row["op"], row["shapes"], row["kernel"]) for row in rows[3:]}
    measure_device_table(
        clock,
        again.append,
        sizes=SIZES,
        dtypes=("float32",),
        kept=lambda row: (row["op"], row["shapes"], row["kernel"]) in known,
    )
    assert again == rows[:3]
    assert len(clock.timed) == 3
