"""Graphs of residual networks with bottleneck blocks from their sizes, as `zoo.resnet` (ResNet and Wide ResNet)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.spec import Graph
from meshwright.templates.graph_builder import B, GraphBuilder, Internal, times
from meshwright.templates.modules import add, cross_entropy, linear, relu

if TYPE_CHECKING:
    from meshwright.templates.shapes import ResidualShape

_EXPANSION = 4


@lru_cache(maxsize=64)
def residual_graph(shape: ResidualShape, *, name: str = "resnet") -> Graph:
    """Return the graph of a residual network for training on square images of ``shape.image`` pixels a side."""
    graph = GraphBuilder()
    images = graph.input("images_BCHW", B, 3, shape.image, shape.image, dtype="float32")
    targets = graph.input("target", B)
    graph.layer("stem")
    with graph.within("stem"):
        value = _normed(graph, "convolution", "norm", images, shape.channels, 7, 2, 3)
        value = relu(graph, value)
        with graph.within("pool"):
            value = _pool(graph, value)
    index = 0
    for stage, count in enumerate(shape.blocks):
        for block in range(count):
            graph.layer(f"blocks.{index}")
            with graph.within(f"blocks.{index}"):
                stride = 2 if stage and not block else 1
                value = _bottleneck(graph, value, shape.channels * 2**stage, shape.width, stride)
            index += 1
    (mean,) = graph.op("aten.mean.dim", (value,), graph.shape(value)[:2], attributes={"dim": "[2, 3]"})
    graph.layer("head")
    logits = linear(graph, "head", mean, shape.classes)
    with graph.within("loss"):
        loss = cross_entropy(graph, logits, targets)
    return graph.finish(name, loss)


def _bottleneck(graph: GraphBuilder, value: int, width: int, wider: int, stride: int) -> int:
    inputs, outputs = graph.shape(value)[1].fixed, width * _EXPANSION
    inner = relu(graph, _normed(graph, "convolution1", "norm1", value, width, 1, 1, 0))
    inner = relu(graph, _normed(graph, "convolution2", "norm2", inner, width * wider, 3, stride, 1))
    inner = _normed(graph, "convolution3", "norm3", inner, outputs, 1, 1, 0)
    beside = value
    if stride > 1 or inputs != outputs:
        with graph.within("shortcut"):
            beside = _normed(graph, "0", "1", value, outputs, 1, stride, 0)
    return relu(graph, add(graph, inner, beside))


def _normed(
    graph: GraphBuilder, name: str, norm: str, value: int, channels: int, window: int, stride: int, padding: int
) -> int:
    """A convolution without biases, and its batch norm."""
    batch, inputs, height, _ = graph.shape(value)
    side = (height.fixed + 2 * padding - window) // stride + 1
    shape = (batch, channels, side, side)
    with graph.within(name):
        weight = graph.parameter("weight", channels, inputs, window, window)
        flops = times(2, *shape, inputs, window**2)
        (out,) = graph.op(
            "aten.conv2d.default",
            (value, weight),
            shape,
            attributes={
                **({"stride": f"[{stride}, {stride}]"} if stride > 1 else {}),
                **({"padding": f"[{padding}, {padding}]"} if padding else {}),
            },
            saved=(value, weight),
            flops=flops,
            backward_flops=times(flops, 1 + graph.requires_grad(value)),
        )
    with graph.within(norm):
        return _batch_norm(graph, out)


def _batch_norm(graph: GraphBuilder, value: int) -> int:
    channels = graph.shape(value)[1]
    weight, bias = graph.parameter("weight", channels), graph.parameter("bias", channels)
    mean, variance = graph.buffer("running_mean", channels), graph.buffer("running_var", channels)
    batches = graph.buffer("num_batches_tracked", dtype="int64")
    graph.op("aten.add_.Tensor", (batches,), (), attributes={"other": 1}, view=True)
    each = Internal((channels,))
    (out,) = graph.op(
        "aten.batch_norm.default",
        (value, weight, bias, mean, variance),
        graph.shape(value),
        attributes={"training": True, "momentum": 0.1, "eps": "1e-05", "cudnn_enabled": False},
        saved=(value, mean, variance, weight, each, each),
    )
    return out


def _pool(graph: GraphBuilder, value: int) -> int:
    """The largest of windows of 3 by 3, every second place."""
    batch, channels, height, _ = graph.shape(value)
    side = (height.fixed - 1) // 2 + 1
    shape = (batch, channels, side, side)
    (out,) = graph.op(
        "aten.max_pool2d.default",
        (value,),
        shape,
        attributes={"kernel_size": "[3, 3]", "stride": "[2, 2]", "padding": "[1, 1]"},
        saved=(value, Internal(shape, "int64")),
    )
    return out
