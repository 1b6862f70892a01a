"""Checkpoints of a training run: the state of every process, from which the same plan can continue.

    folder/step-00000020/meta.json        plan, processes, steps
                        /process-3.pt     parameters, buffers and optimizer states of process 3, or its shards of them

All processes write into a temporary folder, which is renamed when all are done, so that interrupted checkpoints are
never loaded. Files contain tensors and plain values, and are loaded with ``weights_only``. On several nodes the folder
must be on a shared file system.

`gather_state` gathers the whole model's state from the ranks that hold its parts, and `save_state` writes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.runtime import Session
from meshwright.runtime.fully_sharded import own_part
from meshwright.spec import (
    DocumentError,
    Placement,
    Plan,
    RunError,
    content_hash,
    read_document,
    slice_stages,
    write_document,
)
from meshwright.spec.made_with import UNKNOWN

_NAME = re.compile(r"step-(\d{8,})")
_META = "meta.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """The file ``meta.json`` of a checkpoint: which run it belongs to, and after how many steps.

    ``settings``: pairs of name and value that a run must have to continue. ``sums``: SHA-256 of each process's file.
    """

    plan_hash: str
    num_processes: int
    num_steps: int
    run_seed: int
    settings: tuple[tuple[str, str], ...] = ()
    sums: tuple[str, ...] = ()

    SCHEMA_VERSION: ClassVar[int] = 1


def gather_state(model: torch.nn.Module, session: Session) -> dict[str, torch.Tensor] | None:
    """Return the whole state dict of ``model`` on rank 0, in host memory; None on other ranks.

    All ranks call it together. A tensor comes from the first replica of the first stage that holds it; a tensor that
    the graph does not use comes from rank 0's model.
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


