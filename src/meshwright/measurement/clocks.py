"""Clocks: times on a device to which the host issues work (`CudaClock`), and host times op by op (`SegmentRunner`).

`CudaClock` measures the time of the device, and separately that of the host:

    time     seconds of a call on the device: calls are captured in a CUDA graph, which excludes the host's time, and
             the graph is replayed between two events. Some calls cannot be captured: they read a value of the device,
             or the sizes of their outputs depend on values. They run between two events after a kernel that only
             waits, so that they have been issued before the device starts them
    step     the same with events only, and the seconds in which the host issues the call

Everything, also preparation, runs on one stream other than the default stream, because autograd runs a backward on the
stream of its forward, and a graph captures one stream.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from meshwright.measurement.segments import Segment

_TRIVIAL_NODES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOverhead:
    """Nanoseconds that the measurement itself adds to one op's forward, and to one autograd node of a backward."""

    forward_ns: float
    backward_ns: float


# Around one op of a forward: two readings in a row. At one autograd node of a backward: a backward through a chain of
# views with and without hooks.
@cache
def clock_overhead() -> ClockOverhead:
    """Return the overhead of reading the clock, measured on trivial ops, once per process."""
    samples = []
    for _ in range(200):
        start = time.perf_counter_ns()
        middle = time.perf_counter_ns()
        samples.append(time.perf_counter_ns() - middle + middle - start)
    differences = []
    for _ in range(15):
        plain, hooked = _trivial_backward(hooked=False), _trivial_backward(hooked=True)
        differences.append(hooked - plain)
    return ClockOverhead(
        forward_ns=statistics.median(samples), backward_ns=max(statistics.median(differences) / _TRIVIAL_NODES, 0.0)
    )


def _trivial_backward(*, hooked: bool) -> int:
    """Nanoseconds of a backward through a chain of views of one small tensor."""
    leaf = torch.zeros(16, requires_grad=True)
    stamps: list[int] = []
    order: list[int] = []
    value = leaf
    for index in range(_TRIVIAL_NODES):
        value = value.view(16)
        if hooked:
            assert value.grad_fn is not None
            value.grad_fn.register_hook(stamp_hook(index, stamps, order))
    seed = torch.ones(16)
    start = time.perf_counter_ns()
    torch.autograd.backward([value], [seed])
    return time.perf_counter_ns() - start


def stamp_hook(index: int, stamps: list[int], order: list[int]) -> Callable[..., None]:
    """Return a hook for an autograd node, which appends the time (ns) to ``stamps`` and ``index`` to ``order``."""

    def hook(*_: Any) -> None:
        stamps.append(time.perf_counter_ns())
        order.append(index)

    return hook


_ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, slots=True)
class _Step:
    node: fx.Node
    slot: int
    dying: tuple[fx.Node, ...]


