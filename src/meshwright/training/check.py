"""Compare the losses of a run with those of one process: same model, batches, seeds and optimizer, in a serial loop.

A step of that loop accumulates the gradients of its microbatches, each divided by their number, and updates all
parameters at once. Asynchronous schedules compute with older weights, so only synchronous runs can be checked.
"""

from __future__ import annotations

import math
from itertools import islice

import torch

from meshwright.capture import capture_model, flatten_batch, part
from meshwright.runtime import microbatch_seed
from meshwright.spec import EventSink, NullSink, Plan, PlanError, RunError
from meshwright.training.job import Job, RunResult, load_source, make_batches, make_optimizer

# Sums in another order: float32 has 24 bits and a loss is a sum of some thousand terms. Updates propagate differences,
# so the tolerance doubles from step to step, after the first ones, in which a wrong gradient shows.
_FIRST_STEPS, _FIRST, _MOST = 5, 1e-5, 1e-3


def tolerance(step: int) -> float:
    """Return the largest relative difference that is allowed between the losses of a step (number from 0)."""
    return float(min(_FIRST * 2.0 ** max(step + 1 - _FIRST_STEPS, 0), _MOST))


def refuse_unchecked(job: Job) -> None:
    """Raise PlanError for a run whose losses differ from those of one process by design."""
    plan = job.read_plan()
    why = ""
    if not isinstance(plan, Plan) or plan.workload.kind != "training":
        why = "a placement, or for inference"
    elif plan.exchange.policy:
        why = f"the exchange policy {plan.exchange.policy}, under which updates take only some of the gradients"
    elif plan.is_asynchronous:
        why = f"the asynchronous schedule {plan.schedule}, under which weights are older than in one process"
    elif plan.workload.precision not in ("float32", "float64"):
        why = f"precision {plan.workload.precision}, in which products of other shapes are rounded differently"
    elif job.resume:
        why = "a run that continues from a checkpoint"
    if why:
        raise PlanError(f"Losses cannot be checked for {why}. Leave out --check.")


def check_losses(job: Job, result: RunResult, events: EventSink | None = None) -> float:
    """Train the same steps in this process; return the largest relative difference from the losses of the run.

    Raises RunError for a difference above the `tolerance` of its step, and for losses that are not finite.
    """
    plan, sink = job.read_plan(), events or NullSink()
    assert isinstance(plan, Plan), "`refuse_unchecked` comes first"
    source = load_source(plan, job.seed)
    batch = source.inputs, source.targets
    captured = capture_model(source.model, batch[0], targets=batch[1], loss=source.loss, verify=False)
    graph, size, count = captured.graph, plan.microbatch_size * plan.sharding.expert, plan.num_microbatches
    module = part(captured, graph.inputs, graph.outputs[:1], batch_size=size)
    parameters = [parameter for parameter in source.model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, plan.workload.optimizer, job.learning_rate)
    worst, first = 0.0, None
    batches = make_batches(source, plan.workload.global_batch, job.seed)
    for step, (inputs, targets) in enumerate(islice(batches, len(result.losses))):
        tensors = flatten_batch(captured, inputs, targets)
        loss = 0.0
        for microbatch in range(count):
            torch.manual_seed(microbatch_seed(job.seed, step, microbatch))
            rows = [
                item.narrow(0, microbatch * size, size)
                if graph.tensors[i].shape and len(item) == size * count
                else item
                for i, item in zip(graph.inputs, tensors, strict=True)
            ]
            value = module(*rows)[0] / count
            value.backward()
            loss += value.item()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        # A loss that has vanished is rounded at its former size.
        found = result.losses[step]
        if found is None or not math.isfinite(loss):
            raise RunError(
                f"Step {step + 1} had loss {found} in the run and {loss:.6g} in one process; losses that are not "
                "finite cannot be compared. Lower the learning rate, or check fewer steps."
            )
        first = found if first is None else first
        off = abs(found - loss) / max(abs(loss), 1e-3 * abs(first))
        worst = max(worst, off)
        if not off <= tolerance(step):
            raise RunError(
                f"Step {step + 1} had loss {found:.6g} in the run and {loss:.6g} in one process: a relative difference "
                f"of {off:.2g}, where at most {tolerance(step):g} is expected. The run did not compute the same; its "
                "losses and timeline were written nevertheless."
            )
        sink.progress("checking", step + 1, len(result.losses))
    return worst