def save_state(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a state dict with torch.save, completely or not at all (by renaming a temporary file).

    Raises DocumentError if the folder cannot be written to.
    """
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


def save_checkpoint(
    session: Session, folder: Path, num_steps: int, run_seed: int, settings: Mapping[str, str], keep: int
) -> Path:
    """Write a checkpoint after ``num_steps`` steps; return its folder. All processes call it together.

    Older checkpoints in ``folder`` are removed, except for the newest ``keep`` in all. No work may be in progress
    (`Session.finish`). Raises RunError on all processes if one of them cannot write, or if the folder holds a
    checkpoint of more steps, which belongs to another run.
    """
    _refuse_others(folder, num_steps)
    name = f"step-{num_steps:08d}"
    beside = folder / _agree(f".{name}.{secrets.token_hex(4)}")
    error, own_sum = "", ""
    try:
        beside.mkdir(parents=True, exist_ok=True)
        torch.save(_own_state(session), beside / f"process-{session.rank}.pt")
        own_sum = _sum_of(beside / f"process-{session.rank}.pt")
    except (OSError, RuntimeError) as problem:
        # torch's writer reports a full disk as a RuntimeError.
        error = f"{folder}: process {session.rank} cannot write a checkpoint to this folder ({problem})."
    errors = [found for found in _gather(error) if found]
    sums = tuple(_gather(own_sum))
    if session.rank == 0 and not errors:
        meta = CheckpointMeta(
            plan_hash=_hash_of(session.plan),
            num_processes=dist.get_world_size(),
            num_steps=num_steps,
            run_seed=run_seed,
            settings=tuple(settings.items()),
            sums=sums,
        )
        try:
            write_document(meta, beside / _META)
            shutil.rmtree(folder / name, ignore_errors=True)
            beside.rename(folder / name)
            _drop_old(folder, keep)
        except (OSError, DocumentError) as problem:
            error = f"{folder}: a checkpoint cannot be written to this folder ({problem})."
    errors = errors or [found for found in _gather(error) if found]
    if errors:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(f"{errors[0]} Choose a folder that all processes can write to, with room for their states.")
    return folder / name


def load_checkpoint(session: Session, folder: Path, run_seed: int, settings: Mapping[str, str]) -> int:
    """Load the newest checkpoint of a folder; return its number of steps. All processes call it together.

    Raises RunError if the folder has no checkpoint, if its files are damaged, or if it belongs to another plan, number
    of processes, seed or settings.
    """
    newest = find_newest(folder)
    if newest is None:
        raise RunError(f"{folder}: this folder has no checkpoint. Give the folder to which checkpoints were written.")
    meta = read_document(CheckpointMeta, newest / _META)
    wanted = {
        "plan": _hash_of(session.plan),
        "number of processes": dist.get_world_size(),
        "seed": run_seed,
        **settings,
    }
    found = {"plan": meta.plan_hash, "number of processes": meta.num_processes, "seed": meta.run_seed}
    found |= {name: value for name, value in meta.settings if name in settings}
    for what, value in wanted.items():
        if found.get(what, value) != value:
            raise RunError(
                f"{newest}: the checkpoint has {what} {found[what]}, but the run has {value}. Give the run the "
                "checkpoint's value, or start from the weights alone, which `--save-model` writes."
            )
    path = newest / f"process-{session.rank}.pt"
    advice = f"Remove {newest} to continue from the checkpoint before it."
    try:
        if meta.sums and _sum_of(path) != meta.sums[session.rank]:
            raise RunError(f"{path}: the file was changed after the checkpoint was written. {advice}")
        # States that are kept on the host go there at once.
        steps_on_host = isinstance(session.plan, Plan) and session.plan.offload.optimizer != "device"
        place = "cpu" if steps_on_host else session.device
        state = torch.load(path, map_location=place, weights_only=True)
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"{path}: the file cannot be read ({type(error).__name__}: {error}). {advice}") from None
    _take_state(session, state, path)
    return meta.num_steps


def find_newest(folder: Path) -> Path | None:
    """Return the path of the checkpoint with the most steps in a folder; None if the folder has no checkpoint."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / _META).is_file()]
    return max(found, key=_steps_of, default=None)


def _own_state(session: Session) -> dict[str, Any]:
    """The state of this process, as plain tensors."""
    return {
        "parameters": {str(i): own_part(item.detach()) for i, item in session.parameters.items()},
        "buffers": {f"{place}.{name}": item for place, name, item in _buffers(session)},
        "updates": session.updates.state(),
    }


def _take_state(session: Session, state: dict[str, Any], path: Path) -> None:
    own = {str(i): own_part(item.detach()) for i, item in session.parameters.items()}
    own |= {f"{place}.{name}": item for place, name, item in _buffers(session)}
    saved = {**state["parameters"], **state["buffers"]}
    if own.keys() != saved.keys() or any(own[key].shape != saved[key].shape for key in own):
        raise RunError(
            f"{path}: the tensors in this file are not those of the model. Continue with the model of the checkpoint."
        )
    with torch.no_grad():
        for key, value in saved.items():
            own[key].copy_(value)
    session.updates.take_state(state["updates"])
    if session.exchange is not None:
        session.exchange.restart()


def _hash_of(plan: Plan | Placement) -> str:
    """The hash of a plan without its clipping, which is a setting, and without the inputs of its estimate.

    A run with compiled layers can continue one without, and the other way round.
    """
    if isinstance(plan, Plan):
        plan = replace(plan, exchange=replace(plan.exchange, clip_norm=False), compiled=False)
    return content_hash(replace(plan, made_with=UNKNOWN))


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _buffers(session: Session) -> list[tuple[int, str, torch.Tensor]]:
    return [
        (place, name, item) for place, module in enumerate(session.modules) for name, item in module.named_buffers()
    ]


def _refuse_others(folder: Path, num_steps: int) -> None:
    newest = find_newest(folder)
    if newest is not None and _steps_of(newest) > num_steps:
        raise RunError(
            f"{folder}: holds a checkpoint of {_steps_of(newest)} steps, but this run has done {num_steps}, so the "
            "checkpoint belongs to another run. Resume that run, or choose another folder."
        )


def _steps_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _drop_old(folder: Path, keep: int) -> None:
    """Remove interrupted checkpoints, and all but the newest ones."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    whole = sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    for path in whole[: max(len(whole) - keep, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _agree(own: str) -> str:
    """The text of the first process."""
    said = [own]
    dist.broadcast_object_list(said, 0)
    return said[0]


def _gather(own: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
