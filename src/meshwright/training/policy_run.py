"""Train under an exchange policy: the plan's controller decides on the events of the ranks.

`PolicyTrainer` trains on batches that the caller hands in, `train_by_policy` on those of a job. Each rank holds the
whole model. Replica w computes part w of a global batch, as under sums; so replicas that skip a step skip their part of
that batch. Rank 0 decides, and reports a step when its updates have ended. The loss of a step is the mean over the
replicas that computed it.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from meshwright.capture import split_batch
from meshwright.cost.memory import Backend
from meshwright.program.controllers import make_controller
from meshwright.runtime import COMMUNICATION_TIMEOUT, OptimizerArgument, choose_device, join_group, microbatch_seed
from meshwright.runtime.controlled import Decided, Replica, run_controlled
from meshwright.simulator import check_policy, number_steps, steady_window
from meshwright.spec import (
    EventSink,
    Instruction,
    OptimizerStep,
    Plan,
    PlanError,
    ProgramError,
    RunError,
    encode_document,
    format_count,
)
from meshwright.spec.codec import dump_json
from meshwright.training.checkpoint import save_state
from meshwright.training.feed import check_same_batch
from meshwright.training.job import (
    Job,
    RunResult,
    StepFacts,
    Trained,
    load_source,
    make_batches,
    make_optimizer,
    not_finite,
)
from meshwright.zoo import ModelSource


class PolicyTrainer:
    """A model in training under an exchange policy; made by `prepare`.

    All ranks hand in the same ``num_steps`` global batches (`step`). A replica computes its part of a batch, or skips
    it, as the policy decides; a rank that only keeps the parameters updates them. Between steps ranks must not wait
    for each other (barriers, collectives), because a late replica may begin its next step only after others.

    ``is_batched``: whether the first dim of each tensor of a batch is the batch; by default that of every tensor with
    dims. ``report`` is called on rank 0 after every step, in another thread. Raises PlanError if the number of
    processes is not that of the plan, and as `check_policy`.
    """

    def __init__(
        self,
        source: ModelSource,
        plan: Plan,
        optimizer: OptimizerArgument,
        num_steps: int,
        run_seed: int = 0,
        is_batched: Sequence[bool] | None = None,
        report: Callable[[StepFacts], None] | None = None,
    ) -> None:
        self._model, self._plan, self._num_steps = source.model, plan, num_steps
        self._rank, num_processes = dist.get_rank(), dist.get_world_size()
        if num_processes != plan.num_devices:
            raise PlanError(
                f"The plan is for {format_count(plan.num_devices, 'rank')}, but {num_processes} processes were "
                f"started. Start {plan.num_devices}, or plan for {format_count(num_processes, 'device')}."
            )
        self._batches, self._num_given, self._is_batched = _HandOver(num_steps), 0, is_batched
        self._hook: RemovableHandle | None = None
        self._losses_of = _MicrobatchLosses(source, plan, run_seed, self._batches.take)
        made = _own_optimizer(optimizer, [item for item in source.model.parameters() if item.requires_grad])
        replica = Replica(source.model, self._losses_of, lambda _: made)
        updates_per_step = check_policy(plan, num_steps, replica.num_bytes)
        if self._rank >= len(plan.stages[0].ranks):
            # A rank that computes no batch takes the batch of a step before its updates: it does not run ahead of the
            # caller, who may change the learning rate after each step.
            count = itertools.count()

            def wait(*_: object) -> None:
                self._batches.take(next(count) // updates_per_step)

            self._hook = made.register_step_pre_hook(wait)
        on_end = None
        if report is not None and self._rank == 0:
            on_end = _Steps(updates_per_step, plan.workload.global_batch * plan.used_share, report).follow
        self._error: BaseException | None = None
        self._decided: Decided | None = None
        self._losses: tuple[float, ...] | None = None
        arguments = replica, _make_store(self._rank), on_end
        self._thread = threading.Thread(target=self._follow, args=arguments, daemon=True)
        self._thread.start()

    def _follow(self, replica: Replica, store: TCPStore, on_end: Callable[[Instruction], None] | None) -> None:
        """Take part in the run until its end."""
        num_workers = len(self._plan.stages[0].ranks)
        try:
            self._decided = run_controlled(
                make_controller(self._plan.exchange, num_workers, self._num_steps, replica.num_bytes),
                replica,
                rank=self._rank,
                num_ranks=self._plan.num_devices,
                store=store,
                timeout_s=COMMUNICATION_TIMEOUT.total_seconds(),
                # The end of the run needs all ranks: losses, and parameters for all.
                survive_deaths=False,
                on_end=on_end,
            )
        except BaseException as error:  # raised by the next call of the caller's thread
            self._error = error
        finally:
            self._batches.close()

    @property
    def plan(self) -> Plan:
        """The plan that is executed."""
        return self._plan

    @property
    def rank(self) -> int:
        """The number of this process in the process group."""
        return self._rank

    @property
    def decided(self) -> Decided | None:
        """The decisions of the run, on rank 0 after `finish`; else None."""
        return self._decided if self._losses is not None else None

    @property
    def first_not_finite(self) -> tuple[int, tuple[int, ...]] | None:
        """After `finish`, the first step (from 0) with a loss that is not finite, and the ranks that computed it."""
        return self._losses_of.first_not_finite

    @property
    def losses(self) -> tuple[float, ...]:
        """After `finish`, the loss of every step, nan for one that no replica computed; before, empty."""
        return self._losses or ()

    def step(self, inputs: Any, targets: Any = ()) -> float:
        """Hand in the next global batch; return when this rank needs another one, or the run has ended.

        The result is the loss of this rank's part of the batch, nan if it computed none. A replica waits for a batch
        for at most `COMMUNICATION_TIMEOUT`. Raises PlanError if the number of samples is not the plan's global batch,
        or if the batch has another structure than the example; RunError if the ranks were given different first
        batches, and after ``num_steps`` batches; and errors of the run, such as ProgramError for the policy's
        decisions.
        """
        self._raise_error()
        if self._num_given == self._num_steps:
            raise RunError(
                f"A batch was given after {format_count(self._num_given, 'step')}, the num_steps of this run. End the "
                "loop there, or prepare with more num_steps."
            )
        batch = self._split(inputs, targets)
        if self._num_given == 0:
            check_same_batch(leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
        number, self._num_given = self._num_given, self._num_given + 1
        self._batches.give(number, batch)
        self._raise_error()
        return self._losses_of.computed.get(number * self._plan.num_microbatches + self._rank, math.nan)

    def _split(self, inputs: Any, targets: Any) -> _Batch:
        leaves, spec = pytree.tree_flatten(split_batch(inputs, targets))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        flags = self._is_batched if self._is_batched is not None else [leaves[place].ndim > 0 for place in places]
        if len(flags) != len(places):
            raise PlanError(
                f"A batch with {format_count(len(places), 'tensor')} was given; expected {len(flags)}, as in the "
                "example batch."
            )
        batched = [place for place, flag in zip(places, flags, strict=True) if flag]
        sizes = {len(leaves[place]) for place in batched}
        if sizes != {self._plan.workload.global_batch}:
            raise PlanError(
                f"A batch with {' and '.join(map(str, sorted(sizes))) or 'no'} samples was given; expected the plan's "
                f"global batch of {self._plan.workload.global_batch}."
            )
        return _Batch(leaves, spec, frozenset(batched))

    def finish(self) -> None:
        """Wait for the end of the run; then all ranks have the same parameters. All ranks call it together.

        Where each replica has parameters of its own, these become their mean. Raises RunError before all batches were
        given, and for errors of the run.
        """
        if self._losses is not None:
            return
        self._raise_error()
        if self._num_given < self._num_steps:
            raise RunError(
                f"The run ended after {self._num_given} of {format_count(self._num_steps, 'step')}. Under an exchange "
                "policy all steps are needed: give a batch for each, or prepare with fewer num_steps."
            )
        self._thread.join()
        if self._hook is not None:
            self._hook.remove()
        self._raise_error()
        losses = self._losses_of.gather(self._num_steps)
        _share_parameters(self._model, self._plan)
        self._losses = losses

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the model's state dict on rank 0, after `finish`; None on other ranks. All ranks call it together."""
        self.finish()
        return self._model.state_dict() if self._rank == 0 else None

    def save(self, path: Path | str) -> None:
        """Write `state_dict` with torch.save, completely or not at all. All ranks call it together.

        Raises DocumentError if the folder cannot be written to.
        """
        state = self.state_dict()
        if state is not None:
            save_state(state, Path(path))
        dist.barrier()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def train_by_policy(job: Job, plan: Plan, report: Callable[[StepFacts], None], events: EventSink) -> Trained:
    """Train on this rank; return its results. Losses become known at the end.

    ``report`` is called on rank 0 after every step.
    """
    join_group(choose_device(plan, job.device))
    source = load_source(plan, job.seed)
    if dist.get_rank() == 0:
        events.progress("steps", 0, job.num_steps)
    trainer = PolicyTrainer(
        source,
        plan,
        lambda parameters: make_optimizer(parameters, plan.workload.optimizer, job.learning_rate),
        job.num_steps,
        job.seed,
        report=report,
    )
    for inputs, targets in itertools.islice(make_batches(source, plan.workload.global_batch, job.seed), job.num_steps):
        trainer.step(inputs, targets)
    trainer.finish()
    if trainer.first_not_finite is not None and not job.allow_nan:
        raise not_finite(*trainer.first_not_finite)
    if job.save_model is not None:
        trainer.save(job.save_model)
    finite = tuple(loss if math.isfinite(loss) else None for loss in trainer.losses)
    result = RunResult(plan=job.plan, losses=finite, step_seconds=(), timeline="")
    if (decided := trainer.decided) is None:
        return Trained(result)
    timeline = number_steps(decided.timeline(), job.num_steps, strict=False)
    seconds = timeline.step_seconds().tolist()
    num_used = plan.workload.global_batch * plan.used_share
    report(StepFacts(job.num_steps, trainer.losses, job.num_steps, num_used / seconds[-1], seconds[-1]))
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


