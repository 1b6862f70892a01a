"""Heartbeats of ranks (`Watch`): a rank that hangs, stops or leaves the loop early is named, with its stack.

A thread of every rank writes what the rank does to the store of the process group, once per beat. A rank hangs if it
makes no progress for longer than the limit and does not wait for other ranks; its stack shows which of both. A rank
that waits reads what the others do, and reports those that

    do not answer     a signal stopped the process, its host is gone, or it holds Python's lock
    left the loop     they call `save` or have ended, but this rank is in a later step
    wait as all do    a link between them is cut

One rank reports and ends the run. It adds the instruction where each of the others waits, and the stack of the rank
that hangs: a signal has that process write it (Linux), and continues a stopped process for it. A rank that becomes
slower than the others (`Paces`) gets a note, and the run goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import linecache
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from meshwright.runtime import COMMUNICATION_TIMEOUT, Phase, Position, count_progress
from meshwright.spec import RunError, format_seconds

LEAST_LIMIT_S = 30.0
# The limit is this number times the slowest step.
SLOWEST_STEPS = 10
_BEAT_S = 1.0
# Ranks are compared after that time, if all have run some steps more.
PACE_S = 10.0
_PACE_STEPS = 5
# A rank lags if it has become slower by this factor than the median of the others.
_LAG = 1.5
# A rank that uses the processor for that share of its time may compute.
_BUSY = 0.2
# A waiting rank reads the states of that number of ranks per beat.
_READ_PER_BEAT = 64
_STACK_WAIT_S = 1.0
_SHOWN_FRAMES = 12
# Modules whose waits are for other ranks; the first frame outside of `threading` decides.
_WAITING = (
    "runtime/transport.py",
    "runtime/agreed.py",
    "runtime/bucket_sums.py",
    "runtime/replica_broadcast.py",
    "runtime/teams/team_operators.py",
    "training/losses.py",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
)
_ANOTHER_LIMIT = "--hang-after, or hang_after_s of `prepare`, sets another one."
_LIMITED = (Phase.READING, Phase.STEP)


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank did at its last beat.

    ``steps``: the number of steps that it has begun and left; ``computed_s``: their seconds without waits for others.
    ``idle_s``: seconds since it made progress. ``stacks``: the file descriptor to which it writes its stacks after a
    signal, -1 without one.
    """

    beat: int
    phase: str
    steps: int
    computed_s: float
    waits: bool
    idle_s: float
    doing: str
    host: str
    process: int
    stacks: int


def watch_rank(position: Position, limit_s: float | None) -> Watch | None:
    """Return a watch of this rank, in a group with a store; None for other groups. All ranks call it together.

    ``limit_s``: the limit for steps and for the script between them; None for the usual one, without one for the
    script. A rank that hangs ends the process, with a message on stderr. Raises RunError unless it is above 0.
    """
    if limit_s is not None and not limit_s > 0:
        raise RunError(f"hang_after_s={limit_s} was given; expected seconds above 0, or math.inf for no limit.")
    number = next(_NUMBERS)
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    store = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore):
        return None
    return Watch(position, limit_s, PrefixStore(f"meshwright/watch/{number}", store))


def end_process(message: str) -> None:
    """Print an error, and end this process with exit code 1, whatever its main thread does."""
    sys.stderr.write(f"meshwright: {message}\n")
    sys.stderr.flush()
    os._exit(1)


# The kind of a reported error.
HANG = "hang"
# Trainers of a process, in the order of their making, which is the same on all ranks.
_NUMBERS = itertools.count()
# Errors of gloo and NCCL after another rank has closed its connections.
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def is_connection_error(message: str) -> bool:
    """Return whether an error is probably a consequence of another rank's death or error."""
    return any(words in message for words in _LOST_CONNECTION)


@contextlib.contextmanager
def explained(watch: Watch | None) -> Iterator[None]:
    """Raise RunError instead of a connection error in the block, if it is known that another rank left the loop."""
    try:
        yield
    except RuntimeError as error:
        if watch is None or not is_connection_error(str(error)) or not (why := watch.explain_lost()):
            raise
        raise RunError(why) from error


