"""Tensors that autograd keeps on CUDA devices, where kernels keep other tensors than on CPUs.

Graphs are captured on CPUs, so they contain what CPU kernels keep. On CUDA devices

    dropout         its mask, in bool; on CPUs the noise that elements are multiplied with (Dropout.cpp:
                    is_fused_kernel_acceptable, native_dropout)
    attention       query, key, value, mask, output and the logarithm of the sums of rows, in float32: the kernels of
                    cuDNN, flash and memory-efficient attention take dropout and masks with gradients, which on CPUs
                    need the matrix of scores. None of them takes a mask whose last dim is not dense, as that of a
                    permuted lookup: then the scores stay, with dropout's mask (transformers/sdp_utils_cpp.h:
                    check_last_dim_stride_equals_1_dense; attention.cpp: _scaled_dot_product_attention_math). What the
                    fused kernels make has the layout of the query, so that joining the heads copies nothing
    rms_norm        input, weight and a number of each row, in float32; on CPUs values on the way (derivatives.yaml:
                    _fused_rms_norm, from torch 2.9 on)
    lstm, gru       input, states, weights, output and cuDNN's reserve; on CPUs workspaces of oneDNN by layer
                    (derivatives.yaml: _cudnn_rnn). cuDNN does not document the size of the reserve; counted is what the
                    gradient of a cell reads per step: four gates and the state, of a GRU three gates and the product
                    with the state
    cross_entropy   under autocast: logarithms in the type of the logits, which is an argument of the softmax, and
                    float32 copies of them, which nll_loss reads (LossNLL.cpp: cross_entropy_loss); CPUs cast the logits

Sources: torch 2.13, aten/src/ATen/native and tools/autograd.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.cost.autocast import as_computed, cast_copy, cast_inputs
from meshwright.cost.traits import family_of, operator_name
from meshwright.spec.graph import Extent
from meshwright.spec.units import FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.memory.backward import Backend
    from meshwright.spec import Graph, Op
    from meshwright.spec.precision import Numbers

# The number of states that a cell keeps per step.
_KEPT_STATES = {"lstm": 5, "gru": 4}
_MASK = 3
# The swap of heads and tokens of (batch, heads, tokens, width), and the ops that then join the heads.
_SWAPPED = [0, 2, 1, 3]
_JOINING = frozenset({"flatten", "reshape", "view", "contiguous"})


def as_kept(graph: Graph, numbers: Numbers, device: Backend) -> Graph:
    """Return the graph in a precision with what a device's kernels keep; ids stay, copies are appended."""
    graph = as_computed(graph, numbers)
    return _on_cuda(graph, numbers.autocast) if device == "cuda" and graph.mode == "training" else graph


def casts_within(op: Op) -> bool:
    """Return whether autocast on CUDA devices casts a value inside the op, instead of its inputs."""
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
