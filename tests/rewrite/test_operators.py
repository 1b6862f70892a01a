"""Every operator against torch, or a closed form in NumPy where torch has none."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.rewrite import importing  # noqa: F401  (declares operators)
from meshwright.rewrite.calculus import PRIME, Arrays, Doubles, IllTypedError, PrimeField
from meshwright.rewrite.operators import OPERATORS

EPS = 1e-5
POINTWISE_SHAPES = [(), (3,), (1, 4), (2, 3, 1), (2, 1, 3, 2)]


@dataclass(frozen=True)
class Case:
    operator: str
    oracle: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]  # shapes, or functions of a generator
    attributes: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        shapes = [x if isinstance(x, tuple) else getattr(x, "__name__", "made") for x in self.operands]
        return f"{self.operator}-{shapes}-{self.attributes}"


def random_array(rng, operand):
    return rng.standard_normal(operand) if isinstance(operand, tuple) else np.asarray(operand(rng), np.float64)


def run(name, *arrays, numbers=None, **attributes):
    numbers = numbers or Doubles()
    machine = Arrays(numbers)
    known = OPERATORS[name]
    known.check(len(arrays), attributes)
    result = known.define(machine, *(machine.operand(np.asarray(x)[None]) for x in arrays), **attributes)
    (computed,) = machine.compute(result)
    assert computed.shape == result.shape
    return computed


def positive(shape):
    return lambda rng: np.abs(rng.standard_normal(shape)) + 0.1


def few(shape):
    return lambda rng: rng.integers(-1, 2, shape)


def bits(shape):
    return lambda rng: rng.integers(0, 2, shape)


def halves(shape):
    return lambda rng: rng.integers(-9, 10, shape) / 2


def ids(shape, below):
    return lambda rng: rng.integers(0, below, shape)


def centred(x, dims, eps):
    mean = x.mean(dims, keepdim=True)
    return (x - mean) * (x.var(dims, correction=0, keepdim=True) + eps).rsqrt()


def group_normed(x, weight=None, bias=None, groups=1):
    n, c, h, w = x.shape
    out = centred(x.reshape(n, groups, c // groups, h, w), (2, 3, 4), EPS).reshape(x.shape)
    out = out if weight is None else out * weight[:, None, None]
    return out if bias is None else out + bias[:, None, None]


def causal_attention(q, k, v, scale):
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale)


UNARY = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "neg": torch.neg,
    "square": torch.square,
    "relu": torch.relu,
    "abs": torch.abs,
    "silu": F.silu,
    "reciprocal": torch.reciprocal,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
COMPARED = {
    "greater": torch.gt,
    "less": torch.lt,
    "less_equal": torch.le,
    "equal": torch.eq,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
NORMS = [(4,), (3, 5), (2, 3, 1), (2, 1, 3, 4)]


def pointwise_cases():
    for shape in POINTWISE_SHAPES:
        for name, oracle in UNARY.items():
            yield Case(name, oracle, (shape,))
        for name, oracle in BINARY.items():
            yield Case(name, oracle, (shape, shape))
        for name, oracle in COMPARED.items():
            yield Case(name, oracle, (few(shape), few(shape)))
        yield Case("round", torch.round, (halves(shape),))
        yield Case("sign", torch.sign, (few(shape),))
        yield Case("relu", torch.relu, (few(shape),))
        yield Case("sqrt", torch.sqrt, (positive(shape),))
        yield Case("log", lambda x: x.log(), (positive(shape),))
        yield Case("rsqrt", lambda x: x.rsqrt(), (positive(shape),))
        yield Case("pow", lambda x, y: x**y, (positive(shape), shape))
        yield Case("logical_not", torch.logical_not, (bits(shape),))
        yield Case("logical_and", torch.logical_and, (bits(shape), bits(shape)))
        yield Case("where", lambda c, x, y: torch.where(c > 0, x, y), (bits(shape), shape, shape))
        for low, high in ((-0.5, 0.25), (0, 6), (0.5, -0.5)):
            yield Case("clamp", lambda x, a=low, b=high: x.clamp(a, b), (shape,), {"low": low, "high": high})
        for value in (0, 1, -2.5):
            attributes = {"shape": shape, "value": value}
            yield Case("full", lambda s=shape, v=value: torch.full(s, v, dtype=torch.float64), (), attributes)


def layout_cases():
    for shapes, axis in (
        ([(3,)], 0),
        ([(3,), (1,)], 0),
        ([(2, 3), (2, 1), (2, 4)], 1),
        ([(1, 3), (4, 3)], 0),
        ([(2, 1, 3), (2, 5, 3)], 1),
        ([(2, 3, 1, 2), (2, 3, 1, 1), (2, 3, 1, 3), (2, 3, 1, 2)], 3),
    ):
        yield Case("concat", lambda *x, d=axis: torch.cat(x, d), tuple(shapes), {"axis": axis})
    for shape, axis, start, stop in (
        ((5,), 0, 0, 5),
        ((5,), 0, 2, 3),
        ((3, 7), 1, 3, 7),
        ((4, 2, 3), 0, 1, 3),
        ((2, 3, 5, 1), 2, 0, 4),
        ((2, 1), 1, 0, 1),
    ):
        attributes = {"axis": axis, "start": start, "stop": stop}
        yield Case("slice", lambda x, d=axis, a=start, b=stop: x.narrow(d, a, b - a), (shape,), attributes)
    for shape, order in (
        ((3,), (0,)),
        ((2, 3), (1, 0)),
        ((3, 3), (1, 0)),
        ((2, 3, 4), (2, 0, 1)),
        ((2, 3, 4), (1, 2, 0)),
        ((2, 1, 3, 5), (3, 1, 0, 2)),
        ((), ()),
    ):
        yield Case("transpose", lambda x, o=order: x.permute(o), (shape,), {"order": order})
    for shape, wanted in (
        ((6,), (2, 3)),
        ((2, 3), (6,)),
        ((2, 3), (3, 2)),
        ((4, 6), (8, 3)),
        ((2, 6, 5), (2, 2, 3, 5)),
        ((2, 3, 4, 5), (2, 12, 5)),
        ((2, 3, 4), (4, 3, 2)),
        ((1,), ()),
        ((), (1, 1)),
        ((1, 5, 1), (5,)),
        ((2, 2), (2, 1, 2)),
    ):
        yield Case("reshape", lambda x, s=wanted: x.reshape(s), (shape,), {"shape": wanted})
    for shape, wanted in (
        ((), (2, 3)),
        ((3,), (3,)),
        ((1,), (4,)),
        ((3,), (2, 3)),
        ((2, 1), (2, 5)),
        ((1, 3, 1), (4, 2, 3, 5)),
        ((1, 1), (1, 1)),
    ):
        yield Case("broadcast", lambda x, s=wanted: x.expand(s), (shape,), {"shape": wanted})
    for shape, low, high in (
        ((3,), (0,), (0,)),
        ((3,), (2,), (1,)),
        ((2, 3), (0, 1), (2, 0)),
        ((1, 2, 3), (1, 0, 0), (0, 0, 3)),
        ((2, 1, 3, 2), (0, 0, 1, 2), (0, 0, 2, 1)),
        ((4, 3), (-1, 1), (0, -2)),
    ):
        flat = [each for pair in reversed(list(zip(low, high, strict=True))) for each in pair]
        yield Case("pad", lambda x, p=tuple(flat): F.pad(x, p), (shape,), {"low": low, "high": high})
    for shape, axis in (((1,), 0), ((5,), 0), ((2, 3), 0), ((2, 3, 4), 1), ((2, 3, 1, 4), 3)):
        yield Case("reverse", lambda x, d=axis: x.flip(d), (shape,), {"axis": axis})
    for table, shape in (((7, 3), ()), ((7, 3), (5,)), ((4, 1), (2, 3)), ((1, 2), (2, 1, 3))):
        yield Case("embedding", lambda t, i: F.embedding(i.long(), t), (table, ids(shape, table[0])))


def product_cases():
    for x, y in (
        ((2, 3), (3, 4)),
        ((1, 1), (1, 1)),
        ((3, 3), (3, 3)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (2, 1, 4, 1)),
        ((2, 3, 1, 5), (5, 2)),
    ):
        yield Case("matmul", torch.matmul, (x, y))
    for x, weight in (((3,), (2, 3)), ((4, 3), (1, 3)), ((2, 4, 1), (5, 1)), ((2, 1, 3, 5), (4, 5))):
        yield Case("linear", F.linear, (x, weight))
        yield Case("linear", F.linear, (x, weight, weight[:1]))
    for x, weight, stride, padding, dilation, groups in (
        ((2, 3, 5), (4, 3, 3), 1, 0, 1, 1),
        ((1, 4, 7), (2, 2, 3), 2, 1, 1, 2),
        ((2, 3, 9), (6, 1, 2), 3, 2, 2, 3),
        ((1, 1, 1), (1, 1, 1), 1, 0, 1, 1),
        ((2, 2, 4), (2, 2, 5), 1, 2, 1, 1),
    ):
        attributes = {"stride": (stride,), "padding": (padding,), "dilation": (dilation,), "groups": groups}
        for bias in ((), ((weight[0],),)):
            yield Case("conv1d", lambda *t, a=attributes: F.conv1d(*t, **a), (x, weight, *bias), attributes)
    for x, weight, stride, padding, dilation, groups in (
        ((2, 3, 5, 4), (4, 3, 3, 3), (1, 1), (0, 0), (1, 1), 1),
        ((1, 4, 7, 5), (6, 2, 3, 1), (2, 2), (1, 0), (1, 1), 2),
        ((2, 3, 8, 7), (3, 1, 2, 3), (2, 1), (1, 3), (2, 1), 3),
        ((1, 2, 5, 9), (2, 2, 3, 3), (1, 3), (2, 2), (1, 3), 1),
        ((1, 4, 3, 3), (4, 1, 3, 3), (1, 1), (1, 1), (1, 1), 4),
        ((1, 1, 1, 1), (2, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    ):
        attributes = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        for bias in ((), ((weight[0],),)):
            yield Case("conv2d", lambda *t, a=attributes: F.conv2d(*t, **a), (x, weight, *bias), attributes)
    for lead, queries, keys, size, out in (
        ((), 3, 4, 2, 5),
        ((2,), 4, 4, 3, 3),
        ((2, 3), 1, 5, 4, 2),
        ((1, 2), 5, 3, 1, 1),
        ((), 1, 1, 1, 1),
    ):
        operands = ((*lead, queries, size), (*lead, keys, size), (*lead, keys, out))
        for scale in (1, 0.37):
            plain = {"scale": scale, "causal": False}
            yield Case("attention", lambda *t, s=scale: F.scaled_dot_product_attention(*t, scale=s), operands, plain)
            masked = (*operands, (*lead, queries, keys))
            yield Case(
                "attention",
                lambda q, k, v, m, s=scale: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=s),
                masked,
                plain,
            )
            yield Case(
                "attention",
                lambda *t, s=scale: causal_attention(*t, s),
                operands,
                {"scale": scale, "causal": True},
            )


def reduction_cases():
    oracles = {
        "sum": lambda x, d, k: x.sum(d, keepdim=k),
        "mean": lambda x, d, k: x.mean(d, keepdim=k),
        "amax": lambda x, d, k: x.amax(d, keepdim=k),
        "amin": lambda x, d, k: x.amin(d, keepdim=k),
        "variance": lambda x, d, k: x.var(d, correction=0, keepdim=k),
    }
    axes = [((4,), 0), ((3, 5), 0), ((3, 5), 1), ((2, 1, 3), 1), ((2, 3, 4), 2), ((2, 3, 1, 5), 3), ((1, 4, 2, 3), 1)]
    for (shape, axis), keep, (name, oracle) in product(axes, (True, False), oracles.items()):
        yield Case(name, lambda x, o=oracle, d=axis, k=keep: o(x, d, k), (shape,), {"axis": axis, "keep": keep})
    for shape, axis in axes:
        yield Case("softmax", lambda x, d=axis: x.softmax(d), (shape,), {"axis": axis})
        yield Case("log_softmax", lambda x, d=axis: x - x.exp().sum(d, keepdim=True).log(), (shape,), {"axis": axis})
    for shape, kernel, stride, padding in (
        ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)),
        ((2, 3, 5, 7), (2, 3), (2, 3), (0, 0)),
        ((1, 2, 6, 5), (3, 3), (2, 1), (1, 1)),
        ((2, 1, 4, 4), (2, 2), (1, 1), (1, 1)),
        ((1, 2, 7, 3), (5, 2), (3, 2), (2, 1)),
        ((1, 1, 2, 9), (2, 4), (1, 5), (1, 0)),
    ):
        attributes = {"kernel": kernel, "stride": stride, "padding": padding}
        for name, oracle in (("avg_pool2d", F.avg_pool2d), ("max_pool2d", F.max_pool2d)):
            yield Case(name, lambda x, o=oracle, k=kernel, s=stride, p=padding: o(x, k, s, p), (shape,), attributes)
    for shape in ((2, 3), (1, 1), (2, 3, 4), (2, 4, 3, 1)):
        channels = (shape[1],)
        operands = (shape, channels, positive(channels), channels, channels)
        yield Case("batch_norm", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, eps=EPS), operands, {"eps": EPS})
    for shape in NORMS:
        for count in range(3):
            yield Case(
                "layer_norm",
                lambda x, *wb: F.layer_norm(x, x.shape[-1:], *wb, eps=EPS),
                (shape, *(shape[-1:],) * count),
                {"eps": EPS},
            )
        for count in range(2):
            yield Case(
                "rms_norm",
                lambda x, *w: F.rms_norm(x, x.shape[-1:], *w, eps=EPS),
                (shape, *(shape[-1:],) * count),
                {"eps": EPS},
            )
    for shape, groups in (((2, 4, 3, 2), 2), ((1, 3, 1, 5), 3), ((2, 6, 2, 2), 1), ((1, 1, 1, 1), 1)):
        for count in range(3):
            yield Case(
                "group_norm",
                lambda *t, g=groups: group_normed(*t, groups=g),
                (shape, *(shape[1:2],) * count),
                {"groups": groups, "eps": EPS},
            )


CASES = [*pointwise_cases(), *layout_cases(), *product_cases(), *reduction_cases()]
# What torch has no function for: closed forms below. Casts are opaque functions: only shapes are checked.
APART = {
    "partition",
    "combine",
    "replicate",
    "reduce",
    "conv_same",
    "conv_same_grouped",
    "linear_of_copies",
    "bitcast",
    "cast",
}
GROUPS = sorted({case.operator for case in CASES})


def test_each_declared_operator_is_compared_with_something():
    declared = {name for name, known in OPERATORS.items() if known.define.__module__.startswith("meshwright.")}
    assert declared == set(GROUPS) | APART
    assert not set(GROUPS) & APART


@pytest.mark.parametrize("name", GROUPS)
def test_operators_compute_what_torch_computes(name):
    rng = np.random.default_rng(7)
    for case in CASES:
        if case.operator != name:
            continue
        arrays = [random_array(rng, operand) for operand in case.operands]
        wanted = case.oracle(*map(torch.from_numpy, arrays)).to(torch.float64).numpy()
        found = run(name, *arrays, **case.attributes)
        assert found.shape == wanted.shape, str(case)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=str(case))


@pytest.mark.parametrize("name", GROUPS)
def test_a_batch_of_draws_is_computed_draw_by_draw(name):
    rng = np.random.default_rng(3)
    case = next(case for case in reversed(CASES) if case.operator == name)
    draws = [[random_array(rng, operand) for operand in case.operands] for _ in range(3)]
    machine = Arrays(Doubles())
    stacked = [machine.operand(np.stack(each)) for each in zip(*draws, strict=True)]
    together = machine.compute(OPERATORS[name].define(machine, *stacked, **case.attributes))
    for place, arrays in enumerate(draws if stacked else [[]]):
        np.testing.assert_allclose(together[place], run(name, *arrays, **case.attributes), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["log", "rsqrt", "pow"])
def test_functions_of_positive_numbers(name):
    x = np.array([0.1, 1.0, 2.0])
    oracle = {"log": np.log, "rsqrt": lambda v: 1 / np.sqrt(v), "pow": lambda v, y: v**y}[name]
    operands = (x, x) if name == "pow" else (x,)
    np.testing.assert_allclose(run(name, *operands), oracle(*operands), rtol=1e-9)


EXACT = [
    case
    for case in CASES
    if case.operator
    in ("add", "sub", "mul", "neg", "square", "concat", "slice", "transpose", "reshape", "broadcast", "pad", "reverse")
    or case.operator in ("matmul", "linear", "conv1d", "conv2d", "sum", "embedding", "where", "maximum", "relu", "amax")
]


@pytest.mark.parametrize("name", sorted({case.operator for case in EXACT}))
def test_whole_numbers_give_the_same_results_over_the_prime_field(name):
    rng = np.random.default_rng(5)
    for case in EXACT:
        if case.operator != name:
            continue
        arrays = [
            rng.integers(-9, 10, operand) if isinstance(operand, tuple) else np.asarray(operand(rng), np.int64)
            for operand in case.operands
        ]
        wanted = run(name, *(array.astype(np.float64) for array in arrays), **case.attributes)
        found = run(name, *(array % PRIME for array in arrays), numbers=PrimeField(), **case.attributes)
        np.testing.assert_array_equal(found, wanted.astype(np.int64) % PRIME, err_msg=str(case))


def test_padding_of_a_max_pool_over_the_prime_field_is_below_all_numbers():
    x = np.arange(-4, 5).reshape(1, 1, 3, 3)
    attributes = {"kernel": (2, 2), "stride": (1, 1), "padding": (1, 1)}
    wanted = run("max_pool2d", x.astype(np.float64), **attributes)
    found = run("max_pool2d", x % PRIME, numbers=PrimeField(), **attributes)
    np.testing.assert_array_equal(found, wanted.astype(np.int64) % PRIME)


@pytest.mark.parametrize("name", ["cast", "bitcast"])
@pytest.mark.parametrize("shape", POINTWISE_SHAPES)
def test_casts_keep_the_shape(name, shape):
    assert run(name, np.zeros(shape), dtype="float16").shape == shape


@pytest.mark.parametrize("name", ["partition", "combine"])
def test_partition_and_combine_keep_all_numbers(name):
    for shape, axis, degree in (((4,), 0, 2), ((2, 6), 1, 3), ((3, 2, 1), 0, 1), ((1, 2, 8, 2), 2, 4)):
        x = np.random.default_rng(0).standard_normal(shape)
        np.testing.assert_array_equal(run(name, x, axis=axis, degree=degree), x)
    with pytest.raises(IllTypedError):
        run(name, np.zeros((5, 3)), axis=0, degree=2)
    with pytest.raises(IllTypedError):
        run(name, np.zeros((5, 3)), axis=2, degree=1)


def test_replicate_and_reduce_copy_and_sum_parts():
    for shape, axis, degree in (((4,), 0, 2), ((2, 6), 1, 3), ((3, 2, 1), 0, 1), ((1, 2, 8, 2), 2, 4)):
        x = np.random.default_rng(1).standard_normal(shape)
        np.testing.assert_array_equal(run("replicate", x, axis=axis, degree=degree), np.concatenate([x] * degree, axis))
        np.testing.assert_allclose(run("reduce", x, axis=axis, degree=degree), sum(np.split(x, degree, axis)))
    with pytest.raises(IllTypedError):
        run("reduce", np.zeros((5, 3)), axis=0, degree=2)


def convolved(x, weight, stride, groups):
    """A convolution padded to "same", number by number."""
    n, _, height, width = x.shape
    out, per_group, *kernel = weight.shape
    pads = [size // 2 for size in kernel]
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in pads)])
    rows, cols = -(-height // stride[0]), -(-width // stride[1])
    result = np.zeros((n, out, rows, cols))
    for o, i, j in product(range(out), range(rows), range(cols)):
        first = o // (out // groups) * per_group
        window = padded[:, first : first + per_group, i * stride[0] :, j * stride[1] :][:, :, : kernel[0], : kernel[1]]
        result[:, o, i, j] = (window * weight[o]).sum((1, 2, 3))
    return result


def test_convolutions_padded_to_same_are_sums_over_windows():
    rng = np.random.default_rng(2)
    for shape, kernel, stride in (
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1)),
        ((2, 3, 5, 4), (2, 3, 3, 1), (1, 1)),
        ((1, 2, 7, 6), (4, 2, 5, 3), (2, 3)),
    ):
        x, weight = rng.standard_normal(shape), rng.standard_normal(kernel)
        wanted = convolved(x, weight, stride, 1)
        np.testing.assert_allclose(run("conv_same", x, weight, stride=stride), wanted, atol=1e-12)
        np.testing.assert_allclose(run("conv_same_grouped", x, weight, stride=stride), wanted, atol=1e-12)
    for shape, kernel, stride, groups in (
        ((2, 4, 5, 4), (6, 2, 3, 1), (1, 2), 2),
        ((1, 3, 4, 4), (3, 1, 3, 3), (2, 1), 3),
    ):
        x, weight = rng.standard_normal(shape), rng.standard_normal(kernel)
        wanted = convolved(x, weight, stride, groups)
        np.testing.assert_allclose(run("conv_same_grouped", x, weight, stride=stride), wanted, atol=1e-12)


def test_a_linear_layer_of_copies_reads_the_first():
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((3, 4, 5)), rng.standard_normal((2, 6, 5))
    np.testing.assert_allclose(run("linear_of_copies", x, weight), (x[0] @ weight[0].T)[None])


CONV = {"stride": (1,), "padding": (0,), "dilation": (1,), "groups": 1}
CONV_2D = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
ATTENTION = {"scale": 1, "causal": False}
PAIRS = [((2,), (3,)), ((2, 3), (3, 2)), ((2,), (2, 1)), ((), (1,)), ((2, 3), (2, 1)), ((1, 1), (1,))]
ILL_TYPED = {
    **{name: [(shapes, {}) for shapes in PAIRS] for name in (*BINARY, *COMPARED, "pow", "logical_and")},
    "where": [(((2,), (2,), (3,)), {}), (((2,), (3,), (3,)), {}), (((2,), (2,), (2, 1)), {})],
    "concat": [
        (((2, 3), (2, 4)), {"axis": 0}),
        (((2, 3), (2,)), {"axis": 0}),
        (((2, 3), (2, 3)), {"axis": 2}),
        (((2, 3), (2, 3), (3, 2)), {"axis": 1}),
        (((), ()), {"axis": 0}),
    ],
    "embedding": [(((3,), (2,)), {}), (((3, 2, 2), (2,)), {})],
    "matmul": [
        (((2, 3), (2, 3)), {}),
        (((3,), (3,)), {}),
        (((3,), (3, 2)), {}),
        (((2, 3), (2, 3, 4)), {}),
        (((2, 3, 4), (3, 4, 5)), {}),
        (((2, 1, 3, 4), (1, 4, 5)), {}),
    ],
    "linear": [
        (((2, 3), (3, 2)), {}),
        (((), (3, 2)), {}),
        (((2, 3), (3,)), {}),
        (((2, 3), (4, 3), (3,)), {}),
        (((2, 3), (4, 3), (4, 1)), {}),
    ],
    "conv1d": [
        (((1, 2, 5), (3, 1, 3)), CONV),
        (((2, 5), (3, 2, 3)), CONV),
        (((1, 2, 5), (3, 2)), CONV),
        (((1, 2, 5), (3, 2, 3), (2,)), CONV),
        (((1, 2, 5), (3, 1, 3)), {**CONV, "groups": 2}),
    ],
    "conv2d": [
        (((1, 2, 5, 5), (3, 1, 3, 3)), CONV_2D),
        (((2, 5, 5), (3, 2, 3, 3)), CONV_2D),
        (((1, 2, 5, 5), (3, 2, 3)), CONV_2D),
        (((1, 2, 5, 5), (3, 2, 3, 3), (3, 1)), CONV_2D),
        (((1, 4, 5, 5), (3, 2, 3, 3)), {**CONV_2D, "groups": 2}),
    ],
    "attention": [
        (((2, 3), (4, 2), (4, 3)), ATTENTION),
        (((2, 3), (4, 3), (5, 3)), ATTENTION),
        (((2, 3), (1, 4, 3), (4, 3)), ATTENTION),
        (((3,), (3,), (3,)), ATTENTION),
        (((2, 2, 3), (3, 4, 3), (3, 4, 3)), ATTENTION),
        (((2, 3), (4, 3), (4, 3), (4, 2)), ATTENTION),
        (((2, 3), (4, 3), (4, 3), (4,)), ATTENTION),
    ],
    "batch_norm": [
        (((2, 3), (2,), (3,), (3,), (3,)), {"eps": EPS}),
        (((2, 3), (3,), (3,), (3,), (1,)), {"eps": EPS}),
        (((3,), (3,), (3,), (3,), (3,)), {"eps": EPS}),
        (((2, 3), (3, 1), (3,), (3,), (3,)), {"eps": EPS}),
    ],
    "layer_norm": [
        (((2, 3), (2,)), {"eps": EPS}),
        (((2, 3), (3,), (1,)), {"eps": EPS}),
        (((2, 3), (2, 3)), {"eps": EPS}),
        (((), ()), {"eps": EPS}),
    ],
    "rms_norm": [(((2, 3), (2,)), {"eps": EPS}), (((2, 3), (2, 3)), {"eps": EPS})],
    "group_norm": [
        (((1, 4, 2, 2), (2,)), {"groups": 2, "eps": EPS}),
        (((1, 4, 2, 2), (4,), (1,)), {"groups": 2, "eps": EPS}),
        (((1, 4, 2, 2), (4,), (4,)), {"groups": 3, "eps": EPS}),
        (((1, 4, 2), (4,), (4,)), {"groups": 2, "eps": EPS}),
    ],
    "conv_same": [
        (((1, 2, 5, 5), (3, 1, 3, 3)), {"stride": (1, 1)}),
        (((1, 2, 5, 5), (3, 2, 2, 3)), {"stride": (1, 1)}),
        (((2, 5, 5), (3, 2, 3, 3)), {"stride": (1, 1)}),
    ],
    "conv_same_grouped": [
        (((1, 3, 5, 5), (3, 2, 3, 3)), {"stride": (1, 1)}),
        (((1, 4, 5, 5), (3, 2, 3, 3)), {"stride": (1, 1)}),
        (((1, 4, 5, 5), (4, 2, 3, 4)), {"stride": (1, 1)}),
    ],
    "linear_of_copies": [
        (((1, 2, 3), (1, 3, 2)), {}),
        (((2, 3), (1, 2, 3)), {}),
        (((1, 2, 3), (2, 3)), {}),
    ],
}
ONE_OPERAND = {
    "slice": [((3,), {"axis": 0, "start": 0, "stop": 4}), ((3,), {"axis": 0, "start": 2, "stop": 2})],
    "transpose": [((2, 3), {"order": (0,)}), ((2, 3), {"order": (0, 0)})],
    "reshape": [((2, 3), {"shape": (5,)}), ((), {"shape": (2,)})],
    "broadcast": [((2,), {"shape": (4,)}), ((1, 2), {"shape": (2,)}), ((3,), {"shape": (1,)})],
    "pad": [((2, 3), {"low": (1,), "high": (1,)})],
    "sum": [((2, 3), {"axis": 2, "keep": True}), ((), {"axis": 0, "keep": False})],
    "softmax": [((2, 3), {"axis": 2})],
    "reverse": [((2, 3), {"axis": -1})],
    "max_pool2d": [
        ((1, 2, 3), {"kernel": (2, 2), "stride": (1, 1), "padding": (0, 0)}),
        ((1, 1, 3, 3), {"kernel": (2, 2), "stride": (1, 1), "padding": (2, 0)}),
    ],
}


def test_ill_typed_operands_are_tried_for_each_operator_of_several():
    several = {name for name, known in OPERATORS.items() if known.most is None or known.most > 1}
    assert {name for name in several if OPERATORS[name].define.__module__.startswith("meshwright.")} == set(ILL_TYPED)


@pytest.mark.parametrize("name", sorted(ILL_TYPED))
def test_ill_typed_operands_are_refused(name):
    for shapes, attributes in ILL_TYPED[name]:
        with pytest.raises(IllTypedError):
            run(name, *map(np.ones, shapes), **attributes)


@pytest.mark.parametrize("name", sorted(ONE_OPERAND))
def test_ill_typed_attributes_are_refused(name):
    for shape, attributes in ONE_OPERAND[name]:
        with pytest.raises(IllTypedError):
            run(name, np.ones(shape), **attributes)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_missing_operands_and_attributes_are_refused(name):
    known = OPERATORS[name]
    with pytest.raises(IllTypedError):
        known.check(max(known.fewest, 1), {"unknown": 1})
    attributes = dict.fromkeys(known.attributes, 1)
    if known.fewest:
        with pytest.raises(IllTypedError):
            known.check(known.fewest - 1, attributes)
    if known.most is not None:
        with pytest.raises(IllTypedError):
            known.check(known.most + 1, attributes)
