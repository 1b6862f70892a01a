"""The flat graph of a captured model (`FlatTrace`), its shapes at one batch size, and ids for its ops and tensors.

`walk_trace` goes through the graph for one batch size and finds the shape, dtype and strides of every tensor. Sizes
that the export left symbolic (`sym_size` and arithmetic on it) become numbers. `build_table` gives ids to the ops and
tensors of a walk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from meshwright.capture.call_facts import CallFacts, Examiner, draws_random, written_and_aliased
from meshwright.capture.refusals import is_data_dependent, refuse_data_dependence, refuse_sparse_gradient
from meshwright.capture.value_looks import Slot, ValueLooks
from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.capture.export import BatchLayout
    from meshwright.spec.graph import Role


LOSS_MODULE = "loss"


@dataclass(frozen=True, slots=True)
class Returned:
    """The nested structure of a model's output.

    ``leaves``: (True, number of a graph output) for a tensor, (False, value) for any other leaf.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[bool, Any], ...]

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """Return the model's output in its nested structure, from the graph's outputs."""
        leaves = [outputs[value] if is_output else value for is_output, value in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


# The graph has placeholders for the batch's tensors, `get_attr` nodes whose targets are the user's names of parameters
# and buffers (tied ones once), `call_function` nodes, and an output tuple. Node metadata is reduced to ``module`` (path
# of the module that ran the op; "" is the model itself) and ``where`` ("file:line" in the user's code).
@dataclass(slots=True, kw_only=True)
class FlatTrace:
    """A flat graph, and the objects to which it refers.

    ``layout``: how a batch is flattened. ``state``: the model's parameters and buffers, by their first names, in the
    model's order. ``aliases``: further names of tied parameters, by first name. ``persistent``: names that are in the
    state dict. ``constants``: tensors made in forward. ``branches``: subgraphs of `torch.cond` and similar operators.
    ``values``: shape, strides and dtype of each tensor of the example batch. ``batched``: for each of these tensors,
    whether its dim 0 is the batch. ``batch_size``: samples in the example batch. ``returned``: the structure of the
    outputs. ``checkpoint``: a source line that calls ``torch.utils.checkpoint``, which the graph does not record, or
    "". ``facts``: a cache.
    """

    graph: fx.Graph
    layout: BatchLayout
    state: dict[str, torch.Tensor]
    aliases: dict[str, tuple[str, ...]]
    persistent: frozenset[str]
    constants: dict[str, torch.Tensor]
    branches: dict[str, fx.GraphModule]
    values: tuple[ValueLooks, ...]
    batched: tuple[bool, ...]
    batch_size: int
    training: bool
    has_loss: bool
    returned: Returned | None = None
    checkpoint: str = ""
    facts: dict[Any, Any] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """True if the graph holds for one batch size only."""
        return not any(self.batched)

    def attribute(self, name: str) -> Any:
        """Return the tensor or subgraph to which a `get_attr` node with the target ``name`` refers."""
        for table in (self.state, self.constants, self.branches):
            if name in table:
                return table[name]
        raise KeyError(name)


def target_of(node: fx.Node) -> Any:
    """Return ``node.target``, untyped (fx's type hint is too wide to be of use)."""
    return node.target


def args_of(node: fx.Node) -> Any:
    """Return ``node.args``, untyped (fx's type hint is too wide to be of use)."""
    return node.args


aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep:
    """One op of a walk: its facts and its tensors.

    ``arguments``: the distinct tensor arguments. ``results``: the leaves of its result, None for one that is not a
    tensor. ``internals``: tensors that autograd saves and that are neither arguments nor results.
    """

    facts: CallFacts
    arguments: tuple[Slot, ...]
    results: tuple[Slot | None, ...]
    internals: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A walk through a flat graph at one batch size.

    ``env``: by node, its value: a slot (tensor), a number, or a nested structure of these. ``steps``: by node, the
    `WalkStep` of each operator call.
    """

    batch_size: int
    env: dict[fx.Node, Any]
    steps: dict[fx.Node, WalkStep]


def walk_trace(trace: FlatTrace, batch_size: int) -> Walk:
    """Return the walk through ``trace`` for batches of ``batch_size`` samples; cached in the trace.

    Raises CaptureError if an operator cannot run on fake tensors, or if a size depends on data.
    """
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
    """Return the examiner of a trace, which caches facts about calls for all walks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op of a table, with tensor ids.

    ``results``: per leaf of the node's result, its id, or None if it is not a tensor. ``internals``: tensors that only
    the backward pass reads. ``saved``: tensors that autograd saves. ``written``: tensors that the op writes in place.
    ``aliased``: tensors with which results may share memory. ``random``: the op draws random numbers.
    """

    node: fx.Node
    inputs: tuple[int, ...]
    results: tuple[int | None, ...]
    internals: tuple[int, ...]
    saved: tuple[int, ...]
    written: tuple[int, ...]
    aliased: tuple[int, ...]
    random: bool

    @property
    def outputs(self) -> tuple[int, ...]:
        """The ids of the results that are tensors."""
        return tuple(i for i in self.results if i is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor of a table: its slot, role and name ("" for results of ops, which are named after their op later)."""

    slot: Slot
    role: Role
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTable:
    """All tensors and ops of a walk; an id is an index into ``tensors`` or ``ops``.

    ``of_node``: by node whose value is one tensor, the tensor's id. ``inputs`` and ``outputs``: tensor ids.
    """

    tensors: tuple[TensorRow, ...]
    ops: tuple[OpRow, ...]
    of_node: dict[fx.Node, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


# Tensor ids count the batch's tensors, then parameters and buffers in the model's own order, then constants in order of
# first use, then the results and internals of each op in graph order. Nothing here depends on names that the export
# invented or on addresses. So two processes number alike.
def build_table(trace: FlatTrace, walk: Walk) -> CaptureTable:
    """Return a table that gives ids to the tensors and ops of a walk; equal models have equal ids in all processes."""
    builder = _Builder(trace, walk)
    builder.add_sources()
    for node in trace.graph.nodes:
        if node in walk.steps:
            builder.add_op(node)
    output = next(node for node in trace.graph.nodes if node.op == "output")
    return CaptureTable(
        tensors=tuple(builder.tensors),
        ops=tuple(builder.ops),
        of_node={
            node: builder.numbers[slot]
            for node, slot in walk.env.items()
            if isinstance(slot, Slot) and slot in builder.numbers
        },
        inputs=tuple(i for i, row in enumerate(builder.tensors) if row.role == "input"),
        outputs=tuple(
            builder.numbers[walk.env[leaf]]
            for leaf in output.args[0]
            if isinstance(leaf, fx.Node) and isinstance(walk.env[leaf], Slot)
        ),
    )


class _Builder:
    def __init__(self, trace: FlatTrace, walk: Walk) -> None:
        self._trace = trace
        self._walk = walk
        self.tensors: list[TensorRow] = []
        self.ops: list[OpRow] = []
        self.numbers: dict[Slot, int] = {}

    def add_sources(self) -> None:
        nodes = list(self._trace.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, name in zip(placeholders, self._trace.layout.names, strict=True):
            self._add(self._walk.env[node], "input", name)
        used = {node.target: self._walk.env[node] for node in nodes if node.op == "get_attr"}
        state = self._trace.state.items()
        for role in ("parameter", "buffer"):
            for name, tensor in state:
                if isinstance(tensor, torch.nn.Parameter) == (role == "parameter"):
                    self._add(used[name] if name in used else Slot(ValueLooks.of(tensor), -1), role, name)
        for name, slot in used.items():
            if name in self._trace.constants:
                self._add(slot, "constant", name)

    def add_op(self, node: fx.Node) -> None:
        step = self._walk.steps[node]
        args = fx.node.map_arg(node.args, self._walk.env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._walk.env.__getitem__)
        written, aliased = written_and_aliased(node.target, args, kwargs, Slot)
        results = tuple(None if slot is None else self._add(slot, "activation", "") for slot in step.results)
        if not written and all(i is None for i in results):
            return
        internals = tuple(self._add(slot, "saved", "") for slot in step.internals)
        inputs = tuple(self.numbers[slot] for slot in step.arguments)
        sources: dict[str, Any] = {"argument": inputs, "result": results, "internal": internals}
        self.ops.append(
            OpRow(
                node=node,
                inputs=inputs,
                results=results,
                internals=internals,
                saved=tuple(sources[where][position] for where, position in step.facts.saved),
                written=tuple(dict.fromkeys(self.numbers[slot] for slot in written)),
                aliased=tuple(dict.fromkeys(self.numbers[slot] for slot in aliased)),
                random=draws_random(node.target, args, kwargs),
            )
        )

    def _add(self, slot: Slot, role: Role, name: str) -> int:
        self.numbers[slot] = len(self.tensors)
        self.tensors.append(TensorRow(slot=slot, role=role, name=name))
        return self.numbers[slot]
