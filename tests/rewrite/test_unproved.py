"""What must not be called proved: conditions, letters that cannot be computed with, indices, truth values."""

import pytest

from meshwright.rewrite.egraph import EGraph
from meshwright.rewrite.matching import apply, directions, matches
from meshwright.rewrite.rules import rule_of
from meshwright.rewrite.terms import TensorType, TermNode
from meshwright.rewrite.verify import verify
from meshwright.spec import RewriteError

COUNTED = "sum(mul(embedding(t, cast(sum(pad(full(shape=(n, 5), value=1.0), low={}, high={}), axis=1, keep=False), \
dtype='int64')), y), axis=0, keep=False)"


@pytest.mark.parametrize(
    ("left", "right", "when", "ranks", "status"),
    [
        # Sizes may be equal although their letters differ: a square matrix.
        ("transpose(x, order=p)", "x", ["shape(x) == permuted(shape(x), p)"], None, "refuted"),
        # Half of an odd size has no form; that says nothing of even ones.
        (
            "slice(add(x, full(shape=(4, n), value=0.0)), axis=d, start=0, stop=2)",
            "slice(x, axis=d, start=size(x, d) // 2 - 2, stop=size(x, d) // 2)",
            [],
            {"x": 2},
            "tested",
        ),
        (COUNTED.format("(a, 0)", "(0, 0)"), COUNTED.format("(0, 0)", "(a, 0)"), [], None, "tested"),
        ("embedding(t, ids)", "embedding(concat(t, t, axis=0), ids)", [], None, "tested"),
        ("logical_not(full(shape=s, value=2.0))", "full(shape=s, value=-1.0)", [], None, "never fits"),
        ("where(full(shape=shape(x), value=2.0), x, y)", "sub(add(x, x), y)", [], None, "never fits"),
    ],
)
def test_what_only_seems_true_is_not_proved(left, right, when, ranks, status):
    assert verify(rule_of("rule", left, right, when=when, ranks=ranks)).status == status


def test_conditions_on_tuples_are_about_all_their_numbers():
    assert verify(rule_of("rule", "transpose(x, order=p)", "x", when=["p == (0, 1)"])).status == "proved"
    with pytest.raises(RewriteError, match="can only be compared with a tuple, by == or !="):
        verify(rule_of("rule", "reshape(x, shape=s)", "reshape(x, shape=s)", when=["s < (1, 2)"]))


def fits(rule, shape, attributes):
    way = directions(rule, frozenset({(("x", len(shape)),)}))[0]
    graph = EGraph()
    x = graph.add(TermNode("input", (), (("name", "x"),)), TensorType(shape, "float32"))
    graph.add(TermNode(rule.left[0].operator, (x,), attributes))
    return any(apply(graph, way, match) for match in matches(graph, way))


def test_a_proved_rule_is_not_used_for_what_no_proof_speaks_of():
    rule = rule_of("rule", "mean(x, axis=d, keep=False)", "sum(mean(x, axis=d, keep=True), axis=d, keep=False)")
    for shape, axis, used in (((2, 3), 0, True), ((0, 3), 0, False), ((1, 1, 1, 1, 2), 4, False)):
        assert fits(rule, shape, (("axis", axis), ("keep", False))) is used
