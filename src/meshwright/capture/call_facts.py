"""Facts about operator calls: results, writes, FLOPs (`count_flops`); legal cuts of a captured model (`judge_cuts`).

`Examiner` runs each distinct call (operator, shapes, dtypes and strides of its tensors, other arguments) once, on fake
tensors. It records the shape, dtype and strides of each result, the memory that results share with arguments, the
tensors that autograd saves for the backward pass, and the FLOPs of forward and backward. Equal layers make equal calls,
so a graph of 80 equal layers takes about as long as one layer.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from meshwright.capture.value_looks import Slot, ValueLooks
from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshwright.capture.graph_walk import CaptureTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Legality:
    """Where a captured model may be cut into stages.

    ``cuts``: the legal positions c, each between op c - 1 and op c. ``replicable``: per op, whether several stages may
    each compute the op for themselves. ``groups``: per tensor, the number of its memory group; tensors that share
    memory, or may share it, have the same number.
    """

    cuts: frozenset[int]
    replicable: tuple[bool, ...]
    groups: tuple[int, ...]


# A cut is a position c between op c-1 and op c. Each rule was found by a failure (own experiments with corner models):
#
# 1. Memory that is written in place must not cross a cut before its last write: spans [first producer, last write]
# forbid cuts. Values that share memory, or may share it by schema, form one group.
#
# 2. State that is written (batch norm's statistics, counters, a batch that forward changes) is read and written in one
# stage: all of its uses form one span. Otherwise its value would silently differ between stages.
#
# 3. An op is replicable (each stage may recompute it for itself) if it depends on no input, parameter, random number or
# written memory, and writes nothing.
def judge_cuts(table: CaptureTable) -> Legality:
    """Return the legal cuts of a captured model's table.

    Raises CaptureError if forward writes to a parameter or a constant in place.
    """
    groups = _memory_groups(table)
    mutated = {groups[i] for op in table.ops for i in op.written}
    _refuse_lost_writes(table, groups)
    forbidden = [0] * (len(table.ops) + 1)
    for first, last in _spans(table, groups, mutated):
        # The cuts first+1 .. last are forbidden.
        forbidden[first + 1] += 1
        forbidden[last + 1] -= 1
    cuts, depth = [], 0
    for position in range(1, len(table.ops)):
        depth += forbidden[position]
        if depth == 0:
            cuts.append(position)
    return Legality(cuts=frozenset(cuts), replicable=_replicable(table, groups, mutated), groups=tuple(groups))


def _memory_groups(table: CaptureTable) -> list[int]:
    """Union-find over tensors that share memory or may do so."""
    parent = list(range(len(table.tensors)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    for i, row in enumerate(table.tensors):
        if row.slot.storage >= 0:
            parent[find(i)] = find(first.setdefault(row.slot.storage, i))
    for op in table.ops:
        for i in op.aliased:
            for j in op.outputs:
                parent[find(j)] = find(i)
    return [find(i) for i in range(len(parent))]


def _spans(table: CaptureTable, groups: list[int], mutated: set[int]) -> list[tuple[int, int]]:
    held = {
        groups[i] for i, row in enumerate(table.tensors) if row.role in ("input", "parameter", "buffer", "constant")
    }
    touched: dict[int, list[int]] = {}
    last_write: dict[int, int] = {}
    for position, op in enumerate(table.ops):
        for group in {groups[i] for i in (*op.inputs, *op.outputs)} & mutated:
            touched.setdefault(group, []).append(position)
        for i in op.written:
            last_write[groups[i]] = position
    return [
        (positions[0], positions[-1] if group in held else last_write[group]) for group, positions in touched.items()
    ]


def _replicable(table: CaptureTable, groups: list[int], mutated: set[int]) -> tuple[bool, ...]:
    free = {i for i, row in enumerate(table.tensors) if row.role in ("buffer", "constant") and groups[i] not in mutated}
    verdicts = []
    for op in table.ops:
        verdict = (
            not op.random
            and not op.written
            and all(i in free for i in op.inputs)
            and all(groups[i] not in mutated for i in op.outputs)
        )
        verdicts.append(verdict)
        if verdict:
            free.update(op.outputs)
    return tuple(verdicts)


def _refuse_lost_writes(table: CaptureTable, groups: list[int]) -> None:
    lasting = {groups[i]: row for i, row in enumerate(table.tensors) if row.role in ("parameter", "constant")}
    for op in table.ops:
        for i in op.written:
            row = lasting.get(groups[i])
            if row is not None:
                place = op.node.meta["where"] or op.node.meta["module"] or "forward"
                what = (
                    f"parameter {row.name!r}"
                    if row.role == "parameter"
                    else "a tensor that is neither parameter nor buffer"
                )
                raise CaptureError(
                    f"{place}: forward writes to {what} in place; a captured model would lose the write or repeat it. "
                    "Keep such values in a buffer (register_buffer)."
                )


# Operators that update arguments in training though their schema does not say so: name → positions of the running
# statistics.
_STATISTICS = {"aten::batch_norm": (3, 4), "aten::instance_norm": (3, 4)}
# Operators whose schema promises a write that changes no data.
_NOT_A_WRITE = {"aten::detach_", "aten::requires_grad_"}


# Schemas state all writes and aliases, with these exceptions (found with corner models). Batch and instance norm update
# their running statistics without stating it. Operators tagged ``maybe_aliasing_or_mutating`` may return their first
# argument. For operators with subgraphs, the subgraphs decide.
def written_and_aliased(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type) -> tuple[list, list]:
    """Return two lists of a call's arguments: those that the call writes, and those that its results may alias.

    Only arguments of type ``kind`` (fx.Node or Slot) are returned, also from nested lists.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return _of_subgraphs(args, kind)
    written: list[Any] = []
    aliased: list[Any] = []
    if schema.name not in _STATISTICS and torch.Tag.maybe_aliasing_or_mutating in target.tags:
        aliased += [leaf for leaf in args[:1] if isinstance(leaf, kind)]
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        leaves = list(_leaves(value, kind))
        if argument.alias_info is not None:
            aliased += leaves
            if argument.alias_info.is_write and schema.name not in _NOT_A_WRITE:
                written += leaves
        if position in _STATISTICS.get(schema.name, ()) and _updates_statistics(schema.name, args):
            written += leaves
    return written, aliased


