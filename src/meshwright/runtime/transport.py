"""Asynchronous sends, receives and collectives between ranks (`Transport`), and the works in progress (`Pending`).

Tensors are sent with the strides that the receiving stage expects, as a later ``view`` may depend on them: the sender
sends its storage if its strides are equal, else a copy with these strides. Both ends have every layout beforehand, so
no metadata is sent. Received tensors use buffers that are reused after their microbatch.

Some collectives start after others are done, without blocking the calling thread (`Behind`). On a GPU the later one is
issued in a separate CUDA stream, which waits; on CPUs a thread waits, in the order of the calls. Such collectives have
process groups of their own, so that no two threads issue in one of them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from meshwright.runtime.position import Position
from meshwright.runtime.rank_program import SectionName
from meshwright.runtime.recorder import Moment, Recorder
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.spec import Opcode, Program
from meshwright.spec.instructions import SENDS


class Work(Protocol):
    """An asynchronous operation to wait for, such as `dist.Work`."""

    def wait(self) -> object:
        """Wait until the operation is done."""


@runtime_checkable
class Timed(Protocol):
    """Work that records its start and end itself: ``span`` in ns, None until it is done."""

    span: tuple[int, int] | None


class WaitedOnce:
    """Work that several threads may wait for; the work itself is waited for once.

    With gloo every wait for a reduce-scatter would copy its result once more. ``ended``: when the first wait returned,
    in ns of `time.perf_counter_ns`.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self.ended: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until the operation is done."""
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work, self.ended = None, time.perf_counter_ns()


class Key(NamedTuple):
    """An instruction in one run of a section: the number of that run (`place`), and the instruction's id."""

    place: int
    instruction: int


class Pending:
    """The works that are issued and not yet waited for, by instruction.

    ``place`` numbers the runs of sections. Each instruction is waited for once, and its span is recorded then.
    ``position`` receives the instruction that is waited for.
    """

    def __init__(self, recorder: Recorder, position: Position) -> None:
        self._recorder, self._position = recorder, position
        self._works: dict[Key, tuple[Sequence[Work], Moment]] = {}
        self._sections: dict[int, SectionName] = {}

    def begin(self, place: int, section: SectionName) -> None:
        """Start run number ``place``, of this section."""
        self._sections[place] = section

    def section_at(self, place: int) -> SectionName | None:
        """Return the section of run number ``place``; None if all of its works have been waited for."""
        return self._sections.get(place)

    def add(self, key: Key, works: Sequence[Work], start: Moment) -> None:
        """Add the works of an issued instruction, and the moment when it was issued."""
        self._works[key] = works, start

    def works(self, key: Key) -> Sequence[Work]:
        """Return the works of an instruction; empty after they were waited for."""
        return self._works[key][0] if key in self._works else ()

    def wait(self, key: Key) -> None:
        """Wait for the works of an instruction; return at once if they were waited for before."""
        if key in self._works:
            works, start = self._works.pop(key)
            self._position.awaited = key.instruction
            start_s = time.monotonic()
            for work in works:
                work.wait()
            self._position.waited_s += time.monotonic() - start_s
            self._position.awaited = -1
            if self._recorder.active:
                # Some works record themselves when they were done.
                known = next((work.span for work in works if isinstance(work, Timed)), None)
                ended = next((work.ended for work in works if isinstance(work, WaitedOnce)), None)
                self.record(key, *(known or (start, ended)))

    def record(self, key: Key, start: Moment, end: Moment | None = None) -> None:
        """Record the span of an instruction of the body, from ``start`` to ``end`` (None: to now).

        Other sections are not recorded. The step of the span is its repetition of the body.
        """
        if self._sections[key.place] == "body":
            self._recorder.add(key.instruction, key.place, start, self._recorder.now() if end is None else end)

    def settle(self, place: int | None = None, but: Collection[int] = ()) -> None:
        """Wait for all works, or for those of the runs up to ``place``; ``but``: ids of instructions to leave out."""
        for key in [key for key in self._works if place is None or key.place <= place]:
            if key.instruction not in but:
                self.wait(key)
        under_way = {key.place for key in self._works}
        for passed in [other for other in self._sections if place is None or other <= place]:
            if passed not in under_way:
                del self._sections[passed]


