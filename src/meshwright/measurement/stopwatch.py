"""One pass through a segment with a clock at every op: forward node by node, backward by autograd's hooks.

Forward of an op = its call and the release of values that it reads last, as in the code that fx generates. Backward of
an op = the time from one autograd node's end to the next one's, summed over the nodes that the op created; the gaps
cover the whole backward, so nothing is lost between them. A parameter's AccumulateGrad belongs to the op that uses it
first. The cost of the clock itself is measured (`clock`) and subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from meshwright.measurement.clock import clock_overhead, stamp_hook
from meshwright.measurement.segments import Segment

_ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, slots=True)
class _Step:
    node: fx.Node
    slot: int
    dying: tuple[fx.Node, ...]


class SegmentRunner:
    """Runs one segment, as a whole or op by op. ``names`` are the timed ops, in order: slot i of every result."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.names = tuple(segment.keys)
        self._steps = self._plan_steps()
        self._seeds: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._hooks: list[tuple[Any, int]] = []

    def clear_gradients(self) -> None:
        """Clear all gradients, as an optimizer step does."""
        for tensor in (*self._segment.module.parameters(), *self._segment.feeds):
            tensor.grad = None

    def forward(self) -> float:
        """Run the forward as a whole; return seconds."""
        with torch.set_grad_enabled(self._segment.training):
            start = time.perf_counter_ns()
            results = self._segment.module(*self._segment.feeds)
            seconds = (time.perf_counter_ns() - start) / 1e9
        self._keep(results)
        return seconds

    def backward(self) -> float:
        """Run the backward of the last forward as a whole; return seconds (0 without one)."""
        results, self._results = self._results, []
        if not results:
            return 0.0
        start = time.perf_counter_ns()
        torch.autograd.backward(results, self._seeds)
        return (time.perf_counter_ns() - start) / 1e9

    def timed_forward(self) -> NDArray[np.float64]:
        """Run the forward op by op; return seconds per op. The following backward must be `timed_backward`."""
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
        """Run the backward with a clock at every autograd node; return seconds per op, and those of AccumulateGrad.

        ``after_start``: count from the start of the first node, which on a device is in another thread.
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
