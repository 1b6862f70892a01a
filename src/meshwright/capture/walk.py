"""A walk through a trace at one batch size: every size becomes a whole number, every tensor gets its looks.

Sizes that the export left symbolic (`sym_size` and arithmetic on it) are computed from the concrete shapes, so nothing
downstream meets a symbol.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from meshwright.capture.examine import CallFacts, Examiner
from meshwright.capture.refusals import is_data_dependent, refuse_data_dependence, refuse_sparse_gradient
from meshwright.capture.trace import target_of
from meshwright.capture.values import Slot, ValueLooks
from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from meshwright.capture.trace import FlatTrace

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep:
    """One op of a walk: its facts, distinct tensor arguments, and results (None for a result that is not a tensor)."""

    facts: CallFacts
    arguments: tuple[Slot, ...]
    results: tuple[Slot | None, ...]
    internals: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """``env`` maps every node to its slots and numbers, ``steps`` every op that handles tensors to what it does."""

    batch_size: int
    env: dict[fx.Node, Any]
    steps: dict[fx.Node, WalkStep]


def walk_trace(trace: FlatTrace, batch_size: int) -> Walk:
    """Walk ``trace`` for a batch of ``batch_size`` samples; remembered per trace and size."""
    walks = trace.facts.setdefault("walks", {})
    if batch_size not in walks:
        inputs = [
            value.with_batch(batch_size) if grows else value
            for value, grows in zip(trace.values, trace.batched, strict=True)
        ]
        # The caller may be using fake tensors of another mode; modes do not mix.
        with unset_fake_temporarily():
            walks[batch_size] = _Walker(examiner_of(trace), trace.attribute).run(trace.graph, inputs, batch_size)
    return walks[batch_size]


def examiner_of(trace: FlatTrace) -> Examiner:
    """The trace's one examiner, which remembers facts over all walks."""
    if "examiner" not in trace.facts:
        trace.facts["examiner"] = Examiner(training=trace.training, estimate_branch=_estimate_branch)
    return trace.facts["examiner"]


class _Walker:
    def __init__(self, examiner: Examiner, attribute: Any) -> None:
        self._examiner = examiner
        self._attribute = attribute
        self._members: list[list[Slot]] = []
        self._env: dict[fx.Node, Any] = {}
        self._steps: dict[fx.Node, WalkStep] = {}

    def run(self, graph: fx.Graph, inputs: list[Any], batch_size: int) -> Walk:
        feeds = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                feed = next(feeds)
                self._env[node] = self._slot(feed) if isinstance(feed, ValueLooks) else feed
            elif node.op == "get_attr":
                held = self._attribute(node.target)
                self._env[node] = self._slot(ValueLooks.of(held)) if isinstance(held, torch.Tensor) else held
            elif node.op == "call_function":
                self._env[node] = self._call(node)
        return Walk(batch_size=batch_size, env=self._env, steps=self._steps)

    def _slot(self, value: ValueLooks, storage: int | None = None) -> Slot:
        if storage is None:
            storage = len(self._members)
            self._members.append([])
        slot = Slot(value, storage)
        self._members[storage].append(slot)
        return slot

    def _call(self, node: fx.Node) -> Any:
        target = target_of(node)
        args: Any = fx.node.map_arg(node.args, self._env.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._env.__getitem__)
        if target is aten.sym_size.int:
            return args[0].value.shape[args[1]]
        if target is aten.sym_stride.int:
            return args[0].value.stride[args[1]]
        if not isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            # getitem on a tuple, or arithmetic on sizes.
            return target(*args, **kwargs)
        try:
            facts, arguments = self._examiner.facts(target, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:
            where = node.meta.get("where") or node.meta.get("module") or "the model"
            if is_data_dependent(error):
                raise refuse_data_dependence(where) from error
            raise CaptureError(
                f"{where}: {target} could not be analysed on tensors without data ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}). Custom operators need a fake "
                "implementation (torch.library.register_fake); sizes must not depend on data."
            ) from error
        if _is_sparse(target, args, kwargs) and any(item.value and item.value.requires_grad for item in facts.results):
            raise refuse_sparse_gradient(node.meta.get("where") or node.meta.get("module") or "the model")
        return self._apply(node, facts, arguments)

    def _apply(self, node: fx.Node, facts: CallFacts, arguments: list[Slot]) -> Any:
        slots: list[Slot | None] = []
        for result in facts.results:
            if result.value is None:
                slots.append(None)
                continue
            if result.shares is None:
                slots.append(self._slot(result.value))
                continue
            where, position = result.shares
            owner = arguments[position] if where == "argument" else slots[position]
            slots.append(self._slot(result.value, owner.storage))  # type: ignore[union-attr]
        internals = tuple(self._slot(value) for value in facts.internals)
        self._steps[node] = WalkStep(facts=facts, arguments=tuple(arguments), results=tuple(slots), internals=internals)
        for position in facts.followed:
            self._follow(arguments[position].storage)
        leaves = [
            slot if slot is not None else result.constant for slot, result in zip(slots, facts.results, strict=True)
        ]
        return pytree.tree_unflatten(leaves, facts.structure)

    def _follow(self, storage: int) -> None:
        """Writing a value that autograd follows makes all that shares the written memory followed."""
        for member in self._members[storage]:
            if member.value.differentiable and not member.value.requires_grad:
                member.value = replace(member.value, requires_grad=True)


def _is_sparse(target: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an embedding asks for a sparse gradient of its weight."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "sparse":
            return bool(args[position] if position < len(args) else kwargs.get("sparse", False))
    return False


def _estimate_branch(branch: fx.GraphModule, operands: list[Any], training: bool) -> tuple[int, int]:
    """(forward, backward) operations of a subgraph on operands (slots or numbers)."""
    looks = [operand.value if isinstance(operand, Slot) else operand for operand in operands]
    examiner = Examiner(training=training, estimate_branch=_estimate_branch)
    walk = _Walker(examiner, lambda name: getattr(branch, name)).run(branch.graph, looks, 0)
    return (
        sum(step.facts.flops for step in walk.steps.values()),
        sum(step.facts.backward_flops for step in walk.steps.values()),
    )
