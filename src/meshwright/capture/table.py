"""Numbers for a walked trace: which node is which op, which slot is which tensor.

Tensor ids count the batch's tensors, then parameters and buffers in the model's own order, then constants in order of
first use, then the results and internals of each op in graph order. Nothing here depends on names that the export
invented or on addresses, so two processes number alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.capture.values import Slot, ValueLooks
from meshwright.capture.walk import Walk
from meshwright.capture.writes import draws_random, written_and_aliased

if TYPE_CHECKING:
    from meshwright.capture.trace import FlatTrace
    from meshwright.spec.graph import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op: its node and tensor ids. ``results`` follow the node's flattened results (None where no tensor)."""

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
        """Tensor ids of the results."""
        return tuple(i for i in self.results if i is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor: its slot, role and name (empty for what ops make: they are named after the op)."""

    slot: Slot
    role: Role
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTable:
    """All tensors and ops of a walk. ``of_node`` maps the nodes that stand for one tensor to its id."""

    tensors: tuple[TensorRow, ...]
    ops: tuple[OpRow, ...]
    of_node: dict[fx.Node, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def build_table(trace: FlatTrace, walk: Walk) -> CaptureTable:
    """Number the tensors and ops of ``walk``."""
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
