"""Time the host's issuing of each op of a model to a device, in the order of the model, as in a training step.

Layers that together contain every distinct op run one after the other. Before each pass, and never within one, the
device is waited for, so that its queue is never full. A backward starts with its first node: the time to pass it to
autograd's thread is not counted for any op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from meshwright.measurement.device_clock import DeviceClock
from meshwright.measurement.segments import Segment
from meshwright.measurement.stopwatch import SegmentRunner
from meshwright.spec import EventSink, NullSink

# The first passes fill caches: of the allocator, of libraries' choices of kernels, of the processor.
_WARM_UP = 3
_CALLS = 2000


def measure_issue(
    segments: Sequence[Callable[[], Segment]],
    clock: DeviceClock,
    *,
    repeats: int = 10,
    surrounding: Callable[[], AbstractContextManager[Any]],
    events: EventSink | None = None,
) -> dict[str, tuple[float, float]]:
    """Median seconds of the host for forward and backward by key, the mean over an op's occurrences.

    Args:
        segments: functions that create pieces on the clock's device; each is dropped before the next is created.
        clock: the device to wait for.
        repeats: passes that are counted.
        surrounding: the context of a forward (torch's autocast, or none).
        events: receives progress.
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
    """Seconds in which the host issues an addition of two small tensors, in a loop."""
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
