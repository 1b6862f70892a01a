"""What torch issues: every collective of a step, with its group and the bytes of the full tensor."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that exchange → what we call it, and by what the bytes of their first argument are multiplied.
_OPERATORS = {
    "_c10d_functional::all_reduce": ("all_reduce", False),
    "_c10d_functional::all_reduce_": ("all_reduce", False),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", True),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", False),
    "_c10d_functional::all_to_all_single": ("all_to_all", True),
    "c10d::_allgather_base_": ("all_gather", False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", True),
    "c10d::allreduce_": ("all_reduce", False),
}


@dataclass(frozen=True)
class Recorded:
    """One collective: in which phase, among how many ranks, of how many bytes in all."""

    phase: str
    kind: str
    num_ranks: int
    num_bytes: int
    dtype: str


@dataclass
class Recorder(TorchDispatchMode):
    """Lists every collective that is dispatched while it is active."""

    phase: str = "forward"
    found: list[Recorded] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            # DTensor takes the op apart first; this mode then sees what comes of it.
            return NotImplemented
        name = func._schema.name
        if name in _OPERATORS:
            kind, scaled = _OPERATORS[name]
            tensor = args[0]
            while isinstance(tensor, list | tuple):
                tensor = tensor[0]
            num_ranks = _group(args).size()
            num_bytes = tensor.numel() * tensor.element_size() * (num_ranks if scaled else 1)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.found.append(Recorded(self.phase, kind, num_ranks, num_bytes, dtype))
        elif name.split("::")[0] in ("c10d", "_c10d_functional") and not name.endswith(
            ("wait_tensor", "_wrap_tensor_autograd", "barrier")
        ):
            raise AssertionError(f"{name} is a collective that nobody counts")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def backward(self):
        self.phase = "backward"
        yield
        self.phase = "forward"


class SavedBytes:
    """Bytes that autograd keeps on this rank while it is active, each storage once, but for the model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {_local(p.data).untyped_storage().data_ptr() for p in model.parameters()}
        # Tensors are held, so that no storage is at the place of an earlier one.
        self._held: dict[int, torch.Tensor] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        local = _local(tensor)
        place = local.untyped_storage().data_ptr()
        if place not in self._parameters:
            self._held[place] = local
        return tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of this rank, once what is on its way has arrived."""
    while isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return getattr(tensor, "elem", tensor)


def _group(args: Any) -> Any:
    for item in args:
        if isinstance(item, torch.ScriptObject):
            return dist.ProcessGroup.unbox(item)
    return torch._C._distributed_c10d._resolve_process_group(args[-1])
