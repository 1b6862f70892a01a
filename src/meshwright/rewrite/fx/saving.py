"""Save a module as an exported program (.pt2), which can be loaded without Meshwright."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.capture.surroundings import quiet_torch
from meshwright.spec.files import write_bytes

if TYPE_CHECKING:
    from pathlib import Path


# Containers that torch can rebuild in every process.
_PLAIN = (tuple, list, dict)


def save_program(module: nn.Module, inputs: Any, path: Path) -> None:
    """Export a module with `torch.export` and write the program to ``path`` (.pt2).

    ``inputs``: an example batch, as a sequence of arguments or a dict of keyword arguments. Outputs in containers of
    other libraries become plain ones (mappings become dicts, named tuples become tuples), because the loading process
    may lack their classes.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})
    buffer = io.BytesIO()
    with quiet_torch():
        program = torch.export.export(module, args, kwargs, strict=False)
        if not _is_plain(program.call_spec.out_spec):
            program = torch.export.export(_Plain(module), args, kwargs, strict=False)
        torch.export.save(program, buffer)
    write_bytes(buffer.getvalue(), path)


def _is_plain(spec: Any) -> bool:
    return spec.is_leaf() or (spec.type in _PLAIN and all(map(_is_plain, spec.children())))


class _Plain(nn.Module):
    """A module whose outputs are in Python's own containers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs."""
        return _as_plain(self.module(*args, **kwargs))


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    return list(map(_as_plain, value)) if isinstance(value, list) else value
