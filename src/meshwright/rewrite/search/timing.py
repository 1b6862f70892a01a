"""Time whole models against each other: rounds in which every candidate runs once, on one thread's clock."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray


# Seconds that a candidate runs for at a time. A short one then finds its own weights in caches, as it would in a loop,
# and not another candidate's data.
_TURN_S = 0.01


def alternate(
    candidates: Sequence[Callable[[], Any]], *, rounds: int, budget_s: float, clock: Callable[[], float] | None = None
) -> NDArray[np.float64]:
    """Seconds of each candidate in each round, shape (rounds or more, candidates).

    A short candidate runs several times per round, and its median counts. At least 5 rounds, however long they take;
    more than ``rounds`` where they take less than a second.

    Where torch works on one thread, ``clock`` counts the processor time of this thread, which other programs on the
    machine disturb least; otherwise it is the wall's.
    """
    clock = clock or (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    times = [_fitting(candidate) for candidate in candidates]
    taken: list[list[float]] = []
    start = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        while len(taken) < 5 or time.perf_counter() - start < (budget_s if len(taken) < rounds else 1.0):
            row = [0.0] * len(candidates)
            order = range(len(candidates)) if len(taken) % 2 else reversed(range(len(candidates)))
            for i in order:
                row[i] = statistics.median(_timed(candidates[i], clock) for _ in range(times[i]))
            taken.append(row)
    finally:
        if collecting:
            gc.enable()
    return np.array(taken)


def _fitting(candidate: Callable[[], Any]) -> int:
    """The number of runs of a candidate per turn; it has run twice before."""
    candidate()
    return max(1, min(50, round(_TURN_S / max(_timed(candidate, time.perf_counter), 1e-9))))


def _timed(candidate: Callable[[], Any], clock: Callable[[], float]) -> float:
    before = clock()
    candidate()
    return clock() - before


def speedups(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How many times faster than the first each candidate is, and the half width of the 95 % interval.

    Ratios of lower quartiles; the interval is from rounds drawn again.
    """
    rng = np.random.default_rng(0)
    draws = rng.integers(len(seconds), size=(200, len(seconds)))
    quartiles = np.quantile(seconds[draws], 0.25, axis=1)
    ratios = quartiles[:, :1] / quartiles
    typical = np.quantile(seconds, 0.25, axis=0)
    low, high = np.quantile(ratios, (0.025, 0.975), axis=0)
    return typical[0] / typical, (high - low) / 2


def forward_of(module: Any, tensors: Sequence[Any]) -> Callable[[], Any]:
    """One inference of a module on a batch's (args, kwargs)."""
    args, kwargs = tensors

    def run() -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    return run


def step_of(module: Any, tensors: Sequence[Any]) -> Callable[[], Any]:
    """Forward and backward of a module on a batch; gradients are computed and dropped."""
    args, kwargs = tensors

    def run() -> Any:
        outputs = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = [leaf for leaf in outputs if leaf.requires_grad]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        seeds = [torch.ones_like(leaf) for leaf in wanted]
        return torch.autograd.grad(wanted, parameters, seeds, allow_unused=True) if wanted and parameters else outputs

    return run


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Context manager that restores the module's buffers and attributes and torch's random state."""
    parts = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    held = {id(tensor): tensor for _, _, buffers in parts for tensor in buffers.values() if tensor is not None}
    values = {key: tensor.detach().clone() for key, tensor in held.items()}
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for part, attributes, buffers in parts:
                part.__dict__.clear()
                part.__dict__.update(attributes)
                part._buffers.clear()
                part._buffers.update(buffers)
            with torch.no_grad():
                for key, tensor in held.items():
                    tensor.copy_(values[key])
