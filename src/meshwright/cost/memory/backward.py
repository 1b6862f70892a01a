"""What computing an op allocates beside its values: gradients of its inputs, and what it needs meanwhile.

    passed on     the gradient of an input is that of the output, or a view of it: nothing is allocated
    made          one storage per input that requires a gradient, of the input's size
    workspace     beside them, until the op's forward or backward is done

Source: torch 2.13, tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp; for convolutions on
CPUs, aten/src/ATen/native/mkldnn/Conv.cpp: oneDNN works on copies in its own layout of channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec import Graph, Op

# Whose libraries compute.
Backend = Literal["cpu", "cuda"]

# Outputs that show the input's elements in another order or shape: so does the gradient.
_RESHAPING = (
    "aten.view",
    "aten.reshape",
    "aten.unflatten",
    "aten.flatten",
    "aten.transpose",
    "aten.t.",
    "aten.permute",
    "aten.squeeze",
    "aten.unsqueeze",
    "aten.detach",
    "aten.alias",
)
# Inputs of the output's shape get its gradient as it is.
_ADDITIVE = ("aten.add.", "aten.add_.")
# Elementwise products: where an input is broadcast, its gradient is first as large as the output, then summed.
_PRODUCTS = ("aten.mul.", "aten.div.", "aten.mul_.", "aten.div_.")
_CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose")
_MAX_IMAGE_CHANNELS = 3


def passes_on(kind: str, input_elements: int, output_elements: int) -> bool:
    """Whether an input's gradient shares the memory of the output's."""
    if kind.startswith((*_RESHAPING, *_ADDITIVE, "aten.dropout")):
        return input_elements == output_elements
    # Slices or broadcasts of the output's gradient: views of it.
    return kind.startswith(("aten.cat", "aten.stack", "aten.sum", "aten.expand_as"))


def backward_workspace_bytes(graph: Graph, op: Op, sizes: Sequence[int], device: Backend) -> int:
    """Bytes that the op's backward needs beside the gradients that it makes; ``sizes`` are those of all tensors."""
    output = sizes[op.outputs[0]]
    if op.kind.startswith("aten.cross_entropy_loss"):
        # nll_loss makes the gradient of the logarithm of the softmax, from which that of the logits is made.
        return sizes[op.inputs[0]]
    if op.kind.startswith(_PRODUCTS):
        return output if any(sizes[i] < output for i in op.inputs) else 0
    if op.kind.startswith(_CONVOLUTIONS) and device == "cpu":
        return output + _copied_input(graph, op, sizes)
    return 0


def forward_workspace_bytes(graph: Graph, op: Op, sizes: Sequence[int], device: Backend) -> int:
    """Bytes that the op's forward needs beside its outputs and what it saves."""
    if op.kind.startswith(_CONVOLUTIONS) and device == "cpu":
        return sizes[op.outputs[0]] + sizes[op.inputs[1]] + _copied_input(graph, op, sizes)
    return 0


def _copied_input(graph: Graph, op: Op, sizes: Sequence[int]) -> int:
    """Images are read as they are, deeper inputs are copied (oneDNN, is_1stconv in jit_avx512_common_conv_kernel)."""
    channels = graph.tensors[op.inputs[0]].shape[1].fixed
    return sizes[op.inputs[0]] if channels > _MAX_IMAGE_CHANNELS else 0
