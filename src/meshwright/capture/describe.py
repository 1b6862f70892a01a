"""`describe_trace`: describe a trace as a `spec.Graph`, with sizes as functions of the batch size.

Each size and FLOP count is an affine function of the batch size b: ``fixed + per_sample * b``. It is found from walks
at two batch sizes and confirmed by a third. A model whose sizes are not affine, or whose ops differ between batch
sizes, is described for the batch size of its example only.

`crossing_bytes` returns the bytes that cross each cut; `own_graph` the module of an op that contains a graph.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from meshwright.capture.call_facts import Legality, judge_cuts
from meshwright.capture.graph_walk import CaptureTable, FlatTrace, OpRow, Walk, build_table, target_of, walk_trace
from meshwright.capture.layer_division import OpLine, Range, divide
from meshwright.capture.module_devices import CPU
from meshwright.capture.module_parts import part
from meshwright.capture.value_looks import Slot
from meshwright.spec import CaptureError, Extent, Graph, Layer, Op, Tensor
from meshwright.spec.blocks import block_signature

if TYPE_CHECKING:
    from meshwright.capture.capture import Captured


# A graph keeps only a hash of the graph inside such an op (under `torch.no_grad` in a model, say a table of rotary
# positions). So its module is cut out of the captured model.
def has_own_graph(graph: Graph, op: Op) -> bool:
    """Return whether an op contains a graph and has no input or output whose shape depends on the batch size."""
    shapes = (graph.tensors[i].shape for i in (*op.inputs, *op.outputs))
    return "." not in op.kind and not any(extent.per_sample for shape in shapes for extent in shape)


def own_graph(captured: Captured, op: Op, *, batch_size: int, device: torch.device = CPU) -> nn.Module:
    """Return a module that computes an op of the captured graph from the op's inputs, in order.

    ``op`` may also come from a local graph (of one device under a sharding); it is found by its name. Raises GraphError
    if the graph is for another batch size only.
    """
    graph = captured.graph
    index = next(i for i, other in enumerate(graph.ops) if other.name == op.name)
    feeds = tuple(dict.fromkeys(i for i in op.inputs if graph.tensors[i].role in ("activation", "input")))
    made = part(captured, feeds, op.outputs, batch_size=batch_size, ops=[index], device=device)
    return _Fed(made, tuple(op.inputs.index(i) for i in feeds), is_single=len(op.outputs) == 1)


class _Fed(nn.Module):
    """A part of a model, called with some of an op's inputs."""

    def __init__(self, made: nn.Module, places: tuple[int, ...], *, is_single: bool) -> None:
        super().__init__()
        self._made, self._places, self._is_single = made, places, is_single

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self._made(*(given[place] for place in self._places))
        return found[0] if self._is_single else found


# Arguments that set where a result is stored, not what is computed.
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "generator"})