# Forward node by node, backward by autograd's hooks. Forward of an op = its call and the release of values that it
# reads last, as in the code that fx generates. Backward of an op = the time from one autograd node's end to the next
# one's, summed over the nodes that the op created; the gaps cover the whole backward, so nothing is lost between them.
# A parameter's AccumulateGrad belongs to the op that uses it first. The cost of the clock itself is measured
# (`clock_overhead`) and subtracted.
class SegmentRunner:
    """A runner that times a segment (part of a model), as a whole or op by op.

    ``names``: the timed ops; element i of every array of results belongs to ``names[i]``.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.names = tuple(segment.keys)
        self._steps = self._plan_steps()
        self._seeds: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._hooks: list[tuple[Any, int]] = []

    def clear_gradients(self) -> None:
        """Set all gradients of parameters and inputs to None, as after an optimizer step."""
        for tensor in (*self._segment.module.parameters(), *self._segment.feeds):
            tensor.grad = None

    def forward(self) -> float:
        """Run the forward as a whole and return its seconds."""
        with torch.set_grad_enabled(self._segment.training):
            start = time.perf_counter_ns()
            results = self._segment.module(*self._segment.feeds)
            seconds = (time.perf_counter_ns() - start) / 1e9
        self._keep(results)
        return seconds

    def backward(self) -> float:
        """Run the backward of the last forward as a whole and return its seconds; 0 if it has no backward."""
        results, self._results = self._results, []
        if not results:
            return 0.0
        start = time.perf_counter_ns()
        torch.autograd.backward(results, self._seeds)
        return (time.perf_counter_ns() - start) / 1e9

    def timed_forward(self) -> NDArray[np.float64]:
        """Run the forward op by op and return the seconds of each op, shape (ops,).

        The next backward must be `timed_backward`.
        """
        overhead_ns = clock_overhead().forward_ns
        elapsed = np.zeros(len(self.names))
        env: dict[fx.Node, Any] = {}
        feeds = iter(self._segment.feeds)
        roots: list[tuple[Any, int]] = []
        results: Sequence[torch.Tensor] = ()
        with torch.set_grad_enabled(self._segment.training):
            for step in self._steps:
                node = step.node
                if node.op == "placeholder":
                    env[node] = next(feeds)
                elif node.op == "output":
                    results = _look_up(node.args[0], env)
                else:
                    nanoseconds = self._timed_call(step, env, roots) - overhead_ns
                    elapsed[step.slot] += max(nanoseconds, 0.0) / 1e9
        env.clear()
        self._keep(results)
        self._hooks = _created_nodes(roots)
        return elapsed

    def timed_backward(self, *, after_start: bool = False) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Run the backward and return its seconds for each op, and those of accumulating gradients, shape (ops,) each.

        The clock is read at every autograd node; the latter seconds (AccumulateGrad) are part of the former.
        ``after_start``: count from the start of the first node, not from the call of the backward; on a GPU, nodes run
        in another thread.
        """
        total, accumulate = np.zeros(len(self.names)), np.zeros(len(self.names))
        hooks, self._hooks = self._hooks, []
        results, self._results = self._results, []
        if not results:
            return total, accumulate
        overhead_ns = clock_overhead().backward_ns
        stamps: list[int] = []
        order: list[int] = []
        for index, (node, _) in enumerate(hooks):
            node.register_hook(stamp_hook(index, stamps, order))
        begun: list[int] = []
        if after_start:
            for root in {item.grad_fn for item in results if item.grad_fn is not None}:
                root.register_prehook(lambda _gradients: begun.append(time.perf_counter_ns()))
        start = time.perf_counter_ns()
        torch.autograd.backward(results, self._seeds)
        start = begun[0] if begun else start
        gaps = np.diff(np.array([start, *stamps], np.float64)) - overhead_ns
        for index, gap in zip(order, np.maximum(gaps, 0.0) / 1e9, strict=True):
            node, slot = hooks[index]
            total[slot] += gap
            if node.name() == _ACCUMULATE:
                accumulate[slot] += gap
        return total, accumulate

    def _timed_call(self, step: _Step, env: dict[fx.Node, Any], roots: list[tuple[Any, int]]) -> int:
        """Call one node; return nanoseconds of the call and of releasing values after their last use."""
        node = step.node
        target = _callable(self._segment.module, node)
        args, kwargs = _look_up(node.args, env), _look_up(node.kwargs, env)
        start = time.perf_counter_ns()
        value = target(*args, **kwargs)
        called = time.perf_counter_ns() - start
        if self._segment.training:
            roots += [
                (item.grad_fn, step.slot)
                for item in pytree.tree_leaves(value)
                if isinstance(item, torch.Tensor) and item.grad_fn is not None
            ]
        start = time.perf_counter_ns()
        env[node] = value
        del value, args, kwargs
        for dead in step.dying:
            del env[dead]
        return called + time.perf_counter_ns() - start

    def _plan_steps(self) -> list[_Step]:
        nodes = list(self._segment.module.graph.nodes)
        last_reader = {source: node for node in nodes for source in (node, *node.all_input_nodes)}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for source, reader in last_reader.items():
            if source.op != "output" and reader.op not in ("placeholder", "output"):
                dying.setdefault(reader, []).append(source)
        slots = {name: slot for slot, name in enumerate(self.names)}
        steps, slot = [], 0
        for node in nodes:
            # A node that is not an op belongs to the op whose value it reads (an item of a tuple), or that reads it
            # (an attribute of the module).
            related = (*node.all_input_nodes, *node.users)
            slot = slots.get(node.name, next((slots[item.name] for item in related if item.name in slots), slot))
            steps.append(_Step(node, slot, tuple(dying.get(node, ()))))
        return steps

    def _keep(self, results: Sequence[torch.Tensor]) -> None:
        if not self._segment.training:
            return
        chosen = zip(results, self._segment.differentiable, strict=True)
        self._results = [item for item, differentiable in chosen if differentiable]
        if not self._seeds:
            self._seeds = [torch.ones_like(item) / item.numel() for item in self._results]


