"""Measurements: the table of measured times of one kind of device.

`measurement` writes the table and `cost` reads it. An op is identified by its key (`op_key`): operator, shapes and
dtypes of its inputs, and attributes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from meshwright.spec.errors import MeasurementError
from meshwright.spec.graph import Extent, Graph, Op

_CONVERTED = re.compile(r"aten\._to_copy\.default\((\d+):(\w+);dtype=torch\.(\w+)\|0\)")
_ADDED = re.compile(r"aten\.add_\.Tensor\((\d+):(\w+),\1:\2\|00\)")

# The range of measured times other than 0: from the simulator's tick (a picosecond, a thousandth of a GPU's cycle) to
# a day (the longest step of a public table takes minutes). A figure outside is in another unit, and sums and ratios of
# such figures overflow.
MIN_SECONDS, MAX_SECONDS = 1e-12, 86_400.0

# ``OptimizerMeasurement.kind`` of copying gradients into an exchange bucket; the other kinds are `Optimizer.name`.
BUCKET_COPY = "bucket_copy"

# An attribute that is a size or a list of sizes, affine in the batch size, as `Extent` writes them.
_SIZES = re.compile(r"\[?-?[\db+*-]+(?:, -?[\db+*-]+)*\]?")
_SIZE = re.compile(r"[^\[\], ]+")

_EXPECTED = (
    "a figure that is negative or not a number, or seconds that are neither 0 nor from "
    f"{MIN_SECONDS:g} to {MAX_SECONDS:g}"
)

TransferKind = Literal["send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """Typical seconds of one op's forward and backward; ``spread`` is (p90 - p10) / median of the forward times.

    ``key`` is the op's `op_key`. ``backward_s`` is the time in a first microbatch, whose gradients are stored as they
    are; ``accumulate_s`` is the additional time to add to existing gradients in later microbatches. ``forward_issue_s``
    and ``backward_issue_s`` are the seconds in which the host issues forward and backward to an asynchronous device,
    inside a model; 0 if not measured. ``num_samples`` is the number of timed runs.
    """

    key: str
    forward_s: float
    backward_s: float
    num_samples: int
    spread: float = 0.0
    accumulate_s: float = 0.0
    forward_issue_s: float = 0.0
    backward_issue_s: float = 0.0

    def __post_init__(self) -> None:
        times = (self.forward_s, self.backward_s, self.accumulate_s, self.forward_issue_s, self.backward_issue_s)
        if not (_are_times(*times) and _sound(self.spread)):
            raise MeasurementError(f"Op {self.key!r} has {_EXPECTED}; measure again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMeasurement:
    """Seconds of one optimizer step over ``num_elements`` parameters in ``num_tensors`` tensors.

    ``kind`` is `Optimizer.name` for torch's loop over single tensors; ``adamw.fused`` and ``adamw.foreach`` are torch's
    kernels over many tensors. ``issue_s``: seconds in which the host issues the step to a device; 0 if not measured.
    """

    kind: str
    dtype: str
    num_elements: int
    num_tensors: int
    seconds: float
    issue_s: float = 0.0

    def __post_init__(self) -> None:
        if not (_are_times(self.seconds, self.issue_s) and _sound(self.num_elements, self.num_tensors)):
            raise MeasurementError(f"Optimizer step {self!r} is impossible: it has {_EXPECTED}; measure again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMeasurement:
    """Median seconds of a send (in one direction), or of a collective among ``num_ranks`` ranks.

    ``num_bytes`` is the size of the full tensor: the output of an all-gather, the input of a reduce-scatter.
    ``spread`` is (p90 - p10) / median. ``host_s``: seconds of processor time that each rank spends on the transfer
    (copies, sockets).
    """

    kind: TransferKind
    num_ranks: int
    num_bytes: int
    seconds: float
    spread: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        sound = _are_times(self.seconds, self.host_s) and _sound(self.num_bytes, self.spread)
        if not sound or self.seconds == 0 or self.num_ranks < 2:
            raise MeasurementError(
                f"Transfer {self!r} is impossible: it has fewer than two ranks, 0 s, or {_EXPECTED}; measure again."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMeasurement:
    """Seconds of a whole model's inference on one batch: the median, and the 90th and 99th percentiles.

    ``model`` is a name in the form of `meshwright.spec.name_model`. ``num_samples`` is the number of timed batches, or
    0 if it is unknown.
    """

    model: str
    batch_size: int
    seconds: float
    p90_s: float
    p99_s: float
    num_samples: int

    def __post_init__(self) -> None:
        in_order = MIN_SECONDS <= self.seconds <= self.p90_s <= self.p99_s <= MAX_SECONDS
        if not in_order or not self.model or self.batch_size < 1 or self.num_samples < 0:
            raise MeasurementError(
                f"Batch {self!r} is impossible: expected the name of a model, at least one sample in the batch, and "
                f"{MIN_SECONDS:g} <= median <= p90 <= p99 <= {MAX_SECONDS:g} s; measure again."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of one kind of device, and the conditions under which they were taken.

    ``device`` is the name of the device kind. ``overhead_s``: seconds of host time that the runtime spends per
    instruction. ``batches``: inference of whole models. ``host_call_s``: seconds in which the host issues an addition
    of two small tensors in a loop (`Node.host_call_s`); 0 if not measured.
    """

    device: str
    software: str
    date: str
    conditions: str = ""
    ops: tuple[OpMeasurement, ...] = ()
    optimizers: tuple[OptimizerMeasurement, ...] = ()
    transfers: tuple[TransferMeasurement, ...] = ()
    overhead_s: float = 0.0
    batches: tuple[BatchMeasurement, ...] = ()
    host_call_s: float = 0.0

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not _are_times(self.overhead_s, self.host_call_s):
            raise MeasurementError(
                f"overhead_s = {self.overhead_s} and host_call_s = {self.host_call_s} are impossible: one is "
                f"{_EXPECTED}; measure again."
            )


