"""Products in TF32 and in float8: which ops multiply so, at which rate, and what casts cost."""

from dataclasses import replace

import pytest

from meshwright.cost import LAUNCH_S, CostModel
from meshwright.cost.conversion_costs import product_type
from meshwright.cost.traits import operator_name
from meshwright.spec import Extent, load_cluster, load_shipped_graph
from meshwright.spec.precision import numbers_of
from tests.cost.facts import B, GraphMaker, make_table, op_row

H100 = load_cluster("1xH100")
KIND = H100.device_kind(0)
F8 = "float8_e4m3fn"


def types_of(name, precision, kind=KIND):
    graph, numbers = load_shipped_graph(name), numbers_of(precision)
    found = [(operator_name(op), product_type(graph, op, numbers, kind)) for op in graph.ops]
    return {operator for operator, dtype in found if dtype}, {dtype for _, dtype in found if dtype}


def test_tf32_multiplies_all_products_and_convolutions():
    assert types_of("gpt-tiny", "tf32") == ({"linear"}, {"tf32"})
    assert types_of("vgg-tiny", "tf32") == ({"linear", "conv2d"}, {"tf32"})


def test_convolutions_are_in_tf32_by_default_but_not_where_values_are_narrow():
    assert types_of("vgg-tiny", "float32") == ({"conv2d"}, {"tf32"})
    for precision in ("mixed", "bfloat16", "float64"):
        assert types_of("vgg-tiny", precision) == (set(), set())


def test_a_device_without_tensor_cores_multiplies_in_the_type_of_the_factors():
    for precision in ("tf32", "float8"):
        assert types_of("gpt-tiny", precision, load_cluster("1xV100").device_kind(0)) == (set(), set())


def product(kind, tokens, width, out, weight_role="parameter"):
    make = GraphMaker()
    rows = Extent(0, tokens)
    x = make.tensor("x", (rows, width), role="input")
    weight = make.tensor("weight", (out, width), role=weight_role)
    y = make.tensor("y", (rows, out))
    flops = Extent(0, 2 * tokens * width * out)
    make.op(f"aten.{kind}.default", (x, weight), (y,), saved=(x,), flops=flops, backward_flops=flops + flops)
    return make.graph()


@pytest.mark.parametrize(
    ("graph", "dtype"),
    [
        (product("linear", 1, 64, 32), F8),
        (product("linear", 1, 64, 24), ""),
        (product("linear", 1, 64, 32, "buffer"), ""),
        (product("matmul", 1, 64, 32), ""),
    ],
    ids=["linear", "odd size", "no parameter", "no layer"],
)
def test_float8_multiplies_linear_layers_of_sizes_that_it_can(graph, dtype):
    assert product_type(graph, graph.ops[0], numbers_of("float8"), KIND) == dtype


def seconds(graph, precision, kind):
    machine = replace(H100, device_kinds=(kind,))
    costs = CostModel(cluster=machine, precision=precision).estimate_ops(graph, 1, kind)
    return costs.forward_s[0], costs.backward_s[0]


def test_rooflines_have_the_rate_of_the_product_and_the_casts():
    # Without multiprocessors nothing but the roofline is known.
    plain = replace(KIND, num_multiprocessors=0)
    tokens, width, out = 2**14, 2**13, 2**12
    graph, flops = product("linear", tokens, width, out), 2 * tokens * width * out
    rates, bandwidth = plain.peak_flops_per_s, plain.memory_bandwidth_bytes_per_s
    for precision, rate in (("float32", rates["float32"]), ("tf32", rates["tf32"])):
        forward, backward = seconds(graph, precision, plain)
        assert forward == pytest.approx(flops / rate + LAUNCH_S)
        assert backward == pytest.approx(2 * flops / rate + 2 * LAUNCH_S)
    mixed, narrow = (seconds(graph, precision, plain) for precision in ("mixed", "float8"))
    x, weight, y = tokens * width, out * width, tokens * out
    saved = flops / rates["bfloat16"] - flops / rates[F8]
    casts = (2 * x + 2 * weight + 3 * weight) / bandwidth + 3 * LAUNCH_S
    assert narrow[0] == pytest.approx(mixed[0] - saved + casts)
    casts = (2 * y + 3 * weight + 3 * x) / bandwidth + 3 * LAUNCH_S
    assert narrow[1] == pytest.approx(mixed[1] - 2 * saved + casts)


def test_kernels_are_predicted_in_the_type_of_the_product():
    graph = product("linear", 8192, 4096, 4096)
    times = {precision: seconds(graph, precision, KIND) for precision in ("float32", "tf32", "mixed", "float8")}
    for at in (0, 1):
        assert times["float8"][at] < times["mixed"][at] < times["tf32"][at] < times["float32"][at] / 4


def test_memory_is_that_of_the_factors():
    assert numbers_of("tf32").value_bytes == numbers_of("float32").value_bytes
    for word in ("values", "gradients", "states", "master"):
        assert getattr(numbers_of("float8"), word) == getattr(numbers_of("mixed"), word)


def test_tables_hold_what_was_multiplied_by_default():
    convolutions, layers = GraphMaker(), product("linear", 8, 64, 32)
    x = convolutions.tensor("x", (B, 3, 8, 8), role="input", grad=False)
    weight = convolutions.tensor("weight", (4, 3, 3, 3), role="parameter")
    y = convolutions.tensor("y", (B, 4, 6, 6))
    convolutions.op("aten.conv2d.default", (x, weight), (y,), saved=(x,), flops=B, backward_flops=B)
    graphs = {"conv": convolutions.graph(), "linear": layers}
    table = make_table([op_row(graph, 0, 1, 1.0) for graph in graphs.values()], device="H100")
    found = {}
    for precision in ("float32", "tf32"):
        cost = CostModel(cluster=H100, precision=precision, measurements=table)
        for name, graph in graphs.items():
            found[name, precision] = float(cost.estimate_ops(graph, 1, KIND).forward_s[0]) == 1.0
    assert found == {
        ("conv", "float32"): True,
        ("linear", "float32"): True,
        ("conv", "tf32"): True,
        ("linear", "tf32"): False,
    }
