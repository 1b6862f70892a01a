"""Train under an exchange policy (`train_by_policy`): the plan's controller decides on the events of the ranks.

Each rank holds the whole model. Replica w computes part w of a global batch, as under sums; so replicas that skip a
step skip their part of that batch. Rank 0 decides, and reports a step when its updates have ended. The loss of a step
is the mean over the replicas that computed it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils import _pytree as pytree

from meshwright.program.controllers import make_controller
from meshwright.runtime import COMMUNICATION_TIMEOUT, choose_device, join_group, microbatch_seed
from meshwright.runtime.controlled import Decided, Replica, run_controlled
from meshwright.simulator import check_policy
from meshwright.spec import EventSink, Instruction, OptimizerStep, Plan
from meshwright.training.job import Job, load_source, make_batches, make_optimizer
from meshwright.training.trainer import save_state
from meshwright.zoo import ModelSource


def train_by_policy(
    job: Job, plan: Plan, report: Callable[[int, float], None], events: EventSink
) -> tuple[Decided | None, list[float]]:
    """Train on this rank; return the decisions (None except on rank 0), and the loss of each step.

    ``report(step, samples per second)`` is called on rank 0 after every step, counted from 1.
    """
    join_group(choose_device(plan, job.device))
    rank, num_workers = dist.get_rank(), len(plan.stages[0].ranks)
    source = load_source(plan, job.seed)
    losses = _MicrobatchLosses(source, plan, job)
    replica = Replica(
        source.model,
        losses,
        lambda parameters: make_optimizer(parameters, plan.workload.optimizer, job.learning_rate),
    )
    controller = make_controller(plan.exchange, num_workers, job.num_steps, replica.num_bytes)
    steps = None
    if rank == 0:
        each = check_policy(plan, job.num_steps, replica.num_bytes)
        steps = _Steps(each, plan.workload.global_batch * plan.used_share, report)
        events.progress("steps", 0, job.num_steps)
    decided = run_controlled(
        controller,
        replica,
        rank=rank,
        num_ranks=dist.get_world_size(),
        store=_make_store(rank),
        timeout_s=COMMUNICATION_TIMEOUT.total_seconds(),
        on_end=None if steps is None else steps.follow,
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses.computed)
    by_step = defaultdict[int, list[float]](list)
    for microbatch, loss in (item for computed in every for item in computed.items()):
        by_step[microbatch // num_workers].append(loss)
    _share_parameters(source.model, plan)
    if job.save_model is not None and rank == 0:
        save_state(source.model.state_dict(), Path(job.save_model))
    return decided, [float(np.mean(by_step.get(step, np.nan))) for step in range(job.num_steps)]


class _MicrobatchLosses:
    """The loss of a microbatch, and the losses that were computed, by microbatch."""

    def __init__(self, source: ModelSource, plan: Plan, job: Job) -> None:
        self._source, self._seed = source, job.seed
        self._size, self._count = plan.microbatch_size, plan.num_microbatches
        self._batches, self._next = self._read(), 0
        self._batch: Any = None
        self.computed: dict[int, float] = {}

    def _read(self) -> Iterator[tuple[Any, Any]]:
        return make_batches(self._source, self._size * self._count, self._seed)

    def __call__(self, _module: nn.Module, microbatch: int) -> torch.Tensor:
        step, part = divmod(microbatch, self._count)
        if step < self._next - 1:
            self._batches, self._next = self._read(), 0
        while self._next <= step:
            self._batch = next(self._batches)
            self._next += 1

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            is_batched = tensor.ndim and len(tensor) == self._size * self._count
            return tensor.narrow(0, part * self._size, self._size) if is_batched else tensor

        inputs, targets = pytree.tree_map_only(torch.Tensor, cut, self._batch)
        torch.manual_seed(microbatch_seed(self._seed, step, part))
        loss = replace(self._source, inputs=inputs, targets=targets).compute_loss()
        self.computed[microbatch] = loss.item()
        return loss


class _Steps:
    """Counts updates on rank 0, and reports the steps that they complete."""

    def __init__(self, each: int, num_samples: float, report: Callable[[int, float], None]) -> None:
        self._each, self._num_samples, self._report = each, num_samples, report
        self._count, self._since = 0, time.perf_counter()

    def follow(self, instruction: Instruction) -> None:
        """Count an instruction that has ended."""
        self._count += isinstance(instruction, OptimizerStep)
        if isinstance(instruction, OptimizerStep) and self._count % self._each == 0:
            now = time.perf_counter()
            self._report(self._count // self._each, self._num_samples / (now - self._since))
            self._since = now


def _make_store(rank: int) -> TCPStore:
    """Return a store of rank 0 for this run, with the same address on all ranks."""
    host = os.environ["MASTER_ADDR"]
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [None if store is None else store.port]
    dist.broadcast_object_list(port)
    return store or TCPStore(host, port[0], is_master=False, wait_for_workers=False)


def _share_parameters(model: nn.Module, plan: Plan) -> None:
    """Give all ranks the parameters of the rank that holds them, or the mean of those of all replicas."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vector = parameters_to_vector(parameters).detach().clone()
    if plan.exchange.servers:
        dist.broadcast(vector, plan.exchange.servers[0])
    else:
        dist.all_reduce(vector)
        vector /= dist.get_world_size()
    with torch.no_grad():
        vector_to_parameters(vector, parameters)