def refuse_under(policy: str, subject: str, lost: Mapping[str, object], backend: Backend) -> None:
    """Raise PlanError for options that runs under an exchange policy do not have, and for GPUs.

    ``subject``: the plan, in the message. ``lost``: the values of such options by name, None for those not given.
    """
    follows = f"{subject} follows the exchange policy {policy}, whose runs"
    if given := [name for name, value in lost.items() if value is not None]:
        raise PlanError(f"{follows} have no {' and no '.join(given)}. Leave out {' and '.join(given)}.")
    if backend != "cpu":
        raise PlanError(f'{follows} compute on processors only. Give --device cpu, in Python device="cpu".')


def _own_optimizer(optimizer: OptimizerArgument, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    found = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(parameters)
    if found is None:
        raise PlanError(
            "The function for the optimizer returned None; expected an optimizer. Every rank needs one under an "
            "exchange policy."
        )
    return found


class _Batch(NamedTuple):
    """A global batch (args, kwargs, targets), flattened, and the places of the leaves whose first dim is the batch."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    batched: frozenset[int]


class _HandOver:
    """The newest global batch, from the thread that reads batches to the one that computes."""

    def __init__(self, num_batches: int) -> None:
        self._changed = threading.Condition()
        self._num_batches, self._number, self._wanted = num_batches, -1, -1
        self._batch: _Batch | None = None
        self._is_closed = False

    def give(self, number: int, batch: _Batch) -> None:
        """Hand in batch ``number``; return when a later one is wanted, or none any more."""
        with self._changed:
            self._number, self._batch = number, batch
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._wanted > number or self._is_closed)

    def take(self, number: int) -> _Batch:
        """Wait for batch ``number``, and return it.

        Raises ProgramError for an earlier batch than the newest and for one beyond the last; RunError if the run ends.
        """
        with self._changed:
            if not self._number <= number < self._num_batches:
                raise ProgramError(
                    f"The exchange policy issued a microbatch of step {number} after batch {self._number} of "
                    f"{self._num_batches} batches (from 0) was handed in. Expected each replica to compute its steps "
                    "in order, and none beyond the last."
                )
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._number >= number or self._is_closed)
            if self._batch is None or self._number < number:
                raise RunError(f"The run has ended, and batch {number} (from 0) was not handed in.")
            return self._batch

    def close(self) -> None:
        """Want no further batch."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


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
    """The loss of a microbatch, and the losses that were computed, by microbatch.

    ``take``: returns the global batch of a step.
    """

    def __init__(self, source: ModelSource, plan: Plan, seed: int, take: Callable[[int], _Batch]) -> None:
        self._source, self._seed, self._take = source, seed, take
        self._size, self._count = plan.microbatch_size, plan.num_microbatches
        self.computed: dict[int, float] = {}
        # After `gather`, the first step with a loss that is not finite, and the ranks that computed it.
        self.first_not_finite: tuple[int, tuple[int, ...]] | None = None

    def gather(self, num_steps: int) -> tuple[float, ...]:
        """Return the loss of each step, nan for one that no replica computed. All ranks call it together."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.computed)
        odd = [
            (microbatch // self._count, rank)
            for rank, computed in enumerate(every)
            for microbatch, loss in computed.items()
            if not math.isfinite(loss)
        ]
        if odd:
            self.first_not_finite = min(odd)[0], tuple(rank for step, rank in odd if step == min(odd)[0])
        by_step = defaultdict[int, list[float]](list)
        for microbatch, loss in (item for computed in every for item in computed.items()):
            by_step[microbatch // self._count].append(loss)
        return tuple(float(np.mean(by_step.get(step, math.nan))) for step in range(num_steps))

    def __call__(self, _module: nn.Module, microbatch: int) -> torch.Tensor:
        step, part = divmod(microbatch, self._count)
        batch = self._take(step)
        leaves = [
            leaf.narrow(0, part * self._size, self._size) if place in batch.batched else leaf
            for place, leaf in enumerate(batch.leaves)
        ]
        arguments, keywords, targets = pytree.tree_unflatten(leaves, batch.spec)
        # The caller's random numbers, such as those that shuffle, stay the same on all ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(microbatch_seed(self._seed, step, part))
            loss = replace(self._source, inputs=keywords or arguments, targets=targets).compute_loss()
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
            taken = now - self._since
            self._report(StepFacts(self._count // self._each, (), 0, self._num_samples / taken, taken))
            self._since = now


def _make_store(rank: int) -> TCPStore:
    """Return a store of rank 0 for this run, with the same address on all ranks."""
    # A process group that the caller made may have no address of its own.
    host = os.environ.get("MASTER_ADDR", socket.gethostname())
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    place: list[Any] = [None if store is None else (host, store.port)]
    dist.broadcast_object_list(place)
    host, port = place[0]
    return store or TCPStore(host, port, is_master=False, wait_for_workers=False)


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
