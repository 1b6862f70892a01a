"""Costs of an e-graph's nodes (`CallCosts`) in seconds; timings of whole models (`alternate`).

Each node is costed as the torch call that it becomes, by the cost model. A `TorchCall` holds everything on which the
cost of a call depends, so that equal calls of a deep model are estimated once. Calls without a measurement can be
timed on this machine (`CallCosts.measure`). All calls are then timed in one run, each with its own tensors, so that no
weight is in a cache that would not be there in the model.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, capture_calls, part
from meshwright.measurement import OpSource, measure_ops, merge_measurements
from meshwright.rewrite.fx.write import EMITTERS, AtenCall
from meshwright.rewrite.terms import INPUT, ITEM, OPAQUE, TensorType, TermNode
from meshwright.spec import DeviceKind, EventSink, MeasurementError, NullSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from meshwright.cost import CostModel
    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.search.loading import ClassFacts


# Seconds that a candidate runs for at a time. A short one then finds its own weights in caches, as it would in a loop,
# and not another candidate's data.
_TURN_S = 0.01


# Whole models are timed against each other: in each round every candidate runs once.
def alternate(
    candidates: Sequence[Callable[[], Any]], *, rounds: int, budget_s: float, clock: Callable[[], float] | None = None
) -> NDArray[np.float64]:
    """Run candidates in turns; return the seconds of each in each round, shape (rounds run, candidates).

    A short candidate runs several times per round, and the median counts. There are at least 5 rounds, however long
    they take, and more than ``rounds`` if all rounds take less than a second. ``budget_s``: seconds after which no
    further round starts. ``clock``: a function that returns seconds; by default the processor time of this thread if
    torch uses one thread (other programs disturb it least), else wall-clock time.
    """
    clock = clock or (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    times = [_fitting(candidate) for candidate in candidates]
    taken: list[list[float]] = []
    start = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        while len(taken) < 5 or time.perf_counter() - start < (budget_s if len(taken) < rounds else 1.0):
            row = [0.0] * len(candidates)
            order = range(len(candidates)) if len(taken) % 2 else reversed(range(len(candidates)))
            for i in order:
                row[i] = statistics.median(_timed(candidates[i], clock) for _ in range(times[i]))
            taken.append(row)
    finally:
        if collecting:
            gc.enable()
    return np.array(taken)


def _fitting(candidate: Callable[[], Any]) -> int:
    """The number of runs of a candidate per turn; it has run twice before."""
    candidate()
    return max(1, min(50, round(_TURN_S / max(_timed(candidate, time.perf_counter), 1e-9))))


def _timed(candidate: Callable[[], Any], clock: Callable[[], float]) -> float:
    before = clock()
    candidate()
    return clock() - before


def speedups(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each candidate, its speedup over candidate 0 and half the width of the speedup's 95 % interval.

    ``seconds``: the result of `alternate`, shape (rounds, candidates). A speedup is a ratio of lower quartiles over
    rounds; the interval comes from resampling rounds (bootstrap).
    """
    rng = np.random.default_rng(0)
    draws = rng.integers(len(seconds), size=(200, len(seconds)))
    quartiles = np.quantile(seconds[draws], 0.25, axis=1)
    ratios = quartiles[:, :1] / quartiles
    typical = np.quantile(seconds, 0.25, axis=0)
    low, high = np.quantile(ratios, (0.025, 0.975), axis=0)
    return typical[0] / typical, (high - low) / 2


