"""Recompute (activation checkpointing): ranges of a stage's ops that run again in the backward.

Each range of ops becomes a module of its own, called under torch's checkpoint. It saves only its inputs. When its
backward needs a value, the range is recomputed with the same random numbers, up to the last needed value. Parameters
are among its inputs, so that a backward uses the version that the forward read. Buffers belong to the module, and
recomputing does not change them.

Some ops of a range may keep their results (selective checkpointing). `Kept` calls mark the kernels whose results are
saved: all except views and copies of inputs. Collectives between the processes of a team keep their results too, so
that nothing is sent twice. If activations are offloaded to the host, so are kept results; only this module uses the
storage of torch's selective checkpointing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.runtime.ranges import enclose, find_ops, note_ops
from meshwright.runtime.teams.team_operators import Convert
from meshwright.spec import Graph, PlanError
from meshwright.spec.recompute import kept_within

_aten = torch.ops.aten
# Kernels that copy their arguments, or allocate memory for a copy.
_COPIES = frozenset(
    {
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.copy_.default,
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.constant_pad_nd.default,
    }
)

# Marks kernels with kept results, for torch's compiler.
_NOTE = "meshwright_kept"


def checkpoint_ranges(module: torch.nn.Module, graph: Graph, ops: Sequence[int]) -> torch.nn.Module:
    """Return the module of a stage with the ranges of ``graph.recompute`` under checkpoint; ``ops`` are the stage's.

    Raises PlanError for a range that writes to a tensor made outside of it, or reads a tensor that is written later.
    """
    assert isinstance(module, fx.GraphModule), "parts are cut as graphs"
    note_ops(module, ops)
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    for number, (start, stop) in enumerate(graph.recompute):
        nodes = [node for node in module.graph.nodes if (own := find_ops(node)) is not None and start <= own[0] < stop]
        if not nodes:
            continue
        _check_writes(graph, number, {op for op in ops if start <= op < stop})
        read = {str(item.target) for node in nodes for item in node.all_input_nodes if item.op == "get_attr"}
        kept = kept_within(graph, start, stop)
        enclose(module, f"again_{number}", nodes, partial(RecomputedRange, kept=kept), read - parameters)
    return module


class RecomputedRange(torch.nn.Module):
    """A range of ops under checkpoint. ``kept``: the numbers of the ops whose results are saved, not recomputed."""

    def __init__(self, body: fx.GraphModule, kept: Collection[int] = ()) -> None:
        super().__init__()
        self.body = body
        self._keeping = _mark_kept(body, kept) if kept else None

    @property
    def keeps(self) -> bool:
        """Whether the results of some ops are saved (selective checkpointing)."""
        return self._keeping is not None

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Compute the range; with gradients enabled, under checkpoint."""
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        # Bypasses hooks of modules, whose kernels selective checkpointing would count.
        return checkpoint(self.body.forward, *inputs, use_reentrant=False, context_fn=self._contexts)

    def copy_kept(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """Replace kept results by ``pack(tensor)`` after a forward, and restore them by ``unpack`` for the backward."""
        if self._keeping is not None:
            self._keeping.pack, self._keeping.unpack = pack, unpack

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        untouched = _untouched(list(self.body.buffers()))
        return (nullcontext(), untouched) if self._keeping is None else self._keeping.contexts(untouched)


def checkpoint_compiled(body: fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
    """Call a range under checkpoint inside code that torch compiles; return its outputs.

    Notes at `Kept` calls mark the kernels whose results are saved.
    """
    contexts = partial(create_selective_checkpoint_contexts, _keep_noted)
    return checkpoint(body, *given, use_reentrant=False, context_fn=contexts)


def _keep_noted(_: Any, kernel: Any, /, *__: Any, **___: Any) -> CheckpointPolicy:
    return _policy_of(kernel, is_kept=_NOTE in traceback.current_meta.get("custom", {}))


def _policy_of(kernel: Any, *, is_kept: bool) -> CheckpointPolicy:
    if not is_kept or kernel in _COPIES or getattr(kernel, "is_view", False):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


class _Keeping:
    """The shared state of the kept ops of a range.

    ``is_on``: such an op is running, so that its kernels are marked. ``results`` are those of conversions between
    processes in the current call, in order; ``runs_again``: they are taken from there. ``pack`` and ``unpack`` as in
    `RecomputedRange.copy_kept`.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.runs_again = False
        self.results: list[torch.Tensor] = []
        self.pack: Callable[[torch.Tensor], Any] | None = None
        self.unpack: Callable[[Any], torch.Tensor] | None = None

    def contexts(
        self, untouched: AbstractContextManager[None]
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of one call: for its forward, and for running it again."""
        results: list[torch.Tensor] = []
        # In-place kernels inside an op, such as one that adds a bias, are kept with it.
        forward, again = create_selective_checkpoint_contexts(self._policy, allow_cache_entry_mutation=True)
        return self._within(forward, nullcontext(), results, False), self._within(again, untouched, results, True)

    def _replace(self, mode: Any, results: list[Any], change: Callable[[Any], Any] | None) -> None:
        """Replace the kept results of one call."""
        if change is None:
            return
        results[:] = map(change, results)
        for entries in mode.storage.values():
            for entry in entries.values() if isinstance(entries, dict) else entries:
                for item in tree_leaves(entry):
                    if hasattr(item, "val"):
                        item.val = change(item.val)

    @contextmanager
    def _within(
        self,
        mode: AbstractContextManager[Any],
        around: AbstractContextManager[None],
        results: list[torch.Tensor],
        runs_again: bool,
    ) -> Iterator[None]:
        self.results, self.runs_again = results, runs_again
        if runs_again:
            self._replace(mode, results, self.unpack)
        try:
            with around, mode:
                yield
        finally:
            self.results, self.runs_again = [], False
        if not runs_again:
            self._replace(mode, results, self.pack)

    def _policy(self, _: Any, kernel: Any, /, *__: Any, **___: Any) -> CheckpointPolicy:
        return _policy_of(kernel, is_kept=self.is_on)


class Kept:
    """An op whose result is saved in a recomputed range.

    It is a function, not a module, because the hooks of a module would call kernels of their own.
    """

    def __init__(self, call: Callable[..., Any], keeping: _Keeping, name: str) -> None:
        self.call, self._keeping = call, keeping
        # The name by which a graph's code calls it.
        self.__name__ = self.__qualname__ = name

    def __call__(self, /, *given: Any, **options: Any) -> Any:
        """Return the result of the op. ``self`` is positional, because the op may have an argument named ``self``."""
        if torch.compiler.is_compiling():
            with traceback.annotate({_NOTE: True}):
                return self.call(*given, **options)
        self._keeping.is_on = True
        try:
            return self.call(*given, **options)
        finally:
            self._keeping.is_on = False


class KeptConversion(torch.nn.Module):
    """A collective that converts a tensor's layout in a team; its result is saved, so that it runs once per forward."""

    def __init__(self, convert: Convert, keeping: _Keeping) -> None:
        super().__init__()
        self._convert, self._keeping = convert, keeping

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the converted tensor: from the collective, or the saved one while the range is recomputed."""
        if self._keeping.runs_again:
            return self._convert(value, self._keeping.results.pop(0))
        made: torch.Tensor = self._convert(value)
        if torch.is_grad_enabled():
            self._keeping.results.append(made.detach())
        return made


def _mark_kept(body: fx.GraphModule, kept: Collection[int]) -> _Keeping:
    """Mark the kept ops in a range's graph."""
    keeping = _Keeping()
    for node in list(body.graph.nodes):
        own = find_ops(node)
        if own is None or own[0] not in kept or node.target is operator.getitem:
            continue
        call = body.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        if isinstance(call, Convert):
            body.set_submodule(str(node.target), KeptConversion(call, keeping))
            continue
        with body.graph.inserting_before(node):
            made = body.graph.call_function(Kept(call, keeping, f"kept_{own[0]}"), node.args, node.kwargs)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        body.graph.erase_node(node)
    body.recompile()
    return keeping


@contextmanager
def _untouched(buffers: list[torch.Tensor]) -> Iterator[None]:
    """Restore buffers after the block, without autograd's notice."""
    kept = [item.clone() for item in buffers]
    try:
        yield
    finally:
        for item, value in zip(buffers, kept, strict=True):
            item.data.copy_(value)


def _check_writes(graph: Graph, number: int, ops: set[int]) -> None:
    """Raise PlanError if running again would write twice, or read a value that was written since."""
    start, stop = graph.recompute[number]
    made = {graph.tensors[i].storage for op in ops for i in graph.ops[op].outputs if graph.tensors[i].storage == i}
    given = {graph.tensors[i].storage for op in ops for i in graph.ops[op].inputs} - made
    for op, item in enumerate(graph.ops):
        if not item.inputs or not item.is_in_place:
            continue
        storage = graph.tensors[item.inputs[0]].storage
        target = graph.tensors[storage]
        # Integers are counters, from which nothing is computed.
        if storage not in given or (op not in ops and op < stop) or not target.dtype.startswith("float"):
            continue
        if op not in ops and target.role in ("buffer", "parameter"):
            continue
        raise PlanError(
            f"The plan recomputes ops {start}:{stop}, some of which read {target.name!r}, which {item.name!r} "
            "writes in place, so recomputing would read the new value. Choose other ranges, or recompute nothing."
        )
