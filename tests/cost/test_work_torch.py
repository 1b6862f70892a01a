"""Real tensors as the oracle: which gradients share the memory of the one that arrives, and what torch allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.cost.work import find_operator, read_work
from meshwright.cost.work import work_count as products
from meshwright.cost.work.op_calls import read_call
from meshwright.cost.work.work_count import outputs_of

torch = pytest.importorskip("torch")
functional = torch.nn.functional
aten = torch.ops.aten

SIZE = (8, 16, 32)
# Bytes that kernels take beside: statistics of rows, partial sums of a thread, numbers.
SMALL = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """A call on real tensors. ``grads``: which inputs want a gradient; ``exact``: its backward takes nothing else.

    ``in_steps``: its forward makes values on the way, which nothing counts.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    call: Any
    grads: str
    attributes: str = ""
    exact: bool = True
    in_steps: bool = False
    dtypes: tuple[str, ...] = ()

    @property
    def key(self):
        dtypes = self.dtypes or ("float32",) * len(self.shapes)
        tensors = ",".join(
            f"{'x'.join(map(str, shape))}:{dtype}" for shape, dtype in zip(self.shapes, dtypes, strict=True)
        )
        return f"aten.{self.kind}({tensors}{self.attributes}|{self.grads})"

    def tensors(self):
        made = []
        dtypes = self.dtypes or ("float32",) * len(self.shapes)
        for shape, dtype, grad in zip(self.shapes, dtypes, self.grads, strict=True):
            if dtype == "float32":
                made.append((torch.rand(shape) + 0.5).requires_grad_(grad == "1"))
            elif dtype == "bool":
                made.append(torch.rand(shape) > 0.5)
            else:
                made.append(torch.randint(0, 4, shape))
        return made


CASES = (
    Case("add.Tensor", (SIZE, SIZE), torch.add, "11"),
    Case("add.Tensor", (SIZE, (32,)), torch.add, "11"),
    Case("sub.Tensor", (SIZE, SIZE), torch.sub, "11"),
    Case("mul.Tensor", (SIZE, SIZE), torch.mul, "11"),
    Case("mul.Tensor", (SIZE, (32,)), torch.mul, "10"),
    Case("mul.Tensor", (SIZE, (32,)), torch.mul, "11"),
    Case("div.Tensor", (SIZE, SIZE), torch.div, "10"),
    Case("neg.default", (SIZE,), torch.neg, "1"),
    Case("relu.default", (SIZE,), torch.relu, "1"),
    Case("gelu.default", (SIZE,), functional.gelu, "1"),
    Case("silu.default", (SIZE,), functional.silu, "1"),
    Case("tanh.default", (SIZE,), torch.tanh, "1"),
    Case("sigmoid.default", (SIZE,), torch.sigmoid, "1"),
    Case("exp.default", (SIZE,), torch.exp, "1"),
    Case("log.default", (SIZE,), torch.log, "1"),
    Case("leaky_relu.default", (SIZE,), functional.leaky_relu, "1"),
    Case("masked_fill.Scalar", (SIZE, SIZE), lambda x, m: x.masked_fill(m, 0.0), "10", dtypes=("float32", "bool")),
    Case("softmax.int", (SIZE,), lambda x: torch.softmax(x, -1), "1", ";dim=-1"),
    Case("log_softmax.int", (SIZE,), lambda x: torch.log_softmax(x, -1), "1", ";dim=-1"),
    Case("sum.dim_IntList", (SIZE,), lambda x: x.sum(-1), "1", ";dim=[-1]"),
    Case("mean.dim", (SIZE,), lambda x: x.mean(-1), "1", ";dim=[-1]"),
    Case("cumsum.default", (SIZE,), lambda x: x.cumsum(1), "1", ";dim=1", exact=False),
    Case("topk.default", (SIZE,), lambda x: x.topk(4)[0], "1", ";k=4"),
    Case(
        "max_pool2d.default", (SIZE,), lambda x: functional.max_pool2d(x, 2), "1", ";kernel_size=[2, 2];stride=[2, 2]"
    ),
    Case(
        "avg_pool2d.default", (SIZE,), lambda x: functional.avg_pool2d(x, 2), "1", ";kernel_size=[2, 2];stride=[2, 2]"
    ),
    Case("mse_loss.default", (SIZE, SIZE), functional.mse_loss, "10", in_steps=True),
    Case("layer_norm.default", (SIZE, (32,), (32,)), lambda x, w, b: functional.layer_norm(x, (32,), w, b), "111"),
    Case(
        "cross_entropy_loss.default", ((128, 32), (128,)), functional.cross_entropy, "10", dtypes=("float32", "int64")
    ),
    Case("cat.default", (SIZE, SIZE), lambda x, y: torch.cat((x, y), 1), "11", ";dim=1"),
    Case("stack.default", (SIZE, SIZE), lambda x, y: torch.stack((x, y), 1), "11", ";dim=1"),
    Case("clone.default", (SIZE,), torch.clone, "1"),
    Case("pad.default", (SIZE,), lambda x: functional.pad(x, (1, 1)), "1", ";pad=[1, 1]"),
    Case("tril.default", (SIZE,), torch.tril, "1"),
    Case("repeat.default", (SIZE,), lambda x: x.repeat(2, 1, 1), "1", ";repeats=[2, 1, 1]"),
    Case(
        "repeat_interleave.self_int", (SIZE,), lambda x: x.repeat_interleave(2, 1), "1", ";repeats=2;dim=1", exact=False
    ),
    Case("embedding.default", ((50, 16), (64,)), aten.embedding, "10", dtypes=("float32", "int64")),
    Case(
        "index_select.default",
        ((50, 16), (64,)),
        lambda x, i: x.index_select(0, i),
        "10",
        ";dim=0",
        dtypes=("float32", "int64"),
    ),
    Case("gather.default", (SIZE, SIZE), lambda x, i: x.gather(1, i), "10", ";dim=1", dtypes=("float32", "int64")),
    Case(
        "scatter.src",
        (SIZE, SIZE, SIZE),
        lambda x, i, s: x.scatter(1, i, s),
        "001",
        ";dim=1",
        dtypes=("float32", "int64", "float32"),
    ),
    Case("view.default", (SIZE,), lambda x: x.view(8, 512), "1", ";size=[8, 512]"),
    Case("transpose.int", (SIZE,), lambda x: x.transpose(0, 1), "1", ";dim0=0;dim1=1"),
    Case("unsqueeze.default", (SIZE,), lambda x: x.unsqueeze(0), "1", ";dim=0"),
    Case("expand.default", ((1, 16, 32),), lambda x: x.expand(8, 16, 32), "1", ";size=[8, 16, 32]"),
    Case("select.int", (SIZE,), lambda x: x.select(1, 3), "1", ";dim=1;index=3"),
    Case("slice.Tensor", (SIZE,), lambda x: x[:, 2:6], "1", ";dim=1;start=2;end=6"),
    Case("dropout.default", (SIZE,), lambda x: functional.dropout(x, 0.5), "1", ";p=0.5;train=True"),
    Case("dropout.default", (SIZE,), lambda x: aten.dropout(x, 0.5, False), "1", ";p=0.5;train=False"),
    Case(
        "upsample_nearest2d.vec",
        ((2, 3, 8, 8),),
        lambda x: functional.interpolate(x, scale_factor=2.0),
        "1",
        ";scale_factors=[2.0, 2.0]",
        in_steps=True,
    ),
)


