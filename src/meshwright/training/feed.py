"""Data sets under a plan (`Feed`): every rank loads the microbatches that its own stages read.

The order of samples is that of the data set, or a permutation drawn from (seed, epoch). With G samples in a global
batch and S in a microbatch, sample k of an epoch is in global batch k // G, there in microbatch (k mod G) // S, for any
number of ranks. From a map-style data set a rank reads only the samples of its own microbatches. An iterable data set
is read by every rank from end to end; the rank drops the samples of other ranks.

    producers   threads that fetch samples, collate them, and move microbatches to the device
    depth       the number of microbatches that may be loaded ahead of the forwards (`program.build` has the same
                queue); at this number, producers wait
    failure     an error of the data set is raised at the wait for its microbatch, and reading stops

`check_same_batch` and `check_same` compare what all ranks have read. `measure_batches_here` does not use a `Feed`: it
times inference batches of a model on a device of this machine.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, default_collate

from meshwright.host import Host, name_gpu, processor_name
from meshwright.measurement import BATCH_CONDITIONS, measure_batches, merge_measurements
from meshwright.runtime.prefetch import Prefetched
from meshwright.runtime.session import to_device
from meshwright.spec import (
    EventSink,
    Loader,
    MeasurementError,
    Measurements,
    ModelReferenceError,
    Placement,
    Plan,
    PlanError,
    RunError,
    name_model,
)
from meshwright.training.job import tile
from meshwright.training.step_measuring import Sizes
from meshwright.zoo import ModelSource, load_model


def measure_batches_here(
    reference: str,
    batch_sizes: Sequence[int],
    *,
    sizes: Sizes = (),
    device: str | None = None,
    repeats: int = 100,
    budget_s: float = 60.0,
    known: Measurements | None = None,
    events: EventSink | None = None,
) -> Measurements:
    """Time the model's inference on batches of each size, on one device of this host; return a table of these times.

    ``reference`` names the model, ``sizes`` its size options. ``device`` is ``cpu`` or ``cuda:N``; by default the first
    GPU if torch sees one. A CPU computes with one thread, because the device kind ``cpu`` is one core. ``known``: the
    table to which the caller will add the rows, to check its device before anything is timed.

    Raises MeasurementError for a device that torch does not see or that is not the table's, for invalid sizes and for
    errors of the model while it runs; and the errors of loading the model.
    """
    place = _choose_device(device)
    name = name_model(reference, sizes)
    kind, hardware = _describe(place)
    empty = Measurements(
        device=kind,
        software=f"torch {torch.__version__}, Python {platform.python_version()}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        conditions=f"{BATCH_CONDITIONS}{name}: {hardware}, one process, one thread",
    )
    if known is not None:
        merge_measurements(known, empty)
    source = _load(reference, max(batch_sizes, default=1), sizes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = measure_batches(
            source.model,
            _sliced(source),
            batch_sizes,
            name=name,
            device=place,
            repeats=repeats,
            budget_s=budget_s,
            events=events,
        )
    finally:
        torch.set_num_threads(threads)
    return replace(empty, batches=rows)


def _choose_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    chosen = "cuda:0" if device == "cuda" else device
    if chosen not in here:
        raise MeasurementError(
            f"Device {device!r} was given to time batches on; torch sees {', '.join(here)} here. Give one of these."
        )
    return torch.device(chosen)


def _describe(place: torch.device) -> tuple[str, str]:
    """The device kind, and the device's name in this machine."""
    if place.type == "cpu":
        return "cpu", processor_name(Host())
    name = torch.cuda.get_device_name(place)
    return name_gpu(name), name


def _load(reference: str, batch_size: int, sizes: Sizes) -> ModelSource:
    """The model with an example of the largest batch; with its own example, if its function takes no batch size."""
    options: dict[str, Any] = dict(sizes)
    try:
        return load_model(reference, batch_size=batch_size, **options)
    except ModelReferenceError:
        # Any other error would occur without a batch size, too.
        return load_model(reference, **options)


