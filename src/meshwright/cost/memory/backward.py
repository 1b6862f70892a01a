"""Allocations of an op besides its values: gradients of its inputs, and workspaces.

    passed on     the gradient of an input is that of the output, or a view of it: no allocation
    made          one storage per input that requires a gradient, of the input's size
    workspace     additional, until the op's forward or backward is done

Source: torch 2.13, tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp. Convolutions work on
copies in the layout of their library: oneDNN's own on CPUs (aten/src/ATen/native/mkldnn/Conv.cpp); on CUDA devices,
where tensor cores multiply, channels last: cuDNN copies tensors with channels first before and after
(microsoft/onnxruntime#17200), in the workspace that torch gives it for the duration of the call
(aten/src/ATen/native/cudnn/Conv_v8.cpp: run_conv_plan). Each gradient is a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from meshwright.cost.work import find_operator, name_in, operators

if TYPE_CHECKING:
    from meshwright.spec import Graph, Op

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
    """Return whether the gradient of an input, the ``tensor``, shares the memory of the output's."""
    dtypes = [graph.tensors[i].dtype for i in op.inputs]
    operator = find_operator(name_in(op.kind), dict(op.attributes), dtypes)
    return operator is not None and operator.passes_on(op.inputs.index(tensor), input_elements, output_elements)


class TensorSizes(Protocol):
    """Bytes by tensor."""

    def __getitem__(self, tensor: int, /) -> int: ...


def library_workspaces(device: Backend, *, trains: bool) -> tuple[int, ...]:
    """Return the bytes that libraries keep on a device permanently: a cuBLAS workspace for each thread.

    Backwards run in their own thread, which has another handle (torch, aten/src/ATen/cuda/CublasHandlePool.cpp:
    getNewWorkspace takes it from the caching allocator, the pool of handles is thread-local).
    """
    return (CUBLAS_BYTES,) * (2 if trains else 1) if device == "cuda" else ()


def backward_workspace_bytes(graph: Graph, op: Op, sizes: TensorSizes, device: Backend) -> int:
    """Return the bytes that an op's backward needs besides the gradients that it makes; ``sizes`` of all tensors."""
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
    """Return the bytes that an op's forward needs besides its outputs and the values that it saves."""
    if not _is_convolution(graph, op):
        return 0
    if device == "cuda":
        return _relaid_bytes(op, sizes)
    return sizes[op.outputs[0]] + sizes[op.inputs[1]] + _copied_input(graph, op, sizes)


def _relaid_bytes(op: Op, sizes: TensorSizes) -> int:
    """Return the bytes of copies of input, weight and output, or of their gradients, in another layout."""
    return sizes[op.inputs[0]] + sizes[op.inputs[1]] + sizes[op.outputs[0]]


def unrecorded_bytes(graph: Graph, op: Op, batch_size: int, device: Backend) -> dict[int, int]:
    """Return bytes of saved values that a graph records as empty, because only the library knows their sizes."""
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
