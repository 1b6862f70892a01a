"""Gather the whole model's state from the ranks that hold its parts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.runtime import Session
from meshwright.spec.errors import DocumentError
from meshwright.spec.placed_slices import slice_stages


def gather_state(model: torch.nn.Module, session: Session) -> dict[str, torch.Tensor] | None:
    """State dict of ``model`` (its own keys) on rank 0, in host memory; None elsewhere. All ranks call it together.

    A tensor comes from the first replica of the first stage that holds it; tensors that the graph does not use come
    from rank 0's model.
    """
    owners = _owners(session)
    buffers = {name: item for module in session.modules for name, item in module.named_buffers()}
    state: dict[str, torch.Tensor] = {}
    for tensor, holders in owners.items():
        facts = session.graph.tensors[tensor]
        held: torch.Tensor | None = session.parameters.get(tensor, buffers.get(facts.name))
        if isinstance(held, DTensor):
            # Replicas with shards of it gather them, at the same place in this loop.
            held = _on_device(held, session.device).full_tensor().to(getattr(torch, facts.dtype))
        own = held.detach().contiguous() if held is not None else torch.empty(0)
        if session.rank in holders and session.rank != 0:
            dist.send(own, 0)
        if session.rank == 0:
            shape = [extent.at(0) for extent in facts.shape]
            shares = []
            for holder in holders:
                value = torch.empty(shape, dtype=getattr(torch, facts.dtype), device=session.device)
                if holder == 0:
                    value = own
                else:
                    dist.recv(value, holder)
                shares.append(value)
            state[facts.name] = session.model.join(shares, tensor).cpu().clone()
    if session.rank != 0:
        return None
    names = {alias: session.graph.tensors[i].name for i in owners for alias in session.graph.tensors[i].aliases}
    return {
        key: state[names.get(key, key)] if names.get(key, key) in state else value.detach().cpu().clone()
        for key, value in model.state_dict().items()
    }


def _on_device(value: DTensor, device: torch.device) -> DTensor:
    """A sharded tensor on the device where its processes communicate; its shards may be on the host."""
    local = value.to_local()
    if local.device == device:
        return value
    made: DTensor = DTensor.from_local(
        local.to(device), value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
    )
    return made


def save_state(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a state dict with torch.save to a temporary file, then rename; DocumentError if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise DocumentError(f"{path}: cannot be written ({error.strerror}). Choose a writable folder.") from None
    try:
        torch.save(state, temporary)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _owners(session: Session) -> dict[int, tuple[int, ...]]:
    """Tensor id of every parameter and buffer → the processes that provide it: several with shards, or one."""
    owners: dict[int, tuple[int, ...]] = {}
    width = session.grid.width
    for stage in slice_stages(session.graph, session.model.plan):
        first = session.plan.stages[stage.index].ranks[0] * width
        for tensor in (*stage.parameters, *stage.buffers):
            count = width if session.model.is_split(tensor) else 1
            owners.setdefault(tensor, tuple(range(first, first + count)))
    return owners