def allocations(profiler):
    """Bytes of all that was taken meanwhile, and freed again or not."""
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


def profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_forward_makes_its_output_and_what_it_keeps(case):
    tensors = case.tensors()
    with profiled() as profiler:
        output = case.call(*tensors)
    operator = operator_of(case)
    made = {
        "": 0,
        "first": tensors[0].numel() * 4,
        "output": output.numel() * 4,
        "index": output.numel() * 8,
    }[operator.makes]
    written = 0 if operator.family == "view" else output.numel() * 4
    if operator.output == "top":
        written += output.numel() * 8
    assert written + made <= sum(allocations(profiler))
    if not case.in_steps:
        assert sum(allocations(profiler)) <= written + made + SMALL


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_gradients_are_handed_on_or_made_as_in_torch(case):
    tensors = case.tensors()
    output = case.call(*tensors)
    wanted = [place for place, flag in enumerate(case.grads) if flag == "1"]
    gradient = torch.rand_like(output)
    with profiled() as profiler:
        found = torch.autograd.grad(output, [tensors[place] for place in wanted], gradient)
    shared = [each.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr() for each in found]
    call, operator = read_call(case.key), operator_of(case)
    expected = [operator.passes_on(i, call.elements(i), output.numel()) for i in wanted]
    assert shared == expected
    assert outputs_of(call, operator)[0].elements == output.numel()
    made = sum(call.num_bytes(place) for place, passed in zip(wanted, expected, strict=True) if not passed)
    between = call.num_bytes(0) if operator.between else 0
    if "others" in operator.keeps and operator.family == "pointwise":
        between += sum(output.numel() * 4 for place in wanted if call.elements(place) < output.numel())
    assert made + between <= sum(allocations(profiler))
    if case.exact:
        assert sum(allocations(profiler)) <= made + between + SMALL
    assert (read_work(case.key).backward.num_kernels > 0) == (made > 0)


def operator_of(case):
    call = read_call(case.key)
    return find_operator(call.operator, call.attributes, call.dtypes)


def test_attention_that_drops_passes_its_scores_through_memory():
    shape = (2, 4, 64, 32)
    query, key, value = (torch.rand(shape, requires_grad=True) for _ in range(3))
    scores = 2 * 4 * 64 * 64 * 4
    with profiled() as profiler:
        output = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
    # Each is written once and read once: product, softmax, mask, what is left.
    assert 2 * allocations(profiler).count(scores) == products._SCORES_FORWARD
    with profiled() as profiler:
        torch.autograd.grad(output, [query, key, value], torch.rand_like(output))
    # Gradients of what is left, of the softmax and of the product are written.
    assert allocations(profiler).count(scores) == 3
    assert output.shape == shape
