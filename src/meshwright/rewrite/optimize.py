"""`optimize`: turn a module into an equivalent, faster module.

The module is captured on a batch, and cheaper equivalent graphs are searched (`search`). Graphs with a lower predicted
cost are checked in float64, then timed against the original on this machine. If no graph is faster, the module itself
is returned.

The faster module calls torch's Python functions in place of ATen overloads (``torch.ops.aten``): the same operators,
with half the overhead of a call. On one core of the machine where this was measured, a call through
``torch.ops.aten`` takes 2 µs more, which is as long as a small operator itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._ops import OpOverload

from meshwright.capture import Captured, capture_model, flatten_batch
from meshwright.cost import CostModel
from meshwright.rewrite.fx.captured import Rewritten, read_captured
from meshwright.rewrite.fx.check import check_close
from meshwright.rewrite.fx.reading import ReadGraph, channels_last
from meshwright.rewrite.matching import SaturationLimits
from meshwright.rewrite.search.call_costs import CallCosts, alternate, forward_of, speedups, step_of, untouched
from meshwright.rewrite.search.graph_search import FoundGraph, GraphSpace, Grown
from meshwright.rewrite.search.ruleset import Guided, shipped_rules
from meshwright.rewrite.written import check_found, write_found
from meshwright.spec import DeviceKind, EventSink, Measurements, NullSink, RewriteError, load_cluster

if TYPE_CHECKING:
    from torch import fx, nn


LIMITS = SaturationLimits(rounds=4, nodes=4_000, seconds=5.0)

# For every operator the search stores the set of operators that it certainly needs, which takes a gigabyte at this
# number.
MOST_OPERATORS = 50_000

# Graphs of one search that are timed as whole models.
_FEW = 3

# Seconds for the gains of rules, each of which needs a choice of its own.
_GAINS_S = 5.0

# A smaller share of a graph's seconds is not worth another round of timings.
_CLOSE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An equivalent graph that was found.

    ``worst``: the largest relative difference from the model in float64. ``speedup``: measured time of the model over
    that of the graph; ``spread``: half the width of the 95 % interval of the speedup; both None if not measured.
    ``gains``: only for the chosen graph: by rule, the additional seconds of the cheapest graph without the nodes that
    the rule added. If time runs out, only the rules that added the most nodes have a gain.
    """

    name: str
    space: GraphSpace
    found: FoundGraph
    graph: fx.GraphModule
    worst: float
    gains: dict[str, float] = field(default_factory=dict)
    speedup: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """The result of `rewrite_model`.

    ``module``: the fastest module, which may be the original. ``chosen``: the candidate of that module; None for the
    original. ``refused``: messages on graphs that were found but do not compute the same as the model on this batch.
    ``rules``: the rules that were applied. ``source``: the model's graph. ``seconds``: seconds by phase of the search.
    """

    module: nn.Module
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    rules: Guided
    source: ReadGraph
    cost: CostModel
    seconds: dict[str, float]


def optimize(module: nn.Module, batch: Any, **options: Any) -> nn.Module:
    """Return an equivalent module that is faster on batches of this size; the module itself if no faster one is found.

    ``batch``, as in `capture_model`: a tensor, a tuple of arguments, or a dict of keyword arguments. A module in
    training mode is rewritten for training: its forward pass changes, and its gradients stay equal. ``options``: the
    keyword arguments of `rewrite_model`, which also returns a report.
    """
    return rewrite_model(module, batch, **options).module


