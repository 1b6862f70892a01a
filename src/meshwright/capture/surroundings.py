"""What holds while a model is traced or run for a check, and is undone afterwards.

Weights that were never allocated are fake meanwhile, training flags are as asked, and torch keeps quiet.
"""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from meshwright.capture.grouped import grouped_mm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def allocated(
    model: nn.Module, tensors: tuple[torch.Tensor, ...], *, always: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The batch to export with; where any holds no data, or ``always``, all become fake CPU tensors meanwhile."""
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
    """Whether the tensor is neither fake nor on device "meta"."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


@contextmanager
def training_flags(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch all modules, unless the model is in that mode: then each keeps its flag (frozen batch norms stay so)."""
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
    """Undo what running the model changes: buffers, their contents, and the state of the random generators."""
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
    """Libraries that ask torch whether it traces hear that it does not: they take the branches that training takes.

    Of a model that is exported, transformers (5.23) gives attention a mask in memory in place of ``is_causal``, and
    copies keys and values to all heads. Positions in ``batch`` may be those of packed sequences, which need the mask;
    positions that the model makes itself are not. Its grouped products become one operator (`grouped`).
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
    """Export and `torch.cond` warn and log about what we check ourselves; models of transformers log, too."""
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
