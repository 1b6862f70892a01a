"""Checkpoints of a training run, from which any plan of the same model can continue.

    folder/step-00000020/manifest.json            steps, seed, settings, and the SHA-256 of each file
                        /process-3.safetensors    the tensors that process 3 writes, and its numbers in the header
                        /process-3-1.safetensors  further boxes of the same tensors, if it has several

`sharded_state` says which tensors those are. The files have the format of sharded safetensors that
torch.distributed.checkpoint reads (`HuggingFaceStorageReader`); it copies what each process needs, whatever plan wrote
it. Nothing is unpickled.

`Checkpoints` writes in the background: a step waits only until the state is copied. Boxes that several processes hold
are written by one of them. Each process writes to a temporary folder; when all are done, process 0 adds the manifest
and renames the folder, so that an interrupted checkpoint is never loaded. On several nodes the folder must be on a
shared file system.

`gather_state` gathers the whole model's state from the ranks that hold its parts, and `save_state` writes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from meshwright.runtime import COMMUNICATION_TIMEOUT, Session
from meshwright.spec import (
    DocumentError,
    MeshwrightError,
    Placement,
    Plan,
    RunError,
    content_hash,
    format_bytes,
    read_document,
    slice_stages,
    write_document,
)
from meshwright.spec.made_with import UNKNOWN
from meshwright.training.sharded_state import Box, Facts, Part, TensorParts, Wanted, take_apart

_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "manifest.json"
_SUFFIX = ".safetensors"
# Keys in the header of a file: the first two are those of torch.distributed.checkpoint.
_OFFSETS, _VERSION, _FACTS = "DCP_SHARDING_INFO", "DCP_VERSION", "meshwright"
_POLL_S = 0.01
# Runs of a process, in the order of their first checkpoints, which is the same on all processes.
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The file ``manifest.json`` of a checkpoint: which run it belongs to, and after how many steps.

    ``plan_hash`` and ``num_processes``: of the plan that wrote it. ``settings``: pairs of name and value that a run
    must have to continue. ``sums``: pairs of a file's name and its SHA-256. ``own_sum``: the hash of the manifest
    without this field.
    """

    plan_hash: str
    num_processes: int
    num_steps: int
    run_seed: int
    settings: tuple[tuple[str, str], ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    own_sum: str = ""

    SCHEMA_VERSION: ClassVar[int] = 2


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

    Raises DocumentError if the folder cannot be written to, or lacks room.
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
    except (OSError, RuntimeError) as error:
        # torch's writer reports a full disk as a RuntimeError.
        raise DocumentError(
            f"{path}: cannot be written ({error}). Choose a folder with room for {format_bytes(_size_of(state))}."
        ) from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def _size_of(state: Mapping[str, torch.Tensor]) -> int:
    return sum(item.nbytes for item in state.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """The checkpoints to keep: the newest ``newest``, and those of a multiple of ``every`` steps (0: no others)."""

    newest: int = 2
    every: int = 0


class Checkpoints:
    """Writes the checkpoints of a session, one at a time. All processes make the same calls together.

    ``settings``: pairs that a run must have to continue. ``write_s``: the seconds for which the last one was written.
    """

    def __init__(self, session: Session, run_seed: int, settings: Mapping[str, str]) -> None:
        self._session, self._run_seed, self._settings = session, run_seed, settings
        self._store = PrefixStore(
            f"meshwright/checkpoints/{next(_NUMBERS)}", dist.distributed_c10d._get_default_store()
        )
        self._numbers, self._parts = itertools.count(), TensorParts(session)
        # The boxes that this process holds, and those of them that it writes: that depends on what all hold.
        self._held: list[tuple[str, Box]] = []
        self._own: set[tuple[str, Box]] = set()
        self._copies: dict[tuple[str, Box], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._num_processes, self._rank = dist.get_world_size(), session.rank
        self._error, self.write_s = "", 0.0

    def save(self, folder: Path, num_steps: int, keep: KeepRule) -> Path:
        """Copy the state, and start to write it as the checkpoint after ``num_steps`` steps; return its folder.

        Waits for the checkpoint before. No work may be in progress (`Session.finish`). Raises RunError on all processes
        if the folder cannot be written to, if the checkpoint before failed, or if the folder holds a checkpoint of more
        steps, which belongs to another run.
        """
        self.wait()
        name = f"step-{num_steps:08d}"
        beside = folder / agree(f".{name}.{secrets.token_hex(4)}")
        error, facts = "", Facts()
        parts: list[Part] = []
        try:
            _refuse_others(folder, num_steps)
            beside.mkdir(parents=True, exist_ok=True)
            parts, facts = take_apart(self._session, self._parts)
        except OSError as problem:
            error = _cannot_write(folder, problem)
        except RunError as problem:
            error = str(problem)
        self._raise_first(error, parts, beside)
        copies = self._copy([part for part in parts if (part.name, part.box) in self._own])
        arguments = next(self._numbers), folder, beside, folder / name, copies, facts, num_steps, keep
        self._thread = threading.Thread(target=self._write, args=arguments, name="meshwright-checkpoint")
        self._thread.start()
        return folder / name

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises RunError on all processes if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        errors = [found for found in _gather(self._error) if found]
        self._error = ""
        if errors:
            raise RunError(errors[0])

    def leave(self) -> None:
        """Wait for this process's part of the last checkpoint, without the others; errors are reported on stderr."""
        if self._thread is not None:
            self._thread.join()
            if self._error:
                sys.stderr.write(f"meshwright: {self._error}\n")

    def _raise_first(self, error: str, parts: Sequence[Part], beside: Path) -> None:
        """Tell all processes about an error, and which boxes this one holds; then choose those that it writes."""
        held = [(part.name, part.box) for part in parts]
        told: list[Any] = [None] * self._num_processes
        dist.all_gather_object(told, (error, held == self._held))
        if errors := [found for found, _ in told if found]:
            if self._rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            raise RunError(errors[0])
        if not all(known for _, known in told):
            every: list[Any] = [None] * self._num_processes
            dist.all_gather_object(every, held)
            self._held, self._own, self._copies = held, _share_work(every)[self._rank], {}

    def _copy(self, parts: Sequence[Part]) -> list[Part]:
        """The parts in host memory, which is used again by the next checkpoint."""
        found = []
        for part in parts:
            key = part.name, part.box
            if key not in self._copies:
                is_pinned = part.value.device.type == "cuda"
                self._copies[key] = torch.empty(part.value.shape, dtype=part.value.dtype, pin_memory=is_pinned)
            self._copies[key].copy_(part.value, non_blocking=True)
            found.append(replace(part, value=self._copies[key]))
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
        return found

    def _write(
        self,
        number: int,
        folder: Path,
        beside: Path,
        target: Path,
        parts: Sequence[Part],
        facts: Facts,
        num_steps: int,
        keep: KeepRule,
    ) -> None:
        """Write this process's files; on process 0 also wait for the others, and complete the checkpoint."""
        sums, error, start = {}, "", time.monotonic()
        try:
            sums = _write_files(beside, self._rank, parts, facts)
        except Exception as problem:
            error = _cannot_write(folder, problem, self._rank)
        try:
            every = self._tell(number, sums, error)
        except Exception as problem:
            every, error = [], _cannot_write(folder, problem, self._rank)
        if self._rank == 0:
            error = next((found["error"] for found in every if found["error"]), error if not every else "")
            if not error:
                manifest = CheckpointManifest(
                    plan_hash=_hash_of(self._session.plan),
                    num_processes=self._num_processes,
                    num_steps=num_steps,
                    run_seed=self._run_seed,
                    settings=tuple(self._settings.items()),
                    sums=tuple((name, value) for found in every for name, value in found["sums"].items()),
                )
                try:
                    write_document(replace(manifest, own_sum=content_hash(manifest)), beside / _MANIFEST)
                    _sync(beside)
                    if target.exists():
                        target.rename(beside.with_name(f"{beside.name}.before"))
                    beside.rename(target)
                    _sync(folder)
                    _drop_old(folder, keep)
                except (OSError, DocumentError) as problem:
                    error = _cannot_write(folder, problem)
            if error:
                shutil.rmtree(beside, ignore_errors=True)
        self._error, self.write_s = error, time.monotonic() - start

    def _tell(self, number: int, sums: Mapping[str, str], error: str) -> list[dict[str, Any]]:
        """Tell process 0 that this one has written its files; there, wait for all."""
        own = {"sums": sums, "error": error}
        names = [f"{number}/{rank}" for rank in range(self._num_processes)]
        self._store.set(names[self._rank], json.dumps(own))
        if self._rank:
            return []
        # A wait would block the other users of the store.
        deadline = time.monotonic() + COMMUNICATION_TIMEOUT.total_seconds()
        while not self._store.check(names):
            if time.monotonic() > deadline:
                raise TimeoutError("another process has not written its files in time")
            time.sleep(_POLL_S)
        return [json.loads(self._store.get(name)) for name in names]


def _cannot_write(folder: Path, problem: Exception, rank: int = 0) -> str:
    said = " ".join(str(problem).split()) or type(problem).__name__
    return (
        f"{folder}: process {rank} cannot write a checkpoint to this folder ({said}); checkpoints before it are "
        "complete. Choose a folder that all processes can write to, with room for their states."
    )


def _share_work(held: Sequence[Sequence[tuple[str, Box]]]) -> list[set[tuple[str, Box]]]:
    """The boxes that each process writes: those that several have go to the one with the least so far."""
    holders = defaultdict(list)
    for rank, boxes in enumerate(held):
        for key in boxes:
            holders[key].append(rank)
    own: list[set[tuple[str, Box]]] = [set() for _ in held]
    loads = [0] * len(held)
    for key, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        least = min(ranks, key=lambda rank: loads[rank])
        own[least].add(key)
        loads[least] += max(1, int(torch.Size(key[1].sizes).numel()))
    return own


def _write_files(folder: Path, rank: int, parts: Sequence[Part], facts: Facts) -> dict[str, str]:
    """Write parts and facts; return the SHA-256 of each file. A file has at most one box of a tensor."""
    from safetensors.torch import save_file  # noqa: PLC0415 - only runs with checkpoints need it

    files: list[dict[str, Part]] = [{}]
    counts: defaultdict[str, int] = defaultdict(int)
    for part in parts:
        place = counts[part.name]
        counts[part.name] += 1
        if place == len(files):
            files.append({})
        files[place][part.name] = part
    sums = {}
    for place, held in enumerate(files):
        path = folder / f"process-{rank}{f'-{place}' if place else ''}{_SUFFIX}"
        offsets = {name: {"saved_offsets": list(part.box.offsets)} for name, part in held.items()}
        header = {"format": "pt", _VERSION: "1.0", _OFFSETS: json.dumps(offsets)}
        if not place:
            header[_FACTS] = json.dumps(asdict(facts))
        save_file({name: part.value for name, part in held.items()}, path, header)
        _sync(path)
        sums[path.name] = _sum_of(path)
    return sums


def _sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the drive."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(session: Session, folder: Path, run_seed: int, settings: Mapping[str, str]) -> int:
    """Load the newest undamaged checkpoint of a folder; return its number of steps. All processes call it together.

    A damaged one is renamed, with a warning. Raises RunError if the folder has no checkpoint, if all are damaged, or if
    the checkpoint belongs to another model, seed or settings.
    """
    if agree(str(find_newest(folder) or "")) == "":
        raise RunError(f"{folder}: this folder has no checkpoint. Give the folder to which checkpoints were written.")
    while (newest := agree(str(find_newest(folder) or ""))) != "":
        damages = [found for found in _gather(_find_damage(Path(newest), session.rank)) if found]
        if not damages:
            return _load(session, Path(newest), run_seed, settings)
        error, away = "", folder / f"damaged-{Path(newest).name}"
        if session.rank == 0:
            try:
                shutil.rmtree(away, ignore_errors=True)
                Path(newest).rename(away)
            except OSError as problem:
                error = f"{damages[0]} It cannot be renamed ({problem.strerror}): remove it to use the one before it."
        if error := agree(error):
            raise RunError(error)
        if session.rank == 0:
            warnings.warn(f"{damages[0]} The checkpoint before it is used; this one is now {away}.", stacklevel=2)
    raise RunError(f"{damages[0]} No other checkpoint is left: start without --resume, or from saved weights.")


def _find_damage(path: Path, rank: int) -> str:
    """What is wrong with a checkpoint, as a sentence; "" if nothing is. Each process looks at some of the files."""
    try:
        manifest = read_document(CheckpointManifest, path / _MANIFEST)
        if content_hash(replace(manifest, own_sum="")) != manifest.own_sum or manifest.num_steps != _steps_of(path):
            return f"{path / _MANIFEST}: the file was changed after the checkpoint was written."
        if others := {item.name for item in path.glob(f"*{_SUFFIX}")} - {name for name, _ in manifest.sums}:
            return f"{path}: {', '.join(sorted(others))} is not of the checkpoint."
        for name, value in manifest.sums[rank :: dist.get_world_size()]:
            if Path(name).name != name or _sum_of(path / name) != value:
                return f"{path / name}: the file was changed after the checkpoint was written."
    except (MeshwrightError, OSError) as error:
        return f"{path}: the checkpoint cannot be read ({' '.join(str(error).split())})."
    return ""


def _load(session: Session, path: Path, run_seed: int, settings: Mapping[str, str]) -> int:
    manifest = read_document(CheckpointManifest, path / _MANIFEST)
    wanted = {"seed": str(run_seed), **settings}
    found = {"seed": str(manifest.run_seed), **dict(manifest.settings)}
    for what, value in wanted.items():
        if found.get(what, value) != value:
            raise RunError(
                f"{path}: the checkpoint has {what} {found[what]}, but the run has {value}. Give the run the "
                "checkpoint's value, or start from the weights alone, which `--save-model` writes."
            )
    reader = _Reader(path, [name for name, _ in manifest.sums])
    metadata = reader.read_metadata()
    kept = {
        name: (tuple(item.size), item.properties.dtype)
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    # States that are kept on the host go there at once.
    on_host = isinstance(session.plan, Plan) and session.plan.offload.optimizer != "device"
    error = ""
    try:
        state = Wanted(session, kept, reader.facts, "cpu" if on_host else session.device)
        planner = _Planner(state.parts)
        plan = planner.plan(metadata)
    except RunError as problem:
        error = f"{path}: {problem}"
    if errors := [found for found in _gather(error) if found]:
        raise RunError(errors[0])
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(plan, planner)
    state.put_together()
    return manifest.num_steps


class _Reader(HuggingFaceStorageReader):
    """Reads the files of a manifest; ``facts`` are those of all headers, after `read_metadata`."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(str(path))
        self._folder, self._names, self.facts = path, names, Facts()

    def read_metadata(self) -> Metadata:
        """Return the shapes, types and boxes of all tensors."""
        from safetensors import safe_open  # noqa: PLC0415 - as in `_write_files`

        for name in self._names:
            with safe_open(self._folder / name, framework="pt") as file:
                header = file.metadata() or {}
            if _FACTS in header:
                self.facts.add(json.loads(header[_FACTS]))
        return super().read_metadata()


class _Planner(DefaultLoadPlanner):
    """Reads the boxes of a process into its memory. Their names are those of their places among ``parts``."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = parts

    def plan(self, metadata: Metadata) -> LoadPlan:
        """Return what to read."""
        items = []
        for place, part in enumerate(self._parts):
            facts = metadata.state_dict_metadata[part.name]
            assert isinstance(facts, TensorStorageMetadata), "there is nothing else"
            chunk = ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
            found = create_read_items_for_chunk_list(part.name, facts, [chunk])
            if sum(torch.Size(item.lengths).numel() for item in found) < part.value.numel():
                raise RunError(f"{part.name}: the checkpoint lacks a part of this tensor. Use another checkpoint.")
            items += [replace(item, dest_index=MetadataIndex(str(place))) for item in found]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a box."""
        return self._parts[int(index.fqn)].value


def find_newest(folder: Path) -> Path | None:
    """Return the path of the checkpoint with the most steps in a folder; None if the folder has no checkpoint."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / _MANIFEST).is_file()]
    return max(found, key=_steps_of, default=None)


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


def _refuse_others(folder: Path, num_steps: int) -> None:
    newest = find_newest(folder)
    if newest is not None and _steps_of(newest) > num_steps:
        raise RunError(
            f"{folder}: holds a checkpoint of {_steps_of(newest)} steps, but this run has done {num_steps}, so the "
            "checkpoint belongs to another run. Resume that run, or choose another folder."
        )


def _steps_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _drop_old(folder: Path, keep: KeepRule) -> None:
    """Remove interrupted checkpoints, and those that the rule does not keep."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    whole = sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    for path in whole[: max(len(whole) - keep.newest, 0)]:
        if not keep.every or _steps_of(path) % keep.every:
            shutil.rmtree(path, ignore_errors=True)


def agree(own: str) -> str:
    """Return the text of the first process. All processes call it together."""
    said = [own]
    dist.broadcast_object_list(said, 0)
    return said[0]


def _gather(own: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
