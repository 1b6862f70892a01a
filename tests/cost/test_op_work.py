"""What a key says of an op: the same FLOPs as the captured graphs, and bytes by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.op_estimates import OpTable
from meshwright.cost.work import read_work, relatives
from meshwright.spec import Measurements, OpMeasurement, load_shipped_graph, op_key


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "resnet-tiny", "unet-tiny", "t5-tiny", "gnmt-tiny", "mixtral-tiny", "dlrm-tiny"]
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_keys_say_the_flops_that_capture_counted(name, batch_size):
    graph = load_shipped_graph(name)
    seen = 0
    for op in graph.ops:
        work = read_work(op_key(graph, op, batch_size))
        assert work is not None, f"{op.kind} belongs to no family"
        if op.flops.at(batch_size):
            seen += 1
            assert work.forward.flops == op.flops.at(batch_size)
            if op.backward_flops.at(batch_size) and work.family != "attention":
                assert work.backward.flops == op.backward_flops.at(batch_size)
    assert seen >= 5


def test_a_linear_op_by_hand():
    work = read_work("aten.linear.default(2x8x64:float32,32x64:float32,32:float32|111)")
    assert work.forward.flops == 2 * 16 * 64 * 32
    assert work.forward.num_bytes == 4 * (16 * 64 + 32 * 64 + 32 + 16 * 32)
    assert work.backward.flops == 2 * work.forward.flops
    assert work.accumulate.num_bytes == 3 * 4 * (32 * 64 + 32)
    assert work.sizes == (4.0, 5.0, 6.0, 0.0)


def test_a_frozen_weight_saves_a_product_and_its_accumulation():
    work = read_work("aten.linear.default(16x64:float32,32x64:float32|10)")
    assert work.backward.flops == work.forward.flops
    assert (work.accumulate.num_bytes, work.accumulate.num_kernels) == (0.0, 0)


def test_without_gradients_there_is_no_backward():
    assert read_work("aten.relu.default(2x3:float32|0)").backward.num_kernels == 0


def test_looking_up_rows_reads_rows_and_fills_the_gradient_of_the_table():
    work = read_work("aten.embedding.default(1000x10:float32,7:int64|10)")
    assert work.forward.num_bytes == 2 * 7 * 10 * 4 + 7 * 8
    assert work.backward.num_bytes >= 1000 * 10 * 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("aten.dropout.default(8:float32;p=0.0;train=True|1)", "aten.dropout.default(8:float32;p=0.1;train=True|1)"),
        ("aten.to.dtype(8:float32;dtype=float32|0)", "aten.to.dtype(8:float32;dtype=int64|0)"),
    ],
)
def test_what_may_be_a_view_is_one_only_if_it_does_nothing(one, other):
    assert (read_work(one).family, read_work(other).family) == ("view", "pointwise")


def test_another_road_through_torch_is_another_variant():
    tensors = "2x4x8x16:float32,2x4x8x16:float32,2x4x8x16:float32"
    plain, causal, dropped = (
        read_work(f"aten.scaled_dot_product_attention.default({tensors}{more}|111)")
        for more in ("", ";is_causal=True", ";dropout_p=0.1")
    )
    assert len({plain.variant, causal.variant, dropped.variant}) == 3
    assert plain.operator == causal.operator == dropped.operator


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("aten.zeros.default(;size=[2, 4, 64];dtype=float32|)", 2 * 4 * 64 * 4),
        ("aten.new_zeros.default(4x64:float32;size=[4, 161, 64]|0)", 4 * 161 * 64 * 4),
        ("aten.tril_indices.default(;row=27;col=27;offset=-1|)", 2 * 351 * 8),
        ("aten.tril_indices.default(;row=3;col=5;offset=1|)", 2 * (2 + 3 + 4) * 8),
        ("aten.tril_indices.default(;row=6;col=3;offset=0|)", 2 * (1 + 2 + 3 * 4) * 8),
        ("aten.tril_indices.default(;row=4;col=4;offset=-6|)", 0),
        ("aten.arange.default(;end=512|)", 512 * 8),
        ("aten.arange.start_step(;start=0;end=127;step=2;dtype=float32|)", 64 * 4),
    ],
)
def test_what_is_made_has_the_size_that_was_asked_for(key, written):
    assert read_work(key).forward.num_bytes == written


def test_batches_of_what_is_made_differ():
    graph = load_shipped_graph("gnmt-tiny")
    op = next(op for op in graph.ops if ("size", "[2, b, 64]") in op.attributes)
    keys = [op_key(graph, op, size) for size in (1, 64)]
    one, many = map(read_work, keys)
    assert many.forward.num_bytes == 64 * one.forward.num_bytes
    assert many.sizes != one.sizes
    assert relatives(keys[0]) == relatives(keys[1])
    row = OpMeasurement(key=keys[0], forward_s=1.0, backward_s=0.0, num_samples=1)
    table = OpTable(Measurements(device="cpu", software="", date="", ops=(row,)), "float32")
    assert table.find(table.key(graph, op, 1)) is not None
    assert table.find(table.key(graph, op, 64)) is None


def test_attention_that_drops_does_not_compute_its_scores_again():
    tensors = "2x4x8x16:float32,2x4x8x16:float32,2x4x8x16:float32"
    plain, dropped = (
        read_work(f"aten.scaled_dot_product_attention.default({tensors}{more}|111)") for more in ("", ";dropout_p=0.1")
    )
    assert plain.backward.flops == 2.5 * plain.forward.flops
    assert dropped.backward.flops == 2 * dropped.forward.flops


@pytest.mark.parametrize(
    "key",
    [
        "aten.zeros.default(;size=[2, b, 64];dtype=float32|)",
        "aten.arange.default(;end=8;step=0|)",
        "aten.linear.default(0x8:float32,4x8:float32|11)",
        "aten.relu.default(0:float32|1)",
        "aten.linear.default(|)",
        "aten.linear.default(8:float32,4x8:float8|11)",
        "aten.conv2d.default(1x3x4x4:float32,4x3x3x3:float32;stride=[0, 0]|11)",
        f"aten.linear.default({10**20}x{10**20}:float32,5x{10**20}:float32|11)",
        f"aten.relu.default({'9' * 5000}:float32|1)",
    ],
)
def test_damaged_keys_are_not_described(key):
    assert read_work(key) is None


@given(
    st.text(max_size=80)
    | st.from_regex(r"aten\.(linear|conv2d|sum|cat|lstm|bmm)\.x\([0-9x:float32,;=\[\]a-z]{0,60}\|[01]{0,4}\)")
)
@pytest.mark.long
def test_texts_that_are_no_keys_are_not_guessed(text):
    work = read_work(text)
    assert work is None or min(work.forward.flops, work.forward.num_bytes, work.backward.num_bytes) >= 0
