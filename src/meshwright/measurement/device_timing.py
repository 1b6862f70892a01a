"""Measure a device: each distinct op alone, optimizer steps by tensor size, and the host's time to issue a model's ops.

`measure_device_ops` times the forward and the backward of each op, on tensors of its own:

    forward      on inputs that are read repeatedly, as if the previous op had just written them to the cache
    backward     one call of autograd for all needed gradients; saved tensors are read in turns from several copies
                 that exceed the device's cache, because a model reads them long after its forward
    accumulate   each gradient of a parameter is added to an existing gradient

Each op runs without the rest of the model, so the ops of a model of any size are measured on one device. Each row is
written as soon as it is measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from meshwright.measurement.clocks import DeviceClock, Sample, SegmentRunner
from meshwright.measurement.optimizer_timing import is_fatal, is_out_of_memory
from meshwright.measurement.segments import Segment
from meshwright.spec import EventSink, MeasurementError, NullSink, OpMeasurement, OptimizerMeasurement
from meshwright.spec.measurements import BUCKET_COPY, MoveKey

SIZES = (2**8, 2**12, 2**16, 2**20, 2**22, 2**24)
_TOTAL_ELEMENTS, _MOST_TENSORS = 2**26, 96
# Kind of each row, torch's class and its options.
_KINDS: tuple[tuple[str, Any, dict[str, Any]], ...] = tuple(
    (f"{name}{suffix}", of_torch, {**options, **loop})
    for name, of_torch, options in (
        ("adamw", torch.optim.AdamW, {"lr": 1e-4}),
        ("sgd", torch.optim.SGD, {"lr": 1e-4}),
        ("sgd+momentum", torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    )
    for suffix, loop in (("", {"foreach": False}), (".foreach", {"foreach": True}), (".fused", {"fused": True}))
)


# Steps of torch's loop, over many tensors at once, and fused; ``seconds`` are those of the device, after a kernel that
# waits while the host issues the step, ``issue_s`` those of the host. Gradients are copied into a bucket tensor by
# tensor. The number of tensors of one size is such that they exceed the cache of every GPU, but a loop of all
# operations of an update fits the queue of a device (some 1,000 launches).
def measure_device_optimizers(
    clock: DeviceClock,
    *,
    states: Sequence[str],
    gradients: Sequence[str],
    sizes: Sequence[int] = SIZES,
    events: EventSink | None = None,
) -> tuple[OptimizerMeasurement, ...]:
    """Return the times of optimizer steps and of copying gradients into a bucket, one row per tensor size and kind.

    ``states``: data types of the parameters and states of the steps. ``gradients``: data types of the copied gradients.
    ``sizes``: elements of a tensor. ``events`` receives the progress.
    """
    sink, rows = events or NullSink(), []
    for done, size in enumerate(sizes):
        for dtype in states:
            parameters = _parameters(size, dtype, clock.device)
            for kind, of_torch, options in _KINDS:
                optimizer = of_torch(parameters, **options)
                taken = clock.step(optimizer.step)
                rows.append(_row(kind, parameters, taken.seconds, taken.issue_s))
                del optimizer
            del parameters
        for dtype in gradients:
            parameters = _parameters(size, dtype, clock.device)
            bucket = [torch.zeros_like(parameter) for parameter in parameters]

            def fill(bucket: list[torch.Tensor] = bucket, parameters: list[torch.Tensor] = parameters) -> None:
                for view, parameter in zip(bucket, parameters, strict=True):
                    assert parameter.grad is not None
                    view.copy_(parameter.grad)

            rows.append(_row(BUCKET_COPY, parameters, clock.time([fill]).seconds, 0.0))
            del parameters, bucket, fill
        clock.release()
        sink.progress("measure optimizers", done + 1, len(sizes))
    return tuple(rows)


def _parameters(size: int, dtype: str, device: torch.device) -> list[torch.Tensor]:
    count = max(1, min(_MOST_TENSORS, _TOTAL_ELEMENTS // size))
    made = [torch.zeros(size, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return made


def _row(kind: str, parameters: list[torch.Tensor], seconds: float, issue_s: float) -> OptimizerMeasurement:
    return OptimizerMeasurement(
        kind=kind,
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        num_elements=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        seconds=seconds,
        issue_s=issue_s,
    )


# The first passes fill caches: of the allocator, of libraries' choices of kernels, of the processor.
_WARM_UP = 3
_CALLS = 2000


# Ops are issued in the order of the model, as in a training step. Layers that together contain every distinct op run
# one after the other. Before each pass, and never within one, the device is waited for, so that its queue is never
# full. A backward starts with its first node: the time to pass it to autograd's thread is not counted for any op.
def measure_issue(
    segments: Sequence[Callable[[], Segment]],
    clock: DeviceClock,
    *,
    repeats: int = 10,
    surrounding: Callable[[], AbstractContextManager[Any]],
    events: EventSink | None = None,
) -> dict[str, tuple[float, float]]:
    """Return the median seconds in which the host issues an op's forward and backward, by the op's key.

    If an op occurs several times in the segments, its seconds are the mean over the occurrences.

    Args:
        segments: Functions that create the segments (parts of a model) on the clock's device, one after the other.
        clock: The clock of the device.
        repeats: Number of passes that are counted.
        surrounding: A function that returns the context of a forward, such as torch's autocast.
        events: Receives the progress.
    """
    sink, found = events or NullSink(), defaultdict(list)
    for done, make in enumerate(segments):
        segment = make()
        runner = SegmentRunner(segment)
        passes = np.array([_one_pass(runner, clock, surrounding) for _ in range(_WARM_UP + repeats)])
        typical = np.median(passes[_WARM_UP:], axis=0)
        for slot, name in enumerate(runner.names):
            found[segment.keys[name]].append(typical[:, slot])
        del segment, runner
        clock.release()
        sink.progress("measure issuing", done + 1, len(segments))
    means = {key: np.mean(places, axis=0).tolist() for key, places in found.items()}
    return {key: (forward_s, backward_s) for key, (forward_s, backward_s) in means.items()}


def measure_call(clock: DeviceClock) -> float:
    """Return the seconds in which the host issues one addition of two small tensors, averaged over a loop."""
    value = torch.zeros(8, 8, device=clock.device)
    for _ in range(_CALLS // 10):
        value + value
    clock.finish()
    return clock.loop(lambda: value + value, _CALLS)


def _one_pass(
    runner: SegmentRunner, clock: DeviceClock, surrounding: Callable[[], AbstractContextManager[Any]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(2, ops): seconds of the host, forward and backward."""
    runner.clear_gradients()
    clock.finish()
    with surrounding():
        forward = runner.timed_forward()
    clock.finish()
    backward, _ = runner.timed_backward(after_start=True)
    clock.finish()
    return np.stack([forward, backward])


