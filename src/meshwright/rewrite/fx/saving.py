"""A module as a torch program in a file, which anybody with torch can load."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from meshwright.capture.surroundings import quiet_torch
from meshwright.spec.files import write_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def save_program(module: nn.Module, inputs: Any, path: Path) -> None:
    """Export a module for the batch that it is called with (a tuple of arguments, or a dict), and write it (.pt2)."""
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})
    buffer = io.BytesIO()
    with quiet_torch():
        torch.export.save(torch.export.export(module, args, kwargs, strict=False), buffer)
    write_bytes(buffer.getvalue(), path)
