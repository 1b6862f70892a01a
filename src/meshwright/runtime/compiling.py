"""Compile the layers of a stage with torch.compile, one by one (`compile_units`).

A unit is a range of ops that is compiled by itself, as a rule a layer (`spec.compiled_units`). Its ops become a graph
that receives everything it reads as arguments, also parameters. So equal units share one compilation, and hooks of
parameters and FSDP2's all-gathers stay outside of the compiled code. torch caches the code on disk
(``TORCHINDUCTOR_CACHE_DIR``) for later runs. Random numbers are drawn as in torch without compiling. `UnitPartitioner`
chooses the tensors that a unit saves for its backward.

Units that torch cannot compile run eagerly, and `Compilation.left_out` gives the reasons.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InductorError
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from meshwright.runtime.checkpointing import Kept, RecomputedRange, checkpoint_compiled
from meshwright.runtime.ranges import enclose, find_ops
from meshwright.spec import Graph, compiled_units

_COMPARISONS = (torch.ops.aten.le.Scalar, torch.ops.aten.lt.Scalar, torch.ops.aten.ge.Scalar, torch.ops.aten.gt.Scalar)


# Saved tensors are torch's choice, except for masks of the unit's outputs. A unit that ends with a ReLU could save a
# mask of one byte per element, which torch prefers to the output of four bytes. But the output is saved anyway, by the
# unit that reads it; and on CPUs inductor writes such masks slowly: a tiny residual network trained at half the speed
# (2026-11-28, two cores).
class UnitPartitioner(CustomPartitionerFn):
    """Splits the joint graph of a unit into its forward and its backward graph."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph, by torch's `min_cut_rematerialization_partition`."""
        (made,) = next(node for node in gm.graph.nodes if node.op == "output").args
        handed_on = set(made[: kwargs["num_fwd_outputs"]])
        for node in gm.graph.nodes:
            if node.target in _COMPARISONS and node.args[0] in handed_on:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return the key for the cache of compiled code; it changes when this module changes."""
        return "meshwright.runtime.compiling/1"


# Errors of torch's compiler.
_REFUSALS = (TorchDynamoException, FailOnRecompileLimitHit, InductorError)

_LONGEST_REASON = 200


@dataclass(slots=True)
class Compilation:
    """The state of the compiled units of a process.

    ``num_units`` counts the units, ``num_codes`` the different ones among them. ``done`` of these codes were compiled
    or refused so far, which took ``seconds``. ``left_out``: the number of units that run eagerly, by reason.
    ``refused``: the reason if all units run eagerly, else "". ``on_progress(done)`` is called after each code.
    """

    num_units: int = 0
    seconds: float = 0.0
    done: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    refused: str = ""
    on_progress: Callable[[int], None] = lambda _: None
    codes: dict[object, _Code] = field(default_factory=dict)

    @property
    def num_codes(self) -> int:
        """Number of different units, each of which is compiled once."""
        return len(self.codes)

    def code_of(
        self, body: fx.GraphModule, given: object, *, draws_random: bool, again: RecomputedRange | None = None
    ) -> _Code:
        """Return the code of a unit for tensors of the given shapes and types; equal units share one code.

        ``given`` describes the shapes and types. ``again``: the recomputed range of the unit, None if it has none.
        """
        key = _likeness(body), given, again is not None
        if key not in self.codes:
            self.codes[key] = _Code(body, self, draws_random=draws_random, again=again)
        self.num_units += 1
        self.codes[key].num_units += 1
        return self.codes[key]


class _Code:
    """A unit's graph, compiled at its first call, backward included, so that a failure is known then.

    Calls with other strides than the first are compiled when they come.
    """

    def __init__(
        self, body: fx.GraphModule, compilation: Compilation, *, draws_random: bool, again: RecomputedRange | None
    ) -> None:
        options: dict[str, Any] = {"fallback_random": True} if draws_random else {}
        self._body: Callable[..., Any] = _again(again, len(compilation.codes)) if again else body
        self._compilation = compilation
        self._compiled = torch.compile(self._body, fullgraph=True, dynamic=False, options=options)
        self._call: Callable[..., Any] = self._first
        self.num_units = 0

    def __call__(self, *given: torch.Tensor) -> Any:
        """Compute the unit."""
        return self._call(*given)

    def _first(self, *given: torch.Tensor) -> Any:
        begin = time.perf_counter()
        try:
            with (
                # torch reads the gradients of the arguments, which a backward does not leave there.
                warnings.catch_warnings(action="ignore", category=UserWarning),
                _without_note(),
                inductor_config.patch(custom_partitioner_fn=UnitPartitioner()),
                # A backward runs outside of autocast, as it does without compiling.
                functorch_config.patch(force_non_lazy_backward_lowering=True, backward_pass_autocast="off"),
            ):
                made, self._call = self._compiled(*given), self._later
        except _REFUSALS as error:
            made = self._refuse(error, given)
        self._compilation.seconds += time.perf_counter() - begin
        self._compilation.done += 1
        self._compilation.on_progress(self._compilation.done)
        return made

    def _later(self, *given: torch.Tensor) -> Any:
        try:
            return self._compiled(*given)
        except _REFUSALS as error:
            return self._refuse(error, given)

    def _refuse(self, error: Exception, given: tuple[torch.Tensor, ...]) -> Any:
        self._compilation.left_out[_reason(error)] += self.num_units
        self._call = self._body
        return self._body(*given)


@contextmanager
def _without_note() -> Iterator[None]:
    """Suppress torch's warning about in-place writes in partly recomputed ranges: kept values are never written."""
    log = logging.getLogger("torch._higher_order_ops.wrap")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _again(unit: RecomputedRange, number: int) -> Callable[..., Any]:
    """A unit under checkpoint, which torch compiles with it: its backward starts with the unit's ops."""
    body = unit.body

    def run(*given: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return body(*given)
        if not unit.keeps:
            return checkpoint(body, *given, use_reentrant=False)
        return checkpoint_compiled(body, given) if torch.compiler.is_compiling() else unit(*given)

    # torch counts compilations by code, and stops after a few: each unit has its own code object.
    run.__code__ = run.__code__.replace(co_name=f"unit_{number}")
    return run


class CompiledUnit(torch.nn.Module):
    """The module of a compiled unit in a stage's graph."""

    def __init__(self, code: _Code) -> None:
        super().__init__()
        self._code = code

    def forward(self, *given: torch.Tensor) -> Any:
        """Compute the unit."""
        return self._code(*given)


def compile_units(module: torch.nn.Module, graph: Graph, compilation: Compilation) -> torch.nn.Module:
    """Replace the units of a stage's module by compiled ones; return the module.

    Its nodes have to be marked with their ops (`ranges.note_ops`). torch compiles a unit at its first call. A dry run
    compiles nothing.
    """
    if not graph.compiled or detect_fake_mode() is not None:
        return module
    assert isinstance(module, fx.GraphModule), "parts are cut as graphs"
    _compile_inside(module, graph, compilation)
    return module


def _compile_inside(module: fx.GraphModule, graph: Graph, compilation: Compilation) -> None:
    for number, (start, stop) in enumerate(compiled_units(graph)):
        nodes = [node for node in module.graph.nodes if (own := find_ops(node)) and start <= own[0] and own[1] < stop]
        ops = {op for node in nodes for op in _ops_of(node)}
        if all(graph.ops[op].replicable for op in ops):
            # A stage recomputes a few ops of other stages' layers.
            continue
        calls = {str(node.target): module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
        wrap = _wrapper(graph, sorted(ops), compilation)
        again = [name for name, item in calls.items() if isinstance(item, RecomputedRange)]
        for name in again:
            module.add_submodule(
                name, wrap(cast("RecomputedRange", calls[name]).body, again=cast("RecomputedRange", calls[name]))
            )
        if not again and (calls or any(map(_computes, nodes))):
            enclose(module, f"compiled_{number}", nodes, wrap, ())


def _wrapper(graph: Graph, ops: Sequence[int], compilation: Compilation) -> Callable[..., CompiledUnit]:
    draws_random = any(graph.ops[op].random for op in ops)
    read = [graph.tensors[i] for op in ops for i in graph.ops[op].inputs]
    given = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in read)
    return lambda body, again=None: CompiledUnit(
        compilation.code_of(body, given, draws_random=draws_random, again=again)
    )


def _ops_of(node: fx.Node) -> range:
    first, last = find_ops(node) or (0, -1)
    return range(first, last + 1)


def _computes(node: fx.Node) -> bool:
    """Whether a node is more than a view or an element of an existing value."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view


def _likeness(body: fx.GraphModule) -> object:
    """Equal for graphs of the same calls on inputs of the same kind; a graph with submodules equals no other."""
    place = {node: index for index, node in enumerate(body.graph.nodes)}
    rows: list[object] = []
    for node in body.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            return id(body)
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda item: _Place(place[item]))
        target = (node.target.call, Kept) if isinstance(node.target, Kept) else node.target
        rows.append((node.op, target if node.op == "call_function" else "", repr(arguments)))
    return tuple(rows)


class _Place(int):
    """A node in a printed argument, distinguishable from a number."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _reason(error: BaseException) -> str:
    """The first line of the original error."""
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_LONGEST_REASON]