# The description of process groups for the program's sums.
SUMS = "meshwright sums"
# The description of process groups for messages between stages.
MESSAGES = "meshwright messages"
_TAGS = count(1)


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Shape, strides and dtype of a dense tensor that is sent."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a new tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class Transport:
    """Sends, receives and collectives; every call returns at once with works to wait for.

    Ranks are those of the plan. If they are teams, each process communicates with the processes of the same index in
    the other teams (`teams`).
    """

    def __init__(self, program: Program, device: torch.device, grid: TeamPosition) -> None:
        self._device = device
        self._grid = grid
        # Messages of one session must not be received by another: all ranks open their sessions in the same order.
        self._tag = next(_TAGS)
        self._free: defaultdict[WireLayout, list[torch.Tensor]] = defaultdict(list)
        self._groups, self._later_groups = (_make_groups(program, grid, is_first=first) for first in (True, False))
        self._behind = Behind(device)
        self._ways = _make_ways(program, grid) if device.type != "cpu" else {}

    def send(self, tensors: Sequence[torch.Tensor], layouts: Sequence[WireLayout], target: int) -> list[dist.Work]:
        """Start to send tensors to a rank, in order. The works keep the tensors alive."""
        process, group = self._grid.process_of(target), self._ways.get((self._grid.rank, target))
        return [
            _work(dist.isend(_on_wire(item, layout), process, group=group, tag=self._tag))
            for item, layout in zip(tensors, layouts, strict=True)
        ]

    def receive(self, layouts: Sequence[WireLayout], source: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Start to receive tensors from a rank; return them, and the works after which they are filled."""
        tensors, process = [self._take(layout) for layout in layouts], self._grid.process_of(source)
        group = self._ways.get((source, self._grid.rank))
        works = [dist.irecv(_storage_order(item), process, group=group, tag=self._tag) for item in tensors]
        return tensors, [_work(work) for work in works]

    def recycle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Return received tensors to the buffer pool, after their last use."""
        for item in tensors:
            self._free[WireLayout(tuple(item.shape), item.stride(), item.dtype)].append(item)

    def sum_over(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[dist.Work]:
        """Start to sum a tensor in place over the ranks of a group (all-reduce)."""
        return [_work(dist.all_reduce(tensor, group=self._groups[ranks], async_op=True))]

    def sum_behind(self, before: Sequence[Work], tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[Work]:
        """As `sum_over`, but the all-reduce starts after the works ``before`` are done; does not block."""
        group = self._later_groups[ranks]
        return [self._behind.begin(before, lambda: _work(dist.all_reduce(tensor, group=group, async_op=True)))]

    def share(
        self, issue: Callable[[dist.ProcessGroup | None], dist.Work | None], ranks: tuple[int, ...]
    ) -> list[Work]:
        """Start any collective over the ranks of a group: ``issue(group)`` starts it and returns its work."""
        work = _work(issue(self._groups[ranks]))
        return [WaitedOnce(work) if self._device.type == "cpu" else work]

    def _take(self, layout: WireLayout) -> torch.Tensor:
        free = self._free[layout]
        return free.pop() if free else layout.empty(self._device)


def _make_groups(
    program: Program, grid: TeamPosition, *, is_first: bool
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """A process group for every set of ranks that sums; all processes make all groups, in the program's order.

    ``is_first``: for the first lanes of streams, else for the others, whose sums start after those.
    """
    in_lane = np.array([(stream.lane == 0) == is_first for stream in program.streams], np.bool_)
    reducing = {
        int(group)
        for _, section in program.sections()
        for group in section.group[
            np.isin(section.opcode, (Opcode.ALL_REDUCE, Opcode.REDUCE_SCATTER))
            & np.repeat(in_lane, np.diff(section.stream_offsets))
        ]
    }
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for index, ranks in enumerate(program.groups):
        if index not in reducing:
            continue
        groups[ranks] = None if is_first and len(ranks) == dist.get_world_size() else grid.new_group(ranks, SUMS)
    return groups


def _make_ways(program: Program, grid: TeamPosition) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A process group for each rank and one that it sends to; all processes make all, in the program's order.

    NCCL executes the operations of a group in order: two processes that send to each other before they receive would
    deadlock.
    """
    pairs = dict.fromkeys(
        program.groups[int(group)]
        for _, section in program.sections()
        for group in section.group[np.isin(section.opcode, SENDS)]
    )
    return {(source, target): grid.new_group((source, target), MESSAGES) for source, target in pairs}


def _on_wire(tensor: torch.Tensor, layout: WireLayout) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.stride() != layout.stride:
        tensor = layout.empty(tensor.device).copy_(tensor)
    return _storage_order(tensor)


def _storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as one flat, contiguous view."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "every rank takes part in what it issues"
    return work


class Behind:
    """Starts asynchronous operations after others have ended, in the order of the calls to `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._queue: SimpleQueue[_Following | None] | None = None

    def begin(self, before: Sequence[Work], issue: Callable[[], Work]) -> Work:
        """Start ``issue()`` after the operations ``before`` have ended; return its work."""
        if dist.get_backend() == "fake":
            return issue()
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)
            # A thread that waited for one of them already did so in the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for work in before:
                    work.wait()
                return issue()
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), name="behind", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        following = _Following(before, issue)
        self._queue.put(following)
        return following


class _Following:
    """Work of a thread: waits for others, then issues its own and waits for that."""

    def __init__(self, before: Sequence[Work], issue: Callable[[], Work]) -> None:
        self._before, self._issue = before, issue
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Issue the work and wait for it."""
        try:
            for work in self._before:
                work.wait()
            self._issue().wait()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait until the work is done. Raises its error, or the error of a work before it."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def _serve(queue: SimpleQueue[_Following | None]) -> None:
    while (following := queue.get()) is not None:
        following.run()
        # The thread keeps no references while it waits for the next work.
        del following
