"""Compile the layers of a rank before its first step: one microbatch of zeros, forward and backward, in every stage.

All ranks compile at the same time, instead of one after the other as the first microbatch reaches them. Nothing is sent
between stages. Replicas that shard parameters gather them together, as in a step. Afterwards weights, buffers and
random state are as before, and parameters have no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshwright.runtime.holding import Holding
from meshwright.runtime.precisions import multiplying
from meshwright.runtime.random_state import read_generator, write_generator
from meshwright.runtime.stage_module import StageRunner
from meshwright.runtime.transport import WireLayout
from meshwright.spec import EventSink, StageSlice, format_count

# Microbatches are numbered from 0.
_AHEAD = -1
Layouts = Mapping[tuple[int, int, str], tuple[WireLayout, ...]]


def compile_ahead(
    share: Holding, runners: Sequence[StageRunner], layouts: Layouts, device: torch.device, events: EventSink
) -> None:
    """Compile the layers of all stages of this rank, by one microbatch of zeros. All processes call it together.

    ``layouts``: shape, strides and dtype of each tensor of a transfer, by (source stage, target stage, payload).
    ``events`` receives the number of compiled layers as progress.
    """
    compilation = share.model.compilation
    total = compilation.num_codes
    task = f"compile {format_count(total, 'kind', 'kinds')} of layers"
    if total:
        compilation.on_progress = lambda done: events.progress(task, done, total)
        events.progress(task, 0, total)
    generator = read_generator(device)
    buffers = [item for module in share.modules for item in module.buffers()]
    kept = [item.clone() for item in buffers]
    with multiplying(share.model.plan.workload.numbers):
        for stage, runner in zip(share.stages, runners, strict=True):
            _run(share, stage, runner, layouts, device, generator)
            runner.restart()
    for parameter in (*share.cut.values(), *share.parameters.values()):
        parameter.grad = None
    for item, value in zip(buffers, kept, strict=True):
        item.data.copy_(value)
    write_generator(device, generator)
    if device.type == "cuda":
        # Memory that the compiler held would count as the run's.
        torch.cuda.empty_cache()


def _run(
    share: Holding,
    stage: StageSlice,
    runner: StageRunner,
    layouts: Layouts,
    device: torch.device,
    generator: torch.Tensor,
) -> None:
    graph, size = share.model.graph, share.model.plan.microbatch_size
    inputs = [
        torch.zeros(
            [extent.at(size) for extent in graph.tensors[i].shape],
            dtype=getattr(torch, graph.tensors[i].dtype),
            device=device,
        )
        for i in stage.inputs
    ]
    received = {}
    for channel in stage.incoming:
        values = _zeros(layouts[channel.source, channel.target, "activation"], device)
        if channel.carries_rng:
            values[-1] = generator
        received[channel.source] = values
    runner.forward(_AHEAD, inputs, received, seed=0)
    if graph.mode == "training" and stage.has_backward:
        gradients = {
            channel.target: _zeros(layouts[channel.target, channel.source, "gradient"], device)
            for channel in stage.outgoing
            if channel.gradients
        }
        runner.backward(_AHEAD, gradients, 0.0)


def _zeros(layouts: Sequence[WireLayout], device: torch.device) -> list[torch.Tensor]:
    return [item.empty(device).zero_() for item in layouts]
