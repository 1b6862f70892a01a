"""Graph: the ops and tensors of a model as data that needs no torch; checks of it (`check_graph`, `check_amounts`).

A graph lists tensors and ops in topological order. Sizes are `Extent`s, affine in the batch size b, so one capture
serves every microbatch size. A graph whose sizes are not symbolic is valid for one ``batch_size`` only. Each op lists
the tensors that autograd keeps for its backward (``saved``). Tensors that share memory have the same ``storage``, so
that bytes are counted once.

A **layer** is a named, contiguous range of ops. The model can be cut into stages at every boundary between layers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from meshwright.spec.codec import content_hash
from meshwright.spec.errors import GraphError
from meshwright.spec.exchange import Collective, Phase
from meshwright.spec.html import Printer, html_table
from meshwright.spec.recompute import Ranges, check_recompute
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


# The largest size of all tensors of a batch together, and their FLOPs: sums over the microbatches of a schedule stay
# far within int64. 1 PiB is 13,000 devices of 80 GiB.
MAX_GRAPH_BYTES = 2**50
MAX_GRAPH_FLOPS = 2**62


def check_graph(graph: Graph) -> None:
    """Raise GraphError if tensors, ops, layers or collectives of a graph contradict each other."""
    _check_tensors(graph)
    known = _check_ops(graph)
    _check_layers(graph)
    check_recompute(graph)
    if graph.compiled and any(op.phase == "backward" for op in graph.ops):
        raise GraphError(
            f"Graph {graph.name!r} holds its own backward, so its layers cannot be compiled separately. Capture "
            "the model alone."
        )
    _check_collectives(graph)
    graph.check_batch_size(graph.batch_size if graph.batch_size is not None else 1)
    for i in (*graph.inputs, *graph.outputs):
        if i not in known:
            raise GraphError(f"The graph's inputs or outputs name tensor {i}, which no op produces.")


def _check_tensors(graph: Graph) -> None:
    num_tensors = len(graph.tensors)
    for i, tensor in enumerate(graph.tensors):
        if tensor.dtype not in DTYPE_BYTES:
            raise GraphError(
                f"Tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}; known are {', '.join(DTYPE_BYTES)}."
            )
        if not 0 <= tensor.storage < num_tensors or graph.tensors[tensor.storage].storage != tensor.storage:
            raise GraphError(
                f"Tensor {tensor.name!r} (id {i}) has storage {tensor.storage}; expected the id of a tensor that owns "
                "its memory (whose storage is its own id)."
            )


def check_amounts(graph: Graph, batch_size: int) -> None:
    """Raise GraphError if the tensors or the FLOPs of a batch of ``batch_size`` samples exceed the limits.

    The limits are `MAX_GRAPH_BYTES` and `MAX_GRAPH_FLOPS`. A dim of size 0 counts as 1, so that it does not hide the
    sizes of the other dims.
    """
    num_bytes = 0
    for tensor in graph.tensors:
        num_bytes += math.prod((max(extent.most(batch_size), 1) for extent in tensor.shape), start=8)
        if num_bytes > MAX_GRAPH_BYTES:
            raise GraphError(
                f"The tensors of graph {graph.name!r}, up to {tensor.name!r}, take more than "
                f"{format_bytes(MAX_GRAPH_BYTES)} for a batch of {batch_size}. Choose smaller microbatches; if they "
                "are small already, the file is damaged: capture the model again."
            )
    num_flops = sum(op.flops.most(batch_size) + op.backward_flops.most(batch_size) for op in graph.ops)
    if num_flops > MAX_GRAPH_FLOPS:
        raise GraphError(
            f"Graph {graph.name!r} has more than {MAX_GRAPH_FLOPS:.1e} FLOPs for a batch of {batch_size}. "
            "Choose smaller microbatches; if they are small already, the file is damaged: capture the model again."
        )


def _check_ops(graph: Graph) -> set[int]:
    """Check the order of the ops; return the ids of all tensors that have a value at the end."""
    num_tensors = len(graph.tensors)
    known = {i for i, tensor in enumerate(graph.tensors) if tensor.role in ("input", "parameter", "buffer", "constant")}
    for op in graph.ops:
        for i in (*op.inputs, *op.outputs, *op.saved):
            if not 0 <= i < num_tensors:
                raise GraphError(f"Op {op.name!r} refers to tensor {i}, but the graph has {num_tensors} tensors.")
        unknown = [i for i in op.inputs if i not in known]
        if unknown:
            names = ", ".join(graph.tensors[i].name for i in unknown)
            raise GraphError(
                f"Op {op.name!r} reads {names} before any op has produced it; ops must be in topological order."
            )
        again = [i for i in op.outputs if i in known]
        if again:
            names = ", ".join(graph.tensors[i].name for i in again)
            raise GraphError(
                f"Op {op.name!r} writes {names}, which has a value already; an op that changes a tensor in place "
                "makes a new tensor of the same storage."
            )
        known.update(op.outputs)
    return known


def _check_layers(graph: Graph) -> None:
    position, num_ops = 0, len(graph.ops)
    for layer in graph.layers:
        if layer.start != position or layer.stop <= layer.start:
            raise GraphError(
                f"Layer {layer.name!r} covers ops {layer.start}:{layer.stop}; "
                f"expected it to start at {position} and not be empty."
            )
        position = layer.stop
    if position != num_ops:
        raise GraphError(f"The layers cover {position} of {num_ops} ops; every op belongs to exactly one layer.")


def _check_collectives(graph: Graph) -> None:
    for item in graph.collectives:
        known = 0 <= item.at < len(graph.ops) and 0 <= item.tensor < len(graph.tensors)
        if not known or item.copies < 1 or item.count < 1:
            raise GraphError(
                f"The graph has a collective {item.kind} with copies {item.copies}, tensor {item.tensor}, op {item.at} "
                f"and count {item.count}; expected one of its {len(graph.ops)} ops and {len(graph.tensors)} tensors, "
                "and copies and count of at least 1. Shard the graph again."
            )


Role = Literal["input", "parameter", "buffer", "constant", "activation", "saved", "gradient"]

_EXTENT = re.compile(r"(?:(-?\d+)\*)?b(?:([+-]\d+))?")


@dataclass(frozen=True, slots=True)
class Extent:
    """A whole number that is affine in the batch size: ``fixed + per_sample * b``.

    Documents write it as ``768``, ``"b"`` or ``"4*b+1"``.
    """

    fixed: int = 0
    per_sample: int = 0

    def at(self, batch_size: int) -> int:
        """Return the number for a batch of ``batch_size`` samples."""
        return self.fixed + self.per_sample * batch_size

    def most(self, batch_size: int) -> int:
        """Return an upper bound of the number's absolute value for batches of up to ``batch_size`` samples."""
        return abs(self.fixed) + abs(self.per_sample) * batch_size

    def __add__(self, other: Extent) -> Extent:
        return Extent(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def __str__(self) -> str:
        if not self.per_sample:
            return str(self.fixed)
        scale = "b" if self.per_sample == 1 else f"{self.per_sample}*b"
        return f"{scale}{self.fixed:+d}" if self.fixed else scale

    def encode_scalar(self) -> int | str:
        """Return the number as documents contain it: ``768``, ``"b"`` or ``"4*b+1"``."""
        return str(self) if self.per_sample else self.fixed

    @classmethod
    def decode_scalar(cls, data: int | str) -> Extent:
        """Parse a number of a document. Raises ValueError unless it is a whole number or a text such as ``"4*b+1"``."""
        if type(data) is int:
            return cls(data)
        match = _EXTENT.fullmatch(data) if isinstance(data, str) else None
        if match is None:
            raise ValueError(f'{data!r} is not a size; write 768, "b" or "4*b+1"')
        return cls(int(match[2] or 0), int(match[1] or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the graph; its id is its position in ``Graph.tensors``.

    A tensor with ``role`` "saved" is internal to an op and read only by the op's backward (a dropout mask, softmax
    statistics). ``storage`` is the id of the tensor that owns this tensor's memory: its own id unless it is a view or
    written in place. ``aliases`` are further names of a tied parameter. ``requires_grad`` is autograd's flag in
    training: False for frozen parameters and for all tensors before the first trainable op.
    """

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    role: Role
    storage: int
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()

    def num_elements(self, batch_size: int) -> int:
        """Return the number of elements for a batch of ``batch_size`` samples."""
        count = 1
        for extent in self.shape:
            count *= extent.at(batch_size)
        return count

    def num_bytes(self, batch_size: int, float_bytes: int | None = None) -> int:
        """Return the bytes of the tensor's elements for a batch of ``batch_size`` samples; for a view, of its elements.

        ``float_bytes``: bytes per element of floating dtypes, if the model runs in another precision than the captured
        one; None: those of the tensor's own dtype.
        """
        element_bytes = DTYPE_BYTES[self.dtype]
        if float_bytes is not None and self.dtype in FLOAT_DTYPES:
            element_bytes = float_bytes
        return self.num_elements(batch_size) * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation; its id is its position in ``Graph.ops``.

    ``kind`` is the operator's name in torch (``aten.linear.default``); ``attributes`` are its non-tensor arguments as
    (name, text). ``inputs`` and ``outputs`` are tensor ids, and so is ``saved``: the tensors that autograd keeps for
    this op's backward. ``flops`` and ``backward_flops`` count floating-point operations. ``random``: the op draws
    random numbers. ``replicable``: the op depends on no input, parameter, random number or written buffer, so every
    stage that needs the result computes it instead of receiving it. ``module`` is the path of the module that calls the
    op.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    flops: Extent = Extent()
    backward_flops: Extent = Extent()
    saved: tuple[int, ...] = ()
    random: bool = False
    replicable: bool = False
    module: str = ""
    phase: Phase = "forward"

    @property
    def is_in_place(self) -> bool:
        """Return whether the op writes into an input, by torch's naming rule (a trailing underscore)."""
        name = self.kind.split(".")[1] if "." in self.kind else self.kind
        return name.endswith("_") and not name.endswith("__")

    @property
    def writes_buffers(self) -> bool:
        """Return whether the op writes the buffers among its inputs: in place, or as a norm with running statistics."""
        return self.is_in_place or "batch_norm" in self.kind or "instance_norm" in self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: the ops ``start:stop`` under one name.

    ``block`` is equal for layers of equal structure (repeated blocks), so that results for one can be reused.
    """

    name: str
    start: int
    stop: int
    block: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured model: immutable, topologically ordered, identified by its content hash.

    ``inputs`` and ``outputs`` are tensor ids in the model's own order; ``has_loss``: ``outputs[0]`` is the scalar loss.
    ``batch_size`` is None if every size is affine in the batch size, else the only batch size for which the graph is
    valid.

    ``recompute`` lists the ranges of ops that the backward recomputes. The results of the ops in ``keeps`` are kept
    instead (`spec.recompute`). ``compiled`` is the number of parts into which layers are cut for torch's compiler
    (`parts_of_layers`); 0: not compiled. In the local graph of one rank of a split stage, ``collectives`` lists the
    collectives at its ops, and ``model_flops`` are the FLOPs of the whole model.

    Raises GraphError if tensors, ops, layers or collectives contradict each other.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    layers: tuple[Layer, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mode: Literal["training", "inference"] = "training"
    has_loss: bool = False
    batch_size: int | None = None
    recompute: Ranges = ()
    keeps: tuple[int, ...] = ()
    compiled: int = 0
    collectives: tuple[Collective, ...] = ()
    model_flops: Extent | None = None
    _hash: list[str] = field(init=False, repr=False, compare=False, default_factory=list)
    # For a graph under autocast (`cost.autocast`): the number of tensors without cast copies, which follow them.
    _num_uncast: list[int] = field(init=False, repr=False, compare=False, default_factory=list)
    _parameters: list[tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=list)
    _small: set[int] = field(init=False, repr=False, compare=False, default_factory=set)

    def __post_init__(self) -> None:
        check_graph(self)

    @property
    def content_hash(self) -> str:
        """16 hexadecimal digits of SHA-256, equal if two graphs describe the same computation.

        The hash covers all fields except ``name`` and ``compiled``.
        """
        if not self._hash:
            nameless = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
            self._hash.append(content_hash(Graph(**{**nameless, "name": "", "compiled": 0})))
        return self._hash[0]

    def __hash__(self) -> int:
        # Graphs are keys of caches that mostly look for the same object; hashing all of it takes longer than the
        # values looked up.
        ends = self.ops[-1:], self.inputs, self.outputs
        return hash((len(self.tensors), self.layers, self.recompute, self.keeps, self.compiled, *ends))

    @property
    def parameters(self) -> tuple[int, ...]:
        """Ids of all parameters, in the graph's order; a tied parameter occurs once."""
        if not self._parameters:
            self._parameters.append(tuple(i for i, tensor in enumerate(self.tensors) if tensor.role == "parameter"))
        return self._parameters[0]

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample if the model's first input is a sequence of int64 tokens; None for other models."""
        tensor = self.tensors[self.inputs[0]] if self.inputs else None
        if tensor is None or tensor.dtype != "int64" or len(tensor.shape) != 2 or tensor.shape[1].per_sample:
            return None
        return tensor.shape[1].fixed

    def num_parameters(self, *, trainable_only: bool = False) -> int:
        """Return the number of parameter elements, tied ones counted once."""
        return sum(
            self.tensors[i].num_elements(0)
            for i in self.parameters
            if self.tensors[i].requires_grad or not trainable_only
        )

    def flops(self, batch_size: int) -> int:
        """Return the FLOPs of one forward (and, in training, backward) pass over ``batch_size`` samples."""
        return self.total_flops.at(batch_size)

    @property
    def total_flops(self) -> Extent:
        """`flops` as an `Extent` of the batch size."""
        return sum((op.flops + op.backward_flops for op in self.ops), Extent())

    def saved_bytes(
        self,
        ops: Iterable[Op],
        batch_size: int,
        *,
        exclude: frozenset[int] = frozenset(),
        float_bytes: int | None = None,
    ) -> int:
        """Return the bytes that autograd keeps for the backward of ``ops``; each storage counts once.

        Parameters, buffers and constants are left out. ``exclude`` holds storages that are counted elsewhere (received
        values, for instance). ``float_bytes`` is as in `Tensor.num_bytes`.
        """
        storages = {self.tensors[i].storage for op in ops for i in op.saved} - exclude
        return sum(
            self.tensors[i].num_bytes(batch_size, float_bytes)
            for i in storages
            if self.tensors[i].role not in ("parameter", "buffer", "constant")
        )

    def _repr_html_(self) -> str:
        rows = (
            (layer.name, layer.stop - layer.start, str(sum((op.flops for op in self._ops_of(layer)), Extent())))
            for layer in self.layers
        )
        return html_table(self._summary(), ("layer", "ops", "forward FLOPs (b samples)"), rows, len(self.layers))

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(self._summary())

    def _ops_of(self, layer: Layer) -> tuple[Op, ...]:
        return self.ops[layer.start : layer.stop]

    def _summary(self) -> str:
        return (
            f"Graph {self.name!r} for {self.mode}: {len(self.layers):,} layers, {len(self.ops):,} ops, "
            f"{len(self.tensors):,} tensors"
        )

    def check_batch_size(self, batch_size: int) -> None:
        """Raise GraphError if the graph is not valid for batches of this size, or if they exceed `check_amounts`."""
        if type(batch_size) is not int or batch_size < 1:
            raise GraphError(f"A batch of {batch_size!r} samples was given; expected a whole number of at least 1.")
        if self.batch_size is not None and batch_size != self.batch_size:
            raise GraphError(
                f"Graph {self.name!r} was captured for batches of {self.batch_size} samples only (its sizes are not "
                f"symbolic in the batch), but a batch of {batch_size} was given. "
                f"Capture the model with an example batch of {batch_size} samples."
            )
        if batch_size > max(self._small, default=0):
            check_amounts(self, batch_size)
            self._small.add(batch_size)
