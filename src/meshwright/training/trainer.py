"""Training with a plan in four lines: prepare, step, save.

    trainer = meshwright.prepare(model, loss, optimizer, (inputs, targets), plan="plan.json")
    for inputs, targets in loader:
        value = trainer.step(inputs, targets)
    trainer.save("model.pt")

Start the script once per rank (``torchrun --nproc-per-node N script.py``). Every rank builds the same model and reads
the same global batches; each rank computes its own stages and microbatches. The model, the loss, the optimizer and the
DataLoader stay the user's own. For a plan with an exchange policy `prepare` also needs the number of steps, and returns
a `PolicyTrainer`.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist

from meshwright.capture import Captured, capture_model, check_capture, flatten_batch
from meshwright.cost.memory import Backend
from meshwright.runtime import (
    Compilation,
    OptimizerArgument,
    Outputs,
    Phase,
    Position,
    Repair,
    Session,
    autocast_type,
    check_precision,
    choose_device,
    gather_timeline,
    is_batched,
    join_group,
    measure_clock_offset,
    open_session,
)
from meshwright.spec import (
    DocumentError,
    EventSink,
    Placement,
    Plan,
    PlanError,
    RunError,
    Timeline,
    check_fit,
)
from meshwright.spec.plan_files import read_plan, with_compiled
from meshwright.training.checkpoint import Checkpoints, KeepRule, agree, gather_state, load_checkpoint, save_state
from meshwright.training.feed import (
    Feed,
    MicrobatchQueue,
    agree_on_end,
    check_same,
    check_same_batch,
    first_samples,
    load_to,
    unpack,
    with_loader,
)
from meshwright.training.losses import Losses, digest_batch
from meshwright.training.peak_memory import MemoryMeter
from meshwright.training.policy_run import PolicyTrainer, refuse_under
from meshwright.training.precision import bind_plan, capture_in_precision, cast_batch, cast_type, recaptures
from meshwright.training.watch import Watch, explained, watch_rank
from meshwright.zoo import ModelSource


@overload
def prepare(
    model: torch.nn.Module,
    loss: Callable[..., torch.Tensor] | None,
    optimizer: OptimizerArgument | None,
    batch: Any,
    *,
    plan: Plan | Placement | Path | str,
    run_seed: int = 0,
    repair: Repair | None = None,
    clip_norm: float | None = None,
    feed: Feed | None = None,
    verify: bool = True,
    device: Backend | None = None,
    compiled: bool | None = None,
    events: EventSink | None = None,
    offload_folder: Path | str | None = None,
    hang_after_s: float | None = None,
) -> Trainer: ...


@overload
def prepare(
    model: torch.nn.Module,
    loss: Callable[..., torch.Tensor] | None,
    optimizer: OptimizerArgument | None,
    batch: Any,
    *,
    plan: Plan | Placement | Path | str,
    num_steps: int,
    run_seed: int = 0,
    device: Backend | None = None,
) -> PolicyTrainer: ...


def prepare(
    model: torch.nn.Module,
    loss: Callable[..., torch.Tensor] | None,
    optimizer: OptimizerArgument | None,
    batch: Any,
    *,
    plan: Plan | Placement | Path | str,
    num_steps: int | None = None,
    run_seed: int = 0,
    repair: Repair | None = None,
    clip_norm: float | None = None,
    feed: Feed | None = None,
    verify: bool = True,
    device: Backend | None = None,
    compiled: bool | None = None,
    events: EventSink | None = None,
    offload_folder: Path | str | None = None,
    hang_after_s: float | None = None,
) -> Trainer | PolicyTrainer:
    """Capture the model, cut out this rank's stages, and return a trainer for them. All ranks call it together.

    Args:
        model: the whole model, equal on all ranks (build it after ``torch.manual_seed``). The memory of parameters that
            only other ranks hold is released, and a plan in ``mixed`` or ``bfloat16`` casts the model in place;
            otherwise the model is not changed.
        loss: ``loss(outputs, *targets) -> scalar``; None if the model returns its loss, alone or as ``outputs.loss``.
            Ignored for inference.
        optimizer: a torch optimizer over ``model.parameters()`` (it keeps only this rank's parameters), or a function
            that makes one from a list of parameters; None for inference.
        batch: an example batch ``(inputs, targets)``; only its shapes matter. If the model computes its loss, the
            inputs alone, as a dict with labels, or ``((first, second), ())`` for two positional ones.
        plan: a Plan, a Placement or the file of either.
        num_steps: the number of steps of the whole run; only for a plan with an exchange policy, which needs it. Such
            runs compute on CPUs, without `repair`, `clip_norm`, `feed` and `compiled`.
        run_seed: seed of dropout and other random ops.
        repair: the remedy for stale gradients under an asynchronous schedule; None for no remedy.
        clip_norm: the largest norm of all gradients of the model together, as in torch's clip_grad_norm_; None for no
            clipping.
        feed: the data set that `Trainer.train` reads.
        verify: compare the captured model with the eager one on rank 0.
        device: ``cpu`` or ``cuda``; by default that of the plan's cluster.
        compiled: whether torch compiles the layers, each on its own; by default as in the plan.
        events: receives the progress of compiling, if the plan's layers are compiled.
        offload_folder: the folder for optimizer states that the plan keeps on drives; by default that of temporary
            files. No file stays there after the run.
        hang_after_s: the seconds without progress after which a rank hangs, also in the script between two steps: its
            stack is printed, and the run ends. By default 10 times the slowest step, at least 30 s; and the script has
            no limit (`training.watch`).

    Raises PlanError (or GraphMismatchError) if the plan does not match the model, CaptureError if the model cannot be
    captured or the capture computes something else, RunError if a host or its drives lack room for offloaded states.
    """
    position = Position()
    plan = plan if isinstance(plan, Plan | Placement) else read_plan(plan)
    policy = plan.exchange.policy if isinstance(plan, Plan) else ""
    if policy or num_steps is not None:
        others = {"repair": repair, "clip_norm": clip_norm, "feed": feed, "hang_after_s": hang_after_s}
        _check_policy_arguments(policy, num_steps, choose_device(plan, device), others)
    if compiled is not None:
        plan = with_compiled(plan, compiled)
    rank, own_device = join_group(choose_device(plan, device))
    if feed is not None:
        plan = with_loader(plan, feed)
    inputs, targets = unpack(batch)
    infers = plan.workload.kind == "inference"
    if infers:
        loss, targets, optimizer = None, (), _no_optimizer
    if optimizer is None:
        raise PlanError(
            "The plan is for training, but no optimizer was given. Give an optimizer over model.parameters()."
        )
    check_precision(plan, own_device)
    capture = partial(capture_model, model, loss=loss, mode=plan.workload.kind, verify=False)
    captured = capture(inputs, targets=targets)
    if captured.graph.batch_size not in (None, plan.microbatch_size):
        # The model has a fixed batch size: capture it at the size at which it will run.
        inputs, targets = first_samples((inputs, targets), plan.microbatch_size)
        captured = capture(inputs, targets=targets)
    if policy and isinstance(plan, Plan) and num_steps is not None:
        check_fit(plan, captured.graph)
        source = ModelSource(name=plan.model, model=model, inputs=inputs, targets=targets, loss=loss)
        flags = [is_batched(captured.graph, tensor) for tensor in captured.graph.inputs]
        return PolicyTrainer(source, plan, optimizer, num_steps, run_seed, flags)
    if recaptures(plan, model, captured.graph):
        # A model whose plan is refused must stay unchanged.
        check_fit(plan, captured.graph)
        given = captured
        captured, (inputs, targets) = capture_in_precision(plan, model, (inputs, targets), given, capture)
        plan = bind_plan(plan, given.graph, captured.graph)
    if verify and rank == 0:
        captured = check_capture(captured, model, inputs, targets=targets, loss=loss, autocast=autocast_type(plan))
    if captured.remark and rank == 0:
        warnings.warn(captured.remark, stacklevel=2)
    session = open_session(
        captured,
        plan,
        optimizer,
        run_seed=run_seed,
        repair=repair,
        clip_norm=clip_norm,
        device=own_device,
        events=events,
        offload_folder=Path(offload_folder) if offload_folder is not None else None,
        position=position,
    )
    if session.remark and rank == 0:
        warnings.warn(session.remark, stacklevel=2)
    _release_other_parameters(model, session)
    settings = {
        "clip norm": str(clip_norm),
        "global batch": str(plan.workload.global_batch),
        **({"optimizer": session.updates.optimizer_name} if session.updates.optimizer_name else {}),
        **({"repair": str(repair)} if isinstance(plan, Plan) and plan.is_asynchronous else {}),
        "data set": feed.describe_order() if feed is not None else str(None),
    }
    return Trainer(model, captured, session, position, watch_rank(position, hang_after_s), feed, run_seed, settings)


def _check_policy_arguments(policy: str, num_steps: int | None, backend: Backend, others: Mapping[str, object]) -> None:
    """Raise PlanError if the arguments do not fit the plan's exchange policy, "" for none."""
    if not policy:
        raise PlanError(
            f"num_steps={num_steps} was given for a plan without an exchange policy, which needs none. Leave it out."
        )
    if num_steps is None or num_steps < 1:
        given = "without num_steps" if num_steps is None else f"with num_steps={num_steps}"
        raise PlanError(
            f"The plan follows the exchange policy {policy}, and was prepared {given}. Its controller decides until "
            "the last step: give the number of steps, prepare(..., num_steps=1000). The adapters for Hugging Face and "
            "Lightning follow no policy."
        )
    refuse_under(policy, "The plan", others, backend)


class Trainer:
    """A model in training or inference under a plan; made by `prepare`.

    ``position`` is where this rank is in the run. ``watch`` names ranks that hang; None if the ranks have no common
    store.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        captured: Captured,
        session: Session,
        position: Position,
        watch: Watch | None,
        feed: Feed | None = None,
        run_seed: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.position, self.watch = position, watch
        if watch is not None:
            weakref.finalize(self, watch.stop)
        self._model, self._feed, self._run_seed = model, feed, run_seed
        self._settings = settings or {}
        self._num_resumed = self._steps = 0
        self._checkpoints: Checkpoints | None = None
        self._captured, self._session = captured, session
        self._is_checked = False
        self._losses = Losses(session) if session.graph.has_loss else None
        self._clock_offset_ns = measure_clock_offset()
        self._memory = MemoryMeter(session.device, session.own_state, session.count_host_bytes)

    @property
    def plan(self) -> Plan | Placement:
        """The plan that is executed."""
        return self._session.plan

    @property
    def compilation(self) -> Compilation:
        """The state of this rank's compiled layers; empty if the plan compiles no layers."""
        return self._session.model.compilation

    @property
    def rank(self) -> int:
        """The number of this process in the process group."""
        return self._session.rank

    @property
    def num_steps(self) -> int:
        """The number of completed steps, with those before a checkpoint."""
        return self._steps

    def step(self, inputs: Any, targets: Any = ()) -> float:
        """Train one step on a global batch; return its loss (the mean over the microbatches), the same on every rank.

        Under an asynchronous schedule the loss is that of the newest batch whose loss is known, nan while the pipeline
        fills; `losses` has all known losses. The last batch of a data set may have fewer microbatches. Raises PlanError
        if the number of samples does not match the plan's global batch; RunError if the ranks were given different
        first batches, or for a plan for inference.
        """
        if self._losses is None:
            raise RunError("The plan is for inference, which trains nothing. Call `infer`, or plan for training.")
        tensors, made = self._run(inputs, targets)
        digest = digest_batch(tensors, dist.get_world_size())
        return self._took(made, self._session.count_microbatches(tensors), digest)

    def infer(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Run the forward of a global batch; return by name the outputs that this rank made, {} on most ranks.

        The outputs have the samples of the rank's own microbatches, in order. If the last stage has replicas, each
        makes a part of the batch. Raises as `step`, but RunError for a plan for training.
        """
        if self._losses is not None:
            raise RunError("The plan is for training, whose steps update weights. Call `step`, or plan for inference.")
        _, made = self._run(inputs, ())
        self._steps += 1
        self.position.enter(Phase.BETWEEN, self._steps)
        names = self._session.graph.tensors
        return {
            names[i].name: torch.cat([item.value if item.value.ndim else item.value[None] for item in items])
            for i, items in made.items()
        }

    def _run(self, inputs: Any, targets: Any) -> tuple[tuple[torch.Tensor, ...], Outputs]:
        tensors = self._flatten(inputs, targets)
        if not self._is_checked:
            check_same_batch(tensors)
            self._is_checked = True
        self.position.enter(Phase.STEP, self._steps)
        with explained(self.watch):
            return tensors, self._session.run_step(self._steps, tensors)

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """The block is a call in which all ranks take part."""
        phase, call = self.position.phase, self.position.call
        self.position.enter(Phase.CALL, self._steps, call if phase is Phase.CALL else name)
        try:
            with explained(self.watch):
                yield
        finally:
            self.position.enter(Phase.BETWEEN if phase is Phase.START else phase, self._steps, call)

    def _flatten(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, ...]:
        """A batch in the order of the graph's inputs, cast if the plan casts the model."""
        tensors, dtype = flatten_batch(self._captured, inputs, targets), cast_type(self.plan)
        return tensors if dtype is None else tuple(cast_batch(tensors, dtype))

    def train(self) -> Iterator[float]:
        """Train on the data set that `prepare` was given; yield the loss after each step, as `step` returns it.

        All ranks call it together. Raises RunError for errors of the data set, with the microbatch in which they
        occurred; if the ranks were given different data sets; and for a plan for inference.
        """
        if self._losses is None:
            raise RunError("The plan is for inference, which trains nothing. Call `infer`, or plan for training.")
        if self._feed is None:
            raise RunError("No data set was given to train on. Give it to prepare: prepare(..., feed=Feed(dataset)).")
        feed, session = self._feed, self._session
        check_same("read another data set than rank 0, or in another order", feed.describe())
        plan = session.plan
        size = plan.workload.global_batch // plan.num_microbatches
        loader = plan.workload.loader
        depth = feed.depth if loader is None else loader.depth
        batches = feed.batches(plan.workload.global_batch, size, session.reads, self._num_resumed)
        self._num_resumed = 0
        with MicrobatchQueue(batches, self._collate, producers=feed.producers, depth=depth) as queue:
            for index in itertools.count():
                self.position.enter(Phase.READING, self._steps)
                count = queue.next_batch()
                if feed.is_iterable:
                    count = agree_on_end(count, self._steps)
                if count is None:
                    break
                inputs = session.coming_inputs(count, partial(queue.take, index))
                self.position.enter(Phase.STEP, self._steps)
                with explained(self.watch):
                    made = session.run_microbatches(self._steps, count, inputs)
                queue.forget(index - session.steps.num_filling)
                try:
                    yield self._took(made, count)
                except GeneratorExit:
                    self._make_rest(queue, index + 1)
                    raise
            self._make_rest(queue, index)

    def _make_rest(self, queue: MicrobatchQueue, end: int) -> None:
        """For pipelines that are not drained between steps: have the rest of the last batches before ``end`` ready."""
        session = self._session
        for index in range(max(end - session.steps.num_filling, 0), end):
            for microbatch in filter(session.reads, range(session.plan.num_microbatches)):
                queue.take(index, microbatch)

    def _collate(self, samples: list[Any]) -> tuple[torch.Tensor, ...]:
        assert self._feed is not None, "a trainer that reads a data set has one"
        return load_to(self._flatten(*unpack(self._feed.collate(samples))), self._session.device)

    def _took(self, made: Outputs, count: int, digest: torch.Tensor | None = None) -> float:
        """Count a step, and add its losses."""
        assert self._losses is not None, "what trains has losses"
        start_s = time.monotonic()
        with explained(self.watch):
            self._losses.add(self._steps, made, count, digest)
        self.position.waited_s += time.monotonic() - start_s
        self._steps += 1
        self.position.enter(Phase.BETWEEN, self._steps)
        return self._losses.known[-1] if self._losses.known else math.nan

    def finish(self) -> None:
        """Finish all work in progress. Under an asynchronous schedule the next step fills the pipeline again.

        All ranks call it together. Raises RunError if fewer steps were run than fill and empty the pipeline.
        """
        with self._calling("finish"):
            made = self._session.finish()
            if self._losses is not None and self._session.steps.num_filling:
                self._losses.add(self._steps - 1, made)
                self._losses.finish()

    @property
    def losses(self) -> tuple[float, ...]:
        """The known losses by step, from the first step on; after `finish` those of all steps. Empty for inference."""
        return self.losses_since(0)

    def losses_since(self, count: int) -> tuple[float, ...]:
        """Return the known losses except for the first ``count``."""
        return tuple(self._losses.known[count:]) if self._losses is not None else ()

    def first_not_finite(self) -> tuple[int, tuple[int, ...]]:
        """Return the first step (from 0) whose loss is not finite, and the ranks that computed it.

        All ranks call it together, after such a loss is known.
        """
        assert self._losses is not None, "what trains has losses"
        return self._losses.first_not_finite()

    def held_bytes(self, inputs: Any, targets: Any = ()) -> int:
        """Return the bytes that this rank holds before a step on a batch: state, gradient buckets, its microbatches."""
        session = self._session
        given = session.microbatch_inputs(self._flatten(inputs, targets))
        # Stages may read the same inputs: shared memory counts once.
        mine = {
            (index, item.data_ptr()): item.nbytes
            for stage, microbatches in given.items()
            for index, items in enumerate(microbatches)
            if self.plan.stages[stage].rank_of(index) == session.grid.rank
            for item in items
        }
        buckets = session.exchange.buffers if session.exchange is not None else []
        held = {id(item): item.nbytes for item in (*session.own_state, *buckets)}
        return sum(held.values()) + sum(mine.values())

    def record(self) -> None:
        """Record spans from the next step on; earlier recordings are dropped. All ranks call it together."""
        with self._calling("record"):
            dist.barrier()
        self._session.recorder.start(self._session.steps.next_repetition)

    def stop_recording(self) -> None:
        """Stop recording after the last step; recorded spans stay for `timeline`."""
        self._session.recorder.stop(self._session.steps.next_repetition)

    def timeline(self) -> Timeline | None:
        """Return the recorded steps of all ranks on one clock, on rank 0; None on other ranks.

        All ranks call it together.
        """
        session = self._session
        with self._calling("timeline"):
            return gather_timeline(
                session.program,
                session.program.body,
                session.recorder.rows(),
                self._clock_offset_ns,
                self._memory.peak(),
                session.grid.width,
            )

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the whole model's state dict with the user's names, in rank 0's host memory; None on other ranks.

        All ranks call it together. Work in progress is finished first (`finish`). Every tensor comes from the first
        replica of the first stage that holds it; parameters that the graph does not use keep rank 0's values.
        """
        with self._calling("state_dict"):
            self.finish()
            state = gather_state(self._model, self._session)
        join = getattr(self._model, "whole_state", None)
        return join(state) if join is not None and state is not None else state

    def save(self, path: Path | str) -> None:
        """Write `state_dict` with torch.save, completely or not at all. All ranks call it together.

        Raises DocumentError if the folder cannot be written to.
        """
        with self._calling("save"):
            state = self.state_dict()
            error = ""
            if state is not None:
                try:
                    save_state(state, Path(path))
                except DocumentError as problem:
                    error = str(problem)
            # All ranks end with the error of rank 0.
            if error := agree(error):
                raise DocumentError(error)

    def save_checkpoint(
        self, folder: Path | str, keep: int = 2, *, keep_every: int = 0, in_background: bool = False
    ) -> Path:
        """Write a checkpoint from which training can continue, under any plan; return its folder.

        All ranks call it together. The newest ``keep`` checkpoints in ``folder`` are kept, and those of a multiple of
        ``keep_every`` steps. Work in progress is finished first (`finish`). With ``in_background`` the call returns
        when the state is copied; the next call, or `wait_for_checkpoint`, waits until it is written. Raises RunError on
        all ranks if one cannot write.
        """
        with self._calling("save_checkpoint"):
            self.finish()
            if self._checkpoints is None:
                self._checkpoints = Checkpoints(self._session, self._run_seed, self._settings)
            path = self._checkpoints.save(Path(folder), self._steps, KeepRule(newest=keep, every=keep_every))
            if not in_background:
                self._checkpoints.wait()
            return path

    @property
    def last_write_s(self) -> float:
        """The seconds for which the last complete checkpoint was written; 0 before there is one."""
        return self._checkpoints.write_s if self._checkpoints is not None else 0.0

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint in the background is complete. All ranks call it together.

        Raises RunError on all ranks if one could not write.
        """
        if self._checkpoints is not None:
            with self._calling("wait_for_checkpoint"):
                self._checkpoints.wait()

    def resume(self, folder: Path | str) -> int:
        """Continue from the newest checkpoint of a folder; return the number of completed steps.

        All ranks call it together, before the first step. Weights, optimizer states, random numbers and the order of a
        `Feed` continue as without an interruption, also under another plan of the same model and global batch.
        Learning-rate schedulers are not restored. A damaged checkpoint is renamed with a warning, and the one before
        it is used. Raises RunError for a folder without a checkpoint, for a checkpoint of another model, seed, data
        set, global batch, clipping or repair, and after the first step.
        """
        if self._steps:
            raise RunError(f"`resume` was called after {self._steps} steps. Call it before the first step.")
        with self._calling("resume"):
            done = load_checkpoint(self._session, Path(folder), self._run_seed, self._settings)
        self._steps = self._num_resumed = done
        return done

    @property
    def num_filling_steps(self) -> int:
        """The number of steps that fill and empty the pipeline of an asynchronous schedule; 0 for a synchronous one."""
        return self._session.steps.num_filling

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of all parameters, for instance after `resume`."""
        self._session.updates.set_rate(rate)

    def close(self) -> None:
        """Remove the hooks from the user's parameters, and release offloaded states."""
        if self.watch is not None:
            self.watch.stop()
        if self._checkpoints is not None:
            self._checkpoints.leave()
        self._session.close()


def _no_optimizer(_parameters: list[torch.nn.Parameter]) -> None:
    """No optimizer, for inference."""


def _release_other_parameters(model: torch.nn.Module, session: Session) -> None:
    """Free the memory of parameters that only other ranks use; the bare model's state_dict then shows empty tensors."""
    own = {id(parameter) for parameter in session.parameters.values()}
    used = {session.graph.tensors[tensor].name for op in session.graph.ops for tensor in op.inputs}
    for name, parameter in model.named_parameters():
        if name in used and id(parameter) not in own:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
