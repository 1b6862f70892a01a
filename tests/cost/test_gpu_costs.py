"""Ops on CUDA devices: the kernels that torch launches for them, their rates, casts and sums of gradients."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel, read_software
from meshwright.cost.autocast import stays_single
from meshwright.cost.gpu.gpu_products import GpuModel, Rate, is_modelled, shipped_gpu
from meshwright.cost.gpu.launches import attention_seconds, kernel_of
from meshwright.cost.software import PYTORCH
from meshwright.cost.work import key_in
from meshwright.cost.work.op_calls import read_call
from meshwright.spec import decode_document, encode_document, load_cluster
from scripts.gpu_fit import fit_shipped, kernels_of, left_out, load_ops, measured_kind, predicted
from tests.cost.facts import KIND as PROCESSOR
from tests.cost.facts import B, GraphMaker

H100 = load_cluster("H100")
KIND = measured_kind()
AMPERE = load_cluster("A100").device_kinds[0]
ROWS = [row for row in load_ops() if kernels_of(row, KIND.num_multiprocessors)]


def costs(graph, batch_size, precision="float32", cluster=H100):
    return CostModel(cluster=cluster, precision=precision).estimate_ops(graph, batch_size, cluster.device_kinds[0])


def one_op(kind, shapes, output, *, parameters=1, attributes=(), integers=(), frozen=(), saved=True):
    """An op whose first input is made by another; behind it come parameters."""
    make = GraphMaker()
    inputs = []
    for place, shape in enumerate(shapes):
        role = "activation" if place == 0 else "parameter" if place <= parameters else "buffer"
        dtype = "int64" if place in integers else "float32"
        grad = place not in (*integers, *frozen)
        inputs.append(make.tensor(f"t{place}", shape, role=role, dtype=dtype, grad=grad))
    make.op("aten.randn.default", (), (inputs[0],))
    y = make.tensor("y", output)
    make.op(kind, tuple(inputs), (y,), attributes=attributes, saved=tuple(inputs) if saved else ())
    return make.graph()


def measured(op, dtype, *shapes):
    (found,) = [
        row.seconds for row in load_ops() if (row.op, row.dtype) == (op, dtype) and row.shapes[: len(shapes)] == shapes
    ]
    return found


def off(ratios):
    return np.abs(np.log(ratios))


def test_the_shipped_rates_are_those_of_the_shipped_rows():
    def numbers(value):
        if isinstance(value, dict):
            return [number for part in value.values() for number in numbers(part)]
        if isinstance(value, list):
            return [number for part in value for number in numbers(part)]
        return [value] if isinstance(value, int | float) else []

    shipped = encode_document(shipped_gpu())
    assert numbers(encode_document(fit_shipped())) == pytest.approx(numbers(shipped), rel=1e-2)
    assert decode_document(GpuModel, shipped, "again") == shipped_gpu()


def test_rates_explain_the_rows_and_the_largest_of_those_left_out():
    fitted = off([row.seconds / predicted(shipped_gpu().rates, row, KIND) for row in ROWS])
    assert np.median(fitted) < 0.025
    assert np.quantile(fitted, 0.9) < 0.12
    larger = off([ratio for _, ratio in left_out(ROWS, KIND, "large")])
    assert np.median(larger) < 0.04
    assert np.quantile(larger, 0.9) < 0.2


@pytest.mark.parametrize("row", [1, 64, 768, 1000, 2048, 5000, 11008, 10**6])
def test_the_share_of_a_row_lies_between_those_of_its_neighbours(row):
    rate = Rate(fixed_s=1e-6, rows=(768, 2048, 11008), shares=(0.4, 0.6, 0.5), cached=2.0, turn_s=1e-9)
    share = rate.share(row)
    if row < 768:
        assert share < 0.4
    elif row <= 2048:
        assert 0.4 <= share <= 0.6
    else:
        assert 0.5 <= share <= 0.6
    assert replace(rate, rows=(1,), shares=(0.7,)).share(row) == 0.7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_and_activations_take_what_was_measured_for_their_kernels(dtype):
    """Inputs that another kernel has not just made come from memory, so graphs take no less than repeated calls."""
    shape = (8192, 4096)
    norm = one_op(
        "aten.layer_norm.default",
        ((B, 4096), (4096,), (4096,)),
        (B, 4096),
        parameters=2,
        attributes=(("normalized_shape", "[4096]"),),
    )
    found = costs(norm, 8192, dtype)
    assert found.forward_s[-1] == pytest.approx(measured("aten.native_layer_norm", dtype, shape), rel=0.1)
    backward = measured("aten.native_layer_norm_backward", dtype, shape, shape)
    assert found.backward_s[-1] == pytest.approx(backward, rel=0.1)
    assert found.basis[-1] == "regressed"
    gelu = costs(one_op("aten.gelu.default", ((B, 4096),), (B, 4096)), 8192, dtype)
    assert gelu.forward_s[-1] == pytest.approx(measured("aten.gelu", dtype, shape), rel=0.1)
    assert gelu.backward_s[-1] == pytest.approx(measured("aten.gelu_backward", dtype, shape, shape), rel=0.1)


def test_a_loss_is_log_softmax_and_the_pick_of_a_value():
    loss = one_op("aten.cross_entropy_loss.default", ((B, 50257), (B,)), (), parameters=0, integers=(1,), saved=False)
    found = costs(loss, 8192)
    shape = (8192, 50257)
    forward = measured("aten._log_softmax", "float32", shape) + measured("aten.nll_loss_forward", "float32", shape)
    backward = measured("aten._log_softmax_backward_data", "float32", shape, shape)
    backward += measured("aten.nll_loss_backward", "float32", shape)
    assert found.forward_s[-1] == pytest.approx(forward, rel=0.05)
    assert found.backward_s[-1] == pytest.approx(backward, rel=0.05)


@pytest.mark.parametrize(("tokens", "width"), [(2048, 768), (8192, 2048)])
def test_the_gradient_of_an_embedding_fills_the_table_and_adds_rows(tokens, width):
    graph = one_op(
        "aten.embedding.default", ((30522, width), (B,)), (B, width), parameters=0, integers=(1,), saved=False
    )
    expected = measured("aten.embedding_dense_backward", "float32", (tokens, width), (tokens,), (30522, width))
    assert costs(graph, tokens).backward_s[-1] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("shape", "rel"), [((64, 56, 56), 0.15), ((512, 28, 28), 0.15), ((2048, 7, 7), 0.15)])
def test_batch_norm_is_held_up_by_its_blocks_a_channel_each(shape, rel):
    channels = shape[0]
    graph = one_op(
        "aten.batch_norm.default",
        ((B, *shape), *[(channels,)] * 4),
        (B, *shape),
        parameters=2,
        frozen=(3, 4),
        attributes=(("training", "True"),),
    )
    found, whole = costs(graph, 64), (64, *shape)
    assert found.forward_s[-1] == pytest.approx(measured("aten.native_batch_norm", "float32", whole), rel=rel)
    backward = measured("aten.native_batch_norm_backward", "float32", whole, whole)
    assert found.backward_s[-1] == pytest.approx(backward, rel=rel)


def test_dropout_writes_a_mask_and_reads_it_back():
    graph = one_op("aten.dropout.default", ((B, 4096),), (B, 4096), attributes=(("p", "0.1"), ("train", "True")))
    found = costs(graph, 32768)
    assert found.forward_s[-1] == pytest.approx(measured("aten.native_dropout", "float32", (32768, 4096)), rel=0.05)
    moved = 32768 * 4096 * (4 + 1 + 4) / KIND.memory_bandwidth_bytes_per_s
    assert found.backward_s[-1] == pytest.approx(moved / shipped_gpu().rate("pointwise", 4).share(1), rel=0.02)


def test_windows_of_a_pooling_are_looked_through_both_ways():
    attributes = (("kernel_size", "[3, 3]"), ("stride", "[2, 2]"), ("padding", "[1, 1]"))
    graph = one_op("aten.max_pool2d.default", ((B, 64, 112, 112),), (B, 64, 56, 56), attributes=attributes)
    found = costs(graph, 128)
    forward = measured("aten.max_pool2d", "float32", (128, 64, 112, 112))
    assert found.forward_s[-1] == pytest.approx(forward, rel=0.1)
    # Each input is in up to four windows, a quarter as many outputs look at nine inputs each.
    assert found.backward_s[-1] == pytest.approx(forward * 16 / 9, rel=0.1)


def test_the_bias_of_a_linear_layer_gets_the_sum_of_the_rows():
    def backward(biased):
        shapes = ((B, 1024), (4096, 1024), *([(4096,)] * biased))
        graph = one_op("aten.linear.default", shapes, (B, 4096), parameters=2)
        return costs(graph, 8192, "bfloat16").backward_s[-1]

    assert backward(1) - backward(0) == pytest.approx(measured("aten.sum.dim0", "bfloat16", (8192, 4096)), rel=0.2)


@pytest.mark.parametrize("cluster", ["H100", "cpu"])
def test_the_gradients_of_what_two_ops_read_are_added_on_gpus(cluster):
    def graph(reads):
        make = GraphMaker()
        x = make.tensor("x", (B, 4096))
        make.op("aten.randn.default", (), (x,))
        for number in range(reads):
            make.op("aten.neg.default", (x,), (make.tensor(f"y{number}", (B, 4096)),))
        return make.graph()

    found = load_cluster(cluster)
    once, twice = (costs(graph(reads), 32768, cluster=found).backward_s for reads in (1, 2))
    added = twice[-1] - once[-1]
    if cluster == "cpu":
        assert added == 0.0
    else:
        assert added == pytest.approx(measured("aten.add", "float32", (32768, 4096), (32768, 4096)), rel=0.05)
        # The first reader's gradient is there before anything is added.
        assert twice[1] == once[1]


def test_autocast_reads_and_writes_what_products_take_in():
    graph = one_op("aten.linear.default", ((B, 4096), (4096, 4096)), (B, 4096))
    plain, cast = (costs(graph, 8192, precision) for precision in ("bfloat16", "amp"))
    input_s, weight_s = (measured("aten._to_copy", "float32", (rows, 4096)) for rows in (8192, 2048))
    assert cast.forward_s[-1] - plain.forward_s[-1] == pytest.approx(input_s + 2 * weight_s, rel=0.1)
    # Back, gradients are widened.
    assert cast.backward_s[-1] - plain.backward_s[-1] > input_s + 2 * weight_s


def test_the_part_of_a_split_tensor_hands_its_gradient_back_as_a_copy():
    make = GraphMaker()
    x = make.tensor("x", (B, 4096))
    make.op("aten.randn.default", (), (x,))
    parts = tuple(make.tensor(f"p{number}", (B, 2048), storage=x) for number in range(2))
    make.op("aten.chunk.default", (x,), parts, attributes=(("chunks", "2"), ("dim", "-1")))
    found = costs(make.graph(), 32768)
    assert found.forward_s[-1] == 0.0
    assert found.backward_s[-1] == pytest.approx(
        measured("aten.cat.dim1", "float32", (32768, 2048), (32768, 2048)), rel=0.5
    )


def rotated():
    """Positions times frequencies, multiplied with an activation and cast back."""
    make = GraphMaker()
    x = make.tensor("x", (B, 128, 64))
    make.op("aten.randn.default", (), (x,))
    positions = make.tensor("positions", (128,), grad=False)
    make.op("aten.arange.default", (), (positions,), attributes=(("end", "128"), ("dtype", "float32")))
    angles = make.tensor("angles", (128, 64), grad=False)
    frequencies = make.tensor("frequencies", (64,), grad=False)
    make.op("aten.arange.default", (), (frequencies,), attributes=(("end", "64"), ("dtype", "float32")))
    make.op("aten.outer.default", (positions, frequencies), (angles,))
    cosine = make.tensor("cosine", (128, 64), grad=False)
    make.op("aten.cos.default", (angles,), (cosine,))
    turned = make.tensor("turned", (B, 128, 64))
    make.op("aten.mul.Tensor", (x, cosine), (turned,), saved=(x, cosine))
    back = make.tensor("back", (B, 128, 64), storage=turned)
    make.op("aten.type_as.default", (turned, x), (back,))
    return make.graph()


def test_what_is_made_of_numbers_stays_float32_until_it_is_cast_back():
    graph = rotated()
    names = {graph.tensors[i].name for i in stays_single(graph)}
    assert names == {"positions", "frequencies", "angles", "cosine", "turned"}
    narrow, wide = (costs(graph, 1024, precision) for precision in ("bfloat16", "float32"))
    # The cast is a kernel in bfloat16 alone; the product writes as many bytes in both.
    assert narrow.forward_s[-1] > wide.forward_s[-1] == 0.0
    assert narrow.forward_s[-2] == pytest.approx(wide.forward_s[-2], rel=0.4)


def attention(
    queries=1024,
    width=64,
    *,
    keys=None,
    causal=True,
    mask=None,
    dtype="bfloat16",
    kind=KIND,
    batch=16,
    heads=32,
    software=PYTORCH,
):
    make = GraphMaker()
    sizes = zip("qkv", (queries, keys or queries, keys or queries), strict=True)
    parts = [make.tensor(name, (B, heads, size, width)) for name, size in sizes]
    for part in parts:
        make.op("aten.randn.default", (), (part,))
    if mask is not None:
        learned = make.tensor("learned", (1, heads, queries, queries), role="parameter")
        storage = learned if mask == "a view" else None
        parts.append(make.tensor("mask", (1, heads, queries, queries), grad=mask == "a view", storage=storage))
        make.op("aten.permute.default", (learned,), (parts[-1],))
    y = make.tensor("y", (B, heads, queries, width))
    attributes = (("is_causal", str(causal)),)
    make.op("aten.scaled_dot_product_attention.default", tuple(parts), (y,), attributes=attributes)
    graph = make.graph()
    call = read_call(key_in(dtype, graph, graph.ops[-1], batch))
    name = kernel_of(graph, graph.ops[-1], call, dtype, kind, software)
    return name, attention_seconds(graph, graph.ops[-1], call, dtype, kind, trained=True, software=software)


@pytest.mark.parametrize(
    ("facts", "kind", "kernel"),
    [
        ({}, "H100", "cudnn"),
        ({}, "B200", "cudnn"),
        ({}, "A100", "flash 8"),
        ({}, "L40S", "flash 8"),
        ({"dtype": "float32"}, "H100", "efficient"),
        ({"mask": "made"}, "H100", "efficient"),
        ({"mask": "a view"}, "H100", "math"),
    ],
)
def test_attention_is_the_kernel_that_torch_chooses(facts, kind, kernel):
    assert attention(kind=load_cluster(kind).device_kinds[0], **facts)[0] == kernel


@pytest.mark.parametrize(
    ("queries", "width", "causal", "forward", "backward"),
    [
        (512, 64, False, 335, 266),
        (2048, 64, False, 395, 395),
        (16384, 128, False, 595, 516),
        (1024, 64, True, 288, None),
        (8192, 128, True, 529, None),
    ],
)
def test_cudnn_attention_is_as_fast_as_the_paper_of_flash_attention_3_has_it(queries, width, causal, forward, backward):
    """Shah et al. 2024: TFLOP/s on H100 SXM5 with 16,384 tokens and 2,048 elements each."""
    batch, heads = 16384 // queries, 2048 // width
    seconds = attention(queries, width, causal=causal, batch=batch, heads=heads)[1]
    flops = 4.0 * batch * heads * queries**2 * width * (0.5 if causal else 1.0)
    assert flops / seconds.forward_s / 1e12 == pytest.approx(forward, rel=0.1)
    if backward is not None:
        assert 2.5 * flops / seconds.backward_s / 1e12 == pytest.approx(backward, rel=0.1)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_last_rank_of_a_context_computes_with_all_keys(num_ranks):
    """Under a mask that the runtime makes; software that balances the ranks has a share of half of them."""
    whole, own = 65536, 65536 // num_ranks
    whole_s = attention(whole, 128, batch=1, kind=AMPERE)[1].forward_s
    _, masked = attention(whole, 128, causal=False, mask="made", batch=1, kind=AMPERE)
    name, last = attention(own, 128, keys=whole, batch=1, kind=AMPERE)
    assert name == "efficient"
    assert last.forward_s == pytest.approx(masked.forward_s / num_ranks, rel=0.02)
    balanced = attention(own, 128, keys=whole, batch=1, kind=AMPERE, software=read_software("torchtitan"))
    assert balanced[0] == "flash 8"
    assert balanced[1].forward_s == pytest.approx(whole_s / num_ranks, rel=0.02)


def test_scores_that_pass_through_memory_take_longer_than_a_fused_kernel():
    cudnn, efficient, math_s = (attention(mask=mask)[1] for mask in (None, "made", "a view"))
    assert cudnn.forward_s < efficient.forward_s < math_s.forward_s
    assert cudnn.backward_s < efficient.backward_s < math_s.backward_s


@pytest.mark.parametrize("name", ["A100", "V100", "H200", "B200", "L40S"])
def test_shares_of_the_datasheet_carry_over_to_other_devices(name):
    cluster = load_cluster(name)
    kind = cluster.device_kinds[0]
    assert is_modelled(kind)
    graph = one_op("aten.gelu.default", ((B, 4096),), (B, 4096))
    here, there = costs(graph, 32768), costs(graph, 32768, cluster=cluster)
    faster = kind.memory_bandwidth_bytes_per_s / KIND.memory_bandwidth_bytes_per_s
    assert here.forward_s[-1] / there.forward_s[-1] == pytest.approx(faster, rel=0.05)
    assert there.basis[-1] == "transferred"
    assert there.high_s[-1, 0] / there.forward_s[-1] > here.high_s[-1, 0] / here.forward_s[-1]


def test_processors_keep_their_rooflines():
    assert not is_modelled(PROCESSOR)
    graph = one_op("aten.gelu.default", ((B, 4096),), (B, 4096))
    assert set(costs(graph, 8, cluster=load_cluster("cpu")).basis) == {"roofline"}


def test_gradients_that_are_added_up_move_three_times_their_bytes():
    graph = one_op("aten.linear.default", ((B, 4096), (4096, 4096)), (B, 4096))
    expected = measured("aten.add", "float32", (8192, 2048), (8192, 2048))
    assert costs(graph, 8).accumulate_s[-1] == pytest.approx(expected, rel=0.05)
