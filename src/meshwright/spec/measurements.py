"""Measurements: the one table of times that were taken.

`measurement` writes it, `cost` reads it; nobody else stores seconds.

An op is known by its key: kind, shapes and dtypes of its inputs, and the attributes that change its work.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.spec.errors import MeasurementError
from meshwright.spec.graph import Extent

if TYPE_CHECKING:
    from meshwright.spec.graph import Graph, Op

# ``OptimizerMeasurement.kind`` of copying gradients into an exchange bucket; the other kinds are `Optimizer.name`.
BUCKET_COPY = "bucket_copy"

# An attribute that is a size or a list of sizes, affine in the batch size, as `Extent` writes them.
_SIZES = re.compile(r"\[?-?[\db+*-]+(?:, -?[\db+*-]+)*\]?")
_SIZE = re.compile(r"[^\[\], ]+")

TransferKind = Literal["send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """Typical seconds of one op's forward and backward; ``spread`` is (p90 - p10) / median of the forward.

    ``backward_s`` is that of a first microbatch, whose gradients become the parameters' own; ``accumulate_s`` is what
    adding to gradients that are already there takes on top.
    """

    key: str
    forward_s: float
    backward_s: float
    num_samples: int
    spread: float = 0.0
    accumulate_s: float = 0.0

    def __post_init__(self) -> None:
        if not _sound(self.forward_s, self.backward_s, self.accumulate_s, self.spread):
            raise MeasurementError(f"Op {self.key!r} has a time that is negative or no number; measure again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMeasurement:
    """Seconds of one optimizer step over ``num_elements`` parameters in ``num_tensors`` tensors."""

    kind: str
    dtype: str
    num_elements: int
    num_tensors: int
    seconds: float

    def __post_init__(self) -> None:
        if not _sound(self.seconds, self.num_elements, self.num_tensors):
            raise MeasurementError(f"Optimizer step {self!r} is impossible; measure again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMeasurement:
    """Median seconds to send ``num_bytes`` one way, or of a collective over them among ``num_ranks``.

    ``num_bytes`` are those of the full tensor: the output of an all-gather, the input of a reduce-scatter.
    ``host_s``: seconds of processor time that the transfer takes from each rank meanwhile (copies, sockets).
    """

    kind: TransferKind
    num_ranks: int
    num_bytes: int
    seconds: float
    spread: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        sound = _sound(self.seconds, self.num_bytes, self.spread, self.host_s)
        if not sound or self.seconds == 0 or self.num_ranks < 2:
            raise MeasurementError(f"Transfer {self!r} is impossible; measure again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured on one kind of device, and under which conditions.

    ``device`` is the name of the device kind. ``overhead_s``: seconds of the host that the runtime spends per
    instruction.
    """

    device: str
    software: str
    date: str
    conditions: str = ""
    ops: tuple[OpMeasurement, ...] = ()
    optimizers: tuple[OptimizerMeasurement, ...] = ()
    transfers: tuple[TransferMeasurement, ...] = ()
    overhead_s: float = 0.0

    SCHEMA_VERSION: ClassVar[int] = 1


def _sound(*figures: float) -> bool:
    return all(0 <= figure < math.inf for figure in figures)


def op_key(graph: Graph, op: Op, batch_size: int) -> str:
    """The key of an op for a batch size: ``aten.linear.default(4x128x768:float32,...;attribute=value)``.

    Sizes among the attributes are those of the batch, too: ``size=[2, 4, 64]`` where the graph has ``[2, b, 64]``.
    """
    tensors = (graph.tensors[i] for i in op.inputs)
    shapes = ",".join(f"{'x'.join(str(extent.at(batch_size)) for extent in t.shape)}:{t.dtype}" for t in tensors)
    grads = "".join("1" if graph.tensors[i].requires_grad else "0" for i in op.inputs)
    attributes = "".join(f";{name}={_at_batch(value, batch_size)}" for name, value in op.attributes)
    return f"{op.kind}({shapes}{attributes}|{grads})"


def _at_batch(text: str, batch_size: int) -> str:
    """An attribute with its sizes in numbers; every other one as it is."""
    if "b" not in text or not _SIZES.fullmatch(text):
        return text
    try:
        return _SIZE.sub(lambda size: _number(size[0], batch_size), text)
    except ValueError:
        return text


def _number(size: str, batch_size: int) -> str:
    return str(Extent.decode_scalar(size).at(batch_size)) if "b" in size else size