def _sliced(source: ModelSource) -> Callable[[int], Any]:
    """Batches of any size from the samples of the example, repeated if there are too few."""

    def first(tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor[:count] if tensor.ndim and len(tensor) >= count else tile(tensor, count)

    return lambda count: pytree.tree_map_only(torch.Tensor, lambda item: first(item, count), source.inputs)


# A producer that is asked to stop does so after the sample that it is fetching.
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A data set, and the way to read it.

    Args:
        dataset: map-style (``len`` and ``[index]``) or iterable (``iter``); a sample is ``(inputs, targets)``, or
            inputs alone if the model returns its loss.
        shuffle: draw a new order for every epoch; map-style only.
        seed: the seed of that order.
        epochs: how often the data set is read.
        producers: number of threads that load microbatches; the data set must allow this number of readers at once.
        depth: number of microbatches that may be prefetched.
        collate: makes a batch from a list of samples; by default torch's default_collate.
        drop_last: leave out samples at the end of an epoch that do not fill a global batch. If False, these samples
            are a shorter step; they have to be whole microbatches.

    Raises RunError for values out of range, and for a data set that cannot be read in this way.
    """

    dataset: Any
    shuffle: bool = False
    seed: int = 0
    epochs: int = 1
    producers: int = 1
    depth: int = 2
    collate: Callable[[list[Any]], Any] = default_collate
    drop_last: bool = True

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("producers", 1), ("depth", 1)):
            if getattr(self, name) < least:
                raise RunError(f"A feed with {name} = {getattr(self, name)} was given; expected {least} or more.")
        if self.is_iterable and self.shuffle:
            raise RunError(
                f"{type(self.dataset).__name__} is an iterable data set, which Feed(shuffle=True) cannot shuffle. "
                "Shuffle in the data set, by a seed that is equal on all ranks, or give a map-style data set."
            )
        if not self.is_iterable and not (hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__")):
            raise RunError(
                f"A data set of type {type(self.dataset).__name__} was given; expected a data set with `len` and "
                "`[index]`, or one to iterate over."
            )
        if self.is_iterable and self.epochs > 1 and isinstance(self.dataset, Iterator):
            raise RunError(
                f"{type(self.dataset).__name__} is an iterator, which can be read once, but {self.epochs} epochs were "
                "given. Give a data set whose `__iter__` starts from the beginning, or one epoch."
            )

    @property
    def is_iterable(self) -> bool:
        """Whether the data set is iterable, and so read from end to end."""
        is_map = hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__")
        return isinstance(self.dataset, IterableDataset) or (hasattr(self.dataset, "__iter__") and not is_map)

    def describe(self) -> str:
        """Return the settings as text, to check that they are equal on all ranks."""
        size = "iterable" if self.is_iterable else len(self.dataset)
        return f"{type(self.dataset).__name__} {size} {self.shuffle} {self.seed} {self.epochs} {self.drop_last}"

    def describe_order(self) -> str:
        """Return the size and order of the data set as text, which a resumed run must have, too."""
        size = "iterable" if self.is_iterable else f"of {len(self.dataset)} samples"
        return f"{size}, {f'shuffled by seed {self.seed}' if self.shuffle else 'in its order'}"

    def order(self, epoch: int) -> Sequence[int]:
        """Return the indices of the samples of an epoch (from 0), in the order of reading."""
        count = len(self.dataset)
        if not self.shuffle:
            return range(count)
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def batches(
        self, global_batch: int, microbatch: int, own: Callable[[int], bool], first: int = 0
    ) -> Iterator[Batch]:
        """Yield global batches from number ``first`` on.

        ``global_batch`` and ``microbatch`` are numbers of samples. ``own(m)``: whether this rank reads microbatch m of
        a batch. Raises RunError if an epoch ends with a part of a microbatch and ``drop_last`` is False, or if the data
        set has too few samples for any step.
        """
        num_batches = 0
        for epoch in range(self.epochs):
            samples: Iterator[Any] = iter(self.dataset) if self.is_iterable else iter(self.order(epoch))
            while True:
                fetched: dict[int, list[Any]] = {}
                count = 0
                for place, sample in enumerate(itertools.islice(samples, global_batch)):
                    if own(place // microbatch):
                        fetched.setdefault(place // microbatch, []).append(sample)
                    count = place + 1
                whole, rest = divmod(count, microbatch)
                if count < global_batch and (self.drop_last or not count):
                    if not num_batches:
                        raise RunError(
                            f"The data set has {count} samples, fewer than a global batch of {global_batch}, so no "
                            "step can be trained. Give more samples, plan for smaller batches, or give "
                            "`drop_last=False`."
                        )
                    break
                num_batches += 1
                if rest:
                    raise RunError(
                        f"Epoch {epoch} ends with a batch of {count} samples, which are {whole} microbatches of "
                        f"{microbatch} and {rest} samples more. Give `drop_last=True`, or a data set of a multiple of "
                        f"{microbatch}."
                    )
                if first:
                    first -= 1
                    continue
                yield Batch(whole, {index: self._fetch(items) for index, items in fetched.items()})

    def _fetch(self, items: list[Any]) -> Callable[[], list[Any]]:
        if self.is_iterable:
            return lambda: items
        return lambda: [self.dataset[index] for index in items]


SAME_BATCHES = (
    "Every rank must read the same global batches: seed the shuffling alike on all ranks (torch.manual_seed, or "
    "DataLoader's generator) and use no DistributedSampler."
)


class Batch(NamedTuple):
    """A global batch: its number of microbatches, and for each own microbatch a function that fetches its samples."""

    num_microbatches: int
    fetch: Mapping[int, Callable[[], list[Any]]]


class _Ticket(NamedTuple):
    batch: int
    microbatch: int
    fetch: Callable[[], list[Any]]


class MicrobatchQueue:
    """Prefetches the microbatches of global batches, in several threads.

    ``make(samples)`` collates a microbatch and moves it to the device. ``producers`` is the number of threads,
    ``depth`` the number of microbatches that may be loaded ahead.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        make: Callable[[list[Any]], tuple[torch.Tensor, ...]],
        *,
        producers: int,
        depth: int,
    ) -> None:
        self._batches, self._make, self._depth = batches, make, depth
        self._changed = threading.Condition()
        self._counts: deque[int] = deque()
        self._tickets: deque[_Ticket] = deque()
        self._made: dict[tuple[int, int], Prefetched | BaseException] = {}
        self._num_read = self._num_begun = self._num_taken = 0
        self._taken: set[tuple[int, int]] = set()
        self._making: set[tuple[int, int]] = set()
        self._failure: BaseException | None = None
        self._is_reading = self._is_over = self._is_closed = self._makes_some = False
        self._threads = [
            threading.Thread(target=self._produce, name=f"meshwright-producer-{index}", daemon=True)
            for index in range(producers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> MicrobatchQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_ahead(self) -> int:
        """The number of microbatches whose loading was started and that were not taken yet."""
        return self._num_begun - self._num_taken

    def next_batch(self) -> int | None:
        """Return the number of microbatches in the next global batch; None after the last batch.

        Raises RunError if the data set fails.
        """
        with self._changed:
            while not self._counts and not self._is_over:
                self._read()
            if self._failure is not None and not self._counts:
                raise _failed("reading it", self._failure)
            return self._counts.popleft() if self._counts else None

    def take(self, batch: int, microbatch: int) -> Prefetched:
        """Wait for a microbatch of this rank, and return it. Raises RunError if the data set fails."""
        key = batch, microbatch
        with self._changed:
            if key not in self._taken:
                self._taken.add(key)
                self._num_taken += 1
                # An awaited microbatch is made next, whatever is ahead: schedules may have an order of their own.
                awaited = next((ticket for ticket in self._tickets if (ticket.batch, ticket.microbatch) == key), None)
                if awaited is not None:
                    self._tickets.remove(awaited)
                    self._tickets.appendleft(awaited)
                self._changed.notify_all()
            while key not in self._made:
                is_coming = key in self._making or any((t.batch, t.microbatch) == key for t in self._tickets)
                if self._is_closed or (self._failure is not None and not is_coming):
                    raise _failed(f"microbatch {microbatch} of batch {batch}", self._failure)
                self._changed.wait()
            made = self._made[key]
            if isinstance(made, BaseException):
                raise _failed(f"microbatch {microbatch} of batch {batch}", made)
            return made

    def forget(self, before: int) -> None:
        """Drop the microbatches of all batches before number ``before``."""
        with self._changed:
            self._made = {key: made for key, made in self._made.items() if key[0] >= before}
            self._taken = {key for key in self._taken if key[0] >= before}

    def close(self) -> None:
        """Stop the producer threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _read(self) -> None:
        """Read the next global batch, or wait while another thread does. The lock is held, but not during reading."""
        if self._is_reading:
            self._changed.wait()
            return
        self._is_reading = True
        found: Batch | None = None
        self._changed.release()
        try:
            found = next(self._batches, None)
        except BaseException as error:
            self._failure = error
        finally:
            self._changed.acquire()
            self._is_reading = False
        if found is None:
            self._is_over = True
        else:
            self._makes_some |= bool(found.fetch)
            self._counts.append(found.num_microbatches)
            self._tickets.extend(_Ticket(self._num_read, m, fetch) for m, fetch in sorted(found.fetch.items()))
            self._num_read += 1
        self._changed.notify_all()

    def _next_ticket(self) -> _Ticket | None:
        """The next microbatch to make, as soon as there is room; None at the end. The lock is held."""
        while not self._is_closed:
            first = (self._tickets[0].batch, self._tickets[0].microbatch) if self._tickets else None
            if self._num_begun < self._num_taken + self._depth or first in self._taken:
                # Ranks that make nothing find no tickets; they read on when they reach a batch.
                if not self._tickets and not self._is_over and (self._makes_some or not self._counts):
                    self._read()
                    continue  # others may have taken the room
                if self._tickets:
                    self._num_begun += 1
                    ticket = self._tickets.popleft()
                    self._making.add((ticket.batch, ticket.microbatch))
                    return ticket
                if self._is_over:
                    return None
            self._changed.wait()
        return None

    def _produce(self) -> None:
        while True:
            with self._changed:
                ticket = self._next_ticket()
            if ticket is None:
                return
            start = time.perf_counter_ns()
            found: Prefetched | BaseException
            try:
                tensors = self._make(ticket.fetch())
                found = Prefetched(tensors, start, time.perf_counter_ns())
            except BaseException as error:
                found = error
            with self._changed:
                self._made[ticket.batch, ticket.microbatch] = found
                self._making.discard((ticket.batch, ticket.microbatch))
                if isinstance(found, BaseException):
                    self._failure, self._is_over = found, True
                    self._tickets.clear()
                self._changed.notify_all()


def _failed(what: str, error: BaseException | None) -> RunError:
    if error is None:
        return RunError(f"The feed was closed before {what} was made. Take microbatches before it is closed.")
    if isinstance(error, PlanError | RunError):
        return RunError(str(error))
    failed = RunError(f"The data set failed at {what}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def check_same_batch(tensors: Iterable[torch.Tensor]) -> None:
    """Raise RunError unless ``tensors`` are the same batch on all ranks. All ranks call it together."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    check_same("read another first batch than rank 0", digest.hexdigest())


def check_same(what: str, own: str) -> None:
    """Raise RunError unless ``own`` is the same text on all ranks; ``what`` says in the message what differs.

    All ranks call it together.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    different = [rank for rank, other in enumerate(gathered) if other != gathered[0]]
    if different:
        raise RunError(f"Ranks {', '.join(map(str, different))} {what}. {SAME_BATCHES}")


def agree_on_end(own: int | None, step: int) -> int | None:
    """Return the number of microbatches of the next batch, None if the data set of a rank has ended before it.

    ``own``: this rank's number, None if its data set has ended. ``step``: the number of completed steps. All ranks call
    it together; if only some data sets have ended, rank 0 warns.
    """
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    counts[dist.get_rank()] = own or 0
    dist.all_reduce(counts)
    if len(set(counts.tolist())) == 1:
        return own
    ended = [rank for rank, count in enumerate(counts.tolist()) if count == counts.min()]
    if dist.get_rank() == 0:
        warnings.warn(
            f"The data set of rank {', '.join(map(str, ended))} has ended after {step} steps, and the others have "
            "more: training ends here. Give all ranks the same samples.",
            stacklevel=3,
        )
    return None


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets from the result of `collate`: a pair, or inputs alone with targets ``()``."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
        return inputs, targets
    return batch, ()


def load_to(tensors: Iterable[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tensors on a device. A GPU copies them on a separate stream; they are complete on return."""
    if device.type != "cuda":
        return to_device(tensors, device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        moved = to_device(tensors, device)
    # The producer waits, not the device: the tensors are complete when they are taken.
    stream.synchronize()
    return moved


def with_loader(plan: Plan | Placement, feed: Feed) -> Plan | Placement:
    """Return the plan with instructions to load microbatches, ``feed.depth`` ahead.

    Unchanged if the plan has a loader already, or for a placement or an asynchronous schedule.
    """
    if isinstance(plan, Placement) or plan.is_asynchronous or plan.workload.loader is not None:
        return plan
    return replace(plan, workload=replace(plan.workload, loader=Loader(seconds_per_sample=0.0, depth=feed.depth)))


def first_samples(batch: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    """Return the first ``count`` samples of an example batch, or all if it has fewer."""
    leaves, spec = pytree.tree_flatten(batch)
    cut = [item[:count] if isinstance(item, torch.Tensor) and item.ndim else item for item in leaves]
    inputs, targets = pytree.tree_unflatten(cut, spec)
    return inputs, targets
