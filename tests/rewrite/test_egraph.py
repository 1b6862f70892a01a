"""Many equal graphs at once: classes, congruence, matches, saturation, limits."""

import numpy as np
import pytest

from meshwright.rewrite.calculus import Doubles, IllTypedError
from meshwright.rewrite.egraph import EGraph
from meshwright.rewrite.expressions import Name, value_of
from meshwright.rewrite.fuzz import compute
from meshwright.rewrite.matching import SaturationLimits, apply, directions, matches, saturate
from meshwright.rewrite.rules import rule_of
from meshwright.rewrite.terms import INPUT, TensorType, TermNode

SHAPES = {"x": (2, 3), "y": (2, 3), "z": (2, 3), "v": (3, 4), "w": (3, 4)}
LIMITS = SaturationLimits(rounds=5, nodes=5_000, seconds=60.0)


def insert(graph, text):
    """The class of an expression of the tensors of SHAPES."""

    def build(side):
        if isinstance(side, Name):
            type_ = TensorType(SHAPES[side.name], "float32")
            return graph.add(TermNode(INPUT, (), (("name", side.name), ("kind", "batch"))), type_)
        operands = tuple(map(build, side.operands))
        attributes = tuple((name, value_of(value, {}, {})) for name, value in side.attributes)
        return graph.add(TermNode(side.operator, operands, attributes))

    return build(rule_of("text", text, text).left[0])


def rules(*pairs):
    return [way for number, pair in enumerate(pairs) for way in directions(rule_of(str(number), *pair))]


ASSOCIATIVE = ("add(x, add(y, z))", "add(add(x, y), z)")
COMMUTATIVE = ("add(x, y)", "add(y, x)")
DISTRIBUTIVE = ("matmul(x, add(y, z))", "add(matmul(x, y), matmul(x, z))")


def test_equal_nodes_are_one_and_merging_makes_readers_equal():
    graph = EGraph()
    one, two = insert(graph, "relu(tanh(x))"), insert(graph, "relu(tanh(y))")
    assert insert(graph, "relu(tanh(x))") == one
    assert graph.find(one) != graph.find(two)
    graph.merge(insert(graph, "x"), insert(graph, "y"))
    graph.rebuild()
    assert graph.find(one) == graph.find(two)


def test_tensors_that_do_not_fit_are_never_added_and_unlike_types_never_merged():
    graph = EGraph()
    with pytest.raises(IllTypedError, match="sizes of operands"):
        insert(graph, "add(x, v)")
    with pytest.raises(ValueError, match="cannot be merged"):
        graph.merge(insert(graph, "x"), insert(graph, "v"))


def test_sums_in_any_order_are_one():
    graph = EGraph()
    sides = insert(graph, "add(add(z, x), y)"), insert(graph, "add(y, add(x, z))")
    found = saturate(graph, rules(ASSOCIATIVE, COMMUTATIVE), LIMITS)
    assert graph.find(sides[0]) == graph.find(sides[1])
    assert found.ended == "saturated"
    # Seven sums of three tensors, in 2 + 2 + 2 + 12 nodes at most, and the tensors.
    assert len(graph) <= 3 + 18


def test_a_rule_applies_where_it_is_well_typed_only():
    graph = EGraph()
    whole = insert(graph, "matmul(x, add(v, w))")
    parts = insert(graph, "add(matmul(x, v), matmul(x, w))")
    saturate(graph, rules(DISTRIBUTIVE), LIMITS)
    assert graph.find(whole) == graph.find(parts)
    (way,) = [each for each in rules(("add(x, y)", "matmul(x, y)")) if str(each.sources[0]).startswith("add")]
    assert not any(apply(graph, way, match) for match in list(matches(graph, way)))


def test_all_outputs_of_a_rule_are_replaced_together():
    graph = EGraph()
    one, two = insert(graph, "matmul(x, v)"), insert(graph, "matmul(x, w)")
    merged = rule_of(
        "merge",
        ["matmul(x, v)", "matmul(x, w)"],
        [
            "slice(matmul(x, concat(v, w, axis=1)), axis=1, start=0, stop=size(v, 1))",
            "slice(matmul(x, concat(v, w, axis=1)), axis=1, start=size(v, 1), stop=size(v, 1) + size(w, 1))",
        ],
    )
    saturate(graph, directions(merged), SaturationLimits(rounds=1))
    assert len(graph.nodes_of(graph.find(one), "slice")) == 2
    assert len(graph.nodes_of(graph.find(two), "slice")) == 2