def _created_nodes(roots: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Every autograd node with the op that created it: walk back from each op's results to known nodes."""
    known: set[Any] = set()
    created: list[tuple[Any, int]] = []
    for root, slot in roots:
        todo = [root]
        while todo:
            node = todo.pop()
            if node is None or node in known:
                continue
            known.add(node)
            created.append((node, slot))
            todo += [source for source, _ in node.next_functions]
    return created


def _look_up(arguments: Any, env: dict[fx.Node, Any]) -> Any:
    return map_arg(arguments, env.__getitem__)


def _callable(module: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    """The function to call with the node's arguments; it does what the code does that fx generates for the node."""
    target = str(node.target)
    if node.op == "call_function":
        return node.target  # type: ignore[return-value]
    if node.op == "get_attr":
        return partial(attrgetter(target), module)
    if node.op == "call_module":
        return module.get_submodule(target)
    return lambda owner, *args, **kwargs: getattr(owner, target)(*args, **kwargs)


Call = Callable[[], object]

# Calls in one graph: many short ones, so that the start of the graph does not count.
_SHORT_S, _SHORT_CALLS, _LONG_CALLS = 2e-3, 20, 3
# No kernel takes less; a graph without a kernel takes a part of the time of two events.
_NO_KERNEL_S = 5e-7
# The longest duration of a kernel that only waits.
_MOST_DELAY_S = 0.5
_EMPTY = "CUDA Graph is empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The measured time of a call on a device.

    ``seconds``: median, 0 if the call starts no kernel. ``spread``: (p90 - p10) / median. ``num_samples``: number of
    timed calls. ``issue_s``: seconds in which the host issues one call, 0 if not measured.
    """

    seconds: float
    spread: float
    num_samples: int
    issue_s: float = 0.0


class DeviceClock(Protocol):
    """A clock for calls on one device; ``cache_bytes``: size of the device's last-level cache."""

    device: torch.device
    cache_bytes: int

    def side(self) -> AbstractContextManager[Any]:
        """Return a context in which calls are issued to the timed stream."""

    def time(self, calls: Sequence[Call]) -> Sample:
        """Return the device's seconds of one call; ``calls``: the same work on different memory, run in turns."""

    def step(self, call: Call) -> Sample:
        """Return the device's seconds of a long call, and the host's seconds to issue it."""

    def loop(self, call: Call, count: int) -> float:
        """Return the host's seconds per call, over ``count`` calls without waiting for the device between them."""

    def finish(self) -> None:
        """Wait until the device has finished all issued work."""

    def release(self) -> None:
        """Return unused memory of the allocator to the device."""


class CudaClock:
    """A clock for calls on a CUDA device; ``repeats``: number of timed repetitions."""

    def __init__(self, device: torch.device, repeats: int = 10) -> None:
        self.device = device
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._repeats = repeats
        self._stream: Any = torch.cuda.Stream(device)

    def side(self) -> AbstractContextManager[Any]:
        """Return a context in which calls are issued to the timed stream."""
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def time(self, calls: Sequence[Call]) -> Sample:
        """Return the device's seconds of one call, by replays of a CUDA graph, or by events if it cannot be captured.

        ``calls``: the same work on different memory, run in turns.
        """
        with self.side():
            for call in calls:
                call()
            self.finish()
            start = time.perf_counter()
            calls[0]()
            self.finish()
            count = _SHORT_CALLS if time.perf_counter() - start < _SHORT_S else _LONG_CALLS
            count = max(count // len(calls), 1) * len(calls)

            def many() -> None:
                for place in range(count):
                    calls[place % len(calls)]()

            graph = self._captured(many)
            if graph == _EMPTY:
                return Sample(seconds=0.0, spread=0.0, num_samples=count)
            samples = self._replayed(graph) if graph is not None else self._behind(many)[0]
            return _summarise(samples, count)

    def step(self, call: Call) -> Sample:
        """Return the device's seconds of a long call, by events, and the host's seconds to issue it."""
        with self.side():
            call()
            samples, issued = self._behind(call)
            taken = _summarise(samples, 1)
            return Sample(
                seconds=taken.seconds,
                spread=taken.spread,
                num_samples=taken.num_samples,
                issue_s=float(np.median(issued)),
            )

    def loop(self, call: Call, count: int) -> float:
        """Return the host's seconds per call, over ``count`` calls without waiting for the device between them."""
        begun = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - begun) / count
        self.finish()
        return seconds

    def finish(self) -> None:
        """Wait until the device has finished all issued work."""
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Return unused memory of torch's allocator to the device."""
        torch.cuda.empty_cache()

    def _captured(self, call: Call) -> Any:
        """A graph of a call; `_EMPTY` if it starts no kernel, None if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with torch.cuda.graph(graph, stream=self._stream):
                    call()
        except RuntimeError:
            self.finish()
            return None
        return _EMPTY if any(_EMPTY in str(item.message) for item in told) else graph

    def _replayed(self, graph: Any) -> list[float]:
        graph.replay()
        self.finish()
        samples = []
        for _ in range(self._repeats):
            start, end = self._events()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        return samples

    def _behind(self, call: Call) -> tuple[list[float], list[float]]:
        """Seconds of the device and of the host for each of some calls after a kernel that waits."""
        samples: list[float] = []
        issued: list[float] = []
        for _ in range(self._repeats):
            self.finish()
            start, end = self._events()
            # A GPU runs at most some 2e9 cycles per second.
            delay_s = min(2 * max(issued, default=_MOST_DELAY_S / 4), _MOST_DELAY_S)
            torch.cuda._sleep(int(2e9 * delay_s))
            start.record()
            begun = time.perf_counter()
            call()
            issued.append(time.perf_counter() - begun)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        return samples, issued

    def _events(self) -> tuple[Any, Any]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _summarise(samples: Sequence[float], count: int) -> Sample:
    low, middle, high = (float(figure) for figure in np.percentile(samples, (10, 50, 90)) / count)
    if middle < _NO_KERNEL_S:
        return Sample(seconds=0.0, spread=0.0, num_samples=len(samples) * count)
    return Sample(seconds=middle, spread=(high - low) / middle, num_samples=len(samples) * count)
