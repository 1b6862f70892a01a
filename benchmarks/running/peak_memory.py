"""The peak memory of a real training step on this machine's CPU, counted by torch's profiler.

The truth of a case is the largest total of the profiler's memory events, which start before the model is built: every
allocation through torch's CPU allocator, without the libraries' own. The growth of the resident set is measured, too.
A rank of a plan is observed from the moment when everything is prepared: tensors that training holds already are added
one by one (its stage's state, buckets, the inputs of its microbatches).
The truths in `meshwright.validation.memory_sets` were measured this way, by ``scripts/measure_memory.py``.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from meshwright.runtime import join_group
from meshwright.spec import Optimizer, Plan, load_shipped_graph
from meshwright.training import load_source, make_batches, make_optimizer, prepare
from meshwright.training.peak_memory import MemoryMeter
from meshwright.zoo import ModelSource, load_model

# The second step is like all later ones: the optimizer's states exist.
_NUM_STEPS = 3
# Many times what a thread takes to release a finished collective.
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """What is trained. ``optimizer`` as in `Optimizer.name`; "full" recomputes every repeated block."""

    model: str
    batch_size: int
    optimizer: str
    recompute: Literal["none", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """Bytes: the largest total of the profiler's events, and the growth of the process."""

    peak_bytes: int
    resident_bytes: int


def measure_peak(case: MemoryCase) -> MeasuredPeak:
    """Train a few steps in this process. The resident set is that of the process, so use a fresh one."""
    torch.set_num_threads(1)
    meter = MemoryMeter(torch.device("cpu"), [])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        source = load_model(case.model, batch_size=case.batch_size)
        if case.recompute == "full":
            _checkpoint_blocks(source)
        _train(source, case.optimizer)
        del source
    return MeasuredPeak(peak_bytes=_largest_total(profiler), resident_bytes=meter.peak().in_use)


def measure_rank_peak(plan: Plan) -> int:
    """Peak bytes of this rank in a few steps of a plan; all ranks of the process group call it together."""
    torch.set_num_threads(1)
    join_group()
    source = load_source(plan)
    trainer = prepare(
        source.model,
        source.loss,
        lambda parameters: make_optimizer(parameters, plan.workload.optimizer, None),
        (source.inputs, source.targets),
        plan=plan,
        verify=False,
    )
    batch = next(make_batches(source, plan.workload.global_batch))
    del source
    gc.collect()
    held = trainer.held_bytes(*batch)
    activities = [ProfilerActivity.CPU]
    with _freed_by_this_thread(), profile(activities=activities, profile_memory=True) as profiler:
        for _ in range(_NUM_STEPS):
            trainer.step(*batch)
    return held + _largest_total(profiler)


@contextlib.contextmanager
def _freed_by_this_thread() -> Iterator[None]:
    """Let this thread release last what collectives hold: the profiler only sees what its own thread frees.

    After each wait gloo's thread gets time to drop tensors. Works for which another thread waited are held until this
    one waits for something.
    """
    wait, own, others = dist.Work.wait, threading.get_ident(), list[dist.Work]()

    def wait_longer(self: dist.Work, *args: Any) -> bool:
        done = wait(self, *args)
        time.sleep(_PAUSE_S)
        if threading.get_ident() == own:
            others.clear()
        else:
            others.append(self)
        return done

    dist.Work.wait = wait_longer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def _train(source: ModelSource, optimizer: str) -> None:
    kind: Literal["sgd", "adamw"] = "adamw" if optimizer == "adamw" else "sgd"
    described = Optimizer(kind=kind, momentum=optimizer.endswith("+momentum"))
    stepper = make_optimizer(list(source.model.parameters()), described, None)
    for _ in range(_NUM_STEPS):
        stepper.zero_grad()
        source.compute_loss().backward()
        stepper.step()


def _checkpoint_blocks(source: ModelSource) -> None:
    """Checkpoint the blocks: the layers of the model's graph that are elements of a list."""
    for layer in load_shipped_graph(source.name).layers:
        if "." in layer.name:
            block = source.model.get_submodule(layer.name)
            block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _largest_total(profiler: profile) -> int:
    # torch offers the single events only here; tests/training/test_offload_memory.py notices a change.
    kineto: Any = profiler.profiler
    events = kineto.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = largest = 0
    for _, num_bytes in changes:
        total += num_bytes
        largest = max(largest, total)
    return largest
