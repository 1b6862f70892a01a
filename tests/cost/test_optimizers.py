"""Optimizer steps, bucket copies and the runtime's overhead."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import LAUNCH_S, CostModel
from meshwright.cost.op_estimates import ROOFLINE
from meshwright.cost.optimizers import estimate_step
from meshwright.spec import Optimizer, OptimizerMeasurement, load_cluster
from meshwright.spec.measurements import BUCKET_COPY
from tests.cost.facts import KIND, B, GraphMaker, make_cluster, make_table

SGD, MOMENTUM, ADAMW = Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True), Optimizer(kind="adamw")


def weights():
    """Parameters of 10, 1000 and (frozen) 500 elements."""
    make = GraphMaker()
    x = make.tensor("x", (B, 10), role="input", grad=False)
    sizes = [make.tensor(f"w{size}", (size,), role="parameter", grad=size != 500) for size in (10, 1000, 500)]
    make.op("aten.mix.default", (x, *sizes), (make.tensor("y", (B, 10)),))
    return make.graph(), tuple(sizes)


def rows(name, per_tensor_s, per_element_s, dtype="float32"):
    return tuple(
        OptimizerMeasurement(
            kind=name,
            dtype=dtype,
            num_elements=8 * size,
            num_tensors=8,
            seconds=8 * (per_tensor_s + per_element_s * size),
        )
        for size in (1, 100, 10_000)
    )


def test_a_measured_step_is_the_sum_over_trainable_tensors():
    graph, parameters = weights()
    table = make_table(optimizers=rows("adamw", 1.0, 0.1) + rows("sgd", 5.0, 0.0) + rows(BUCKET_COPY, 0.5, 0.01))
    cost = CostModel(cluster=make_cluster(), measurements=table)
    assert cost.optimizer_seconds(graph, parameters, ADAMW, KIND) == pytest.approx(2 * 1.0 + 0.1 * 1010)
    assert cost.optimizer_seconds(graph, parameters[:1], ADAMW, KIND) == pytest.approx(1.0 + 0.1 * 10)
    assert cost.optimizer_seconds(graph, parameters, SGD, KIND) == pytest.approx(10.0)
    assert cost.bucket_seconds(graph, parameters, KIND) == pytest.approx(2 * 0.5 + 0.01 * 1010)


def test_what_was_not_measured_moves_its_bytes():
    graph, parameters = weights()
    table = make_table(optimizers=rows("sgd", 5.0, 0.0) + rows("adamw", 1.0, 1.0, dtype="float64"))
    for cost in (CostModel(cluster=make_cluster(), measurements=table), CostModel(cluster=make_cluster())):
        # tensor by tensor AdamW's eight operations read and write 20 floats per element, and it counts its steps
        expected = 1010 * 80e-9 + 2 * 9 * LAUNCH_S
        assert cost.optimizer_seconds(graph, parameters, ADAMW, KIND) == pytest.approx(expected)
        expected = 1010 * 32e-9 + 2 * 3 * LAUNCH_S
        assert cost.optimizer_seconds(graph, parameters, MOMENTUM, KIND) == pytest.approx(expected)
        assert cost.bucket_seconds(graph, parameters, KIND) == pytest.approx(1010 * 8e-9 + 2 * LAUNCH_S)
        assert cost.optimizer_seconds(graph, parameters[2:], ADAMW, KIND) == 0.0
        assert cost.bucket_seconds(graph, parameters[2:], KIND) == 0.0


def test_loops_start_other_numbers_of_kernels():
    graph, parameters = weights()
    cost = CostModel(cluster=make_cluster())

    def seconds(optimizer, loop):
        return cost.estimate_optimizer(graph, parameters, optimizer, KIND, loop).seconds

    # All at once: the same operations, each started once. In one kernel: 4 floats read and 3 written, and the count.
    assert seconds(ADAMW, "foreach") == pytest.approx(1010 * 80e-9 + 9 * LAUNCH_S)
    assert seconds(ADAMW, "fused") == pytest.approx(1010 * 28e-9 + 2 * LAUNCH_S)
    assert seconds(MOMENTUM, "fused") == pytest.approx(1010 * 20e-9 + LAUNCH_S)
    assert seconds(SGD, "tensors") == pytest.approx(1010 * 12e-9 + 2 * LAUNCH_S)


def test_gpus_run_the_loop_that_our_runtime_asks_for():
    graph, parameters = weights()
    gpu = load_cluster("8xA100")
    cost, kind = CostModel(cluster=gpu), gpu.device_kinds[0]
    for optimizer, loop in ((ADAMW, "fused"), (SGD, "foreach"), (MOMENTUM, "foreach")):
        assert cost.estimate_optimizer(graph, parameters, optimizer, kind) == cost.estimate_optimizer(
            graph, parameters, optimizer, kind, loop
        )


def test_many_elements_take_several_starts():
    elements = np.array([320 * 65_536 + 1], np.int64)
    one, two = (
        estimate_step(size, SGD, KIND, "float32", None, "foreach", ROOFLINE).seconds
        for size in (elements - 1, elements)
    )
    assert two - one == pytest.approx(12e-9 + LAUNCH_S)


def test_mixed_precision_goes_over_a_master_copy():
    graph, parameters = weights()

    def seconds(precision):
        return (
            CostModel(cluster=make_cluster(), precision=precision)
            .estimate_optimizer(graph, parameters, ADAMW, KIND, "fused")
            .seconds
        )

    # the loop in four bytes; the gradient is read in two and written in four, the parameter the other way round
    assert seconds("mixed-bf16-gradients") == pytest.approx(1010 * (28e-9 + 12e-9) + (2 + 2 * 2) * LAUNCH_S)
    # gradients in float32 are read as they are, and without a master copy all is in two bytes
    assert seconds("mixed") == pytest.approx(1010 * (28e-9 + 6e-9) + (2 + 2) * LAUNCH_S)
    assert seconds("bfloat16") == pytest.approx(1010 * 14e-9 + 2 * LAUNCH_S)


def test_a_cost_says_what_it_rests_on():
    graph, parameters = weights()
    table = make_table(optimizers=rows("adamw", 1.0, 0.1))
    cost = CostModel(cluster=make_cluster(), measurements=table)
    inside = cost.estimate_optimizer(graph, parameters, ADAMW, KIND)
    assert inside.basis == "interpolated"
    assert inside.low_s < inside.seconds < inside.high_s
    guessed = cost.estimate_optimizer(graph, parameters, SGD, KIND)
    assert (guessed.basis, guessed.high_s) == ("roofline", pytest.approx(guessed.seconds * ROOFLINE.high))
    # what was measured is torch's loop over the tensors
    assert cost.estimate_optimizer(graph, parameters, ADAMW, KIND, "fused").basis == "roofline"
    assert cost.at_end("high").optimizer_seconds(graph, parameters, ADAMW, KIND) == inside.high_s
    assert cost.estimate_bucket(graph, parameters, KIND).basis == "roofline"


def test_the_overhead_is_the_measured_one():
    assert CostModel(cluster=make_cluster()).overhead_s == 0.0
    assert CostModel(cluster=make_cluster(), measurements=replace(make_table(), overhead_s=3e-5)).overhead_s == 3e-5
