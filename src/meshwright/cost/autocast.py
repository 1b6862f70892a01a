"""Data types of a graph's tensors: bytes per element (`Widths`), and the graph under torch's autocast (`as_computed`).

Autocast casts the inputs of matrix products to the lower type (bfloat16 or float16), and the inputs of ops with long
sums to float32. All other ops compute in the types of their inputs. A product saves the cast copy of its input for its
backward. A parameter is cast once per forward. The lists of ops are torch's for CUDA devices (torch 2.13,
aten/src/ATen/autocast_mode.h), plus the grouped product (`capture.surroundings`). On CPUs a few of the ops with long
sums, such as normalisation, compute in the lower type.

The graph under autocast has the ids of ops and tensors, the shapes and the content hash of the original graph. The cast
copies are additional tensors with higher ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cost.traits import family_of, operator_name
from meshwright.spec import DTYPE_BYTES, FLOAT_DTYPES, Graph, Op, Tensor
from meshwright.spec.precision import Numbers

_SINGLE_PRECISION = "float32"
# Families whose outputs have the widest type of their inputs.
_PROMOTING = frozenset({"pointwise", "reduction", "copy", "view"})


# Under autocast the types of the graph hold. Otherwise parameters were converted to the type of the values, and with
# them everything computed from them. Tensors that a forward makes from integers stay float32, torch's default:
# positions times frequencies, their sines and cosines, and by type promotion products with them. They stay so until an
# op casts the result back (`type_as`) or a layer with parameters follows.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Widths:
    """The bytes per element of each tensor of a graph, in the precision of a run.

    ``values``: bytes of a floating-point element; None under autocast, where the types of ``graph`` hold. ``single``:
    ids of the tensors that stay float32 (`stays_single`).
    """

    graph: Graph
    values: int | None
    single: frozenset[int]

    def of(self, tensor: int) -> int:
        """Return the bytes of one element of the tensor with this id."""
        dtype = self.graph.tensors[tensor].dtype
        if self.values is None or dtype not in FLOAT_DTYPES or tensor in self.single:
            return DTYPE_BYTES[dtype]
        return self.values


def stays_single(graph: Graph) -> frozenset[int]:
    """Return the ids of the tensors that stay float32 when the parameters are converted to another type."""
    found: set[int] = set()
    for op in graph.ops:
        floats = [i for i in op.inputs if graph.tensors[i].dtype in FLOAT_DTYPES]
        if not floats:
            # Other ops that make tensors from nothing are mostly written to follow the values.
            single = bool(op.inputs) or operator_name(op) == "arange"
        elif operator_name(op) == "type_as":
            single = op.inputs[-1] in found
        else:
            # Tensors without dims do not widen others.
            widening = [i for i in floats if graph.tensors[i].shape] or floats
            single = (any if family_of(op) in _PROMOTING else all)(i in found for i in widening)
        if single:
            found.update(i for i in op.outputs if graph.tensors[i].dtype == _SINGLE_PRECISION)
    return frozenset(found)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER = _words("""
    linear matmul mm mv bmm grouped_mm addmm addmv addr addbmm baddbmm einsum chain_matmul linalg_multi_dot
    linalg_vecdot prelu
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
# Parameters of these ops do not widen the output.
_AS_FIRST = _words("batch_norm instance_norm")
# The output type of these ops is an argument.
_BY_ARGUMENT = _words("to _to_copy")


def as_computed(graph: Graph, numbers: Numbers) -> Graph:
    """Return the graph with the data types in which it is computed: under autocast a cached copy, else ``graph``."""
    if not numbers.autocast or graph._num_uncast:
        return graph
    return under_autocast(graph, numbers.autocast)


def compute_type(graph: Graph, op: Op, lower: str) -> str:
    """Return the data type in which an op of a graph under autocast to the type ``lower`` computes."""
    found = [graph.tensors[i].dtype for i in (*op.outputs, *op.inputs) if graph.tensors[i].dtype in FLOAT_DTYPES]
    return _cast_type(op, lower) or (found[0] if found else "float32")


