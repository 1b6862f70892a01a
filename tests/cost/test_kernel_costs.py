"""Graphs on GPUs: which ops the predictor of kernels estimates, as which products, and what it leaves alone."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel, load_cost_model
from meshwright.cost.gpu.gpu_products import Launch, shipped_gpu
from meshwright.cost.kernels import Kernel, adapt_kernels, shipped_model
from meshwright.records import make_records, named_shapes
from meshwright.records.parquet import write_records
from meshwright.spec import Extent, load_cluster
from meshwright.validation import load_records
from tests.cost.facts import B, GraphMaker, linear_graph, make_table, op_row

H100 = load_cluster("H100")
KIND = H100.device_kinds[0]


def model(precision="bfloat16", **facts):
    return CostModel(cluster=H100, precision=precision, **facts)


def product(m, n, k, count=1):
    sizes = {"m": m, "n": n, "k": k, "count": count}
    return shipped_model().predict(Kernel(op="matmul", dtype="bfloat16", device=KIND), sizes)


def wide_graph(grad):
    """x (b, 512, 1024) → linear to (b, 512, 4096)."""
    make = GraphMaker()
    x = make.tensor("x", (B, 512, 1024), role="input" if not grad else "activation", grad=grad)
    if grad:
        make.op("aten.randn.default", (), (x,))
    weight = make.tensor("weight", (4096, 1024), role="parameter")
    y = make.tensor("y", (B, 512, 4096))
    make.op("aten.linear.default", (x, weight), (y,), saved=(x,), flops=Extent(0, 2 * 512 * 1024 * 4096))
    return make.graph()


@pytest.mark.parametrize("grad", [False, True])
def test_a_linear_op_is_one_product_forward_and_one_for_each_gradient(grad):
    costs = model().estimate_ops(wide_graph(grad), 3, KIND)
    m = 3 * 512
    forward, to_input, to_weight = product(m, 4096, 1024), product(m, 1024, 4096), product(1024, 4096, m)
    assert costs.forward_s[-1] == pytest.approx(forward.seconds[0])
    backward = to_weight.seconds[0] + (to_input.seconds[0] if grad else 0)
    assert costs.backward_s[-1] == pytest.approx(backward)
    assert costs.low_s[-1, 0] == pytest.approx(forward.low_s[0])
    assert costs.high_s[-1, 0] == pytest.approx(forward.high_s[0])
    # The products of gradients have other layouts than the measured ones.
    assert costs.basis[-1] == "transferred"
    near = shipped_model().ops["matmul"].transfers["near"]
    assert costs.low_s[-1, 1] == pytest.approx(near.low * backward)
    assert costs.high_s[-1, 1] == pytest.approx(near.high * backward)


def test_in_inference_nothing_runs_backward():
    costs = model().estimate_ops(linear_graph("inference"), 2, KIND)
    assert costs.forward_s[0] > 0
    assert costs.backward_s[0] == 0.0
    assert costs.basis[0] == "regressed"


def test_a_batched_product_counts_its_products():
    make = GraphMaker("inference")
    left = make.tensor("left", (B, 16, 256, 64), role="input", grad=False)
    right = make.tensor("right", (B, 16, 64, 128), role="input", grad=False)
    make.op("aten.matmul.default", (left, right), (make.tensor("y", (B, 16, 256, 128), grad=False),))
    costs = model().estimate_ops(make.graph(), 2, KIND)
    assert costs.forward_s[0] == pytest.approx(product(256, 128, 64, count=32).seconds[0])
    near = shipped_model().ops["matmul"].transfers["near"]
    assert costs.basis == ("transferred",)
    assert costs.high_s[0, 0] == pytest.approx(near.high * costs.forward_s[0])


def test_a_row_that_is_not_aligned_takes_an_older_kernel():
    """cuBLAS: rows of 50,257 elements of two bytes are no multiple of 16 bytes, those of 50,304 are."""

    def seconds(vocabulary, precision="bfloat16"):
        make = GraphMaker()
        x, weight = make.tensor("x", (B, 1024, 768)), make.tensor("weight", (vocabulary, 768), role="parameter")
        y = make.tensor("y", (B, 1024, vocabulary))
        make.op("aten.randn.default", (), (x,))
        make.op("aten.linear.default", (x, weight), (y,), saved=(x,), flops=Extent(0, 2 * 1024 * 768 * vocabulary))
        costs = model(precision).estimate_ops(make.graph(), 8, KIND)
        return costs.forward_s[-1], costs.backward_s[-1]

    (odd, back), (even, even_back) = seconds(50_257), seconds(50_304)
    # Measured on an H100 (validation/data/h100_ops.parquet): 6.59 ms, and 4.45 and 4.23 ms.
    assert odd == pytest.approx(6.59e-3, rel=0.15)
    assert back == pytest.approx(8.68e-3, rel=0.15)
    assert odd > 5 * even
    assert back > 4 * even_back
    # Half as odd, twice as fast; float32 has no tensor cores to feed.
    assert seconds(50_258)[0] == pytest.approx(odd / 2, rel=0.01)
    assert seconds(50_257, "float32")[0] == pytest.approx(seconds(50_304, "float32")[0], rel=0.05)


def test_channels_are_filled_up_to_what_tensor_cores_load():
    def seconds(channels):
        make = GraphMaker("inference")
        x = make.tensor("x", (B, channels, 224, 224), role="input", grad=False)
        weight = make.tensor("weight", (64, channels, 7, 7), role="parameter")
        y = make.tensor("y", (B, 64, 112, 112))
        attributes = (("stride", "[2, 2]"), ("padding", "[3, 3]"))
        make.op("aten.conv2d.default", (x, weight), (y,), attributes=attributes)
        return model().estimate_ops(make.graph(), 8, KIND).forward_s[0]

    assert seconds(3) == pytest.approx(seconds(8))
    assert seconds(16) > seconds(8)


def test_a_recurrent_layer_multiplies_its_states_step_by_step():
    def seconds(steps):
        make = GraphMaker("inference")
        x = make.tensor("x", (B, steps, 1024), role="input", grad=False)
        states = [make.tensor(name, (1, B, 1024), role="input", grad=False) for name in ("h", "c")]
        weights = [make.tensor(name, (4096, 1024), role="parameter") for name in ("w", "u")]
        y = make.tensor("y", (B, steps, 1024))
        attributes = (("batch_first", "True"),)
        make.op("aten.lstm.input", (x, *states, *weights), (y,), attributes=attributes)
        return model().estimate_ops(make.graph(), 64, KIND).forward_s[0]

    cell = shipped_gpu().seconds([Launch(sort="pointwise", width=2, hot=2.0 * 64 * 4096 * 2)], KIND)
    step = product(64, 4096, 1024).seconds[0] + cell
    assert seconds(50) == pytest.approx(product(3200, 4096, 1024).seconds[0] + 50 * step)


def test_a_convolution_is_its_implicit_product():
    make = GraphMaker("inference")
    x = make.tensor("x", (B, 64, 56, 56), role="input", grad=False)
    weight = make.tensor("weight", (128, 64, 3, 3), role="parameter")
    attributes = (("stride", "[2, 2]"), ("padding", "[1, 1]"))
    y = make.tensor("y", (B, 128, 28, 28))
    make.op("aten.conv2d.default", (x, weight), (y,), attributes=attributes)
    costs = model().estimate_ops(make.graph(), 4, KIND)
    # Channels are turned last and back, which takes a third more on images of 28 x 28 places.
    factor = shipped_gpu().products.convolution_factor(28 * 28, "bfloat16", is_point=False)
    assert 1.2 < factor < 1.4
    assert costs.forward_s[0] == pytest.approx(factor * product(4 * 28 * 28, 128, 64 * 9).seconds[0])
    far = shipped_model().ops["matmul"].transfers["far"]
    assert costs.basis == ("transferred",)
    assert costs.low_s[0, 0] == pytest.approx(far.low * costs.forward_s[0])
    assert costs.high_s[0, 0] == pytest.approx(far.high * costs.forward_s[0])


def test_other_ops_are_estimated_by_the_kernels_that_torch_launches():
    costs = model().estimate_ops(linear_graph(), 2, KIND)
    assert costs.basis == ("transferred", "regressed", "regressed")
    shipped = shipped_gpu().regressed
    assert costs.high_s[1, 0] == pytest.approx(shipped.high * costs.forward_s[1])
    assert costs.low_s[1, 0] == pytest.approx(shipped.low * costs.forward_s[1])


def test_a_measured_op_wins():
    graph = linear_graph()
    table = make_table([op_row(graph, 0, 2, 7.0, 8.0, 9.0, dtype="bfloat16")], device="H100")
    costs = model(measurements=table).estimate_ops(graph, 2, KIND)
    assert costs.forward_s[0] == 7.0
    assert costs.basis[0] == "measured"


@pytest.mark.parametrize(("device", "precision"), [("V100", "float32"), ("B200", "bfloat16"), ("H100", "float32")])
def test_what_was_never_measured_is_transferred(device, precision):
    cluster = load_cluster(device)
    kind = cluster.device_kinds[0]
    costs = CostModel(cluster=cluster, precision=precision).estimate_ops(wide_graph(grad=True), 8, kind)
    assert costs.basis[-1] == "transferred"
    share = 2 * 8 * 512 * 1024 * 4096 / kind.peak_flops_per_s[precision] / costs.forward_s[-1]
    assert 0.3 < share < 1.0
    assert costs.low_s[-1, 0] < costs.forward_s[-1] < costs.high_s[-1, 0]


def own_rows(factor, count, kernel=""):
    """Products on an H100 that take ``factor`` times what the shipped predictor says."""
    sizes = dict(zip("mnk", 2.0 ** np.random.default_rng(0).integers(6, 13, (3, count)), strict=True))
    seconds = factor * shipped_model().predict(Kernel(op="matmul", dtype="bfloat16", device=KIND), sizes).seconds
    shapes = [named_shapes(m=m, n=n, k=k) for m, n, k in zip(*sizes.values(), strict=True)]
    return make_records(
        op="matmul", shapes=shapes, dtype="bfloat16", device="H100", kernel=kernel, seconds=seconds, source="own"
    ).dedupe()


@pytest.mark.parametrize(
    ("count", "kernel", "error"), [(30, "", 0.2), (400, "", 0.1), (400, "a kernel of my own", 0.2)]
)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_own_rows_of_products_move_the_costs_of_a_graph(tmp_path, factor, count, kernel, error):
    path = write_records(own_rows(factor, count, kernel), tmp_path / "own.parquet")
    graph = wide_graph(grad=True)
    shipped, adapted = (load_cost_model(H100, at, "bfloat16").estimate_ops(graph, 3, KIND) for at in (None, path))
    assert adapted.forward_s[-1] / shipped.forward_s[-1] == pytest.approx(factor, rel=error)
    assert adapted.backward_s[-1] / shipped.backward_s[-1] == pytest.approx(factor, rel=error)
    assert adapted.basis[-1] == shipped.basis[-1]
    assert adapted.forward_s[:-1].tolist() == shipped.forward_s[:-1].tolist()


def test_rows_that_the_predictor_has_seen_leave_it_as_it_is():
    some = load_records("kernels").where(op="matmul", device="H100").select(np.arange(50))
    assert adapt_kernels(shipped_model(), some, {"H100": KIND}) is shipped_model()


def test_own_rows_make_a_dtype_that_was_never_measured_regressed(tmp_path):
    rows = own_rows(3.0, 30)
    path = write_records(replace(rows, dtype=np.full(len(rows), "float32", object)), tmp_path / "own.parquet")
    graph = linear_graph("inference")
    shipped, adapted = (
        load_cost_model(H100, at, "float32").estimate_ops(graph, 3, KIND).basis[0] for at in (None, path)
    )
    assert (shipped, adapted) == ("transferred", "regressed")