def _are_times(*seconds: float) -> bool:
    return all(figure == 0 or MIN_SECONDS <= figure <= MAX_SECONDS for figure in seconds)


def _sound(*figures: float) -> bool:
    return all(0 <= figure < math.inf for figure in figures)


class MoveKey(NamedTuple):
    """The key of work that is not an op of a graph, on ``elements`` elements.

    It converts them from dtype ``read`` to dtype ``written``, or adds them to existing values of that dtype (``adds``).
    """

    elements: int
    read: str
    written: str
    adds: bool

    def write(self) -> str:
        """Return the text of the key in the form of `op_key`, with all elements in one dim."""
        if self.adds:
            return f"aten.add_.Tensor({self.elements}:{self.read},{self.elements}:{self.read}|00)"
        return f"aten._to_copy.default({self.elements}:{self.read};dtype=torch.{self.written}|0)"


def read_move_key(key: str) -> MoveKey | None:
    """Parse a text written by `MoveKey.write`. Returns None for the key of an op of a graph."""
    if converted := _CONVERTED.fullmatch(key):
        return MoveKey(int(converted[1]), converted[2], converted[3], adds=False)
    if added := _ADDED.fullmatch(key):
        return MoveKey(int(added[1]), added[2], added[2], adds=True)
    return None


def op_key(graph: Graph, op: Op, batch_size: int) -> str:
    """Return the key of an op for a batch size: ``aten.linear.default(4x128x768:float32,...;attribute=value)``.

    At its end, left out above, ``|10`` says for each input whether it requires a gradient. Sizes among the
    attributes are those for the batch, too: ``size=[2, 4, 64]`` if the graph has ``[2, b, 64]`` and the batch is 4.
    """
    tensors = (graph.tensors[i] for i in op.inputs)
    shapes = ",".join(f"{'x'.join(str(extent.at(batch_size)) for extent in t.shape)}:{t.dtype}" for t in tensors)
    grads = "".join("1" if graph.tensors[i].requires_grad else "0" for i in op.inputs)
    attributes = "".join(f";{name}={_at_batch(value, batch_size)}" for name, value in op.attributes)
    return f"{op.kind}({shapes}{attributes}|{grads})"


def _at_batch(text: str, batch_size: int) -> str:
    """An attribute with its sizes as numbers; all others unchanged."""
    if "b" not in text or not _SIZES.fullmatch(text):
        return text
    try:
        return _SIZE.sub(lambda size: _number(size[0], batch_size), text)
    except ValueError:
        return text


def _number(size: str, batch_size: int) -> str:
    return str(Extent.decode_scalar(size).at(batch_size)) if "b" in size else size