def cast_inputs(graph: Graph, op: Op, lower: str) -> list[int]:
    """Return the ids of the op's inputs that autocast to the type ``lower`` casts."""
    wanted = _cast_type(op, lower)
    types = {i: graph.tensors[i].dtype for i in op.inputs if wanted}
    return [i for i, dtype in types.items() if dtype in FLOAT_DTYPES and dtype != wanted]


def cast_copy(tensor: Tensor, op: Op, dtype: str, number: int) -> Tensor:
    """Return the copy, cast to ``dtype``, that an op saves of a tensor; ``number`` is the copy's id in the graph."""
    copied = replace(tensor, name=f"{tensor.name} cast for {op.name}", dtype=dtype, role="saved")
    return replace(copied, storage=number, requires_grad=False, aliases=())


def kept_copies(graph: Graph, op: Op) -> list[int]:
    """Return the ids of the cast copies of its inputs that an op saves for its backward; [] without autocast."""
    return [i for i in op.saved if i >= graph._num_uncast[0]] if graph._num_uncast else []


@lru_cache(maxsize=64)
def under_autocast(graph: Graph, lower: str) -> Graph:
    """Return a copy of the graph with the data types and cast copies of autocast to the type ``lower``."""
    types = [tensor.dtype for tensor in graph.tensors]
    copies: dict[tuple[int, str], int] = {}
    tensors = list(graph.tensors)
    ops = []
    for op in graph.ops:
        for i in op.outputs:
            if types[i] in FLOAT_DTYPES:
                types[i] = _output_type(graph, op, types, lower) or types[i]
        if family_of(op) in ("product", "convolution"):
            for i in op.saved:
                # Tensors that they save themselves are copies of inputs in another layout.
                if graph.tensors[i].role == "saved" and types[i] in FLOAT_DTYPES:
                    types[i] = lower
        ops.append(_with_copies(graph, op, types, _cast_type(op, lower), copies, tensors))
    tensors[: len(types)] = [
        tensor if tensor.dtype == dtype else replace(tensor, dtype=dtype)
        for tensor, dtype in zip(graph.tensors, types, strict=True)
    ]
    made = replace(graph, tensors=tuple(tensors), ops=tuple(ops))
    made._hash.append(graph.content_hash)
    made._num_uncast.append(len(types))
    return made


def _cast_type(op: Op, lower: str) -> str:
    """Return the type to which autocast casts an op's inputs; "" if it does not cast them."""
    name = operator_name(op).rstrip("_")
    return lower if name in _LOWER else "float32" if name in _SINGLE else ""


def _output_type(graph: Graph, op: Op, types: list[str], lower: str) -> str:
    """Return the type of an op's floating outputs; "" if it is as captured."""
    name = operator_name(op).rstrip("_")
    inputs = [i for i in op.inputs if types[i] in FLOAT_DTYPES]
    if name in _BY_ARGUMENT or not inputs:
        return ""
    if op.is_in_place or name in _AS_FIRST:
        return types[inputs[0]]
    if name == "type_as":
        return types[inputs[-1]]
    # Tensors without dims do not widen others.
    widening = [types[i] for i in inputs if graph.tensors[i].shape] or [types[i] for i in inputs]
    return _cast_type(op, lower) or max(widening, key=DTYPE_BYTES.__getitem__)


def _with_copies(
    graph: Graph, op: Op, types: list[str], wanted: str, copies: dict[tuple[int, str], int], tensors: list[Tensor]
) -> Op:
    """Return the op with saved inputs replaced by copies of the type ``wanted``, which are appended to ``tensors``."""
    saved = []
    for i in op.saved:
        tensor = graph.tensors[i]
        if not wanted or i not in op.inputs or types[i] not in FLOAT_DTYPES or types[i] == wanted:
            saved.append(i)
        elif tensor.role != "parameter" or (i, wanted) not in copies:
            # All ops share one copy of a parameter, which belongs to the first of them.
            copies[i, wanted] = len(tensors)
            saved.append(len(tensors))
            tensors.append(cast_copy(tensor, op, wanted, len(tensors)))
    return op if tuple(saved) == op.saved else replace(op, saved=tuple(saved))