def rewrite_model(
    module: nn.Module,
    batch: Any,
    *,
    rules: Guided | None = None,
    limits: SaturationLimits = LIMITS,
    cost: CostModel | None = None,
    device: DeviceKind | None = None,
    measure: bool = True,
    least_gain: float = 0.01,
    rounds: int = 30,
    budget_s: float = 30.0,
    threads: int | None = None,
    events: EventSink | None = None,
) -> Rewriting:
    """Search for an equivalent, faster module, and report on the search.

    Args:
        module: the model; in training mode it is rewritten for training, in evaluation mode for inference.
        batch: an example batch; the resulting module accepts only batches of this size.
        rules: the rules to apply; by default all shipped rules that keep finite numbers finite and others non-finite.
        limits: limits at which the application of rules stops.
        cost: the cost model; by default one for this machine's CPU, without measurements: calls are timed when needed.
        device: the kind of device to estimate for; by default the only kind of the cost model's cluster.
        measure: True: time candidates against the original, and choose the fastest. False: choose by predicted time.
        least_gain: the fraction (0.01 is 1 %) by which a graph must be faster, beyond the noise of the timings.
        rounds: the most rounds of timings (more if all rounds take less than a second); each candidate runs in each.
        budget_s: seconds for the timings of calls, and again for the timings of candidates.
        threads: the number of threads that torch uses during the search; by default its current number.
        events: receives progress events.

    Raises CaptureError for a module that cannot be captured, RewriteError for a graph that cannot be rewritten.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with untouched(module):
            return _rewrite(
                module,
                batch,
                rules=rules or shipped_rules(),
                limits=limits,
                costs_of=_costs_of(cost, device),
                measure=measure,
                least_gain=least_gain,
                rounds=rounds,
                budget_s=budget_s,
                events=events or NullSink(),
            )
    finally:
        torch.set_num_threads(before)


def _rewrite(
    module: nn.Module,
    batch: Any,
    *,
    rules: Guided,
    limits: SaturationLimits,
    costs_of: tuple[CostModel, DeviceKind],
    measure: bool,
    least_gain: float,
    rounds: int,
    budget_s: float,
    events: EventSink,
) -> Rewriting:
    clock = _Clock()
    captured, source, tensors = _read(module, batch, events)
    if (count := len(source.terms.needed())) > MOST_OPERATORS:
        raise RewriteError(
            f"The graph of {type(module).__name__} has {count:,} operators; expected at most {MOST_OPERATORS:,}. "
            "Rewrite its submodules one by one."
        )
    clock.lap("capture")
    training = module.training
    cost, device = costs_of
    spaces = _spaces(source, rules, limits, training=training)
    clock.lap("rules")
    measuring = measure and cost.measurements is not None
    costs = CallCosts(cost, device, training=training, measuring=measuring)
    costs.estimate(call for _, space, _ in spaces for call in space.calls())
    clock.lap("costs")
    candidates: list[Candidate] = []
    refused: list[str] = []
    for name, space, grown in spaces:
        few = 0
        for found in _choose(space, grown, costs, budget_s=budget_s, events=events):
            if few == _FEW or any(found.terms.nodes == other.found.terms.nodes for other in candidates):
                continue
            few += 1
            label = name if few == 1 else f"{name}, number {few}"
            try:
                candidates.append(_written(label, space, found, source, captured, tensors, training=training))
                if few == 1 and measure and not training:
                    candidates += _in_channels_last(candidates[-1], tensors)
            except RewriteError as error:
                # Other candidates may be right, and the model itself is.
                refused.append(f"{label}: {error}")
    clock.lap("choice")
    for each in candidates:
        call_directly(each.graph)
    sizes = [tensor.shape for tensor in tensors]
    modules = [Rewritten(each.graph, captured, sizes, training=training) for each in candidates]
    if measure and candidates:
        example = captured.trace.layout.rebuild(tuple(tensor.clone() for tensor in tensors))[:2]
        candidates = _timed(candidates, (module, *modules), example, rounds, budget_s, events)
    clock.lap("timing")
    best = _best(candidates, least_gain, measured=measure)
    if best is not None:
        candidates[best] = _with_gains(candidates[best], costs)
    clock.lap("gains of rules")
    return Rewriting(
        module=module if best is None else modules[best],
        chosen=None if best is None else candidates[best],
        candidates=tuple(candidates),
        refused=tuple(refused),
        rules=rules,
        source=source,
        cost=costs.cost,
        seconds=clock.laps,
    )


def _timed(
    candidates: list[Candidate],
    modules: tuple[nn.Module, ...],
    example: Any,
    rounds: int,
    budget_s: float,
    events: EventSink,
) -> list[Candidate]:
    """The candidates with their measured speedup over the first of the modules."""
    call = step_of if modules[0].training else forward_of
    events.progress("time candidates", 0, 1)
    taken = alternate([call(each, example) for each in modules], rounds=rounds, budget_s=budget_s)
    events.progress("time candidates", 1, 1)
    ratios, spreads = speedups(taken)
    return [
        replace(each, speedup=float(ratio), spread=float(spread))
        for each, ratio, spread in zip(candidates, ratios[1:], spreads[1:], strict=True)
    ]


def _choose(
    space: GraphSpace, grown: Grown, costs: CallCosts, *, budget_s: float, events: EventSink
) -> list[FoundGraph]:
    """The best few graphs, the cheapest first: choose, time what was chosen, and choose again.

    Untimed calls cost less than they will (`CallCosts`), so that a choice is a lower bound for every graph. Once the
    cheapest chosen graph, with timed calls, is almost as cheap as that bound, nothing better can follow.
    """
    deadline = time.perf_counter() + budget_s
    tried: list[FoundGraph] = []
    while True:
        found = space.choose(costs, grown)
        left = deadline - time.perf_counter()
        if not costs.measuring or left <= 0 or not costs.measure(space.calls_of(found), budget_s=left, events=events):
            # All calls were timed, or no more can be timed.
            break
        tried.append(found)
        if min(space.seconds(each.choice, costs) for each in tried) * (1.0 - _CLOSE) <= found.after_s:
            break
    ranked = sorted((space.with_costs(each, costs) for each in tried), key=lambda each: each.after_s)
    return [found, *ranked] if found not in tried else ranked


class _Clock:
    def __init__(self) -> None:
        self._last, self.laps = time.perf_counter(), {}  # type: float, dict[str, float]

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def _read(module: nn.Module, batch: Any, events: EventSink) -> tuple[Captured, ReadGraph, tuple[torch.Tensor, ...]]:
    mode: Literal["training", "inference"] = "training" if module.training else "inference"
    captured = capture_model(module, batch, mode=mode, verify=False, needs_loss=False, events=events)
    return captured, read_captured(captured, batch), flatten_batch(captured, batch)


def _costs_of(cost: CostModel | None, device: DeviceKind | None) -> tuple[CostModel, DeviceKind]:
    if cost is None:
        empty = Measurements(device="cpu", software=f"torch {torch.__version__}", date="", conditions="")
        cost = CostModel(cluster=load_cluster("2xcpu"), measurements=empty)
    if device is None:
        kinds = cost.cluster.device_kinds
        if len(kinds) != 1:
            raise RewriteError(
                f"The cluster {cost.cluster.name!r} has devices of the kinds {[kind.name for kind in kinds]}; pass one "
                "of them as device=..., the kind on which the module will run."
            )
        (device,) = kinds
    return cost, device


def _spaces(
    source: ReadGraph, rules: Guided, limits: SaturationLimits, *, training: bool
) -> list[tuple[str, GraphSpace, Grown]]:
    """The graphs that all rules lead to, and those of the simplifying rules alone."""
    made = []
    for name, used in (("all rules", rules), ("simplified", Guided(simplify=rules.simplify, explore=(), merge=()))):
        space = GraphSpace(
            source.terms, source.effects, frozen=not training, finite=finite_names(source, frozen=not training)
        )
        made.append((name, space, space.grow(used, limits)))
    return made


def finite_names(source: ReadGraph, *, frozen: bool) -> frozenset[str]:
    """Return the names of stored tensors that contain only finite numbers and never change.

    Constants never change; ``frozen``: neither do parameters and buffers (inference).
    """
    found = set()
    for term in source.terms.inputs():
        node = source.terms.nodes[term]
        held = source.holders.get(str(node.attribute("name")))
        fixed = node.attribute("kind") == "constant" or (frozen and node.attribute("kind") != "batch")
        if fixed and isinstance(held, torch.Tensor) and bool(torch.isfinite(held).all()):
            found.add(str(node.attribute("name")))
    return frozenset(found)


def _with_gains(candidate: Candidate, costs: CallCosts) -> Candidate:
    gains = {}
    found = candidate.found
    deadline = time.perf_counter() + _GAINS_S
    for rule in sorted(found.rules, key=lambda rule: -found.rules[rule]):
        if time.perf_counter() > deadline:
            # The gains of the other rules stay unknown.
            break
        other = candidate.space.choose(costs, found.grown, limit_s=2.0, without=rule)
        gains[rule] = max(other.after_s - found.after_s, 0.0)
    return replace(candidate, gains=dict(sorted(gains.items(), key=lambda item: -item[1])))


def _written(
    name: str,
    space: GraphSpace,
    found: FoundGraph,
    source: ReadGraph,
    captured: Captured,
    tensors: tuple[torch.Tensor, ...],
    *,
    training: bool,
) -> Candidate:
    graph = write_found(found, source, training=training)
    worst = check_found(found, graph, source, captured, tensors, training=training)
    return Candidate(name=name, space=space, found=found, graph=graph, worst=worst)


def _in_channels_last(candidate: Candidate, tensors: tuple[torch.Tensor, ...]) -> list[Candidate]:
    """The candidates in the other layout, which cost models do not distinguish; [] if there are no convolutions."""
    graph = channels_last(candidate.graph)
    if graph is None:
        return []
    check_close(candidate.graph, graph, tensors)
    return [replace(candidate, name=f"{candidate.name}, channels last", graph=graph)]


def _best(candidates: list[Candidate], least_gain: float, *, measured: bool) -> int | None:
    def gain(candidate: Candidate) -> float:
        if measured:
            return (candidate.speedup or 0.0) - 1.0 - (candidate.spread or 0.0)
        return candidate.found.before_s / max(candidate.found.after_s, 1e-12) - 1.0

    best = max(range(len(candidates)), key=lambda i: gain(candidates[i]), default=None)
    return best if best is not None and gain(candidates[best]) > least_gain else None


# Names that a function of torch shares with an operator of other arguments, or that Python code wraps.
_LEFT = frozenset({"to", "view", "full", "constant_pad_nd"})


def call_directly(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ATen calls of declared operators by calls of torch's Python functions, in place; return the module."""
    for node in module.graph.nodes:
        # Opaque calls stay as they were.
        if not node.meta.get("declared") or not isinstance(node.target, OpOverload):
            continue
        name = node.target._schema.name.partition("::")[2]
        if name == "slice":
            tensor, axis, start, stop = node.args
            node.target, node.args = torch.narrow, (tensor, axis, start, stop - start)
        elif name == "expand":
            node.target = torch.Tensor.expand
        elif name not in _LEFT:
            node.target = _function(name) or node.target
    module.recompile()
    return module


def _function(name: str) -> Any:
    for place in (torch, torch._C._nn):
        found = getattr(place, name, None)
        if isinstance(found, BuiltinFunctionType):
            return found
    return None