class NotAffineError(Exception):
    """A size is not an affine function of the batch size, or the ops differ between batch sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphWithTable:
    """A graph, the table whose ids its ops and tensors have, and the legal cuts."""

    graph: Graph
    table: CaptureTable
    legality: Legality


# What divides ops into layers: (ops, tensors, their nodes) → ranges.
Division = Callable[[Sequence[Op], Sequence[Tensor], Sequence[fx.Node]], tuple[Range, ...]]


def describe_trace(trace: FlatTrace, name: str, division: Division | dict[str, bool]) -> GraphWithTable:
    """Return the graph of a trace.

    ``division`` determines the layers: the model's units (`find_units`), or a function of (ops, tensors, nodes) that
    returns ranges of ops. Raises NotAffineError if a size is not an affine function of the batch size.
    """
    example = trace.batch_size
    sizes = (example,) if trace.fixed else (example, 2 * example, 3 * example)
    walks = [_walk(trace, size) for size in sizes]
    tables = [build_table(trace, walk) for walk in walks]
    _check_alike(tables)
    return _Describer(trace, sizes, walks, tables, name, division).describe()


def _walk(trace: FlatTrace, size: int) -> Walk:
    if size == trace.batch_size:
        return walk_trace(trace, size)
    try:
        return walk_trace(trace, size)
    except CaptureError as error:
        raise NotAffineError(str(error)) from error


def _check_alike(tables: list[CaptureTable]) -> None:
    """Numbers and wiring must not depend on the batch size."""
    first = tables[0]
    for other in tables[1:]:
        alike = len(first.tensors) == len(other.tensors) and len(first.ops) == len(other.ops)
        if not alike or any(
            (one.inputs, one.results, one.saved, one.written) != (two.inputs, two.results, two.saved, two.written)
            for one, two in zip(first.ops, other.ops, strict=True)
        ):
            raise NotAffineError("the graph differs between batch sizes")


class _Describer:
    def __init__(
        self,
        trace: FlatTrace,
        sizes: tuple[int, ...],
        walks: list[Walk],
        tables: list[CaptureTable],
        name: str,
        division: Division | dict[str, bool],
    ) -> None:
        self._trace, self._sizes, self._walks, self._tables = trace, sizes, walks, tables
        self._name, self._division = name, division
        self._table = tables[0]
        self._legality = judge_cuts(self._table)

    def describe(self) -> GraphWithTable:
        table = self._table
        names = _op_names(table.ops)
        tensors = self._tensors(names)
        ops = tuple(self._op(i, row, names[i]) for i, row in enumerate(table.ops))
        ranges = self._ranges(ops, tensors)
        graph = Graph(
            name=self._name,
            tensors=tensors,
            ops=ops,
            layers=tuple(
                Layer(
                    name=item.name,
                    start=item.start,
                    stop=item.stop,
                    block=block_signature(ops, tensors, item.start, item.stop),
                )
                for item in ranges
            ),
            inputs=table.inputs,
            outputs=table.outputs,
            mode="training" if self._trace.training else "inference",
            has_loss=self._trace.has_loss,
            batch_size=self._trace.batch_size if self._trace.fixed else None,
        )
        return GraphWithTable(graph=graph, table=table, legality=self._legality)

    def _extent(self, numbers: Sequence[int]) -> Extent:
        return fit_extent(self._sizes, numbers)

    def _tensors(self, names: list[str]) -> tuple[Tensor, ...]:
        made: dict[int, str] = {}
        for row, name in zip(self._table.ops, names, strict=True):
            several = len(row.results) > 1
            made |= {i: f"{name}:{j}" if several else name for j, i in enumerate(row.results) if i is not None}
            made |= {i: f"{name}.saved{j}" for j, i in enumerate(row.internals)}
        owner: dict[int, int] = {}
        tensors = []
        for i, rows in enumerate(zip(*(table.tensors for table in self._tables), strict=True)):
            row = rows[0]
            values = [item.slot.value for item in rows]
            shape = tuple(self._extent(sizes) for sizes in zip(*(value.shape for value in values), strict=True))
            storage = owner.setdefault(row.slot.storage, i) if row.slot.storage >= 0 else i
            followed = row.role in ("parameter", "activation") and (self._trace.training or row.role == "parameter")
            tensors.append(
                Tensor(
                    name=made.get(i, row.name),
                    shape=shape,
                    dtype=dtype_name(values[0].dtype),
                    role=row.role,
                    storage=storage,
                    requires_grad=followed and values[0].requires_grad,
                    aliases=self._trace.aliases.get(row.name, ()) if row.role in ("parameter", "buffer") else (),
                )
            )
        return tuple(tensors)

    def _op(self, index: int, row: OpRow, name: str) -> Op:
        rows = [table.ops[index] for table in self._tables]
        facts = [walk.steps[row.node].facts for walk in self._walks]
        return Op(
            name=name,
            kind=kind_of(row.node),
            inputs=row.inputs,
            outputs=row.outputs,
            attributes=self._attributes(row.node),
            flops=self._extent([item.flops for item in facts]),
            backward_flops=self._extent([item.backward_flops for item in facts]),
            saved=rows[0].saved,
            random=row.random,
            replicable=self._legality.replicable[index],
            module=row.node.meta["module"],
            phase=row.node.meta.get("phase", "forward"),
        )

    def _attributes(self, node: fx.Node) -> tuple[tuple[str, str], ...]:
        """The call's arguments that are not tensors and differ from their defaults, as text."""
        calls = [
            (fx.node.map_arg(node.args, walk.env.__getitem__), fx.node.map_arg(node.kwargs, walk.env.__getitem__))
            for walk in self._walks
        ]
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return (("branches", _branches_text(calls[0][0])),)
        attributes = []
        for position, argument in enumerate(schema.arguments):
            values = [args[position] if position < len(args) else kwargs.get(argument.name) for args, kwargs in calls]
            given = position < len(node.args) or argument.name in node.kwargs
            if not given or argument.name in _PLACEMENT or values[0] is None or _has_slot(values[0]):
                continue
            if argument.has_default_value() and values[0] == argument.default_value:
                continue
            attributes.append((argument.name, self._text(values)))
        return tuple(attributes)

    def _text(self, values: list[Any]) -> str:
        first = values[0]
        if isinstance(first, list | tuple):
            return "[" + ", ".join(self._text(list(items)) for items in zip(*values, strict=True)) + "]"
        if type(first) is int:
            return str(self._extent(values))
        if type(first) is float and len(set(values)) > 1:
            # A number of tokens that something is divided by.
            if not all(value.is_integer() for value in values):
                raise NotAffineError(f"{values} at batch sizes {list(self._sizes)}")
            return str(self._extent([int(value) for value in values]))
        return dtype_name(first) if isinstance(first, torch.dtype) else str(first)

    def _ranges(self, ops: tuple[Op, ...], tensors: tuple[Tensor, ...]) -> tuple[Range, ...]:
        if not isinstance(self._division, dict):
            return self._division(ops, tensors, [row.node for row in self._table.ops])
        size = self._trace.batch_size
        lines = [
            OpLine(
                module=op.module,
                kind=op.kind,
                has_parameters=any(tensors[i].role == "parameter" for i in op.inputs),
                replicable=op.replicable,
                work=op.flops.at(size) + sum(tensors[i].num_bytes(size) for i in (*op.inputs, *op.outputs)),
            )
            for op in ops
        ]
        return divide(
            lines, self._legality.cuts, crossing_bytes(ops, tensors, self._table.outputs, size), self._division
        )


