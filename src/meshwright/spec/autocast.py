"""A graph under torch's autocast: which type each value has then, and the copies that backwards keep.

Autocast casts inputs of products to the lower type and those of ops with long sums to float32; all others compute in
what they are given. What a product keeps for its backward is the cast copy of its input; a parameter is cast once in a
forward. Which ops those are is what torch lists for CUDA devices (torch 2.13, aten/src/ATen/autocast_mode.h); on
processors a few of those with long sums, as normalisation, stay in the lower type.

Ids of ops and of tensors stay; copies are further tensors behind them. Shapes and the content hash stay, too: it is
the same graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from meshwright.spec.graph import Graph, Op, Tensor
from meshwright.spec.precision import Numbers
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _words("""
    linear matmul mm mv bmm addmm addmv addr addbmm baddbmm einsum chain_matmul linalg_multi_dot linalg_vecdot prelu
    conv1d conv2d conv3d convolution _convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
_SINGLE = _words("""
    layer_norm native_layer_norm rms_norm group_norm native_group_norm softmax log_softmax cross_entropy_loss nll_loss
    nll_loss2d nll_loss_nd kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss triplet_margin_loss
    margin_ranking_loss hinge_embedding_loss cosine_embedding_loss poisson_nll_loss binary_cross_entropy_with_logits
    cosine_similarity exp expm1 log log2 log10 log1p pow reciprocal rsqrt acos asin cosh sinh tan softplus cumsum
    cumprod prod sum linalg_vector_norm linalg_matrix_norm norm logsumexp renorm dist cdist pdist
""")
# Parameters of these do not widen what comes out.
_AS_FIRST = _words("batch_norm instance_norm")
# These say by themselves what they make.
_BY_ARGUMENT = _words("to _to_copy")


def as_computed(graph: Graph, numbers: Numbers) -> Graph:
    """The graph as it is computed in a precision: another one under autocast, once."""
    if not numbers.autocast or graph._autocast:
        return graph
    return under_autocast(graph, numbers.autocast)


def compute_type(graph: Graph, op: Op, lower: str) -> str:
    """The type in which an op of a graph under autocast computes."""
    name = _name(op)
    if name in _LOWER:
        return lower
    if name in _SINGLE:
        return "float32"
    found = [graph.tensors[i].dtype for i in (*op.outputs, *op.inputs) if graph.tensors[i].dtype in FLOAT_DTYPES]
    return found[0] if found else "float32"


def cast_inputs(graph: Graph, op: Op, lower: str) -> list[int]:
    """The inputs of an op that autocast casts."""
    if _name(op) not in _LOWER | _SINGLE:
        return []
    computed = compute_type(graph, op, lower)
    return [
        i
        for i in dict.fromkeys(op.inputs)
        if graph.tensors[i].dtype in FLOAT_DTYPES and graph.tensors[i].dtype != computed
    ]


def kept_copies(graph: Graph, op: Op) -> list[int]:
    """The cast copies of its inputs that an op keeps for its backward."""
    return [i for i in op.saved if graph.tensors[i].role == "saved" and graph.tensors[i].name.endswith(_mark(op))]


def _mark(op: Op) -> str:
    """How the names of copies end that an op keeps."""
    return f" cast for {op.name}"


@lru_cache(maxsize=64)
def under_autocast(graph: Graph, lower: str) -> Graph:
    """The graph under autocast to a type."""
    types = [tensor.dtype for tensor in graph.tensors]
    copies: dict[tuple[int, str], int] = {}
    tensors = list(graph.tensors)
    ops = []
    for op in graph.ops:
        for i, dtype in _output_types(graph, op, types, lower).items():
            types[i] = dtype
        ops.append(_with_copies(graph, op, types, lower, copies, tensors))
    tensors[: len(types)] = [
        tensor if tensor.dtype == dtype else replace(tensor, dtype=dtype)
        for tensor, dtype in zip(graph.tensors, types, strict=True)
    ]
    made = replace(graph, tensors=tuple(tensors), ops=tuple(ops))
    made._hash.append(graph.content_hash)
    made._autocast.append(lower)
    return made


def _output_types(graph: Graph, op: Op, types: list[str], lower: str) -> dict[int, str]:
    """The types of an op's floating outputs."""
    outputs = [i for i in op.outputs if graph.tensors[i].dtype in FLOAT_DTYPES]
    inputs = [i for i in op.inputs if types[i] in FLOAT_DTYPES]
    name = _name(op)
    # Numbers without dims do not widen tensors.
    wide = [types[i] for i in inputs if graph.tensors[i].shape] or [types[i] for i in inputs]
    if name in _BY_ARGUMENT or not inputs:
        return {}
    if _called(op).endswith("_") or name in _AS_FIRST:
        chosen = types[inputs[0]]
    elif name == "type_as":
        chosen = types[inputs[-1]]
    elif name in _LOWER:
        chosen = lower
    elif name in _SINGLE:
        chosen = "float32"
    else:
        chosen = max(wide, key=DTYPE_BYTES.__getitem__)
    return dict.fromkeys(outputs, chosen)


def _with_copies(
    graph: Graph,
    op: Op,
    types: list[str],
    lower: str,
    copies: dict[tuple[int, str], int],
    tensors: list[Tensor],
) -> Op:
    """The op with cast copies in place of what it keeps of inputs."""
    name = _name(op)
    computed = lower if name in _LOWER else "float32" if name in _SINGLE else ""
    saved = []
    for i in op.saved:
        tensor = graph.tensors[i]
        cast = computed and i in op.inputs and types[i] in FLOAT_DTYPES and types[i] != computed
        if not cast:
            saved.append(i)
            continue
        is_known = (i, computed) in copies and tensor.role == "parameter"
        if not is_known:
            # Of a parameter all ops share one copy, which is with the first of them.
            copies[i, computed] = len(tensors)
            copied = replace(
                tensor,
                name=f"{tensor.name}{_mark(op)}",
                dtype=computed,
                role="saved",
                storage=len(tensors),
                requires_grad=False,
                aliases=(),
            )
            tensors.append(copied)
            saved.append(copies[i, computed])
    return op if tuple(saved) == op.saved else replace(op, saved=tuple(saved))


def _called(op: Op) -> str:
    """``add_`` of ``aten.add_.Tensor``; what is no operator of torch is called as it is."""
    parts = op.kind.split(".")
    return parts[1] if len(parts) > 1 else op.kind


def _name(op: Op) -> str:
    """The same without the mark of writing in place."""
    return _called(op).rstrip("_")
