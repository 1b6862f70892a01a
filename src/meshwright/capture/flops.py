"""Floating-point operations of what torch dispatches: torch's own formulas, and ours where torch has none.

torch's `flop_registry` (torch/utils/flop_counter.py) covers matrix products, convolutions and the GPU attention
kernels; a multiply and an add are two operations, elementwise work counts nothing. It has no entry for the attention
kernels of the CPU nor for matrix-vector products, and before torch 2.13 none of grouped keys and values; those formulas
stand here: attention as torch 2.13 counts it for GPUs (no saving for causal masks; the backward pass recomputes the
scores), a matrix-vector product as 2·rows·columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (width + value.shape[3])


def _attention_backward(
    _grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores again; from the output's gradient those of weights and values, from that those of queries and keys."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (3 * width + 2 * value.shape[3])


def _matrix_vector(matrix: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _added_matrix_vector(_bias: torch.Tensor, matrix: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _recurrent(sequence: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor, *_: Any, **__: Any) -> int:
    """One layer of an LSTM over a sequence: every step multiplies input and hidden state by their weights."""
    return 2 * math.prod(sequence.shape[:2]) * (weight_ih.numel() + weight_hh.numel())


def _recurrent_backward(
    sequence: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor, *_: Any, **__: Any
) -> int:
    return 2 * _recurrent(sequence, weight_ih, weight_hh)


def _grouped(tokens: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each token is multiplied by the matrix of one group: tokens (S, K), weights (groups, K, N)."""
    return 2 * tokens.shape[0] * weights.shape[-2] * weights.shape[-1]


def _grouped_backward(tokens: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * _grouped(tokens, weights)


# Operators that are not torch's own.
_NAMED: dict[str, Callable[..., int]] = {
    "meshwright::grouped_mm": _grouped,
    "meshwright::grouped_mm_backward": _grouped_backward,
}

_OWN: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _attention_backward,
    ),
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.addmv: _added_matrix_vector,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}


def count_flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Operations of one dispatched operator; 0 for those that do no arithmetic worth counting."""
    packet = getattr(target, "overloadpacket", None)
    if packet in _OWN:
        return _OWN[packet](*args, **kwargs)
    if (name := getattr(getattr(target, "_schema", None), "name", "")) in _NAMED:
        return _NAMED[name](*args, **kwargs)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of everything dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += count_flops(func, args, kwargs or {}, out)
        return out
