"""Compiled layers: which kernels, what they move, and their costs. Against inductor itself: `test_fusion_inductor`."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from meshwright.cost import CostModel
from meshwright.cost.autocast import Widths, as_computed
from meshwright.cost.fusion import fuse_unit
from meshwright.cost.fusion.partition import Flow
from meshwright.cost.fusion.written_values import fusion_rules
from meshwright.cost.host_issue import load_host_calls
from meshwright.cost.op_classes import classify_ops
from meshwright.cost.traits import is_view, operator_name, passes_of
from meshwright.spec import Measurements, OpMeasurement, compiled_units, load_cluster, load_shipped_graph, op_key
from meshwright.spec.precision import numbers_of

GPT = replace(load_shipped_graph("gpt-tiny"), compiled=True)
H100 = load_cluster("1xH100")
BATCH, TOKENS, WIDTH = 8, 128, 128


def unit_of(graph, number, precision="float32", batch=BATCH):
    """The kernels of a unit, with its first op."""
    numbers = numbers_of(precision)
    graph = as_computed(graph, numbers)
    start, stop = compiled_units(graph)[number]
    outside = {i for op in graph.ops[stop:] for i in op.inputs} | set(graph.outputs)
    later = frozenset(i for op in graph.ops[start:stop] for i in op.outputs if i in outside)
    widths = Widths(
        graph=graph,
        values=None if numbers.autocast else numbers.value_bytes,
        single=classify_ops(graph).single,
    )
    return fuse_unit(graph, start, stop, batch, numbers, widths, later), start


def names(graph, kernels, start):
    """The operators of each kernel that is generated."""
    return [
        " ".join(operator_name(graph.ops[start + op]) for op, _ in sorted(kernel.members))
        for kernel in kernels
        if not kernel.extern
    ]


def test_a_block_of_a_transformer_is_a_few_kernels():
    unit, start = unit_of(GPT, 1)
    # The residual of attention is added where it is normalised, and again where the next one is added.
    assert names(GPT, unit.forward, start) == ["layer_norm", "add layer_norm", "gelu", "add add"]
    # Four products and attention.
    assert sum(kernel.extern for kernel in unit.forward) == 5
    assert sum(kernel.extern for kernel in unit.backward) == 9


def test_a_norm_reads_and_writes_each_tensor_once():
    unit, _ = unit_of(GPT, 1)
    norm, values = unit.forward[0], BATCH * TOKENS * WIDTH * 4
    assert norm.rows == WIDTH
    assert norm.read == values + 2 * WIDTH * 4
    # Mean and deviation of each row are kept for the backward.
    assert norm.written == values + 2 * BATCH * TOKENS * 4


def test_casts_of_autocast_are_inside_of_kernels_but_for_weights():
    unit, start = unit_of(GPT, 1, "amp")
    graph = as_computed(GPT, numbers_of("amp"))
    generated = [kernel for kernel in unit.forward if not kernel.extern]
    named = list(zip(names(graph, unit.forward, start), generated, strict=True))
    # Weights of the four layers, and their biases where something else than element-wise ops reads the result.
    casts = [kernel for name, kernel in named if name == "linear"]
    assert all(kernel.read == 2 * kernel.written for kernel in casts)
    large = sorted(kernel.written / 2 for kernel in casts if kernel.written > 4 * WIDTH * 2)
    assert large == [WIDTH * WIDTH, 3 * WIDTH * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH]
    gelu = next(kernel for name, kernel in named if name.endswith("gelu"))
    # Read and written in bfloat16, what is between in float32.
    assert gelu.read == gelu.written == BATCH * TOKENS * 4 * WIDTH * 2
    assert gelu.narrow


def test_sums_over_columns_join_sums_over_rows_of_large_matrices():
    large, _ = unit_of(replace(load_shipped_graph("gpt2-small"), compiled=True), 1, "amp", batch=8)
    small, _ = unit_of(GPT, 1)
    assert any(kernel.rows and kernel.columns for kernel in large.backward)
    assert not any(kernel.rows and kernel.columns for kernel in small.backward)


def test_every_rule_can_be_read():
    for steps, back in fusion_rules().values():
        assert "y0" in [name for name, _ in steps]
        assert all(made.sort for _, made in (*steps, *back))


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_minimal(seed):
    rng = np.random.default_rng(seed)
    nodes = 12
    capacities = rng.integers(0, 20, (nodes, nodes)) * (rng.random((nodes, nodes)) < 0.3)
    np.fill_diagonal(capacities, 0)
    flow = Flow(nodes)
    for start, end in zip(*np.nonzero(capacities), strict=True):
        flow.add(int(start), int(end), float(capacities[start, end]))
    behind = flow.cut(0, nodes - 1)
    most = maximum_flow(csr_array(capacities.astype(np.int32)), 0, nodes - 1).flow_value
    assert nodes - 1 in behind
    assert 0 not in behind
    crossing = sum(capacities[i, j] for i in range(nodes) for j in behind if i not in behind)
    assert crossing == most


def test_graphs_without_compiled_layers_are_estimated_as_ever():
    plain = replace(GPT, compiled=False)
    cost = CostModel(cluster=H100, precision="amp")
    kind = H100.device_kind(0)
    before = cost.estimate_ops(plain, BATCH, kind)
    compiled = cost.estimate_ops(GPT, BATCH, kind)
    again = CostModel(cluster=H100, precision="amp").estimate_ops(plain, BATCH, kind)
    for column in ("forward_s", "backward_s", "accumulate_s", "issue_s", "low_s", "high_s"):
        np.testing.assert_array_equal(getattr(before, column), getattr(again, column))
    assert compiled.total().seconds < before.total().seconds
    assert np.array_equal(compiled.accumulate_s, before.accumulate_s)


def test_a_kernel_is_with_its_last_op_forward_and_its_first_backward():
    costs = CostModel(cluster=H100, precision="bfloat16").estimate_ops(GPT, BATCH, H100.device_kind(0))
    start, stop = compiled_units(GPT)[1]
    ops = {operator_name(GPT.ops[op]): op for op in reversed(range(start, stop))}
    norms = [op for op in range(start, stop) if operator_name(GPT.ops[op]) == "layer_norm"]
    # The sum before the second norm is computed with it.
    assert costs.forward_s[ops["add"]] == 0 < costs.forward_s[norms[1]]
    assert costs.backward_s[norms[0]] > 0
    for op in range(start, stop):
        if is_view(GPT, GPT.ops[op]):
            assert costs.forward_s[op] == 0
    low, high = costs.low_s[:, :2].sum(), costs.high_s[:, :2].sum()
    assert low < costs.total().seconds < high


def test_equal_blocks_are_estimated_alike():
    costs = CostModel(cluster=H100, precision="amp").estimate_ops(GPT, BATCH, H100.device_kind(0))
    (first, end), (second, _) = compiled_units(GPT)[1:3]
    same = slice(first, end), slice(second, second + end - first)
    for column in (costs.forward_s, costs.backward_s, costs.issue_s[:, 0], costs.issue_s[:, 1]):
        np.testing.assert_array_equal(column[same[0]], column[same[1]])


def test_a_processor_takes_the_share_of_the_bytes_that_are_left():
    cluster = load_cluster("cpu")
    kind, cost = cluster.device_kind(0), CostModel(cluster=cluster)
    plain = cost.estimate_ops(replace(GPT, compiled=False), BATCH, kind)
    compiled = cost.estimate_ops(GPT, BATCH, kind)
    start, stop = compiled_units(GPT)[1]
    gelu = next(op for op in range(start, stop) if operator_name(GPT.ops[op]) == "gelu")
    moved = 2 * BATCH * TOKENS * 4 * WIDTH * 4
    alone = passes_of(GPT, GPT.ops[gelu], BATCH, "float32").forward.num_bytes
    assert compiled.forward_s[gelu] == pytest.approx(plain.forward_s[gelu] * moved / alone)
    assert compiled.basis[gelu] == "roofline"
    products = [op for op in range(start, stop) if operator_name(GPT.ops[op]) == "linear"]
    np.testing.assert_array_equal(compiled.forward_s[products], plain.forward_s[products])


def test_hosts_issue_kernels_of_a_unit():
    costs = CostModel(cluster=H100, precision="float32").estimate_ops(GPT, BATCH, H100.device_kind(0))
    start, stop = compiled_units(GPT)[1]
    unit, _ = unit_of(GPT, 1)
    calls = load_host_calls()
    extern = sum(kernel.extern for kernel in unit.forward)
    generated = len(unit.forward) - extern
    own = calls.compiled.unit_s + extern * calls.compiled.extern_s + generated * calls.compiled.generated_s
    expected = calls.compiled_speed * own + len(unit.forward) * calls.launch_s
    assert costs.issue_s[start:stop, 0].sum() == pytest.approx(expected)


def test_products_of_odd_sizes_are_padded():
    graph = load_shipped_graph("gpt2-small")
    cost, kind = CostModel(cluster=H100, precision="amp"), H100.device_kind(0)
    plain, compiled = (cost.estimate_ops(replace(graph, compiled=flag), 8, kind) for flag in (False, True))
    head = max(op for op in range(len(graph.ops)) if operator_name(graph.ops[op]) == "linear")
    assert compiled.forward_s[head] < plain.forward_s[head] / 2
    assert compiled.backward_s[head] < plain.backward_s[head] / 2


def test_what_is_computed_again_is_compiled_too():
    layer = next(item for item in GPT.layers if item.name == "blocks.0")
    graph = replace(GPT, recompute=((layer.start, layer.stop),))
    cost, kind = CostModel(cluster=H100, precision="amp"), H100.device_kind(0)
    kept, again = (cost.estimate_ops(each, BATCH, kind) for each in (GPT, graph))
    last = layer.stop - 1
    assert 0 < again.again_s[last] <= kept.forward_s[layer.start : layer.stop].sum()
    assert again.backward_s[last] == pytest.approx(kept.backward_s[last] + again.again_s[last])


def test_what_was_measured_on_a_gpu_is_scaled_by_bytes():
    """A kernel takes the share of what its ops took, and no rate of another device's."""
    kind = H100.device_kind(0)
    plain = replace(GPT, compiled=False)
    start, stop = compiled_units(GPT)[1]
    gelu = next(op for op in range(start, stop) if operator_name(GPT.ops[op]) == "gelu")
    took = OpMeasurement(key=op_key(plain, plain.ops[gelu], BATCH), forward_s=1e-3, backward_s=2e-3, num_samples=9)
    table = Measurements(device=kind.name, software="torch", date="2026-11-28", ops=(took,))
    costs = CostModel(cluster=H100, measurements=table).estimate_ops(GPT, BATCH, kind)
    unit, _ = unit_of(GPT, 1)
    kernel = next(item for item in unit.forward if item.members == {(gelu - start, False)})
    alone = passes_of(GPT, GPT.ops[gelu], BATCH, "float32").forward.num_bytes
    assert costs.forward_s[gelu] == pytest.approx(1e-3 * (kernel.read + kernel.written) / alone)
    assert costs.basis[gelu] == "transferred"
