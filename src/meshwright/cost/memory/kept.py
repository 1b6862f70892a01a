"""The memory of ops and tensors: values saved for the backward (`as_kept`), workspaces, and bytes of all tensors.

Graphs are captured on CPUs, so they contain the values that CPU kernels save for the backward. CUDA kernels save other
values:

    dropout         the mask, in bool; on CPUs the noise by which elements are multiplied (Dropout.cpp:
                    is_fused_kernel_acceptable, native_dropout)
    attention       query, key, value, mask, output and the logarithm of the sums of rows, in float32. The kernels of
                    cuDNN, flash and memory-efficient attention support dropout and masks with gradients, for which CPUs
                    save the matrix of scores. A mask whose last dim is not dense, as that of a permuted lookup, is not
                    supported: then the scores are saved, with dropout's mask (transformers/sdp_utils_cpp.h:
                    check_last_dim_stride_equals_1_dense; attention.cpp: _scaled_dot_product_attention_math). Outputs of
                    the fused kernels have the layout of the query, so joining the heads copies nothing
    rms_norm        input, weight and one float32 number per row; on CPUs intermediate values (derivatives.yaml:
                    _fused_rms_norm, from torch 2.9 on)
    lstm, gru       input, states, weights, output and cuDNN's reserve; on CPUs workspaces of oneDNN by layer
                    (derivatives.yaml: _cudnn_rnn). cuDNN does not document the size of the reserve. It is counted as
                    the values that the gradient of a cell reads per step: four gates and the state; for a GRU three
                    gates and the product with the state
    cross_entropy   under autocast: logarithms in the type of the logits, which is an argument of the softmax, and
                    float32 copies of the logarithms, which nll_loss reads (LossNLL.cpp: cross_entropy_loss); CPUs cast
                    the logits instead

Sources: torch 2.13, aten/src/ATen/native and tools/autograd.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from meshwright.cost.autocast import as_computed, cast_copy, cast_inputs
from meshwright.cost.optimizers import optimizer_bytes
from meshwright.cost.traits import family_of, operator_name
from meshwright.cost.work import find_operator, name_in, operators
from meshwright.spec import FLOAT_DTYPES, Extent, Graph, GraphError, Op, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from meshwright.spec.precision import Numbers


# The device type, whose libraries compute.
Backend = Literal["cpu", "cuda"]

# Workspace of cuBLAS on Hopper and later (torch, CUDABlas.cpp: parseChosenWorkspaceSize).
CUBLAS_BYTES = 32 * 2**20
_MAX_IMAGE_CHANNELS = 3
# Batch, length and features of a sequence.
_SEQUENCE_DIMS = 3
_FLOAT_BYTES = 4
_LINE_ELEMENTS, _ALIASED_ELEMENTS = 16, 256


def passes_on(graph: Graph, op: Op, tensor: int, input_elements: int, output_elements: int) -> bool:
    """Return whether the gradient of ``tensor``, an input of the op, shares the memory of the output's gradient."""
    dtypes = [graph.tensors[i].dtype for i in op.inputs]
    operator = find_operator(name_in(op.kind), dict(op.attributes), dtypes)
    return operator is not None and operator.passes_on(op.inputs.index(tensor), input_elements, output_elements)


class TensorSizes(Protocol):
    """A sequence or mapping of the bytes of each tensor, by the tensor's id."""

    def __getitem__(self, tensor: int, /) -> int: ...


def library_workspaces(device: Backend, *, trains: bool) -> tuple[int, ...]:
    """Return the bytes of each permanent library workspace on a device: one of cuBLAS per thread; none on CPUs.

    With ``trains`` there are two, because backwards run in their own thread, which has another handle (torch,
    aten/src/ATen/cuda/CublasHandlePool.cpp: getNewWorkspace allocates the workspace from the caching allocator; the
    pool of handles is thread-local).
    """
    return (CUBLAS_BYTES,) * (2 if trains else 1) if device == "cuda" else ()


