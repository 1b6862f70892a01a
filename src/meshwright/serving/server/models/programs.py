"""Exported programs: ``model.pt2``, as torch.export.save writes them.

A program that was exported for any batch size (`torch.export.Dim`) runs batches unchanged, within the bounds of its
export; for one that was exported for a single size, smaller batches are padded.

Loading such a file executes it: torch unpickles objects other than plain tensors, and evaluates shape expressions. So
a program is trusted like a Python file: the owner of the deployment names it, never a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from meshwright.capture.surroundings import quiet_torch
from meshwright.serving.server.models.tensors import Arguments
from meshwright.spec import ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProgram:
    """A program to call, with example arguments.

    ``fixed`` is the only batch size that it runs, or 0 if it runs all sizes up to ``largest``.
    """

    call: Callable[..., Any]
    arguments: Arguments
    fixed: int
    largest: float


def load_program(path: Path, device: torch.device) -> ModelProgram:
    """Load a program onto a device. Raises ServingError for an invalid file, or a program without a batch dim."""
    try:
        with quiet_torch():
            exported = torch.export.load(path)
            if device.type != "cpu":
                exported = move_to_device_pass(exported, str(device))
    except Exception as error:
        raise ServingError(
            f"{path} cannot be loaded as an exported program ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Give a file that torch.export.save of this torch wrote."
        ) from None
    values = _user_inputs(exported)
    # By their text, as symbols are not hashable; torch types them as int.
    sizes: dict[str, Any] = {
        str(size): size for _, value in values if isinstance(value, torch.Tensor) for size in value.shape[:1] or (0,)
    }
    if len(sizes) != 1 or "0" in sizes:
        raise ServingError(
            f"{path}: first dims of its inputs are {', '.join(sorted(sizes)) or 'none'}; expected one size, the batch "
            "size, for all. Export the program with a batch: dynamic_shapes of {0: Dim('batch')} for each input."
        )
    (size,) = sizes.values()
    args, kwargs = exported.example_inputs or pytree.tree_unflatten(
        [_zeros(value) for _, value in values], exported.call_spec.in_spec
    )
    arguments = Arguments(args, kwargs, ["input"] * len(args))
    arguments.names = [name for name, value in values if isinstance(value, torch.Tensor)]
    fixed = size if isinstance(size, int) else 0
    return ModelProgram(
        call=exported.module(), arguments=arguments, fixed=fixed, largest=fixed or _most(exported, size)
    )


def _user_inputs(exported: torch.export.ExportedProgram) -> list[tuple[str, Any]]:
    """Return names and (fake) values of the program's arguments, in the order of its call."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    found = []
    for item in exported.graph_signature.input_specs:
        if item.kind is InputKind.USER_INPUT:
            name = item.arg.name
            found.append((name, nodes[name].meta["val"] if name in nodes else getattr(item.arg, "value", None)))
    return found


def _zeros(value: Any) -> Any:
    """Return zeros, with the example size for variable dims."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes: list[Any] = list(value.shape)
    return torch.zeros([size if isinstance(size, int) else size.node.hint for size in sizes], dtype=value.dtype)


def _most(exported: torch.export.ExportedProgram, size: torch.SymInt) -> float:
    bounds = exported.range_constraints.get(size.node.expr)
    upper = math.inf if bounds is None else float(bounds.upper)
    return upper if upper < 2**31 else math.inf
