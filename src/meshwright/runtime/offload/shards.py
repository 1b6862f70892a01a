"""Shards of torch's FSDP2 whose optimizer is on the host: gradients in their own type, parameters in its memory.

FSDP2 casts summed gradients to the type of the shards. With master weights on the host shards have the type of the
parameters, and gradients are to stay wide. Where parameters lie on the host, a `CPUOffloadPolicy` keeps shards there,
and copies gradients to them; on processors, whose memory is both, it does nothing, and shards and gradients are put
into memory of the host here, so that they are no part of the device's.

This is the one place that knows the inner names of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.runtime.offload.memory import HostMemory


def widen_gradients(modules: Sequence[torch.nn.Module], dtype: torch.dtype) -> None:
    """Let summed gradients of shards be of a type, whatever that of the shards is."""
    for group in _groups(modules):
        group._init_mp_dtypes = _with_gradients(group, dtype)
        for item in group.fsdp_params:
            item.sharded_param.grad_dtype = dtype


def _with_gradients(group: Any, dtype: torch.dtype) -> Callable[[], None]:
    initialise = group._init_mp_dtypes

    def initialise_and_widen() -> None:
        initialise()
        group._orig_dtype = dtype

    return initialise_and_widen


def move_to_host(modules: Sequence[torch.nn.Module], memory: HostMemory) -> None:
    """Put shards, and their gradients when they are made, into memory of the host; for processors."""
    for group in _groups(modules):
        for item in group.fsdp_params:
            parameter, padded = item.sharded_param, item._sharded_param_data
            local = parameter._local_tensor
            own = memory.moved(padded)
            item._sharded_param_data = own
            parameter._local_tensor = own[: local.numel()].view(local.shape)
            if parameter.requires_grad:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                gradient = memory.empty(local.numel(), dtype).view(local.shape)
                parameter.register_post_accumulate_grad_hook(_placed_at(gradient))


def _placed_at(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def place(parameter: torch.Tensor) -> None:
        assert isinstance(parameter.grad, DTensor), "gradients of shards are shards"
        # Further microbatches are added where the first one's gradient lies.
        if parameter.grad._local_tensor is not gradient:
            parameter.grad._local_tensor = gradient.copy_(parameter.grad._local_tensor)

    return place


def _groups(modules: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for module in modules:
        for each in module.modules():
            if isinstance(each, FSDPModule):
                group: Any = each._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    yield group
