"""What one operator does, found by running it alone on fake tensors, once per distinct call.

For a call (operator, looks of its tensor arguments, other arguments) this answers: what its results look like and whose
memory they share, what autograd keeps for its backward pass (`saved_tensors_hooks`, told apart by storage), and how
many floating-point operations its forward and its backward pass take. A model of 80 equal layers makes each distinct
call once, so a graph of thousands of ops costs about as much as one layer.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.capture.flops import FlopCounter
from meshwright.capture.values import Slot, ValueLooks
from meshwright.capture.writes import written_and_aliased

if TYPE_CHECKING:
    from collections.abc import Callable

# (where it comes from, position there): a distinct tensor argument, a result, or an internal of the operator.
Source = tuple[Literal["argument", "result", "internal"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A leaf of what the operator returns: a tensor (``value``, in the memory of ``shares``) or a ``constant``."""

    value: ValueLooks | None = None
    shares: Source | None = None
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What one call does.

    ``saved`` names what autograd keeps, ``internals`` the looks of what only its backward sees. ``followed``: arguments
    that autograd follows only after the call, because it wrote to them.
    """

    results: tuple[Result, ...]
    structure: pytree.TreeSpec
    saved: tuple[Source, ...]
    internals: tuple[ValueLooks, ...]
    followed: tuple[int, ...]
    flops: int
    backward_flops: int


class Examiner:
    """Remembers the facts of every distinct call; ``estimate_branch`` counts (forward, backward) of a subgraph."""

    def __init__(
        self, *, training: bool, estimate_branch: Callable[[fx.GraphModule, list[Any], bool], tuple[int, int]]
    ) -> None:
        self._training = training
        self._estimate_branch = estimate_branch
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._facts: dict[Any, CallFacts] = {}

    def facts(self, target: Any, args: Any, kwargs: dict[str, Any]) -> tuple[CallFacts, list[Slot]]:
        """Facts of the call and its distinct tensor arguments in order of first occurrence."""
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