def test_attributes_are_bound_compared_and_computed():
    graph = EGraph()
    twice = insert(graph, "transpose(transpose(x, order=(1, 0)), order=(1, 0))")
    law = ("transpose(transpose(x, order=p), order=q)", "transpose(x, order=compose(p, q))")
    saturate(graph, rules(law, ("transpose(x, order=(0, 1))", "x")), LIMITS)
    assert graph.find(twice) == graph.find(insert(graph, "x"))


def test_conditions_and_ranks_decide():
    text = ("sum(concat(x, y, axis=d), axis=e, keep=True)", "concat(sum(x, axis=e, keep=True), y, axis=d)")
    graph = EGraph()
    insert(graph, "sum(concat(x, y, axis=0), axis=1, keep=True)")
    guarded = rule_of("guarded", *text, when=["d == e"])
    way = directions(guarded)[0]
    assert [apply(graph, way, match) for match in matches(graph, way)] == [False]
    way = directions(rule_of("vectors", "tanh(relu(x))", "tanh(x)"), frozenset({(("x", 1),)}))[0]
    insert(graph, "tanh(relu(x))")
    assert [apply(graph, way, match) for match in matches(graph, way)] == [False]


def test_limits_end_a_saturation_that_would_not_end():
    graph = EGraph()
    start = insert(graph, "add(x, add(y, z))")
    growing = rules(("add(x, y)", "neg(sub(neg(x), y))"), ("add(x, y)", "add(add(x, sub(y, y)), y)"), COMMUTATIVE)
    found = saturate(graph, growing, SaturationLimits(rounds=50, nodes=300, seconds=60.0))
    assert found.ended == "nodes"
    assert len(graph) < 400
    assert graph.find(start) == graph.find(insert(graph, "add(x, add(y, z))"))
    assert saturate(EGraph(), growing, SaturationLimits()).ended == "saturated"


@pytest.mark.parametrize("seed", range(6))
def test_all_graphs_of_a_class_compute_the_same(seed):
    rng = np.random.default_rng(seed)
    graph = EGraph()
    laws = [
        ASSOCIATIVE,
        COMMUTATIVE,
        DISTRIBUTIVE,
        ("neg(neg(x))", "x"),
        ("sub(x, y)", "add(x, neg(y))"),
        ("concat(neg(x), neg(y), axis=d)", "neg(concat(x, y, axis=d))"),
        ("relu(concat(x, y, axis=d))", "concat(relu(x), relu(y), axis=d)"),
    ]
    names = ["x", "y", "z"]

    def text(depth):
        if depth == 0:
            return str(rng.choice(names))
        kind = rng.integers(5)
        if kind < 2:
            return f"{('add', 'sub')[kind]}({text(depth - 1)}, {text(depth - 1)})"
        return f"{('neg', 'relu', 'neg')[kind - 2]}({text(depth - 1)})"

    root = insert(graph, f"matmul(concat({text(2)}, {text(2)}, axis=0), add(v, neg(w)))")
    saturate(graph, rules(*laws), SaturationLimits(rounds=3, nodes=2_000, seconds=60.0))
    arrays = {name: rng.standard_normal((1, *shape)) for name, shape in SHAPES.items()}
    values = _values(graph, arrays)
    for cls in graph.classes():
        for node in graph.nodes(cls):
            np.testing.assert_allclose(_computed(graph, node, values), values[cls], rtol=1e-9, atol=1e-9)
    assert graph.find(root) in values


def _values(graph, arrays):
    """The value of every class, by any node whose operands have one."""
    values = {}
    while True:
        before = len(values)
        for cls in graph.classes():
            if cls not in values:
                for node in graph.nodes(cls):
                    if node.operator == INPUT:
                        values[cls] = arrays[node.attribute("name")]
                    elif all(graph.find(operand) in values for operand in node.operands):
                        values[cls] = _computed(graph, node, values)
                    else:
                        continue
                    break
        if len(values) == before:
            return values


def _computed(graph, node, values):
    if node.operator == INPUT:
        return values[graph.lookup(node)]
    names = [f"t{place}" for place in range(len(node.operands))]
    attributes = "".join(f", {name}={value!r}" for name, value in node.attributes)
    rule = rule_of("node", f"{node.operator}({', '.join(names)}{attributes})", "t0")
    held = {name: values[graph.find(operand)] for name, operand in zip(names, node.operands, strict=True)}
    (result,) = compute(rule.left, held, {}, Doubles())
    return result
