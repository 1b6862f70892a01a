"""A call of every operator that the table of placements names: what torch computes, and how a graph has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Case:
    """``call`` on tensors of ``shapes`` is the op ``kind`` with ``attributes``; ``integers``: inputs of indices.

    ``highest`` is one more than the largest index.
    """

    kind: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    attributes: tuple[tuple[str, str], ...] = ()
    integers: tuple[int, ...] = ()
    booleans: tuple[int, ...] = ()
    highest: int = 8

    @property
    def operator(self) -> str:
        return self.kind.split(".")[1]

    def tensors(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for i, shape in enumerate(self.shapes):
            if i in self.integers:
                made.append(torch.randint(self.highest, shape, generator=generator))
            elif i in self.booleans:
                made.append(torch.rand(shape, generator=generator) > 0.5)
            else:
                made.append(torch.rand(shape, generator=generator) + 0.5)
        return made


def case(
    kind: str, call: Callable[..., Any], *shapes: tuple[int, ...], integers=(), booleans=(), highest=8, **attributes
):
    texts = tuple((name, str(value)) for name, value in attributes.items())
    return Case(f"aten.{kind}", call, shapes, texts, integers, booleans, highest)


def _normed(x, weight, bias, mean, variance):
    return F.batch_norm(x, mean, variance, weight, bias, training=True)


X, Y = (8, 16, 32), (8, 4, 16, 32)
BINARY = ("add", "sub", "mul", "div")
UNARY = {
    "neg": torch.neg,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "gelu": F.gelu,
    "silu": F.silu,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "softplus": F.softplus,
    "contiguous": torch.Tensor.contiguous,
    "clone": torch.clone,
    "alias": torch.ops.aten.alias,
    "detach": torch.detach,
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "empty_like": torch.empty_like,
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
}
CASES = (
    case("linear.default", F.linear, X, (64, 32), (64,)),
    case("linear.default", F.linear, X, (64, 32)),
    case("mm.default", torch.mm, (16, 32), (32, 64)),
    case("bmm.default", torch.bmm, X, (8, 32, 64)),
    case("matmul.default", torch.matmul, Y, (8, 4, 32, 64)),
    case("addmm.default", torch.addmm, (64,), (16, 32), (32, 64)),
    case("baddbmm.default", torch.baddbmm, (8, 16, 64), X, (8, 32, 64)),
    case("outer.default", torch.outer, (16,), (32,)),
    case("conv1d.default", F.conv1d, (8, 4, 16), (8, 4, 3), (8,)),
    case("conv2d.default", F.conv2d, (8, 4, 16, 16), (8, 4, 3, 3), (8,)),
    case("conv3d.default", F.conv3d, (4, 4, 6, 6, 6), (8, 4, 3, 3, 3), (8,)),
    case("conv_transpose2d.input", F.conv_transpose2d, (8, 4, 16, 16), (4, 8, 3, 3), (8,)),
    case("scaled_dot_product_attention.default", F.scaled_dot_product_attention, Y, Y, Y),
    case(
        "embedding.default",
        lambda weight, index: F.embedding(index, weight),
        (64, 32),
        (8, 16),
        integers=(1,),
        highest=64,
    ),
    case("cross_entropy_loss.default", F.cross_entropy, (16, 64), (16,), integers=(1,), highest=64),
    case("mse_loss.default", F.mse_loss, X, X),
    case("binary_cross_entropy_with_logits.default", F.binary_cross_entropy_with_logits, X, X),
    *(case(f"{name}.Tensor", getattr(torch, name), X, X) for name in BINARY),
    *(case(f"{name}.Tensor", getattr(torch, name), X, (32,)) for name in BINARY),
    *(case(f"{name}.default", call, X) for name, call in UNARY.items()),
    case("pow.Tensor_Scalar", lambda x: x**2, X, exponent=2),
    case("clamp.default", lambda x: x.clamp(max=1.0), X, max=1.0),
    case("where.self", torch.where, X, X, X, booleans=(0,)),
    case("masked_fill.Scalar", lambda x, mask: x.masked_fill(mask, 0.0), X, X, booleans=(1,), value=0.0),
    *(case(f"{name}.Tensor", getattr(torch, name), X, X) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    case("to.dtype", lambda x: x.to(torch.float64), X, dtype="float64"),
    case("type_as.default", lambda x, y: x.type_as(y), X, X),
    case("expand_as.default", lambda x, y: x.expand_as(y), (16, 32), X),
    case("broadcast_tensors.default", torch.broadcast_tensors, X, (16, 32)),
    case("layer_norm.default", lambda x, w, b: F.layer_norm(x, (32,), w, b), X, (32,), (32,), normalized_shape=[32]),
    case("rms_norm.default", lambda x, w: F.rms_norm(x, (32,), w), X, (32,), normalized_shape=[32]),
    case("batch_norm.default", _normed, (8, 4, 6, 6), (4,), (4,), (4,), (4,), training=True),
    case("group_norm.default", lambda x, w, b: F.group_norm(x, 4, w, b), (8, 16, 6, 6), (16,), (16,), num_groups=4),
    case("softmax.int", lambda x: x.softmax(-1), X, dim=-1),
    case("log_softmax.int", lambda x: x.log_softmax(1), X, dim=1),
    case("cumsum.default", lambda x: x.cumsum(1), X, dim=1),
    case("topk.default", lambda x: x.topk(2), X, k=2),
    case("sum.dim_IntList", lambda x: x.sum(1), X, dim=[1]),
    case("sum.default", torch.sum, X),
    case("mean.dim", lambda x: x.mean(-1, keepdim=True), X, dim=[-1], keepdim=True),
    case("var.correction", lambda x: x.var(1), X, dim=[1]),
    case("amax.default", lambda x: x.amax(1), X, dim=[1]),
    case("argmax.default", lambda x: x.argmax(1), X, dim=1),
    case("linalg_vector_norm.default", torch.linalg.vector_norm, X),
    case("view.default", lambda x: x.view(8, 16, 4, 8), X, size=[8, 16, 4, 8]),
    case("reshape.default", lambda x: x.reshape(8, 512), X, shape=[8, 512]),
    case("flatten.using_ints", lambda x: x.flatten(0, 1), X, end_dim=1),
    case("unflatten.int", lambda x: x.unflatten(-1, (4, 8)), X, dim=-1, sizes=[4, 8]),
    case("unsqueeze.default", lambda x: x.unsqueeze(1), X, dim=1),
    case("squeeze.dim", lambda x: x.squeeze(1), (8, 1, 32), dim=1),
    case("transpose.int", lambda x: x.transpose(1, 2), X, dim0=1, dim1=2),
    case("swapaxes.default", lambda x: x.swapaxes(0, 2), X, axis0=0, axis1=2),
    case("permute.default", lambda x: x.permute(2, 0, 1), X, dims=[2, 0, 1]),
    case("t.default", torch.t, (16, 32)),
    case("chunk.default", lambda x: x.chunk(2, -1), X, chunks=2, dim=-1),
    case("split.Tensor", lambda x: x.split(8, 1), X, split_size=8, dim=1),
    case("split_with_sizes.default", lambda x: x.split([8, 24], 2), X, split_sizes=[8, 24], dim=2),
    case("unbind.int", lambda x: x.unbind(1), (8, 2, 32), dim=1),
    case("select.int", lambda x: x.select(1, 0), X, dim=1, index=0),
    case("slice.Tensor", lambda x: x[:, :8], X, dim=1, start=0, end=8),
    case("narrow.default", lambda x: x.narrow(2, 0, 16), X, dim=2, start=0, length=16),
    case("cat.default", lambda *x: torch.cat(x, 1), X, X, dim=1),
    case("stack.default", lambda *x: torch.stack(x, 1), X, X, dim=1),
    case("expand.default", lambda x: x.expand(8, 16, 32), (16, 32), size=[8, 16, 32]),
    case("repeat_interleave.self_int", lambda x: x.repeat_interleave(2, dim=1), X, repeats=2, dim=1),
    case("gather.default", lambda x, i: x.gather(1, i), X, (8, 4, 32), integers=(1,), dim=1),
    case("scatter.src", lambda x, i, s: x.scatter(1, i, s), X, (8, 4, 32), (8, 4, 32), integers=(1,), dim=1),
    case("index_select.default", lambda x, i: x.index_select(1, i), X, (8,), integers=(1,), dim=1),
    case("index.Tensor", lambda x, i, j: x[:, i, j], X, (8,), (8,), integers=(1, 2)),
    case("max_pool2d.default", lambda x: F.max_pool2d(x, 2), (8, 4, 16, 16), kernel_size=[2, 2]),
    case("avg_pool2d.default", lambda x: F.avg_pool2d(x, 2), (8, 4, 16, 16), kernel_size=[2, 2]),
    case("adaptive_avg_pool2d.default", lambda x: F.adaptive_avg_pool2d(x, 2), (8, 4, 16, 16), output_size=[2, 2]),
    case(
        "upsample_nearest2d.vec", lambda x: F.interpolate(x, scale_factor=2.0), (8, 4, 8, 8), scale_factors=[2.0, 2.0]
    ),
    case("upsample_bilinear2d.vec", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (8, 4, 8, 8)),
    case("tril.default", torch.tril, X),
    case("triu.default", torch.triu, X),
    case("pad.default", lambda x: F.pad(x, (1, 1)), X, pad=[1, 1]),
    case("new_zeros.default", lambda x: x.new_zeros(8, 16), X, size=[8, 16]),
    case("new_empty.default", lambda x: x.new_empty(8, 16, 48), X, size=[8, 16, 48]),
    case("new_ones.default", lambda x: x.new_ones(8, 16, 48), X, size=[8, 16, 48]),
    case("bitwise_not.default", torch.bitwise_not, X, booleans=(0,)),
    case("floor_divide.default", lambda x: x // 2, X, integers=(0,), other=2),
    case("max.dim", lambda x: x.max(-1, keepdim=True), X, dim=-1, keepdim=True),
    case("min.dim", lambda x: x.min(1, keepdim=True), X, dim=1, keepdim=True),
    case("histc.default", lambda x: torch.histc(x, bins=8, min=0, max=7), (64,), bins=8, max=7),
    case("bincount.default", lambda x: torch.bincount(x, minlength=8), (64,), integers=(0,), minlength=8),
)