# Largest number of copies of a backward's inputs, and their size in caches, so that no copy stays in the cache.
_MOST_COPIES, _CACHES = 8, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The form of an input tensor to create.

    ``strides``: None for a contiguous tensor; 0 for an expanded dim. ``bound``: integer values are below this number.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    requires_grad: bool = False
    bound: int = 2

    def make(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of this form with random values on a device."""
        dtype = getattr(torch, self.dtype)
        strides = self.strides or _contiguous(self.shape)
        # Expanded dims have one element in memory.
        held = [1 if stride == 0 else size for size, stride in zip(self.shape, strides, strict=True)]
        value = torch.empty_strided(held, strides, dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            return value.normal_().expand(self.shape).requires_grad_(self.requires_grad)
        return value.random_(0, 2 if dtype is torch.bool else max(self.bound, 1)).expand(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOp:
    """An op to time: ``module``, called with tensors of the forms ``feeds``, returns its outputs.

    ``key``: the op's key in the measurement table. ``state``: dtypes of the module's parameters and buffers, by name.
    ``differentiable``: for each output, whether it gets a gradient. ``is_view``: whether the forward starts no kernel.
    ``is_in_place``: whether the op writes into its first input.
    """

    key: str
    module: fx.GraphModule
    feeds: tuple[InputSpec, ...]
    state: Mapping[str, str]
    differentiable: tuple[bool, ...]
    is_view: bool = False
    is_in_place: bool = False


def measure_device_ops(
    ops: Iterable[DeviceOp],
    clock: DeviceClock,
    write: Callable[[OpMeasurement], None],
    *,
    issued: Mapping[str, tuple[float, float]] | None = None,
    events: EventSink | None = None,
) -> dict[str, str]:
    """Measure ops one after the other, pass each row to ``write``, and return the reasons for ops left out, by key.

    ``issued``: measured seconds in which the host issues forward and backward, by key (`measure_issue`). Raises
    MeasurementError if an op leaves the device unusable.
    """
    sink, chosen = events or NullSink(), list(ops)
    left_out = {}
    for done, op in enumerate(chosen):
        try:
            forward, backward, accumulate = _time(op, clock)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            refuse_fatal(error, op.key, clock)
            left_out[op.key] = "out of memory" if is_out_of_memory(error) else reason
            clock.release()
            sink.progress("measure ops", done + 1, len(chosen))
            continue
        forward_issue_s, backward_issue_s = (issued or {}).get(op.key, (0.0, 0.0))
        write(
            OpMeasurement(
                key=op.key,
                forward_s=forward.seconds,
                backward_s=backward.seconds,
                accumulate_s=accumulate,
                num_samples=forward.num_samples or backward.num_samples,
                spread=max(forward.spread, backward.spread),
                forward_issue_s=forward_issue_s,
                backward_issue_s=backward_issue_s,
            )
        )
        clock.release()
        sink.progress("measure ops", done + 1, len(chosen))
    return left_out


def refuse_fatal(error: Exception, what: str, clock: DeviceClock) -> None:
    """Raise MeasurementError if after ``error`` the device is unusable; ``what``: name of the op, for the message."""
    if is_fatal(error):
        raise MeasurementError(
            f"{what} left {clock.device} unusable ({str(error).strip().partition(chr(10))[0][:200]}). The times "
            "measured before are in the table. Report this error, and measure again on a machine where the op runs."
        ) from error


def _time(op: DeviceOp, clock: DeviceClock) -> tuple[Sample, Sample, float]:
    """Forward, backward, and seconds of adding to gradients."""
    nothing = Sample(seconds=0.0, spread=0.0, num_samples=0)
    trained = any(op.differentiable)
    with clock.side(), torch.set_grad_enabled(trained):
        copies = [_Copy(op, clock.device)]
        forward = nothing if op.is_view else clock.time([copies[0].forward])
        if not trained:
            return forward, nothing, 0.0
        while len(copies) < _num_copies(copies[0].num_bytes, clock.cache_bytes):
            copies.append(_Copy(op, clock.device))
        for copy in copies:
            copy.keep()
        backward = clock.time([copy.backward for copy in copies]) if copies[0].wanted else nothing
        gradients = [torch.zeros_like(p) for p in copies[0].module.parameters() if p.requires_grad]
        del copies
        return forward, backward, math.fsum(_time_adding(gradient, clock) for gradient in gradients)


def _time_adding(gradient: torch.Tensor, clock: DeviceClock) -> float:
    other = torch.zeros_like(gradient)
    return clock.time([lambda: gradient.add_(other)]).seconds


def _num_copies(num_bytes: int, cache_bytes: int) -> int:
    return min(max(math.ceil(_CACHES * cache_bytes / max(num_bytes, 1)), 1), _MOST_COPIES)


class _Copy:
    """An op with memory of its own."""

    def __init__(self, op: DeviceOp, device: torch.device) -> None:
        self.module = materialised(op.module, op.state, device)
        self._bases = [feed.make(device) for feed in op.feeds]
        self._differentiable, self._is_in_place = op.differentiable, op.is_in_place
        self._outputs: list[torch.Tensor] = []
        self._seeds: list[torch.Tensor] = []
        held = (*self._bases, *self.module.parameters(), *self.module.buffers())
        self.num_bytes = sum(value.numel() * value.element_size() for value in held)
        self.wanted = [value for value in (*self._bases, *self.module.parameters()) if value.requires_grad]
        self._feeds = self._enter()

    def forward(self) -> Any:
        """Run the op and return its outputs."""
        return self.module(*self._feeds)

    def keep(self) -> None:
        """Run the op and keep its outputs for `backward`."""
        self._feeds = self._enter()
        outputs = self.module(*self._feeds)
        chosen = zip(outputs, self._differentiable, strict=True)
        self._outputs = [value for value, wanted in chosen if wanted and value.requires_grad]
        self._seeds = [torch.ones_like(value) for value in self._outputs]

    def backward(self) -> Any:
        """Run the backward of the kept outputs, which can be repeated."""
        return torch.autograd.grad(self._outputs, self.wanted, self._seeds, retain_graph=True, allow_unused=True)

    def _enter(self) -> list[torch.Tensor]:
        if not self._is_in_place:
            return self._bases
        return [_Entry.apply(base) if base.requires_grad else base for base in self._bases]


class _Entry(torch.autograd.Function):
    """The result of another op, which may be written into; its backward starts no kernel."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def make_move(elements: int, read: str, written: str, *, adds: bool = False) -> DeviceOp:
    """Return an op that converts a tensor of ``elements`` from the type ``read`` to the type ``written``.

    With ``adds``, the op adds the tensor to an existing tensor of the same type instead.
    """
    graph = fx.Graph()
    value = graph.placeholder("value")
    source = InputSpec(shape=(elements,), strides=None, dtype=read)
    feeds: tuple[InputSpec, ...] = (source, source) if adds else (source,)
    if adds:
        made = graph.call_function(torch.ops.aten.add_.Tensor, (value, graph.placeholder("other")))
    else:
        made = graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": getattr(torch, written)})
    graph.output((made,))
    module = fx.GraphModule(nn.Module(), graph)
    key = MoveKey(elements, read, written, adds).write()
    return DeviceOp(key=key, module=module, feeds=feeds, state={}, differentiable=(False,))


def materialised(module: fx.GraphModule, state: Mapping[str, str], device: torch.device) -> fx.GraphModule:
    """Return a copy of a module on a device, with small random parameters and buffers of ones.

    ``state``: dtypes of parameters and buffers by name; others keep theirs.
    """
    made = fx.GraphModule(module, module.graph)
    for name, held in (*module.named_parameters(), *module.named_buffers()):
        dtype = getattr(torch, state.get(name, str(held.dtype).removeprefix("torch.")))
        value: torch.Tensor
        if isinstance(held, nn.Parameter):
            value = torch.empty_strided(held.shape, held.stride(), dtype=dtype, device=device).normal_(std=0.02)
            value = nn.Parameter(value, requires_grad=held.requires_grad)
        else:
            value = torch.ones(held.shape, dtype=dtype, device=device)
        # The new module's own owners of attributes, whose values were shared so far.
        owner, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(owner), leaf, value)
    return made


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
