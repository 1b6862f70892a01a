"""Context managers under which a model is traced or checked; grouped matrix products as one operator (`grouped_mm`).

`allocated` replaces weights without data by fake tensors, `training_flags` sets the training mode, `quiet_torch` turns
off torch's warnings. Each context manager restores the former state at its end.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_LIBRARY.define("grouped_mm_backward(Tensor rows, Tensor matrices, Tensor ends, Tensor gradient) -> (Tensor, Tensor)")
# Of NVIDIA's GPUs the kernel serves compute capability 8.0 and newer, and strides of 16 bytes (torch 2.13,
# GroupedBlas.cpp).
_CAPABILITY, _ALIGNMENT = (8, 0), 16
_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)


# ``meshwright::grouped_mm`` for every device and dtype, with or without data:
#
# rows (S, K), sorted by group; matrices (G, K, N); ends (G), where the rows of each group end → (S, N)
#
# torch 2.13 has a kernel (`torch._grouped_mm`) for float32 and below. It infers shapes of tensors without data only in
# bfloat16, and has no rule for autocast. Here every dtype has a shape rule. Autocast computes in its own dtype, as for
# other products. In float64, and on GPUs older than the kernel, groups are multiplied one after the other. While a
# model is traced, the grouped products of transformers are this operator.
def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group by the group's matrix; return (S, N).

    ``rows``: (S, K), sorted by group. ``matrices``: (G, K, N). ``offs``: (G,), whole numbers: the row at which each
    group ends (exclusive).
    """
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


@contextmanager
def allocated(
    model: nn.Module, tensors: tuple[torch.Tensor, ...], *, always: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the batch's tensors for an export.

    If a parameter, buffer or input holds no data, or if ``always``, fake CPU tensors replace all of the model's
    parameters and buffers until the context ends, and the yielded tensors are fake, too.
    """
    held = [*model.parameters(), *model.buffers(), *tensors]
    if not always and all(holds_data(tensor) for tensor in held):
        yield tensors
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
            as_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if as_parameter else empty
        return made[id(tensor)]

    tables: list[Any] = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: fake(tensor) for name, tensor in table.items() if tensor is not None})
        with mode:
            batch = tuple(fake(tensor) for tensor in tensors)
        yield batch
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.clear()
            table.update(original)


def holds_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds data: it is neither fake nor on device "meta"."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


@contextmanager
def training_flags(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode; restore each module's flag at the end.

    A model that is in this mode already keeps the flags of its modules (for example batch norms in evaluation mode).
    """
    flags = {module: module.training for module in model.modules()}
    try:
        if model.training != training:
            model.train(training)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers (objects and contents) and torch's random states when the context ends."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    copies = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for table, held in tables:
                    table.clear()
                    table.update(held)
                for buffer, copy in copies:
                    buffer.copy_(copy)


@contextmanager
def as_untraced(batch: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make libraries take the same branches under export as in training.

    ``torch.compiler.is_compiling`` and ``is_exporting`` return False. Otherwise transformers (5.23) would pass
    attention a mask tensor in place of ``is_causal``, and copy keys and values to all heads. Its check for packed
    sequences runs only for positions that are part of ``batch``, not for those that the model makes itself. Its grouped
    matrix products become one operator (`grouped_mm`).
    """
    with ExitStack() as stack:
        for name in ("is_compiling", "is_exporting"):
            stack.enter_context(patch.object(torch.compiler, name, lambda: False))
        experts = sys.modules.get("transformers.integrations.moe")
        if experts is not None and hasattr(experts, "_grouped_mm"):
            stack.enter_context(patch.object(experts, "_grouped_mm", grouped_mm))
        masks = sys.modules.get("transformers.masking_utils")
        if masks is not None and hasattr(masks, "find_packed_sequence_indices"):
            find, given = masks.find_packed_sequence_indices, {_storage(tensor) for tensor in batch}

            def find_packed(position_ids: torch.Tensor) -> torch.Tensor | None:
                return find(position_ids) if _storage(position_ids) in given else None

            stack.enter_context(patch.object(masks, "find_packed_sequence_indices", find_packed))
        yield


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Turn off Python warnings, and log messages of torch.export and transformers, until the context ends."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.fx.experimental", "torch.export", "torch._export", "torch._subclasses", "transformers")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