def forward_of(module: Any, tensors: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs one inference of a module; ``tensors`` is a batch as (args, kwargs)."""
    args, kwargs = tensors

    def run() -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    return run


def step_of(module: Any, tensors: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs one forward and backward of a module; ``tensors`` is a batch as (args, kwargs).

    Gradients of all parameters are computed and discarded.
    """
    args, kwargs = tensors

    def run() -> Any:
        outputs = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = [leaf for leaf in outputs if leaf.requires_grad]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        seeds = [torch.ones_like(leaf) for leaf in wanted]
        return torch.autograd.grad(wanted, parameters, seeds, allow_unused=True) if wanted and parameters else outputs

    return run


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers and attributes, and torch's random state on the CPU, when the ``with`` block ends."""
    parts = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    held = {id(tensor): tensor for _, _, buffers in parts for tensor in buffers.values() if tensor is not None}
    values = {key: tensor.detach().clone() for key, tensor in held.items()}
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for part, attributes, buffers in parts:
                part.__dict__.clear()
                part.__dict__.update(attributes)
                part._buffers.clear()
                part._buffers.update(buffers)
            with torch.no_grad():
                for key, tensor in held.items():
                    tensor.copy_(values[key])


# Nodes without a call of their own: inputs, and opaque calls that are copied.
FREE = (INPUT, OPAQUE, ITEM, "full")


class Operand(NamedTuple):
    """An operand of a torch call, as far as the call's cost depends on it.

    ``weight``: True if the operand does not depend on the batch. ``number``: the value of an operand whose elements
    all have one known value; else None.
    """

    type: TensorType
    weight: bool
    number: float | None


class TorchCall(NamedTuple):
    """The torch call of a node: everything on which its cost depends. ``type`` is the type of its result."""

    operator: str
    operands: tuple[Operand, ...]
    attributes: tuple[tuple[str, Any], ...]
    type: TensorType


def call_of(graph: EGraph, known: ClassFacts, cls: int, node: TermNode) -> TorchCall:
    """Return the torch call that ``node`` of class ``cls`` becomes."""
    operands = tuple(
        Operand(graph.types[child], child in known.constant, known.number.get(child))
        for child in map(graph.find, node.operands)
    )
    return TorchCall(node.operator, operands, node.attributes, graph.types[cls])


class CallCosts:
    """Seconds of torch calls on one kind of device; in training forward plus backward, else forward only.

    ``measuring``: chosen calls will be timed (`measure`). Until a call is timed, its cost is the low end of its
    interval, so that no cheap call is missed. Once calls of an operator were timed, the low ends of its other calls are
    multiplied by the smallest factor by which timed seconds exceeded the low end. Raises MeasurementError if
    ``measuring`` and the cost model has no measurements.
    """

    def __init__(self, cost: CostModel, device: DeviceKind, *, training: bool, measuring: bool = False) -> None:
        if measuring and cost.measurements is None:
            raise MeasurementError(
                "The cost model has no measurements to which timed calls could be added. Give the cost model "
                "measurements, or pass measuring=False."
            )
        self.cost, self.device, self.training, self.measuring = cost, device, training, measuring
        self._seconds: dict[TorchCall, float] = {}
        self._measured: dict[TorchCall, bool] = {}
        # By operator, the least ratio of timed seconds to the low end, over all timed calls.
        self._slower: dict[str, float] = {}

    def seconds(self, call: TorchCall) -> float:
        """Return the seconds of a call that `estimate` has seen; infinity if torch has no such operator."""
        raised = 1.0 if self._measured.get(call, True) else self._slower.get(call.operator, 1.0)
        return self._seconds[call] * raised

    @property
    def num_calls(self) -> int:
        """The number of distinct calls with a cost."""
        return len(self._seconds)

    def estimate(self, calls: Iterable[TorchCall]) -> None:
        """Estimate the costs of calls that have no cost yet, all at once."""
        new = [call for call in dict.fromkeys(calls) if call not in self._seconds]
        writable = [call for call in new if call.operator in EMITTERS]
        self._seconds.update((call, float("inf")) for call in new if call.operator not in EMITTERS)
        if not writable:
            return
        captured = _as_graph(writable, training=self.training)
        costs = self.cost.estimate_ops(captured.graph, 1, self.device)
        passes = 2 if self.training else 1
        for call, op in zip(writable, _ops_of(captured, len(writable)), strict=True):
            measured = costs.basis[op] == "measured"
            expected = costs.forward_s[op] + (costs.backward_s[op] if self.training else 0.0)
            low = self.measuring and not measured
            self._seconds[call] = float(costs.low_s[op, :passes].sum() if low else expected)
            self._measured[call] = measured

    def measure(
        self, calls: Iterable[TorchCall], *, repeats: int = 10, budget_s: float = 30.0, events: EventSink | None = None
    ) -> int:
        """Time those of ``calls`` that have no measurement, in this thread; return their number.

        ``calls`` must have been estimated. The timings replace the estimates and are added to the cost model.
        """
        missing = [call for call in dict.fromkeys(calls) if self._measured.get(call) is False]
        if not missing:
            return 0
        captured = _as_graph(missing, training=self.training)
        source = OpSource(graph=captured.graph, cut=_cutter(captured), batch=lambda _: _batch(captured))
        run = measure_ops(source, 1, repeats=repeats, budget_s=budget_s, events=events or NullSink())
        table = self.cost.measurements
        assert table is not None
        added = replace(table, ops=run.ops, optimizers=(), transfers=())
        self.cost = replace(self.cost, measurements=merge_measurements(table, added))
        low = {call: self._seconds.pop(call) for call in missing}
        self.estimate(missing)
        for call in missing:
            if self._measured[call] and low[call] > 0:
                ratio = max(self._seconds[call] / low[call], 1.0)
                self._slower[call.operator] = min(self._slower.get(call.operator, ratio), ratio)
        return len(missing)


def _as_graph(calls: Sequence[TorchCall], *, training: bool) -> Captured:
    """All calls side by side in one graph, each with its own tensors."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    parameters: dict[str, torch.Tensor] = {}

    def made(operand: Operand) -> Any:
        dtype = getattr(torch, operand.type.dtype)
        look = torch.empty(operand.type.shape, dtype=dtype, device="meta")
        differentiable = dtype.is_floating_point
        if operand.weight and differentiable:
            name = f"weight{len(parameters)}"
            parameters[name] = nn.Parameter(look)
            return graph.get_attr(name)
        inputs.append(look.requires_grad_(training and differentiable))
        return graph.placeholder(f"input{len(inputs)}")

    written = [tuple(made(operand) for operand in call.operands) for call in calls]
    results = []
    for call, operands in zip(calls, written, strict=True):
        numbers = tuple(operand.number for operand in call.operands)
        results.append(EMITTERS[call.operator](AtenCall(graph, operands, numbers, dict(call.attributes), call.type)))
    graph.output(tuple(results))
    return capture_calls(graph, inputs, parameters, training=training)


def _ops_of(captured: Captured, count: int) -> range:
    if len(captured.graph.ops) != count:
        raise AssertionError(f"{count} calls became {len(captured.graph.ops)} ops")
    return range(count)


def _cutter(captured: Captured) -> Callable[..., nn.Module]:
    return lambda feeds, fetches, ops, size: part(captured, feeds, fetches, batch_size=size, ops=ops)


def _batch(captured: Captured) -> list[torch.Tensor]:
    """Tensors with data: noise, and zeros for indices."""
    made = []
    for value in captured.trace.values:
        tensor = torch.zeros(value.shape, dtype=value.dtype)
        if value.dtype.is_floating_point:
            tensor.normal_().requires_grad_(value.requires_grad)
        made.append(tensor)
    return made