# Allocations of an op besides its values:
#
#     passed on     the gradient of an input is that of the output, or a view of it (`passes_on`): no allocation
#     made          one storage per input that requires a gradient, of the input's size
#     workspace     additional, until the op's forward or backward is done
#
# Source: torch 2.13, tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp. Convolutions work on
# copies in the layout of their library: oneDNN's own on CPUs (aten/src/ATen/native/mkldnn/Conv.cpp); on CUDA devices,
# where tensor cores multiply, channels last: cuDNN copies tensors with channels first before and after
# (microsoft/onnxruntime#17200), in the workspace that torch gives it for the duration of the call
# (aten/src/ATen/native/cudnn/Conv_v8.cpp: run_conv_plan). Each gradient is a call.
def backward_workspace_bytes(graph: Graph, op: Op, sizes: TensorSizes, device: Backend) -> int:
    """Return the bytes that an op's backward needs in addition to the gradients that it makes.

    ``sizes``: bytes of each tensor of the graph.
    """
    if not op.inputs or not op.outputs:
        return 0
    output, operator = sizes[op.outputs[0]], operators().get(name_in(op.kind))
    if operator is not None and operator.between:
        return sizes[op.inputs[0]]
    if operator is not None and operator.family == "pointwise" and "others" in operator.keeps:
        # If an input is broadcast, its gradient is first as large as the output, then summed.
        return output if any(sizes[i] < output for i in op.inputs) else 0
    if not _is_convolution(graph, op):
        return 0
    return output + _copied_input(graph, op, sizes) if device == "cpu" else _relaid_bytes(op, sizes)


def forward_workspace_bytes(graph: Graph, op: Op, sizes: TensorSizes, device: Backend) -> int:
    """Return the bytes that an op's forward needs in addition to its outputs and saved values.

    ``sizes``: bytes of each tensor of the graph.
    """
    if not _is_convolution(graph, op):
        return 0
    if device == "cuda":
        return _relaid_bytes(op, sizes)
    return sizes[op.outputs[0]] + sizes[op.inputs[1]] + _copied_input(graph, op, sizes)


def _relaid_bytes(op: Op, sizes: TensorSizes) -> int:
    """Return the bytes of copies of input, weight and output, or of their gradients, in another layout."""
    return sizes[op.inputs[0]] + sizes[op.inputs[1]] + sizes[op.outputs[0]]


