"""Measure sends and all-reduces between the ranks of a process group: seconds, and CPU seconds of the process.

    send         half a round trip between ranks 0 and 1
    all-reduce   among the first k ranks, for each k; all ranks start together

Small messages are timed in batches, so that the barrier before them does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from meshwright.spec import EventSink, NullSink, TransferMeasurement
from meshwright.spec.measurements import TransferKind

DEFAULT_SIZES = (4, 2**10, 2**14, 2**17, 2**20, 2**22, 2**24, 2**26)
# Messages up to this size are timed in batches of this number.
_SMALL_BYTES, BATCH = 2**16, 20
_SEND_RANKS = 2


def measure_transfers(
    *,
    sizes: Sequence[int] = DEFAULT_SIZES,
    repeats: int = 10,
    events: EventSink | None = None,
) -> tuple[TransferMeasurement, ...]:
    """Measure sends and all-reduces in the default process group, for each of the ``sizes`` (bytes).

    Every rank must call this function, which returns the rank's own times. ``events`` receives the progress.
    """
    sink = events or NullSink()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups = {count: dist.new_group(list(range(count))) for count in range(2, world_size + 1)}
    rows = []
    for done, num_bytes in enumerate(sizes):
        # At least one element of four bytes: gloo sums floats.
        buffer = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32)
        if rank < _SEND_RANKS:
            rows.append(_time("send", buffer, round_trip, groups[_SEND_RANKS], repeats))
        for count, group in groups.items():
            dist.barrier()
            if rank < count:
                rows.append(_time("all_reduce", buffer, partial(dist.all_reduce, group=group), group, repeats))
        dist.barrier()
        sink.progress("measure transfers", done + 1, len(sizes))
    return tuple(rows)


def round_trip(buffer: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Send a message from the first to the second rank of a group and back; both ranks must call this function."""
    first, second = dist.get_process_group_ranks(group)[:2]
    if dist.get_rank() == first:
        dist.send(buffer, second, group=group)
        dist.recv(buffer, second, group=group)
    else:
        dist.recv(buffer, first, group=group)
        dist.send(buffer, first, group=group)


def _time(
    kind: TransferKind,
    buffer: torch.Tensor,
    action: Callable[[torch.Tensor], object],
    group: dist.ProcessGroup,
    repeats: int,
) -> TransferMeasurement:
    num_bytes = buffer.numel() * buffer.element_size()
    taken = time_messages(
        partial(action, buffer),
        messages=2 if kind == "send" else 1,
        batch=BATCH if num_bytes <= _SMALL_BYTES else 1,
        repeats=repeats,
        meet=partial(dist.barrier, group),
    )
    return TransferMeasurement(
        kind=kind,
        num_ranks=dist.get_world_size(group),
        num_bytes=num_bytes,
        seconds=taken.seconds,
        spread=taken.spread,
        host_s=taken.host_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The measured time of a message.

    ``seconds``: median. ``spread``: (p90 - p10) / median. ``host_s``: median CPU seconds of this process.
    ``num_samples``: number of timed actions.
    """

    seconds: float
    spread: float
    host_s: float
    num_samples: int


def time_messages(
    action: Callable[[], object],
    *,
    messages: int,
    batch: int,
    repeats: int,
    meet: Callable[[], object],
    finish: Callable[[], object] = lambda: None,
) -> Timing:
    """Return the time per message of an action that consists of ``messages`` messages.

    The action is repeated ``batch`` times between two readings of the clock, and this is repeated ``repeats`` times
    (after one repetition that is not counted). ``meet``: a barrier before each batch. ``finish``: wait for the device.
    """
    samples = []
    for repeat in range(repeats + 1):
        meet()
        host, start = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(batch):
            action()
        finish()
        elapsed = (time.perf_counter_ns() - start, time.process_time_ns() - host)
        if repeat:  # the first one opens connections
            samples.append(elapsed)
    seconds, host_s = np.array(samples).T / 1e9 / (messages * batch)
    low, middle, high = np.percentile(seconds, (10, 50, 90))
    return Timing(
        seconds=float(middle),
        spread=float((high - low) / middle),
        host_s=float(np.median(host_s)),
        num_samples=repeats * batch,
    )
