"""Parts of a stage that run again in the backward instead of keeping what it reads.

Each range of ops becomes a module of its own, called under torch's checkpoint: it keeps its inputs alone, and runs
again, with the random numbers that it drew, as soon as its backward asks for a value; it ends with the last one that is
asked for. Parameters are among its inputs, so that a backward meets the version that the forward read. Buffers are its
own, and running again leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from meshwright.runtime.ranges import enclose, find_ops, note_ops
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph


def checkpoint_ranges(module: torch.nn.Module, graph: Graph, ops: Sequence[int]) -> torch.nn.Module:
    """The module of a stage's ``ops``, with those in the graph's ranges computed again.

    Raises PlanError for a range that writes to what is made outside of it, or that reads what is written later.
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
        enclose(module, f"again_{number}", nodes, Again, read - parameters)
    return module


class Again(torch.nn.Module):
    """A range of ops under checkpoint."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the range makes."""
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        return checkpoint(self.body, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _untouched(list(self.body.buffers()))


@contextmanager
def _untouched(buffers: list[torch.Tensor]) -> Iterator[None]:
    """Buffers are afterwards as they were; past autograd, which has no part in them."""
    kept = [item.clone() for item in buffers]
    try:
        yield
    finally:
        for item, value in zip(buffers, kept, strict=True):
            item.data.copy_(value)


def _check_writes(graph: Graph, number: int, ops: set[int]) -> None:
    """Raise PlanError if running again would write twice, or read what was written since."""
    start, stop = graph.recompute[number]
    made = {graph.tensors[i].storage for op in ops for i in graph.ops[op].outputs if graph.tensors[i].storage == i}
    given = {graph.tensors[i].storage for op in ops for i in graph.ops[op].inputs} - made
    for op, item in enumerate(graph.ops):
        if not item.inputs or not item.is_in_place:
            continue
        storage = graph.tensors[item.inputs[0]].storage
        target = graph.tensors[storage]
        # Whole numbers are counters, which nothing is computed from.
        if storage not in given or (op not in ops and op < stop) or not target.dtype.startswith("float"):
            continue
        if op not in ops and target.role in ("buffer", "parameter"):
            continue
        raise PlanError(
            f"The plan computes ops {start}:{stop} again, of which some read {target.name!r}, which {item.name!r} "
            "writes in place: running them again would read what was written. Choose other ranges, or compute nothing "
            "again."
        )