def unrecorded_bytes(graph: Graph, op: Op, batch_size: int, device: Backend) -> dict[int, int]:
    """Return the bytes, by tensor, of saved values whose sizes are unknown in the graph: oneDNN's of an LSTM."""
    shapes = [[extent.at(batch_size) for extent in graph.tensors[i].shape] for i in op.inputs]
    if not op.kind.startswith("aten.lstm") or device != "cpu" or not shapes or len(shapes[0]) != _SEQUENCE_DIMS:
        return {}
    batch, length, _ = shapes[0]
    # The weights of the input, (4·hidden, inputs), come first for each direction.
    weights = [shape for shape in shapes if len(shape) == 2][::2]
    empty = [i for i in op.saved if graph.tensors[i].role == "saved" and not graph.tensors[i].num_elements(batch_size)]
    sizes = [_lstm_bytes(batch, length, inputs, gates // 4) for gates, inputs in weights]
    return dict(zip(empty, sizes, strict=False))


def _lstm_bytes(batch: int, length: int, inputs: int, hidden: int) -> int:
    """Return the bytes that oneDNN keeps of a direction for its backward: gates, states and their gradients.

    Gates are of all steps, states and gradients of one more. The rows' padding is that of oneDNN
    (src/cpu/rnn/rnn_utils.cpp, get_good_ld); the number of states was found from the sizes that torch 2.13 allocates
    for six shapes.
    """
    states = 6 * _padded(max(inputs, hidden)) + 5 * _padded(hidden)
    return _FLOAT_BYTES * batch * ((length + 1) * states + length * _padded(4 * hidden))


def _padded(row: int) -> int:
    """Return the elements of a padded row: whole cache lines, but not a multiple of 256 elements."""
    lines = -(-row // _LINE_ELEMENTS) * _LINE_ELEMENTS
    return lines + _LINE_ELEMENTS if lines % _ALIASED_ELEMENTS == 0 else lines


def _is_convolution(graph: Graph, op: Op) -> bool:
    """Return whether the op is a convolution whose input has channels, with a weight and an output."""
    operator = operators().get(name_in(op.kind))
    known = operator is not None and operator.family == "convolution" and len(op.inputs) > 1 and len(op.outputs) > 0
    return known and len(graph.tensors[op.inputs[0]].shape) > 1


def _copied_input(graph: Graph, op: Op, sizes: TensorSizes) -> int:
    """Return the bytes of the copied input; images are read in place.

    See oneDNN, is_1stconv in jit_avx512_common_conv_kernel.
    """
    channels = graph.tensors[op.inputs[0]].shape[1].fixed
    return sizes[op.inputs[0]] if channels > _MAX_IMAGE_CHANNELS else 0


class OtherSizes:
    """The bytes of each tensor, in which ``others`` replace the ``usual`` bytes of some tensors."""

    def __init__(self, usual: Sequence[int], others: Mapping[int, int]) -> None:
        self._usual, self._others = usual, others

    def __getitem__(self, tensor: int) -> int:
        return self._others.get(tensor, self._usual[tensor])


@lru_cache(maxsize=64)
def measure_tensors(
    graph: Graph, batch_size: int, float_bytes: int | None, device: Backend
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bytes of all tensors, and their numbers of elements.

    ``float_bytes``: bytes of a floating-point element, None under autocast. Raises GraphError for an invalid batch size
    and for a graph that contains its own backward.
    """
    graph.check_batch_size(batch_size)
    if has_own_backward(graph):
        raise GraphError(
            f"Graph {graph.name!r} contains its own backward (a joint graph); expected a forward only. Capture the "
            "model without its backward."
        )
    sizes = [max(tensor.num_bytes(batch_size, float_bytes), 0) for tensor in graph.tensors]
    for op in graph.ops:
        for i, num_bytes in unrecorded_bytes(graph, op, batch_size, device).items():
            sizes[i] = num_bytes
    return tuple(sizes), tuple(tensor.num_elements(batch_size) for tensor in graph.tensors)


class TensorBytes(NamedTuple):
    """Bytes of each tensor's values, gradient and optimizer states, each of shape (tensors,).

    Gradients and optimizer states are 0 except for trained parameters.
    """

    values: NDArray[np.int64]
    gradients: NDArray[np.int64]
    states: NDArray[np.int64]


def weigh_tensors(graph: Graph, batch_size: int, workload: Workload) -> TensorBytes:
    """Return the bytes of every tensor of a graph at a batch size, from which those of stages and layers are summed."""
    values = [tensor.num_bytes(batch_size, workload.float_bytes) for tensor in graph.tensors]
    gradients, states = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    for i in graph.parameters if workload.kind == "training" else ():
        if graph.tensors[i].requires_grad:
            gradients[i] = workload.gradient_bytes(graph.tensors[i])
            states[i] = optimizer_bytes(graph.tensors[i], workload)
    return TensorBytes(np.array(values, np.int64), gradients, states)


@lru_cache(maxsize=64)
def has_own_backward(graph: Graph) -> bool:
    """Return whether the graph contains ops of a backward, as a captured joint graph does."""
    return any(op.phase == "backward" for op in graph.ops)


# The number of states that a cell keeps per step.
_KEPT_STATES = {"lstm": 5, "gru": 4}
_MASK = 3
# The swap of heads and tokens of (batch, heads, tokens, width), and the ops that then join the heads.
_SWAPPED = [0, 2, 1, 3]
_JOINING = frozenset({"flatten", "reshape", "view", "contiguous"})


def as_kept(graph: Graph, numbers: Numbers, device: Backend) -> Graph:
    """Return the graph in a precision, with the values that a device's kernels save for the backward.

    Ids of ops and tensors are unchanged; cast copies are appended.
    """
    graph = as_computed(graph, numbers)
    return _on_cuda(graph, numbers.autocast) if device == "cuda" and graph.mode == "training" else graph


def casts_within(op: Op) -> bool:
    """Return whether autocast on CUDA devices casts a value inside the op, not its inputs (the cross entropy)."""
    return operator_name(op) == "cross_entropy_loss"


@lru_cache(maxsize=64)
def _on_cuda(graph: Graph, lower: str) -> Graph:
    kept = _Kept(graph, lower)
    ops = tuple(kept.by(op) for op in graph.ops)
    tensors = tuple(kept.tensors)
    if ops == graph.ops and tensors == graph.tensors:
        return graph
    made = replace(graph, tensors=tensors, ops=ops)
    made._hash.append(graph.content_hash)
    made._num_uncast.extend(graph._num_uncast or [len(graph.tensors)])
    return made


class _Kept:
    """Replaces what ops keep; ``tensors`` are those of the graph, some with another shape or type, and copies."""

    def __init__(self, graph: Graph, lower: str) -> None:
        self.tensors = list(graph.tensors)
        self._graph, self._lower = graph, lower
        self._num_uncast = graph._num_uncast[0] if graph._num_uncast else len(graph.tensors)
        # Storages of joined heads that exist on CPUs, by the storages that they are copied from.
        self._viewed: dict[int, int] = {}
        self._attended: set[int] = set()
        self._makers = {i: op for op in graph.ops for i in op.outputs}

    def by(self, op: Op) -> Op:
        """Return the op with what its CUDA kernel keeps."""
        self._view(op)
        made = [i for i in op.saved if self.tensors[i].role == "saved" and i < self._num_uncast]
        if not made or not op.inputs or not op.outputs:
            return op
        given = [i for i in op.saved if i not in made]
        first, name = self.tensors[op.inputs[0]], operator_name(op)
        if name == "dropout":
            self._make(made[0], first.shape, "bool")
            saved = made[:1]
        elif name == "scaled_dot_product_attention" and op.outputs[0] not in op.saved:
            saved = self._keep_attention(op, made)
        elif name == "rms_norm":
            num_dims = len(_numbers(op, "normalized_shape"))
            self._make(made[0], (*first.shape[: len(first.shape) - num_dims], *[Extent(1)] * num_dims), "float32")
            saved = [*self._with_inputs(op, given, op.inputs), made[0]]
        elif name in _KEPT_STATES:
            saved = self._with_inputs(op, [*given, *(i for i in op.outputs[:1] if i not in given)], op.inputs[:1])
            saved.append(self._reserve(op, made[0], _KEPT_STATES[name]))
        elif casts_within(op) and (wide := self._logarithms(op, made)):
            self._make(wide[0], first.shape, first.dtype)
            saved = [*op.saved, self._copy(op.inputs[0], op, "float32")]
        else:
            return op
        return replace(op, saved=tuple(saved))

    def _logarithms(self, op: Op, made: Sequence[int]) -> list[int]:
        """Return what a CPU's loss makes of logits in the type of autocast, if targets are classes."""
        if len(op.inputs) == 1:
            return []
        logits, targets = (self.tensors[i] for i in op.inputs[:2])
        if logits.dtype != self._lower or targets.dtype in FLOAT_DTYPES:
            return []
        return [i for i in made if self.tensors[i].shape == logits.shape and self.tensors[i].dtype != self._lower]

    def _view(self, op: Op) -> None:
        """Make ops that join heads, and their views, views of the attention's output."""
        swap = self._makers.get(op.inputs[0]) if op.inputs else None
        joins = operator_name(op) in _JOINING and swap is not None and _order_of(swap, len(_SWAPPED)) == _SWAPPED
        for i in op.outputs:
            if joins and self.tensors[i].storage == i and self.tensors[op.inputs[0]].storage in self._attended:
                self._viewed[i] = self.tensors[op.inputs[0]].storage
            if (storage := self.tensors[i].storage) in self._viewed:
                self.tensors[i] = replace(self.tensors[i], storage=self._viewed[storage])

    def _is_dense(self, tensor: int) -> bool:
        """Return whether elements of the last dim are contiguous: no op since they were computed moved that dim."""
        op, shape = self._makers.get(tensor), self.tensors[tensor].shape
        if op is None or not op.inputs:
            return True
        if order := _order_of(op, len(shape)):
            return order[-1] == len(shape) - 1 and self._is_dense(op.inputs[0])
        # Views and pointwise ops keep the order of their input's elements.
        follows = family_of(op) in ("view", "pointwise") and self.tensors[op.inputs[0]].shape[-1:] == shape[-1:]
        return not follows or self._is_dense(op.inputs[0])

    def _keep_attention(self, op: Op, made: Sequence[int]) -> list[int]:
        query, mask = self.tensors[op.inputs[0]], op.inputs[_MASK] if len(op.inputs) > _MASK else -1
        if mask >= 0 and not self._is_dense(mask):
            noise = [i for i in made if len(self.tensors[i].shape) == len(query.shape)][1:2]
            for i in noise:
                self._make(i, self.tensors[i].shape, "bool")
            return list(op.saved)
        self._attended.add(self.tensors[op.outputs[0]].storage)
        self._make(made[0], query.shape[:-1], "float32")
        kept = [*self._with_inputs(op, [], op.inputs), made[0], op.outputs[0]]
        if len(made) > 1 and mask in kept and self.tensors[mask].dtype not in FLOAT_DTYPES:
            # A bool mask becomes an additive one.
            self._make(made[1], self.tensors[mask].shape, self._lower or query.dtype)
            kept[kept.index(mask)] = made[1]
        return kept

    def _reserve(self, op: Op, made: int, states: int) -> int:
        output, num_layers = self.tensors[op.outputs[0]], max([1, *_numbers(op, "num_layers")])
        # Outputs between layers are kept, too.
        self._make(made, (*output.shape, Extent(states * num_layers + num_layers - 1)), output.dtype)
        return made

    def _with_inputs(self, op: Op, kept: Sequence[int], inputs: Sequence[int]) -> list[int]:
        """Return the kept values and the inputs, each in the type that the op computes in; parameters have copies."""
        found, names = list(kept), {self.tensors[i].name for i in kept}
        cast = cast_inputs(self._graph, op, self._lower) if self._lower else []
        for i in inputs:
            if i not in cast:
                found += [i] if i not in found else []
            elif self.tensors[i].role != "parameter":
                copy = cast_copy(self.tensors[i], op, self._lower, len(self.tensors))
                if copy.name not in names:
                    found.append(self._copy(i, op, self._lower))
        return found

    def _copy(self, tensor: int, op: Op, dtype: str) -> int:
        self.tensors.append(cast_copy(self.tensors[tensor], op, dtype, len(self.tensors)))
        return len(self.tensors) - 1

    def _make(self, tensor: int, shape: Sequence[Extent], dtype: str) -> None:
        """Give a value made for a CPU's backward another shape and type."""
        self.tensors[tensor] = replace(self.tensors[tensor], shape=tuple(shape), dtype=dtype)


def _order_of(op: Op, num_dims: int) -> list[int]:
    """Return the dims of an op's input in the order of its output's; empty if the op does not reorder them."""
    name, order = operator_name(op), list(range(num_dims))
    if name == "permute":
        return [dim % max(num_dims, 1) for dim in _numbers(op, "dims")]
    swapped = [*_numbers(op, "dim0"), *_numbers(op, "dim1")] if name == "transpose" else []
    if len(swapped) != 2 or not all(-num_dims <= dim < num_dims for dim in swapped):
        return []
    first, second = swapped
    order[first], order[second] = order[second], order[first]
    return order


def _numbers(op: Op, name: str) -> list[int]:
    """Return the integers in an attribute of an op."""
    return [int(number) for number in re.findall(r"-?\d+", dict(op.attributes).get(name, ""))]
