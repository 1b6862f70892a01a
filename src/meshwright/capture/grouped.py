"""Grouped products as one operator, ``meshwright::grouped_mm``: for every device and type, with or without data.

    rows (S, K), sorted by group; matrices (G, K, N); ends (G), where the rows of each group end → (S, N)

torch 2.13 has a kernel (`torch._grouped_mm`) for float32 and below, no shape for tensors without data but in bfloat16,
and nothing for autocast. Here every type has a shape; autocast computes in its own type, as for other products; in
float64, and on GPUs older than the kernel, groups are multiplied one after the other. While a model is traced, the
grouped products of transformers are this operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_LIBRARY.define("grouped_mm_backward(Tensor rows, Tensor matrices, Tensor ends, Tensor gradient) -> (Tensor, Tensor)")
# Of NVIDIA's GPUs the kernel serves compute capability 8.0 and newer, and strides of 16 bytes (torch 2.13,
# GroupedBlas.cpp).
_CAPABILITY, _ALIGNMENT = (8, 0), 16
_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group by its matrix: (S, K), (G, K, N), int (G) → (S, N)."""
    found: torch.Tensor = torch.ops.meshwright.grouped_mm(rows, matrices, offs)
    return found


def _has_kernel(*tensors: torch.Tensor) -> bool:
    first = tensors[0]
    if not hasattr(torch, "_grouped_mm") or first.dtype not in _KERNEL_TYPES:
        return False
    if first.device.type == "cuda" and torch.cuda.get_device_capability(first.device) < _CAPABILITY:
        return False
    return all(_is_aligned(tensor) for tensor in tensors)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a matrix, or each of several, is dense in rows or columns, and its other stride is aligned."""
    rows, columns = tensor.stride()[-2:]
    other = max(rows, columns)
    return min(rows, columns) == 1 and other * tensor.element_size() % _ALIGNMENT == 0


def _forward(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if len(rows) and _has_kernel(rows, matrices):
        return torch._grouped_mm(rows, matrices, offs=ends)
    made = rows.new_empty(len(rows), matrices.shape[-1])
    for group, here in _groups(ends):
        torch.mm(rows[here], matrices[group], out=made[here])
    return made


def _backward(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel does not accept an expanded gradient.
    gradient = gradient.contiguous()
    of_rows = _forward(gradient, matrices.transpose(-2, -1), ends)
    columns = rows.transpose(0, 1)
    if len(rows) and _has_kernel(columns, gradient):
        return of_rows, torch._grouped_mm(columns, gradient, offs=ends)
    of_matrices = matrices.new_zeros(matrices.shape)
    for group, here in _groups(ends):
        torch.mm(columns[:, here], gradient[here], out=of_matrices[group])
    return of_rows, of_matrices


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - torch's protocol
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return *torch.ops.meshwright.grouped_mm_backward(*ctx.saved_tensors, gradient), None


def _under_autocast(key: str, device_type: str) -> Callable[..., torch.Tensor]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        rows, matrices = (item if item.dtype == torch.float64 else item.to(dtype) for item in (rows, matrices))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return grouped_mm(rows, matrices, ends)

    return cast


_LIBRARY.impl("grouped_mm", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_mm_backward", _backward, "CompositeExplicitAutograd")
for _key, _device_type in (("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")):
    _LIBRARY.impl("grouped_mm", _under_autocast(_key, _device_type), _key)
torch.library.register_autograd("meshwright::grouped_mm", _differentiate, setup_context=_keep, lib=_LIBRARY)


@torch.library.register_fake("meshwright::grouped_mm", lib=_LIBRARY)
def _looks(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    torch._check(rows.dim() == 2 and matrices.dim() == 3 and rows.shape[1] == matrices.shape[1])
    torch._check(ends.dim() == 1 and ends.shape[0] == matrices.shape[0])
    return rows.new_empty(rows.shape[0], matrices.shape[-1])


@torch.library.register_fake("meshwright::grouped_mm_backward", lib=_LIBRARY)
def _backward_looks(rows: torch.Tensor, matrices: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), matrices.new_empty(matrices.shape)
