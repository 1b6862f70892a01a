"""Grappler's examples: each rewrites what it is about, and leaves a near miss as it is.

Examples are those of TensorFlow's graph optimizations (tensorflow/core/grappler/optimizers: constant_folding.cc,
arithmetic_optimizer.cc, remapper.cc), stated in torch. Costs are a datasheet's, so that nothing here depends on the
machine. Every rule that took part must be one that ships, with its proof.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.capture import capture_model
from meshwright.cost import CostModel
from meshwright.rewrite.fx import read_captured, write_graph
from meshwright.rewrite.matching import SaturationLimits
from meshwright.rewrite.optimize import finite_names
from meshwright.rewrite.rulebook import shipped_rule_book
from meshwright.rewrite.search.call_costs import CallCosts
from meshwright.rewrite.search.graph_search import GraphSpace
from meshwright.rewrite.search.ruleset import shipped_rules
from meshwright.rewrite.terms import INPUT, OPAQUE
from meshwright.spec import load_cluster

PROVED = {entry.rule.name for name in ("torch", "xla", "generated") for entry in shipped_rule_book(name).rules}


class Of(nn.Module):
    """A function of tensors; ``w.name`` are its weights."""

    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, value in weights.items():
            self.register_buffer(name, value)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def left(function, inputs, special="kept", *, whole=False, **weights):
    """Operators that are left for each batch, sorted, after the search.

    Those of weights alone are not counted, nor broadcasts; a subtraction of a constant counts as an addition, and one
    of less than the result is a small one. ``whole``: the search must have seen all that the rules lead to.
    """
    model = Of(function, **weights).eval()
    source = read_captured(capture_model(model, inputs, mode="inference", verify=False), inputs)
    space = GraphSpace(source.terms, source.effects, frozen=True, finite=finite_names(source, frozen=True))
    grown = space.grow(shipped_rules(special), SaturationLimits(rounds=4, nodes=10_000, seconds=100.0))
    assert grown.ended in ({"saturated"} if whole else {"saturated", "rounds", "nodes"})
    cluster = load_cluster("2xcpu")
    costs = CallCosts(CostModel(cluster=cluster), cluster.device_kinds[0], training=False)
    costs.estimate(space.calls())
    found = space.choose(costs, grown)
    assert set(found.rules) <= PROVED
    largest = max(math.prod(source.terms.types[output].shape) for output in source.terms.outputs)
    names = []
    for cls, node in found.choice.items():
        if node.operator not in (INPUT, "broadcast") and cls not in space.known.constant:
            name = {OPAQUE: "opaque", "sub": "add"}.get(node.operator, node.operator)
            small = name == "add" and math.prod(space.graph.types[cls].shape) < largest
            names.append(f"small {name}" if small else f"{name} of {len(node.operands)}" if name == "concat" else name)
    return sorted(names)


def batch(*shapes):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


X, Y, IMAGE = (64, 64), (64, 64), (1, 8, 16, 16)
ROW = torch.rand(64) + 0.5
KERNEL = torch.randn(8, 8, 3, 3)
NORM = {"mean": torch.randn(8), "variance": torch.rand(8) + 0.5, "scale": torch.rand(8) + 0.5, "shift": torch.randn(8)}


def norm(w, x):
    return F.batch_norm(x, w.mean, w.variance, w.scale, w.shift)


# name: (function, shapes of the batch, weights, what is left), and the near miss in the same form.
EXAMPLES = {
    "constants pushed down through add": (
        (lambda w, x: (x + w.a) + w.b, [X], {"a": ROW, "b": ROW}, ["add"]),
        (lambda w, x, y: (x + y) + w.b, [X, Y], {"b": ROW}, ["add", "add"]),
    ),
    "constants pushed down through convolution": (
        (lambda w, x: F.conv2d(x * 0.5, w.k, w.b), [IMAGE], {"k": KERNEL, "b": torch.randn(8)}, ["conv2d"]),
        (lambda w, x, y: F.conv2d(x * y, w.k), [IMAGE, IMAGE], {"k": KERNEL}, ["conv2d", "mul"]),
    ),
    "n-ary add folded in part": (
        (lambda w, x, y: x + w.a + y + w.b, [X, Y], {"a": torch.randn(X), "b": torch.randn(X)}, ["add", "add"]),
        (lambda _, x, y, z: x + y + z, [X, Y, Y], {}, ["add", "add"]),
    ),
    "n-ary concat folded in part": (
        (lambda w, x: torch.cat([w.a, w.b, x]), [X], {"a": torch.randn(X), "b": torch.randn(X)}, ["concat of 2"]),
        (lambda w, x: torch.cat([w.a, x, w.b]), [X], {"a": torch.randn(X), "b": torch.randn(X)}, ["concat of 3"]),
    ),
    "concat of a split": (
        (lambda _, x: torch.cat([part.relu() for part in x.split([32, 32])]), [X], {}, ["relu"]),
        (lambda _, x: torch.cat(x.split([32, 32])[::-1]), [X], {}, ["concat of 2", "slice", "slice"]),
    ),
    "split of a concat": (
        (lambda _, x, y: torch.cat([x, y]).split([64, 64])[0].exp(), [X, X], {}, ["exp"]),
        (lambda _, x, y: torch.cat([x, y]).split([60, 68])[1].exp(), [X, X], {}, ["concat of 2", "exp", "slice"]),
    ),
    "neutral elements": (
        (lambda _, x: ((x * 1.0) + 0.0 - 0.0) / 1.0, [X], {}, []),
        (lambda w, x: x * w.one, [X], {"one": torch.ones(64)}, ["mul"]),
    ),
    "absorbing elements, of what is finite only": (
        (lambda w, x: x + w.a * 0.0, [X], {"a": torch.randn(X)}, []),
        (lambda _, x: x * 0.0, [X], {}, ["mul"]),
    ),
    "reshapes flattened": (
        (lambda _, x: x.reshape(16, 4, 64).reshape(4096), [X], {}, ["reshape"]),
        (lambda _, x: x.reshape(16, 4, 64).transpose(0, 1).reshape(4096), [X], {}, ["reshape", "reshape", "transpose"]),
    ),
    "common factor hoisted": (
        (lambda _, a, x, y: a * x + a * y, [X, X, X], {}, ["add", "mul"]),
        (lambda _, a, b, x, y: a * x + b * y, [X, X, X, X], {}, ["add", "mul", "mul"]),
    ),
    "sum of equals": (
        (lambda _, x: x + x + x, [X], {}, ["mul"]),
        (lambda _, x, y, z: x + y + z, [X, X, X], {}, ["add", "add"]),
    ),
    "transposed factor": (
        (lambda _, x, y: x @ y.t(), [X, X], {}, ["linear"]),
        (lambda _, x, y: (x @ y).t().relu() + y, [X, X], {}, ["add", "matmul", "relu", "transpose"]),
    ),
    "inverse transposes": (
        (lambda _, x: x.permute(1, 2, 0).permute(2, 0, 1), [(4, 5, 6)], {}, []),
        (lambda _, x: x.permute(1, 2, 0).permute(1, 2, 0), [(4, 5, 6)], {}, ["transpose"]),
    ),
    "inverse bitcasts": (
        (lambda _, x: x.view(torch.int32).view(torch.float32), [X], {}, []),
        (lambda _, x: x.view(torch.int32), [X], {}, ["bitcast"]),
    ),
    "involution": (
        (lambda _, x: x.neg().neg(), [X], {}, []),
        (lambda _, x: -torch.exp(-x), [X], {}, ["exp", "neg", "neg"]),
    ),
    "idempotent": (
        (lambda _, x: torch.relu(torch.relu(x)), [X], {}, ["relu"]),
        (lambda _, x: torch.tanh(torch.tanh(x)), [X], {}, ["tanh", "tanh"]),
    ),
    "unary chain through concat": (
        (lambda _, x, y: torch.cat([x.relu().neg(), y.relu().neg()]), [X, X], {}, ["concat of 2", "neg", "relu"]),
        (lambda _, x, y: torch.cat([x.relu(), y.tanh()]), [X, X], {}, ["concat of 2", "relu", "tanh"]),
    ),
    "unary through a slice": (
        (lambda _, x: torch.exp(x)[:, :4], [X], {}, ["exp", "slice"]),
        (lambda _, x: torch.softmax(x, 1)[:, :4], [X], {}, ["slice", "softmax"]),
    ),
    "fewest broadcasts": (
        (lambda _, x, y, z: (x + y) + z, [X, (64,), (64,)], {}, ["add", "small add"]),
        (lambda _, x, y, z: (x + y) + z, [X, X, (64,)], {}, ["add", "add"]),
    ),
    "convolution, bias and batch norm": (
        (lambda w, x: norm(w, F.conv2d(x, w.k)), [IMAGE], {"k": KERNEL, **NORM}, ["conv2d"]),
        (
            lambda w, x: norm(w, torch.relu(F.conv2d(x, w.k))),
            [IMAGE],
            {"k": KERNEL, **NORM},
            ["batch_norm", "conv2d", "relu"],
        ),
    ),
    "convolution and bias": (
        (lambda w, x: F.conv2d(x, w.k) + w.b.reshape(8, 1, 1), [IMAGE], {"k": KERNEL, "b": torch.randn(8)}, ["conv2d"]),
        (
            lambda w, x: F.conv2d(x, w.k) + w.b,
            [IMAGE],
            {"k": KERNEL, "b": torch.randn(14)},
            ["add", "conv2d"],
        ),
    ),
    "product, bias and activation": (
        (lambda w, x: torch.relu(x @ w.a + w.b), [X], {"a": torch.randn(X), "b": ROW}, ["linear", "relu"]),
        (lambda _, x, y, z: torch.relu(x @ y + z), [X, X, X], {}, ["add", "matmul", "relu"]),
    ),
    "gelu by tanh": (
        (
            lambda _, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
            [X],
            {},
            ["gelu_tanh"],
        ),
        (
            lambda _, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.05 * x**3))),
            [X],
            {},
            ["add", "add", "mul", "mul", "mul", "mul", "mul", "square", "tanh"],
        ),
    ),
    "attention by hand": (
        (
            lambda _, q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v,
            [(2, 64, 64)] * 3,
            {},
            ["attention"],
        ),
        (
            lambda _, q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 8.0, -2) @ v,
            [(2, 64, 64)] * 3,
            {},
            ["div", "matmul", "matmul", "softmax", "transpose"],
        ),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("near_miss", [False, True], ids=["fires", "near miss"])
def test_an_example_of_grappler(name, near_miss):
    function, shapes, weights, wanted = EXAMPLES[name][near_miss]
    assert left(function, batch(*shapes), whole=near_miss, **weights) == wanted


@pytest.mark.parametrize(("special", "wanted"), [("ignored", ["less_equal"]), ("kept", ["greater", "logical_not"])])
def test_a_comparison_is_negated_only_where_nan_does_not_matter(special, wanted):
    assert left(lambda _, x, y: torch.logical_not(x > y), batch(X, X), special=special) == wanted


class Branching(nn.Module):
    def __init__(self, *, predicate):
        super().__init__()
        self.register_buffer("level", torch.tensor(3.0))
        self.predicate, self.linear = predicate, nn.Linear(4, 4)

    def forward(self, x):
        def inner(x):
            return torch.cond(self.level < 0, torch.sin, self.linear, (x,))

        return torch.cond(self.predicate(self, x), inner, torch.cos, (x,)) * 2


@pytest.mark.parametrize(
    ("predicate", "training", "wanted"),
    [
        # It follows from a buffer that nobody writes to, and so does that of the branch inside.
        (lambda model, _: model.level > 0, False, ["linear", "mul"]),
        (lambda model, _: model.level > 5, False, ["cos", "mul"]),
        # Near misses: of the batch; of a buffer that a step may change; of one that this call changes.
        (lambda _, x: x.sum() > 0, False, ["item", "mul", "opaque"]),
        (lambda model, _: model.level > 0, True, ["greater", "item", "mul", "opaque"]),
        (lambda model, _: model.level.add_(0.0) > 0, False, ["item", "mul", "opaque"]),
        (lambda model, _: torch.bernoulli(torch.ones_like(model.level)) > 0, False, ["item", "mul", "opaque"]),
    ],
)
@pytest.mark.matrix
def test_a_constant_predicate_settles_a_branch(predicate, training, wanted):
    torch.manual_seed(0)
    model, x = Branching(predicate=predicate).train(training), torch.randn(2, 4)
    mode = "training" if training else "inference"
    captured = capture_model(model, x, mode=mode, verify=False, needs_loss=False)
    source = read_captured(captured, x)
    needed = source.terms.needed((*source.terms.outputs, *(() if source.effects is None else (source.effects,))))
    names = {source.terms.nodes[term].operator for term in needed} - {INPUT, "full", "broadcast", "reshape"}
    assert set(wanted) <= names
    assert (OPAQUE in names) == ("opaque" in wanted)
    graph = write_graph(source.terms, source, effects=source.effects)
    torch.testing.assert_close(graph(x)[0], model(x))
    # Whoever captured the model has it as it was.
    assert any("cond" in str(node.target) for node in captured.trace.graph.nodes)
