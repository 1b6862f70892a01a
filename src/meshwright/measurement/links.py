"""Measure every collective between the available ranks, by bytes and by the groups of ranks (`measure_links`).

For every r that divides the number N of ranks, these groups of r ranks are measured (`RankGroups`):

    alone        the first r ranks
    neighbours   all N / r groups of neighbouring ranks, at once
    strided      all N / r groups of ranks with stride N / r, at once (the other dimension of a mesh)

Every op runs within every group, in all groups at once. A send is half a round trip between the ranks of a pair.

The remaining seconds of the budget are divided evenly among the remaining cells (op, groups, size). A cell is repeated
as often as its seconds allow. If the fewest repetitions of a size take several times these seconds, larger sizes of the
series are left out. All ranks use the same numbers of repetitions. A collective takes until the slowest rank has its
result. With GPUs the groups use NCCL. Else they use gloo, and short collectives are timed between computations
(`time_among`); the time is then the mean over ranks, which wait for each other in the following collectives.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from meshwright.measurement.copy_timing import BATCH, Timing, round_trip, time_messages
from meshwright.measurement.rank_processes import RankContext, run_ranks
from meshwright.records import Records, make_records, named_shapes
from meshwright.records.importing.public import DEVICES
from meshwright.records.record_table import columns_of
from meshwright.spec import MIN_SECONDS, EventSink
from meshwright.spec.measurements import TransferKind
from meshwright.torch_names import all_gather_single, reduce_scatter_single

# About one slice of Linux' scheduler, and the time of a layer of a small model; from products of this number of rows.
_COMPUTE_S, _ROWS = 0.005, 256
# k: the data left to be sent after the last one is not counted.
_COUNT = 5


class Computation:
    """A computation of about 5 ms of processor time: matrix products, in the same number on all ranks.

    ``seconds``: about the time that it takes, which is longer under a quota. All ranks must create an instance at the
    same time, because they determine the number together.
    """

    def __init__(self) -> None:
        self._factor = torch.full((_ROWS, _ROWS), 1 / _ROWS)
        self._num_products = 10
        self()
        host, start = time.process_time(), time.perf_counter()
        self()
        elapsed = time.process_time() - host, time.perf_counter() - start
        slowest = torch.tensor(elapsed, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        factor = _COMPUTE_S / float(slowest[0])
        self._num_products = max(round(self._num_products * factor), 1)
        self.seconds = float(slowest[1]) * factor

    def __call__(self) -> None:
        """Run the computation once."""
        for _ in range(self._num_products):
            torch.mm(self._factor, self._factor)


def sample_seconds(computation: Computation, once_s: float) -> float:
    """Return the approximate seconds of one sample of `time_among`, for a collective that takes ``once_s`` seconds."""
    return _COUNT * (2 * computation.seconds + once_s)


# On processors, the threads that compute and those that move data share cores and wait for each other's time slices.
# After a computation a collective starts later on one rank than on another, and occasionally it takes a slice longer.
# Data still to be sent when a rank has its result slows the next computation down. Timing the collective by itself
# shows none of that. So the time is
#
#     (seconds of k times a computation and the collective - seconds of k times the computation) / k
def time_among(action: Callable[[], object], computation: Computation, repeats: int) -> Timing:
    """Return the time that a collective adds to computations around it.

    It is the mean of samples without the smallest and the largest one. All ranks must call this function together;
    ranks outside the collective's group pass an empty ``action``.
    """
    samples = np.array([_sample(action, computation) for _ in range(repeats + 1)][1:])
    seconds, host_s = np.sort(samples, axis=0).T
    low, middle, high = np.percentile(seconds, (10, 50, 90))
    inner = slice(1, -1) if repeats > 2 else slice(None)
    return Timing(
        seconds=max(float(seconds[inner].mean()), MIN_SECONDS),
        spread=float(high - low) / max(float(middle), MIN_SECONDS),
        host_s=max(float(host_s[inner].mean()), 0.0),
        num_samples=repeats * _COUNT,
    )


def _sample(action: Callable[[], object], computation: Computation) -> tuple[float, float]:
    """Seconds, and processor seconds, that each collective adds."""

    def both() -> None:
        computation()
        action()

    (with_s, with_host_s), (alone_s, alone_host_s) = _elapsed(both), _elapsed(computation)
    return (with_s - alone_s) / _COUNT, (with_host_s - alone_host_s) / _COUNT


def _elapsed(action: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    host, start = time.process_time(), time.perf_counter()
    for _ in range(_COUNT):
        action()
    return time.perf_counter() - start, time.process_time() - host


LINK_SIZES = tuple(4**exponent for exponent in range(2, 14))
# With the start of the processes and the fit, under a minute.
BUDGET_S = 30.0
_MOST_REPEATS, _FEWEST_REPEATS = 20, 3
# If the fewest repetitions take this multiple of the cell's share, the series ends: larger sizes take longer.
_PATIENCE = 4.0
_ELEMENT_BYTES = 4
_PAIR = 2
# Longer ones hide the other work of processors.
_SHORT_S = 0.02

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Groups of ranks that run the same collective at once.

    ``groups[i]``: the ranks of group i, which are ``stride`` apart.
    """

    groups: tuple[tuple[int, ...], ...]
    stride: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks of each group."""
        return len(self.groups[0])


def list_places(num_ranks: int) -> list[RankGroups]:
    """Return all `RankGroups` that are measured among ``num_ranks`` ranks (see the module)."""
    places = []
    for size in (size for size in range(2, num_ranks + 1) if num_ranks % size == 0):
        count = num_ranks // size
        places.append(RankGroups(groups=(tuple(range(size)),), stride=1))
        if count > 1:
            neighbours = tuple(tuple(range(first, first + size)) for first in range(0, num_ranks, size))
            strided = tuple(tuple(range(first, num_ranks, count)) for first in range(count))
            places += [RankGroups(groups=neighbours, stride=1), RankGroups(groups=strided, stride=count)]
    return places


def measure_links(
    *,
    num_ranks: int = 2,
    num_nodes: int = 1,
    sizes: Sequence[int] = LINK_SIZES,
    budget_s: float = BUDGET_S,
    timeout_s: float = 300.0,
    events: EventSink | None = None,
    prepare: Callable[[int], None] | None = None,
) -> Records:
    """Return measurement rows of every collective among ``num_ranks`` new processes on this machine.

    Each process uses one GPU if the machine has enough of them, else a CPU core. ``sizes``: bytes of the full tensor.
    ``budget_s``: seconds for all collectives. ``prepare`` moves a rank to its emulated node, of which there are
    ``num_nodes`` (`run_ranks`); then no GPU is used. Raises MeasurementError if a process fails or ``timeout_s``
    passes.
    """
    device: Device = "cuda" if prepare is None and torch.cuda.device_count() >= num_ranks else "cpu"
    parts = run_ranks(
        _measure_rank,
        tuple(sizes),
        budget_s,
        device,
        num_ranks=num_ranks,
        timeout_s=timeout_s,
        events=events,
        prepare=prepare,
    )
    return _records(parts, num_nodes=num_nodes, num_ranks=num_ranks, device=device)


def measure_links_here(
    *, sizes: Sequence[int] = LINK_SIZES, budget_s: float = BUDGET_S, events: EventSink | None = None
) -> Records | None:
    """Return measurement rows as `measure_links`, with this process as one rank of torchrun, on one or more machines.

    Only rank 0 returns the rows; the other ranks return None.
    """
    local_size, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device: Device = "cuda" if torch.cuda.device_count() >= local_size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("gloo")
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = _time_places(tuple(sizes), budget_s, device, events if rank == 0 else None)
    parts: list[dict[_Cell, Timing]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(parts, mine)
    dist.destroy_process_group()
    if rank:
        return None
    return _records(parts, num_nodes=num_ranks // local_size, num_ranks=num_ranks, device=device)


_Cell = tuple[TransferKind, int, int, int, int]  # op, ranks, groups, stride, bytes


def _measure_rank(context: RankContext, sizes: tuple[int, ...], budget_s: float, device: Device) -> dict[_Cell, Timing]:
    if device == "cuda":
        torch.cuda.set_device(context.rank)
    return _time_places(sizes, budget_s, device, context.events)


def _time_places(
    sizes: tuple[int, ...], budget_s: float, device: Device, events: EventSink | None
) -> dict[_Cell, Timing]:
    """The times of this rank in every cell in which it takes part."""
    start, places = time.monotonic(), list_places(dist.get_world_size())
    backend = "nccl" if device == "cuda" else "gloo"
    live = list(_series(places))
    groups = {place: _own_group(place, backend) for place in dict.fromkeys(place for _, place in live)}
    computation = Computation() if device == "cpu" else None
    taken: dict[_Cell, Timing] = {}
    # Size by size over all series, so that if time runs out all lack their largest sizes and none is missing.
    for index, size in enumerate(sorted(sizes)):
        ended = []
        for done, (op, place) in enumerate(live):
            group = groups[place]
            action, num_bytes = _prepare(op, size, place.num_ranks, group, device)
            num_left = len(live) * (len(sizes) - index) - done
            once_s, share_s = _agree(action, device, (budget_s - (time.monotonic() - start)) / num_left)
            # Every series has its smallest size.
            if index and _FEWEST_REPEATS * once_s > _PATIENCE * share_s:
                ended.append((op, place))
                continue
            if computation is not None and op != "send" and once_s < _SHORT_S:
                timing = time_among(action, computation, _repeats(share_s / sample_seconds(computation, once_s)))
            else:
                affordable = int(share_s / once_s)
                batch = min(max(affordable // _FEWEST_REPEATS, 1), BATCH)
                timing = time_messages(
                    action,
                    messages=2 if op == "send" else 1,
                    batch=batch,
                    repeats=_repeats(affordable // batch),
                    meet=dist.barrier,
                    finish=partial(_finish, device),
                )
                if group is not None:
                    timing = _until_all(timing, group, device)
            if group is not None:
                taken[op, place.num_ranks, len(place.groups), place.stride, num_bytes] = timing
        live = [one for one in live if one not in ended]
        if events is not None:
            events.progress("measure links", index + 1, len(sizes))
    return taken


def _own_group(place: RankGroups, backend: str) -> dist.ProcessGroup | None:
    """The group of a place that contains this rank; every rank has to create every group."""
    made = [dist.new_group(list(ranks), backend=backend) for ranks in place.groups]
    return next((group for group, ranks in zip(made, place.groups, strict=True) if dist.get_rank() in ranks), None)


def _series(places: Sequence[RankGroups]) -> Iterator[tuple[TransferKind, RankGroups]]:
    """Every op in every place; sends in those of two ranks, or else between the first two."""
    pairs = [place for place in places if place.num_ranks == _PAIR] or [RankGroups(groups=((0, 1),), stride=1)]
    for op in get_args(TransferKind):
        yield from ((op, place) for place in (pairs if op == "send" else places))


def _prepare(
    op: TransferKind, num_bytes: int, num_ranks: int, group: dist.ProcessGroup | None, device: Device
) -> tuple[Callable[[], object], int]:
    """The call of one message, an empty one for ranks that only watch; and the bytes of its full tensor, rounded up."""
    step = num_ranks * (num_ranks if op == "all_to_all" else 1)
    count = -(-num_bytes // (_ELEMENT_BYTES * step)) * step
    if group is None:
        return lambda: None, count * _ELEMENT_BYTES
    full = torch.zeros(count, dtype=torch.float32, device=device)
    part = torch.zeros(count // num_ranks, dtype=torch.float32, device=device)
    first = dist.get_global_rank(group, 0)
    calls: dict[TransferKind, Callable[[], object]] = {
        "send": partial(round_trip, full, group),
        "all_reduce": partial(dist.all_reduce, full, group=group),
        "all_gather": partial(all_gather_single, full, part, group=group),
        "reduce_scatter": partial(reduce_scatter_single, part, full, group=group),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(part), part, group=group),
        "broadcast": partial(dist.broadcast, full, src=first, group=group),
    }
    return calls[op], count * _ELEMENT_BYTES


def _agree(action: Callable[[], object], device: Device, share_s: float) -> tuple[float, float]:
    """Seconds of the slowest rank's second try, and the smallest share. The first try opens connections."""
    action()
    _finish(device)
    dist.barrier()
    start = time.perf_counter()
    action()
    _finish(device)
    worst = torch.tensor((time.perf_counter() - start, -share_s), dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return max(float(worst[0]), 1e-9), -float(worst[1])


def _until_all(timing: Timing, group: dist.ProcessGroup, device: Device) -> Timing:
    """The time until every rank of a group has its result: ranks on slow links have it later than others."""
    slowest = torch.tensor(timing.seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return replace(timing, seconds=float(slowest))


def _repeats(affordable: float) -> int:
    return min(max(int(affordable), _FEWEST_REPEATS), _MOST_REPEATS)


def _finish(device: Device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _order(cell: _Cell) -> tuple[int, tuple[int, ...]]:
    """Sort key: the order of `TransferKind`, then place and size."""
    return get_args(TransferKind).index(cell[0]), cell[1:]


def _records(parts: Sequence[dict[_Cell, Timing]], *, num_nodes: int, num_ranks: int, device: Device) -> Records:
    """The mean over ranks (and so over groups) of every cell; processor seconds only if ranks share processors."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    per_node = num_ranks // num_nodes
    rows = []
    for cell in sorted({cell for part in parts for cell in part}, key=_order):
        op, ranks, groups, stride, num_bytes = cell
        timings = [part[cell] for part in parts if cell in part]
        shapes = named_shapes(
            bytes=num_bytes, ranks=ranks, groups=groups, stride=stride, nodes=num_nodes, devices_per_node=per_node
        )
        about = {"op": op, "shapes": shapes, "num_samples": sum(timing.num_samples for timing in timings)}
        seconds, spread, host_s = (
            float(np.mean([getattr(timing, figure) for timing in timings]))
            for figure in ("seconds", "spread", "host_s")
        )
        rows.append({**about, "phase": "", "seconds": seconds, "spread": spread})
        if device == "cpu" and host_s > 0:
            rows.append({**about, "phase": "host", "seconds": host_s, "spread": 0.0})
    return make_records(
        **columns_of(rows, ("op", "shapes", "num_samples", "phase", "seconds", "spread")),
        dtype="float32",
        device=DEVICES.get(name, name),
        software=f"torch {torch.__version__}, Python {platform.python_version()}",
        kernel="NCCL" if device == "cuda" else "gloo",
        source=f"{num_ranks} ranks on {num_nodes} machines, all busy at once",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
