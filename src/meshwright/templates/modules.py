"""Operators and small modules for the templates of all model families.

Functions add ops to a `GraphBuilder`; they take values by their numbers and return the number of the output. What each
op saves for its backward, and which outputs share memory with another tensor, is what capture records of the zoo's
models (`tests/templates`). FLOPs are counted as capture counts them: 2 for each multiplication of a product, and in the
backward the same number for each factor with a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.templates.graph_builder import B, GraphBuilder, Internal, OwnOutput, Saved, Shape, times

if TYPE_CHECKING:
    from collections.abc import Sequence


def embedding(graph: GraphBuilder, name: str, rows: int, width: int, indices: int) -> tuple[int, int]:
    """Add an embedding of ``rows`` entries of size ``width``; return its output and its table."""
    with graph.within(name):
        table = graph.parameter("weight", rows, width)
        shape: Shape = (*graph.shape(indices), width)
        (out,) = graph.op("aten.embedding.default", (table, indices), shape, saved=(indices,))
    return out, table


def linear(
    graph: GraphBuilder, name: str, value: int, outputs: int, *, bias: bool = True, weight: int | None = None
) -> int:
    """Add a linear layer with ``outputs`` features; ``weight`` is an existing weight to share (tied weights)."""
    with graph.within(name):
        width = graph.width(value)
        if weight is None:
            weight = graph.parameter("weight", outputs, width)
        else:
            graph.tie(weight, "weight")
        shape: Shape = (*graph.shape(value)[:-1], outputs)
        flops = times(2, *shape, width)
        (out,) = graph.op(
            "aten.linear.default",
            (value, weight, graph.parameter("bias", outputs)) if bias else (value, weight),
            shape,
            saved=(value, weight) if bias else (weight, value),
            flops=flops,
            backward_flops=times(flops, 1 + graph.requires_grad(value)),
        )
    return out


def batched_product(graph: GraphBuilder, value: int, weight: int) -> int:
    """Add a batched matrix product of (groups, rows, width) with a parameter (groups, width, columns)."""
    groups, rows, width = graph.shape(value)
    columns = graph.shape(weight)[-1]
    flops = times(2, groups, rows, width, columns)
    (out,) = graph.op(
        "aten.bmm.default",
        (value, weight),
        (groups, rows, columns),
        saved=(weight, value),
        flops=flops,
        backward_flops=times(2, flops),
    )
    return out


def layer_norm(graph: GraphBuilder, name: str, value: int, *, bias: bool = True, epsilon: str = "") -> int:
    """Add a layer norm over the last dim."""
    with graph.within(name):
        *outer, width = graph.shape(value)
        weight = graph.parameter("weight", width)
        biases = (graph.parameter("bias", width),) if bias else ()
        each = Internal((*outer, 1))
        (out,) = graph.op(
            "aten.layer_norm.default",
            (value, weight, *biases),
            graph.shape(value),
            attributes={
                "normalized_shape": f"[{width}]",
                **({"eps": epsilon} if epsilon else {}),
                "cudnn_enable": False,
            },
            saved=(*biases, value, weight, each, each),
        )
    return out


def rms_norm(graph: GraphBuilder, name: str, value: int) -> int:
    """Add a root mean square norm over the last dim."""
    with graph.within(name):
        *outer, width = graph.shape(value)
        weight = graph.parameter("weight", width)
        (out,) = graph.op(
            "aten.rms_norm.default",
            (value, weight),
            graph.shape(value),
            attributes={"normalized_shape": f"[{width}]", "eps": "1e-05"},
            saved=(value, Internal((*outer, 1)), weight, Internal(graph.shape(value))),
        )
    return out


def dropout(graph: GraphBuilder, name: str, value: int, share: float) -> int:
    """Add dropout with probability ``share``; with probability 0 the output is a view of the input."""
    with graph.within(name):
        shape = graph.shape(value)
        (out,) = graph.op(
            "aten.dropout.default",
            (value,),
            shape,
            attributes={"p": share, "train": True},
            saved=(Internal(shape),) if share else (),
            view=not share,
            random=share > 0,
        )
    return out


def activation(graph: GraphBuilder, kind: str, value: int, **attributes: object) -> int:
    """Add an elementwise function, such as silu, whose backward reads its input."""
    (out,) = graph.op(f"aten.{kind}.default", (value,), graph.shape(value), attributes=attributes, saved=(value,))
    return out


def relu(graph: GraphBuilder, value: int) -> int:
    """Add a ReLU, whose backward reads its output."""
    (out,) = graph.op("aten.relu.default", (value,), graph.shape(value), saved=(OwnOutput(),))
    return out


def add(graph: GraphBuilder, left: int, right: int) -> int:
    """Add the sum of two values; the second may be smaller and is then broadcast."""
    (out,) = graph.op("aten.add.Tensor", (left, right), graph.shape(left))
    return out


def multiply(graph: GraphBuilder, left: int, right: int) -> int:
    """Add the elementwise product of two values; the gradient of each factor needs the other factor."""
    saved = [other for value, other in ((left, right), (right, left)) if graph.requires_grad(value)]
    (out,) = graph.op("aten.mul.Tensor", (left, right), graph.shape(left), saved=saved)
    return out


def scale(graph: GraphBuilder, kind: str, value: int, other: object) -> int:
    """Add an elementwise op with a number, such as "mul" or "sub"; its backward reads no tensor."""
    (out,) = graph.op(f"aten.{kind}.Tensor", (value,), graph.shape(value), attributes={"other": other})
    return out


def look(graph: GraphBuilder, kind: str, value: int, shape: Shape, **attributes: object) -> int:
    """Add a view of a value with a new shape; ``kind`` is the torch op, such as "unsqueeze.default"."""
    (out,) = graph.op(f"aten.{kind}", (value,), shape, attributes=attributes, view=True)
    return out


def transpose(graph: GraphBuilder, value: int, first: int, second: int) -> int:
    """Add a view with two dims swapped."""
    shape = list(graph.shape(value))
    shape[first], shape[second] = shape[second], shape[first]
    return look(graph, "transpose.int", value, shape, dim0=first, dim1=second)


def chunk(graph: GraphBuilder, value: int, count: int) -> tuple[int, ...]:
    """Add views of ``count`` equal parts of the last dim; return all of them."""
    *outer, width = graph.shape(value)
    part: Shape = (*outer, width.fixed // count)
    return graph.op("aten.chunk.default", (value,), *[part] * count, attributes={"chunks": count, "dim": -1}, view=True)


def split(graph: GraphBuilder, value: int, *sizes: int) -> tuple[int, ...]:
    """Add views of parts of these sizes of the last dim; return all of them."""
    parts: list[Shape] = [(*graph.shape(value)[:-1], size) for size in sizes]
    return graph.op(
        "aten.split_with_sizes.default",
        (value,),
        *parts,
        attributes={"split_sizes": f"[{', '.join(map(str, sizes))}]", "dim": -1},
        view=True,
    )


def join(graph: GraphBuilder, left: int, right: int) -> int:
    """Add the concatenation of two values along the last dim."""
    shape: Shape = (*graph.shape(left)[:-1], graph.width(left) + graph.width(right))
    (out,) = graph.op("aten.cat.default", (left, right), shape, attributes={"dim": -1})
    return out


def split_heads(graph: GraphBuilder, value: int, heads: int, sizes: str) -> int:
    """Add views that turn (batch, tokens, heads · width) into (batch, heads, tokens, width); return the result's id.

    ``sizes``: the new sizes of the last dim as text, in the form in which capture records them.
    """
    *outer, width = graph.shape(value)
    apart = look(graph, "unflatten.int", value, (*outer, heads, width.fixed // heads), dim=-1, sizes=sizes)
    return transpose(graph, apart, 1, 2)


def attention(
    graph: GraphBuilder,
    query: int,
    key: int,
    value: int,
    *,
    causal: bool,
    dropout: float = 0.0,
    grouped: bool = False,
) -> int:
    """Add scaled dot-product attention of (batch, heads, tokens, width); the output is (batch, tokens, heads · width).

    ``grouped``: there are fewer heads of keys and values than of queries. Graphs are captured on a CPU, which computes
    attention by products and keeps the scores if there is dropout, or if values and keys have different widths.
    """
    batch, heads, tokens, width = graph.shape(query)
    value_width = graph.shape(value)[-1]
    product = times(2, batch, heads, tokens, tokens)
    keeps_scores = dropout > 0 or width != value_width
    if keeps_scores:
        together, scores = times(batch, heads), Internal((batch, heads, tokens, tokens))
        saved: Sequence[Saved] = (
            Internal((together, width, tokens)),
            Internal((together, tokens, width)),
            *([scores, scores] if dropout else [scores]),
            Internal((together, tokens, value_width)),
            *([Internal((together, tokens, tokens))] if dropout else []),
        )
        backward_flops = times(2, product, width + value_width)
    else:
        saved = (key, query, value, Internal((batch, heads, tokens)), OwnOutput())
        backward_flops = times(product, times(3, width) + times(2, value_width))
    (mixed,) = graph.op(
        "aten.scaled_dot_product_attention.default",
        (query, key, value),
        (batch, heads, tokens, value_width),
        attributes={
            **({"dropout_p": dropout} if dropout else {}),
            **({"is_causal": True} if causal else {}),
            **({"enable_gqa": True} if grouped else {}),
        },
        saved=saved,
        flops=times(product, width + value_width),
        backward_flops=backward_flops,
        random=dropout > 0,
    )
    turned = transpose(graph, mixed, 1, 2)
    # Only the fused kernel without groups leaves its result token by token, so that heads lie side by side.
    (out,) = graph.op(
        "aten.flatten.using_ints",
        (turned,),
        (batch, tokens, times(heads, value_width)),
        attributes={"start_dim": 2},
        view=not (keeps_scores or grouped),
    )
    return out


def attention_by_products(graph: GraphBuilder, query: int, key: int, value: int, *, dropout_share: float) -> int:
    """Add attention that keeps its scores for the backward; the output is (batch, tokens, heads · width).

    As in Megatron-LM without FlashAttention (megatron/core/transformer/dot_product_attention.py): a scaled product, one
    kernel for mask and softmax, dropout, a product. The products read views; joining the heads copies.
    """
    batch, heads, tokens, width = graph.shape(query)
    scores: Shape = (batch, heads, tokens, tokens)
    flops = times(2, batch, heads, tokens, tokens, width)
    backward_flops = times(2, flops)
    turned = transpose(graph, key, 2, 3)
    (raw,) = graph.op(
        "aten.matmul.default",
        (query, turned),
        scores,
        saved=(query, turned),
        flops=flops,
        backward_flops=backward_flops,
    )
    (shares,) = graph.op("aten.softmax.int", (raw,), scores, attributes={"dim": -1}, saved=(OwnOutput(),))
    shares = dropout(graph, "dropout", shares, dropout_share)
    (mixed,) = graph.op(
        "aten.matmul.default",
        (shares, value),
        (batch, heads, tokens, width),
        saved=(shares, value),
        flops=flops,
        backward_flops=backward_flops,
    )
    joined: Shape = (batch, tokens, times(heads, width))
    (out,) = graph.op("aten.flatten.using_ints", (transpose(graph, mixed, 1, 2),), joined, attributes={"start_dim": 2})
    return out


def cross_entropy(graph: GraphBuilder, logits: int, targets: int) -> int:
    """Add the mean cross-entropy of logits (rows, classes)."""
    (out,) = graph.op(
        "aten.cross_entropy_loss.default",
        (logits, targets),
        (),
        saved=(Internal(graph.shape(logits)), targets, Internal(())),
    )
    return out


def token_cross_entropy(graph: GraphBuilder, logits: int, targets: int) -> int:
    """Add the mean cross-entropy of logits (batch, tokens, classes)."""
    _, tokens, classes = graph.shape(logits)
    rows = times(B, tokens)
    flat = look(graph, "flatten.using_ints", logits, (rows, classes), end_dim=1)
    wanted = look(graph, "flatten.using_ints", targets, (rows,))
    return cross_entropy(graph, flat, wanted)
