"""Train under an exchange policy (`train_by_policy`): the plan's controller decides on the events of the ranks.

Each rank holds the whole model. Replica w computes part w of a global batch, as under sums; so replicas that skip a
step skip their part of that batch. Rank 0 decides, and reports a step when its updates have ended. The loss of a step
is the mean over the replicas that computed it.
"""

from __future__ import annotations

import math
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
from meshwright.runtime.controlled import Replica, run_controlled
from meshwright.simulator import check_policy, number_steps, steady_window
from meshwright.spec import EventSink, Instruction, OptimizerStep, Plan, encode_document
from meshwright.spec.codec import dump_json
from meshwright.training.job import Job, RunResult, StepFacts, Trained, load_source, make_batches, make_optimizer
from meshwright.training.trainer import save_state
from meshwright.zoo import ModelSource


def train_by_policy(job: Job, plan: Plan, report: Callable[[StepFacts], None], events: EventSink) -> Trained:
    """Train on this rank; return its results. Losses become known at the end.

    ``report`` is called on rank 0 after every step.
    """
    join_group(choose_device(plan, job.device))
    rank, num_workers = dist.get_rank(), len(plan.stages[0].ranks)
    source = load_source(plan, job.seed)
    losses_of = _MicrobatchLosses(source, plan, job)
    replica = Replica(
        source.model,
        losses_of,
        lambda parameters: make_optimizer(parameters, plan.workload.optimizer, job.learning_rate),
    )
    controller = make_controller(plan.exchange, num_workers, job.num_steps, replica.num_bytes)
    num_used = plan.workload.global_batch * plan.used_share
    steps = None
    if rank == 0:
        steps = _Steps(check_policy(plan, job.num_steps, replica.num_bytes), num_used, report)
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
    losses = losses_of.gather(job.num_steps)
    _share_parameters(source.model, plan)
    if job.save_model is not None and rank == 0:
        save_state(source.model.state_dict(), Path(job.save_model))
    finite = tuple(loss if math.isfinite(loss) else None for loss in losses)
    result = RunResult(plan=job.plan, losses=finite, step_seconds=(), timeline="")
    if decided is None:
        return Trained(result)
    timeline = number_steps(decided.timeline(), job.num_steps, strict=False)
    seconds = timeline.step_seconds().tolist()
    report(StepFacts(job.num_steps, losses, job.num_steps, num_used / seconds[-1]))
    # As in the simulation: the first steps fill queues, in the last ones some replicas have ended.
    shown = steady_window(timeline)[0]
    if job.first_recorded is not None:
        shown = range(job.first_recorded, job.first_recorded + job.num_recorded_steps)
    gradients = _count_gradients(decided.state)
    return Trained(
        replace(result, step_seconds=tuple(seconds), first_recorded=shown.start, gradients=gradients),
        dump_json(encode_document(timeline.between(shown.start, shown.stop))),
        dump_json(encode_document(decided.log)),
    )


def _count_gradients(state: Any) -> dict[str, int]:
    """Return the counts of gradients that the last state of a controller has; those of several servers added up."""
    found = dict[str, int]()
    for name in ("applied", "dropped", "abandoned"):
        count = getattr(state, name, None)
        parts = count if isinstance(count, tuple) else (count,)
        if all(isinstance(part, int) for part in parts):
            found[name] = sum(parts)
    return found


class _MicrobatchLosses:
    """The loss of a microbatch, and the losses that were computed, by microbatch."""

    def __init__(self, source: ModelSource, plan: Plan, job: Job) -> None:
        self._source, self._seed = source, job.seed
        self._size, self._count = plan.microbatch_size, plan.num_microbatches
        self._batches, self._next = self._read(), 0
        self._batch: Any = None
        self.computed: dict[int, float] = {}

    def gather(self, num_steps: int) -> tuple[float, ...]:
        """Return the loss of each step, nan for one that no replica computed. All ranks call it together."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.computed)
        by_step = defaultdict[int, list[float]](list)
        for microbatch, loss in (item for computed in every for item in computed.items()):
            by_step[microbatch // self._count].append(loss)
        return tuple(float(np.mean(by_step.get(step, math.nan))) for step in range(num_steps))

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

    def __init__(self, each: int, num_samples: float, report: Callable[[StepFacts], None]) -> None:
        self._each, self._num_samples, self._report = each, num_samples, report
        self._count, self._since = 0, time.perf_counter()

    def follow(self, instruction: Instruction) -> None:
        """Count an instruction that has ended."""
        self._count += isinstance(instruction, OptimizerStep)
        if isinstance(instruction, OptimizerStep) and self._count % self._each == 0:
            now = time.perf_counter()
            self._report(StepFacts(self._count // self._each, (), 0, self._num_samples / (now - self._since)))
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