def fit_extent(sizes: Sequence[int], numbers: Sequence[int]) -> Extent:
    """Return the affine function of the batch size that has the values ``numbers`` at the batch sizes ``sizes``.

    Raises NotAffineError if there is no such function with whole coefficients and a slope of at least 0.
    """
    if len(set(numbers)) == 1:
        return Extent(numbers[0])
    slope, rest = divmod(numbers[1] - numbers[0], sizes[1] - sizes[0])
    extent = Extent(numbers[0] - slope * sizes[0], slope)
    if rest or slope < 0 or any(extent.at(size) != number for size, number in zip(sizes, numbers, strict=True)):
        raise NotAffineError(f"{list(numbers)} at batch sizes {list(sizes)}")
    return extent


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def kind_of(node: fx.Node) -> str:
    """Return torch's name of the node's operator, like "aten.add.Tensor"."""
    target = target_of(node)
    return str(target) if isinstance(target, torch._ops.OpOverload) else str(target.name())


def _op_names(ops: Sequence[OpRow]) -> list[str]:
    counts: Counter[str] = Counter()
    names = []
    for row in ops:
        kind = kind_of(row.node)
        own = kind.startswith(("aten.", "meshwright."))
        short = kind.split(".")[1] if own else kind.replace("::", ".").removesuffix(".default")
        names.append(f"{short}_{counts[short]}")
        counts[short] += 1
    return names


def _has_slot(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_slot(item) for item in value)
    return isinstance(value, Slot)


def _branches_text(args: tuple[Any, ...]) -> str:
    """A hash of the subgraphs' code without comments, which name files of this machine."""
    codes = [re.sub(r"#.*", "", item.code) for item in args if isinstance(item, fx.GraphModule)]
    flags = [str(item) for item in args if isinstance(item, bool)]
    return hashlib.sha256("\n".join([*flags, *codes]).encode()).hexdigest()[:12]


def crossing_bytes(ops: Sequence[Op], tensors: Sequence[Tensor], outputs: Sequence[int], batch_size: int) -> list[int]:
    """Return, for each position c from 0 to ``len(ops)``, the bytes that cross a cut in front of op c.

    These are the outputs of ops before c that ops from c on, or the graph's outputs, use. Outputs of replicable ops do
    not count, because each stage can compute them.
    """
    last: dict[int, int] = {i: len(ops) for i in outputs}
    for position in range(len(ops) - 1, -1, -1):
        for i in ops[position].inputs:
            last.setdefault(i, position)
    change = [0] * (len(ops) + 2)
    for position, op in enumerate(ops):
        if not op.replicable:
            for i in op.outputs:
                end = last.get(i, position)
                change[position + 1] += tensors[i].num_bytes(batch_size)
                change[end + 1] -= tensors[i].num_bytes(batch_size)
    crossing, level = [], 0
    for position in range(len(ops) + 1):
        level += change[position]
        crossing.append(level)
    return crossing