class Watch:
    """Watches a rank, and the ranks that it waits for.

    ``limit_s``: the time without progress after which a rank hangs; None for `SLOWEST_STEPS` times the slowest step, at
    least `LEAST_LIMIT_S`, and no limit for the script between two steps. ``store`` is common to all ranks. ``report``
    receives the text of an error; it ends the process.
    """

    def __init__(self, position: Position, limit_s: float | None, store: Store) -> None:
        self.report: Callable[[str], None] = end_process
        self._position, self._limit_s, self._store = position, limit_s, store
        self._limited = _LIMITED if limit_s is None else (*_LIMITED, Phase.BETWEEN)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._beat_s = min(_BEAT_S, (limit_s or LEAST_LIMIT_S) / 4)
        self._main = threading.main_thread().ident
        # Beats measure the time, so that a suspended machine has not hung.
        self._clock_s, self._last_s = 0.0, time.monotonic()
        self._count, self._since_s, self._since_used_s, self._beats = -1, 0.0, 0.0, 0
        # For each rank the number of its last known beat, and when it was first read.
        self._heard: dict[int, tuple[int, float]] = {}
        self._stacks, self._paces, self._remarked = _open_stacks(), Paces(), -1
        self._lock, self._over = threading.Lock(), threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._follow, name="meshwright-watch", daemon=True)
        self._thread.start()

    @property
    def limit_s(self) -> float:
        """The time without progress after which a rank hangs, in seconds."""
        return self._limit_s or max(LEAST_LIMIT_S, SLOWEST_STEPS * self._position.slowest_s)

    def stop(self) -> None:
        """End the thread, and write that the rank has ended."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join(timeout=2 * _BEAT_S)
            has_failed = getattr(sys, "last_value", None) is not None
            self._position.enter(Phase.FAILED if has_failed else Phase.ENDED, self._position.step)
            with contextlib.suppress(RuntimeError), self._lock:
                self._write()

    def explain_lost(self) -> str:
        """Return why another rank closed its connections while this one waited, if it left the loop; else ""."""
        deadline = time.monotonic() + 2 * self._beat_s
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError), self._lock:
                if left := self._find_left(self._read()):
                    return left
            time.sleep(self._beat_s / 10)
        return ""

    def _follow(self) -> None:
        # The store ends with the launcher.
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(self._beat_s):
                with self._lock:
                    self._beat()

    def _beat(self) -> None:
        state = self._write()
        if not state.waits:
            if self._may_compute(state):
                pass
            elif state.idle_s > self.limit_s and self._position.phase is Phase.BETWEEN and self._limit_s is None:
                self._remark(state)
            elif state.idle_s > self.limit_s and self._position.phase in self._limited and self._claim():
                own = f"Rank {self._rank} hangs: it {state.doing}, without progress for {_shown(state.idle_s)}."
                self.report(self._compose(own, [self._rank], self._read()) + _own_stacks())
        elif state.idle_s > 2 * self._beat_s and self._beats % max(1, self._num_ranks // _READ_PER_BEAT) == 0:
            self._look_at_others(state)
        if self._rank == 0 and self._num_ranks > 1 and self._paces.are_due():
            every = {0: state, **self._read()}
            if len(every) == self._num_ranks and (said := self._paces.compare(every)):
                sys.stderr.write(f"meshwright: {said}\n")
                sys.stderr.flush()

    def _may_compute(self, own: RankState) -> bool:
        """Whether the rank seems to compute its first step: it uses the processor, and no limit is given."""
        is_first = not self._position.has_stepped and self._position.phase is Phase.STEP and self._limit_s is None
        used_s = time.process_time() - self._since_used_s
        return is_first and used_s > _BUSY * own.idle_s and own.idle_s < COMMUNICATION_TIMEOUT.total_seconds()

    def _remark(self, own: RankState) -> None:
        """Say once that others wait for this rank while it is in the script, which has no limit."""
        others = self._read()
        waiting = any(state.waits and state.phase == Phase.STEP.name for state in others.values())
        if waiting and self._remarked != own.steps:
            self._remarked = own.steps
            said = f"Rank {self._rank} {own.doing}, without a step for {_shown(own.idle_s)}."
            said = f"{self._compose(said, [self._rank], others)}{_own_stacks()}"
            sys.stderr.write(f"meshwright: {said}The run goes on: give hang_after_s to end it.\n")
            sys.stderr.flush()

    def _write(self) -> RankState:
        position, now_s = self._position, time.monotonic()
        self._clock_s += min(now_s - self._last_s, 2 * self._beat_s)
        self._last_s = now_s
        # A process may have several trainers, of which one is idle.
        count = count_progress()
        if count != self._count:
            self._count, self._since_s, self._since_used_s = count, self._clock_s, time.process_time()
        self._beats += 1
        frame = sys._current_frames().get(self._main or 0)
        state = RankState(
            beat=self._beats,
            phase=position.phase.name,
            steps=position.step,
            computed_s=position.computed_s,
            waits=frame is not None and _waits(frame),
            idle_s=self._clock_s - self._since_s,
            doing=position.describe(),
            host=socket.gethostname(),
            process=os.getpid(),
            stacks=self._stacks,
        )
        self._store.set(str(self._rank), json.dumps(asdict(state)))
        return state

    def _read(self) -> dict[int, RankState]:
        """The states of the other ranks that have written one."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank and self._store.check([str(rank)])]
        texts = self._store.multi_get([str(rank) for rank in others]) if others else []
        return {rank: RankState(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}

    def _look_at_others(self, own: RankState) -> None:
        others, now = self._read(), self._clock_s
        for rank, state in others.items():
            if self._heard.get(rank, (0, 0.0))[0] != state.beat:
                self._heard[rank] = state.beat, now
        if (left := self._find_left(others)) and self._claim():
            self.report(left)
        limit = self.limit_s
        silent = [rank for rank in others if now - self._heard[rank][1] > limit]
        if silent and self._claim():
            found = {rank: _find_stop(others[rank]) for rank in silent}
            named = " ".join(f"Rank {rank} has not answered for {_shown(limit)}{found[rank]}." for rank in silent)
            self.report(self._compose(named, silent, others) + _stacks_of(silent, others))
        # In the first step a slow link may need any time.
        may_wait = self._limit_s is not None or self._position.has_stepped
        in_step = {own.phase, *(item.phase for item in others.values())} == {Phase.STEP.name}
        all_wait = len(others) == self._num_ranks - 1 and all(item.waits for item in others.values())
        all_wait = all_wait and may_wait and in_step
        if all_wait and min(own.idle_s, *(item.idle_s for item in others.values())) > limit and self._claim():
            said = f"All ranks wait for each other for {_shown(limit)}: a link between them is cut, or it is too slow."
            self.report(self._compose(said, [], others))

    def _find_left(self, others: Mapping[int, RankState]) -> str:
        """What to say of ranks that left the loop, while this one is in a later step; else ""."""
        if self._position.phase is not Phase.STEP:
            return ""
        failed = [f"Rank {rank} {state.doing}" for rank, state in others.items() if state.phase == Phase.FAILED.name]
        if failed:
            return f"{', '.join(failed)}; its own error says why."
        step, gone = self._position.step, (Phase.CALL.name, Phase.ENDED.name)
        left = [rank for rank, state in others.items() if state.phase in gone and state.steps <= step]
        if not left:
            return ""
        named = "".join(f"Rank {rank} {others[rank].doing}, " for rank in left)
        return (
            f"{named}but rank {self._rank} is in step {step + 1}. All ranks must run the same steps and make the same "
            "calls: give every rank the same number of batches (DataLoader: drop_last=True), or end the loops at a "
            "number of steps."
        )

    def _claim(self) -> bool:
        """Whether this rank is the one that reports."""
        mine = str(self._rank)
        return self._store.compare_set("reporting", "", mine).decode() == mine

    def _compose(self, what: str, blamed: Sequence[int], others: Mapping[int, RankState]) -> str:
        doing = {rank: state.doing for rank, state in others.items()} | {self._rank: self._position.describe()}
        waiting = [f"rank {rank} {said}" for rank, said in sorted(doing.items()) if rank not in blamed]
        rest = len(waiting) - _SHOWN_FRAMES
        shown = "; ".join(waiting[:_SHOWN_FRAMES]) + (f"; and {rest} more" if rest > 0 else "")
        limit = f"The limit is {_shown(self.limit_s)}" + (
            "." if self._limit_s else f" ({SLOWEST_STEPS} times the slowest step, at least {_shown(LEAST_LIMIT_S)})."
        )
        parts = [what, *([f"Meanwhile {shown}."] if waiting else []), limit, _ANOTHER_LIMIT]
        return " ".join(parts) + "\n"


class Paces:
    """The seconds that each rank computes per step, in windows of `PACE_S`; finds ranks that become slower.

    The first window is the reference of a rank, as stages may differ in their work.
    """

    def __init__(self) -> None:
        self._next_s = time.monotonic() + PACE_S
        self._first: dict[int, float] = {}
        self._before: Mapping[int, RankState] = {}
        self._suspected: tuple[int, ...] = ()
        self._named: set[int] = set()

    def are_due(self) -> bool:
        """Whether a window has passed."""
        return time.monotonic() >= self._next_s

    def compare(self, states: Mapping[int, RankState]) -> str:
        """Return what to say of ranks that lag in two windows in a row, unless it was said before; else ""."""
        before, self._next_s = self._before, time.monotonic() + PACE_S
        if any(state.steps < (before[rank].steps + _PACE_STEPS if before else 2) for rank, state in states.items()):
            return ""
        self._before = states
        if not before:
            return ""
        now = {
            rank: (state.computed_s - before[rank].computed_s) / (state.steps - before[rank].steps)
            for rank, state in states.items()
        }
        self._first = self._first or now
        growth = {rank: now[rank] / max(self._first[rank], 1e-9) for rank in states}
        others = {rank: float(np.median([growth[other] for other in states if other != rank])) for rank in states}
        lagging = tuple(rank for rank in states if growth[rank] > _LAG * others[rank])
        new = [rank for rank in lagging if rank in self._suspected and rank not in self._named]
        self._suspected = lagging
        self._named = self._named.intersection(lagging).union(new)
        return " ".join(
            f"Rank {rank} lags: it computes {growth[rank]:.1f} times as long per step as in its first steps, and the "
            f"others {others[rank]:.1f} times."
            for rank in new
        )


def _shown(seconds: float) -> str:
    return format_seconds(round(seconds, 1))


def _waits(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits for other ranks."""
    names = [item.f_code.co_filename.replace(os.sep, "/") for item in _outwards(frame)]
    outside = [name for name in names if not name.endswith(("/threading.py", "/torch/_ops.py"))]
    # Some functions of torch.distributed are wrapped by others of it.
    return any(name.endswith(_WAITING) for name in outside[:2])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


_STACKS = "meshwright-stacks"


def _own_stacks() -> str:
    """The stacks of the main thread and of the threads that read data, innermost frame last."""
    frames, shown = sys._current_frames(), []
    for thread in threading.enumerate():
        is_main = thread is threading.main_thread()
        if thread.ident in frames and (is_main or thread.name.startswith("meshwright-producer")):
            linecache.checkcache()
            lines = traceback.format_stack(frames[thread.ident])[-_SHOWN_FRAMES:]
            shown.append(f"Stack of {'the main thread' if is_main else thread.name}:\n{''.join(lines)}")
    return "".join(shown)


# The signal after which a rank writes its stacks; the first real-time signals are those of the C library.
_STACK_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None


@cache
def _open_stacks() -> int:
    """Have this process write its stacks to a file in memory after a signal; return the file's descriptor, or -1."""
    if sys.platform != "linux" or _STACK_SIGNAL is None:
        return -1
    descriptor = os.memfd_create(_STACKS)
    faulthandler.register(_STACK_SIGNAL, file=descriptor, all_threads=True)
    return descriptor


def _stacks_of(ranks: Sequence[int], others: Mapping[int, RankState]) -> str:
    """The stacks of processes on this host that do not answer; "" if they cannot be had."""
    said = ""
    for rank in ranks:
        state = others[rank]
        if state.host != socket.gethostname() or state.stacks < 0 or _STACK_SIGNAL is None:
            continue
        with contextlib.suppress(OSError):
            file, deadline = Path(f"/proc/{state.process}/fd/{state.stacks}"), time.monotonic() + _STACK_WAIT_S
            # The number may belong to another process by now, or on a host of the same name.
            if _STACKS not in str(file.readlink()):
                continue
            os.kill(state.process, _STACK_SIGNAL)
            os.kill(state.process, signal.SIGCONT)
            found, before = file.read_text(), None
            while (not found or found != before) and time.monotonic() < deadline:
                time.sleep(_STACK_WAIT_S / 10)
                found, before = file.read_text(), found
            # One paragraph per thread.
            shown = [part for part in found.strip().split("\n\n") if __file__ not in part]
            said += "\n".join([f"Stacks of rank {rank}:", *shown, ""])
    return said


def _find_stop(state: RankState) -> str:
    """How a process that does not answer was stopped, as the end of a sentence; "" if that is not known."""
    where = f", on host {state.host}, process {state.process}"
    if state.host != socket.gethostname():
        return where
    try:
        status = Path(f"/proc/{state.process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"{where}, which no longer runs"
    return ": a signal stopped its process (SIGSTOP, SIGTSTP)" if status in "Tt" else where