def draws_random(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers; a dropout with p = 0 or outside training does not."""
    branches = [leaf for leaf in args if isinstance(leaf, fx.GraphModule)]
    if branches:
        return any(
            draws_random(node.target, node.args, node.kwargs)
            for branch in branches
            for node in branch.graph.nodes
            if node.op == "call_function"
        )
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    given = {item.name: args[i] for i, item in enumerate(schema.arguments) if i < len(args)} | kwargs
    if schema.name in ("aten::scaled_dot_product_attention",):
        return bool(given.get("dropout_p", 0.0))
    probability = next((given[name] for name in ("p", "dropout") if isinstance(given.get(name), float)), None)
    if "dropout" in schema.name or schema.name in ("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"):
        return probability != 0.0 and given.get("train", given.get("training", True)) is not False
    if schema.name.startswith("aten::rrelu"):
        return bool(given.get("training", False))
    return torch.Tag.nondeterministic_seeded in target.tags


def _updates_statistics(name: str, args: tuple[Any, ...]) -> bool:
    # Position 5 is `training` (batch norm) or `use_input_stats` (instance norm).
    return len(args) <= 5 or args[5] is not False or name not in _STATISTICS


def _of_subgraphs(args: tuple[Any, ...], kind: type) -> tuple[list, list]:
    """Writes to a placeholder of a subgraph are writes to the operand that it stands for."""
    branches = list(_leaves(args, fx.GraphModule))
    operands = [leaf for leaf in _flat(args) if not isinstance(leaf, fx.GraphModule)]
    written: list[Any] = []
    for branch in branches:
        placeholders = [node for node in branch.graph.nodes if node.op == "placeholder"]
        roots = {node: node for node in placeholders}
        touched: set[fx.Node] = set()
        for node in branch.graph.nodes:
            if node.op == "call_function":
                writes, aliases = written_and_aliased(node.target, _with_branches(node), node.kwargs, fx.Node)
                roots[node] = next((roots[item] for item in aliases if item in roots), node)
                touched.update(roots[item] for item in writes if item in roots)
        # The operands are the last arguments: flags, predicates and subgraphs stand before them.
        lifted = operands[len(operands) - len(placeholders) :]
        written += [
            operand
            for operand, node in zip(lifted, placeholders, strict=True)
            if node in touched and isinstance(operand, kind)
        ]
    return written, list(written)


def _with_branches(node: fx.Node) -> Any:
    """The node's arguments with subgraphs in place of the nodes that name them."""
    module = node.graph.owning_module

    def resolve(leaf: fx.Node) -> Any:
        held = getattr(module, str(leaf.target), None) if leaf.op == "get_attr" else None
        return held if isinstance(held, fx.GraphModule) else leaf

    return fx.node.map_arg(node.args, resolve)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    return (leaf for leaf in _flat(value) if isinstance(leaf, kind))


aten = torch.ops.aten


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (width + value.shape[3])


def _attention_backward(
    _grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Scores again; from the output's gradient those of weights and values, from that those of queries and keys."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (3 * width + 2 * value.shape[3])


def _matrix_vector(matrix: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _added_matrix_vector(_bias: torch.Tensor, matrix: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _recurrent(sequence: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor, *_: Any, **__: Any) -> int:
    """One layer of an LSTM over a sequence: every step multiplies input and hidden state by their weights."""
    return 2 * math.prod(sequence.shape[:2]) * (weight_ih.numel() + weight_hh.numel())


def _recurrent_backward(
    sequence: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor, *_: Any, **__: Any
) -> int:
    return 2 * _recurrent(sequence, weight_ih, weight_hh)


def _grouped(tokens: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each token is multiplied by the matrix of one group: tokens (S, K), weights (groups, K, N)."""
    return 2 * tokens.shape[0] * weights.shape[-2] * weights.shape[-1]


def _grouped_backward(tokens: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * _grouped(tokens, weights)


# Operators that are not torch's own.
_NAMED: dict[str, Callable[..., int]] = {
    "meshwright::grouped_mm": _grouped,
    "meshwright::grouped_mm_backward": _grouped_backward,
}

_OWN: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _attention_backward,
    ),
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.addmv: _added_matrix_vector,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}


# Formulas are torch's own (`flop_registry`, torch/utils/flop_counter.py), and ours where torch has none. A multiply and
# an add are two operations; elementwise work is not counted. The registry covers matrix products, convolutions and the
# GPU attention kernels. It lacks the CPU's attention kernels, matrix-vector products and, before torch 2.13, grouped
# keys and values. Ours count attention as torch 2.13 does for GPUs (no saving for causal masks; the backward pass
# recomputes the scores), and a matrix-vector product as 2·rows·columns.
def count_flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOPs of one dispatched operator (a multiply-add is 2); 0 for operators that are not counted.

    Matrix products, convolutions, attention and recurrent layers are counted, elementwise operators are not. ``out``
    is the operator's result.
    """
    packet = getattr(target, "overloadpacket", None)
    if packet in _OWN:
        return _OWN[packet](*args, **kwargs)
    if (name := getattr(getattr(target, "_schema", None), "name", "")) in _NAMED:
        return _NAMED[name](*args, **kwargs)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


class FlopCounter(TorchDispatchMode):
    """A context manager that adds the FLOPs of all operators dispatched in the ``with`` block to ``total``."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += count_flops(func, args, kwargs or {}, out)
        return out


# (where it comes from, position there): a distinct tensor argument, a result, or an internal of the operator.
Source = tuple[Literal["argument", "result", "internal"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One leaf of an operator's (nested) result: a tensor or a constant.

    ``value``: shape, strides and dtype of a tensor; None for a constant. ``shares``: the tensor whose memory it shares,
    or None. ``constant``: the value of a leaf that is not a tensor.
    """

    value: ValueLooks | None = None
    shares: Source | None = None
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """Facts about one distinct call of an operator.

    ``results``: the leaves of its result, ``structure`` their nesting. ``saved``: the tensors that autograd saves for
    the backward pass. ``internals``: shape, strides and dtype of saved tensors that are neither arguments nor results.
    ``followed``: positions of arguments that require a gradient only after the call, because the call wrote to them.
    ``flops`` and ``backward_flops``: the FLOPs of forward and backward pass.
    """

    results: tuple[Result, ...]
    structure: pytree.TreeSpec
    saved: tuple[Source, ...]
    internals: tuple[ValueLooks, ...]
    followed: tuple[int, ...]
    flops: int
    backward_flops: int


class Examiner:
    """Finds the facts of calls and caches them.

    ``training``: calls run with autograd. ``estimate_branch(subgraph, operands, training)`` returns the (forward,
    backward) FLOPs of a subgraph, such as a branch of `torch.cond`.
    """

    def __init__(
        self, *, training: bool, estimate_branch: Callable[[fx.GraphModule, list[Any], bool], tuple[int, int]]
    ) -> None:
        self._training = training
        self._estimate_branch = estimate_branch
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._facts: dict[Any, CallFacts] = {}

    def facts(self, target: Any, args: Any, kwargs: dict[str, Any]) -> tuple[CallFacts, list[Slot]]:
        """Return the facts of a call, and its distinct tensor arguments (slots) in order of first occurrence."""
        slots: list[Slot] = []
        key = (target, _key(args, slots), _key(kwargs, slots))
        if key not in self._facts:
            self._facts[key] = self._examine(target, args, kwargs, slots)
        return self._facts[key], slots

    def _examine(self, target: Any, args: Any, kwargs: dict[str, Any], slots: list[Slot]) -> CallFacts:
        branches = [leaf for leaf in args if isinstance(leaf, fx.GraphModule)]
        # Operators with subgraphs accept no counter; their subgraphs are estimated one by one.
        counter = nullcontext() if branches else FlopCounter()
        written = set(written_and_aliased(target, args, kwargs, Slot)[0])
        kept: list[torch.Tensor] = []
        with self._mode, torch.set_grad_enabled(self._training):
            leaves = [slot.value.empty() for slot in slots]
            # An in-place write to a leaf that requires a gradient is an error; in the graph these are not leaves.
            fakes = [
                leaf.clone() if slot in written and leaf.requires_grad else leaf
                for slot, leaf in zip(slots, leaves, strict=True)
            ]
            call_args, call_kwargs = _materialise((args, kwargs), dict(zip(slots, fakes, strict=True)))
            with torch.autograd.graph.saved_tensors_hooks(_keep_in(kept), lambda tensor: tensor), counter:
                out = target(*call_args, **call_kwargs)
            if isinstance(counter, FlopCounter):
                flops = counter.total, _backward_flops(leaves, out) if self._training else 0
            else:
                flops = self._dearest(target, branches, args)
        if branches:
            # torch.cond keeps operands only; everything else seen here belongs to torch tracing the branches.
            operands = {_storage(fake) for fake in fakes}
            kept = [tensor for tensor in kept if _storage(tensor) in operands]
        return _collect(fakes, slots, out, kept, flops)

    def _dearest(self, target: Any, branches: list[fx.GraphModule], args: Any) -> tuple[int, int]:
        operands = [leaf for leaf in pytree.tree_leaves(args) if not isinstance(leaf, fx.GraphModule)]
        # The first argument of wrap_with_set_grad_enabled says whether autograd follows its branch.
        training = self._training and (target.name() == "cond" or args[0])
        costs = []
        for branch in branches:
            forward, backward = self._estimate_branch(branch, operands[len(operands) - _arity(branch) :], training)
            # torch.cond keeps its operands only: its backward pass runs the branch again (torch 2.13).
            recomputed = forward if backward and target.name() == "cond" else 0
            costs.append((forward, backward + recomputed))
        return max(costs, key=sum)


def _keep_in(kept: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    return keep


def _arity(branch: fx.GraphModule) -> int:
    return sum(node.op == "placeholder" for node in branch.graph.nodes)


def _backward_flops(leaves: list[torch.Tensor], out: Any) -> int:
    outs = [item for item in pytree.tree_leaves(out) if isinstance(item, torch.Tensor) and item.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not outs or not wanted:
        return 0
    gradients = [torch.empty_like(item) for item in outs]
    with FlopCounter() as counter:
        torch.autograd.grad(outs, wanted, gradients, allow_unused=True)
    return counter.total


def _collect(
    fakes: list[torch.Tensor], slots: list[Slot], out: Any, kept: list[torch.Tensor], flops: tuple[int, int]
) -> CallFacts:
    owners: dict[int, Source] = {}
    for i, fake in enumerate(fakes):
        owners.setdefault(_storage(fake), ("argument", i))
    leaves, structure = pytree.tree_flatten(out)
    results = tuple(_result(i, leaf, fakes, slots, owners) for i, leaf in enumerate(leaves))
    saved: dict[Source, None] = {}
    internals: list[ValueLooks] = []
    for tensor in kept:
        key = _storage(tensor)
        if key not in owners:
            owners[key] = ("internal", len(internals))
            internals.append(_whole(tensor))
        saved[owners[key]] = None
    return CallFacts(
        results=results,
        structure=structure,
        saved=tuple(saved),
        internals=tuple(internals),
        followed=tuple(
            i
            for i, (fake, slot) in enumerate(zip(fakes, slots, strict=True))
            if fake.requires_grad and not slot.value.requires_grad
        ),
        flops=flops[0],
        backward_flops=flops[1],
    )


def _result(
    position: int, leaf: Any, fakes: list[torch.Tensor], slots: list[Slot], owners: dict[int, Source]
) -> Result:
    if not isinstance(leaf, torch.Tensor):
        return Result(constant=leaf)
    shares = owners.setdefault(_storage(leaf), ("result", position))
    value = ValueLooks.of(leaf)
    if any(leaf is fake for fake in fakes):
        # An in-place operator returns its argument: keep the argument's own strides, which a clone may have lost.
        argument = slots[shares[1]].value
        value = ValueLooks(argument.shape, argument.stride, value.dtype, value.requires_grad)
    return Result(value=value, shares=None if shares == ("result", position) else shares)


def _whole(tensor: torch.Tensor) -> ValueLooks:
    """The looks of an internal; a view is kept together with all of its memory."""
    looks = ValueLooks.of(tensor.detach())
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return looks if size == tensor.numel() else ValueLooks((size,), (1,), looks.dtype, False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _key(value: Any, slots: list[Slot]) -> Any:
    """Hashable form of arguments; equal tensors (by identity) get one number, in order of first occurrence."""
    if isinstance(value, Slot):
        for number, slot in enumerate(slots):
            if slot is value:
                return number
        slots.append(value)
        return value.value
    if isinstance(value, list | tuple):
        return tuple(_key(item, slots) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item, slots)) for name, item in value.items())
    if isinstance(value, fx.GraphModule):
        return id(value)
    # 1, 1.0 and True are equal but not the same argument; numbers of a slot are distinguished by type, too.
    return type(value), value


def _materialise(value: Any, fakes: dict[Slot, torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return fakes[value]
    if isinstance(value, list | tuple):
        return type(value)(_materialise(item, fakes) for item in value)
    if isinstance(value, dict):
        return {name: _materialise(item, fakes) for name, item in value.items()}
    return value
