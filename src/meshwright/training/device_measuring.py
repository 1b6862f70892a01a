"""Measure op times on a CUDA device, for one model or for any.

`measure_device_here` times every distinct op of a model by itself, and the host's time to issue it.
`device_table_here` times a fixed set of operators and sizes, from which costs of any model are predicted.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from meshwright.capture import Captured, capture_model, part, strides_of
from meshwright.cost.autocast import Widths, as_computed, cast_inputs
from meshwright.cost.conversion_costs import Move, moves_beside, op_type
from meshwright.cost.op_classes import classify_ops
from meshwright.cost.traits import family_of, operator_name
from meshwright.cost.work import key_in
from meshwright.host import Host, find_gpu_state, name_gpu
from meshwright.measurement import (
    CudaClock,
    DeviceClock,
    DeviceOp,
    InputSpec,
    Segment,
    TableSizes,
    covering_layers,
    make_move,
    materialised,
    measure_call,
    measure_device_ops,
    measure_device_optimizers,
    measure_device_table,
    measure_issue,
    measure_links,
    merge_measurements,
    refuse_fatal,
)
from meshwright.records import Records, concat_records, from_measurements, make_records, to_measurements
from meshwright.records.record_table import Row, columns_of
from meshwright.spec import (
    FLOAT_DTYPES,
    EventSink,
    Graph,
    MeasurementError,
    Measurements,
    Op,
    OpMeasurement,
    StageSlice,
    load_cluster,
)
from meshwright.spec.measurements import BUCKET_COPY, read_move_key
from meshwright.spec.precision import SIMULATED_ONLY, Numbers, Precision, numbers_of
from meshwright.training.precision import OF_ONE_TYPE
from meshwright.training.step_measuring import Sizes, host_overhead
from meshwright.zoo import load_model

# Ops whose second input has indices into the first dim of the first one, and losses whose second input has classes.
_LOOKUPS = ("embedding", "embedding_bag")
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward")
# Ops that read at indices along some dim of their first input.
_PLACES = (
    "gather",
    "index",
    "index_select",
    "take",
    "take_along_dim",
    "scatter",
    "scatter_add",
    "index_add",
    "index_put",
)


def capture_unallocated(reference: str, sizes: Sizes, batch_size: int) -> Captured:
    """Return the model captured for training with fake weights, without their memory.

    The graph is for all batch sizes if possible, else for ``batch_size``.
    """
    options: dict[str, Any] = dict(sizes)
    for size in (None, batch_size):
        source = load_model(reference, batch_size=size, fake=True, **options)
        captured = capture_model(
            source.model, source.inputs, targets=source.targets, loss=source.loss, name=reference, verify=False
        )
        if captured.graph.batch_size in (None, batch_size):
            break
    captured.graph.check_batch_size(batch_size)
    return captured


# Ops are single calls on the device, in the types in which a precision computes them. The model is captured without
# memory. Keys are those of the measurement table (`cost.work.key_in`).
class ModelOps:
    """The distinct ops of a captured model to time: in a precision, at batch size ``size``, on a device.

    ``keys``: the keys of these ops in the measurement table.
    """

    def __init__(self, captured: Captured, numbers: Numbers, size: int, device: torch.device) -> None:
        self._captured, self._numbers, self._size, self._device = captured, numbers, size, device
        self._graph = graph = as_computed(captured.graph, numbers)
        self._classes = classify_ops(graph)
        width = None if numbers.autocast else numbers.value_bytes
        self._widths = Widths(graph=graph, values=width, single=self._classes.single)
        self._strides = strides_of(captured, size)
        self._bounds = index_bounds(graph, size)
        self._key_of = {i: key_in(op_type(graph, op, numbers), graph, op, size) for i, op in enumerate(graph.ops)}
        self.keys = frozenset(self._key_of.values())

    def ops(self) -> Iterator[DeviceOp]:
        """Yield each distinct op once, with the strides of its inputs that are most frequent in the model."""
        layouts: dict[str, Counter[Any]] = {}
        for i, key in self._key_of.items():
            layout = tuple(self._strides.get(tensor) for tensor in self._graph.ops[i].inputs)
            layouts.setdefault(key, Counter())[layout] += 1
        seen = set()
        for i, key in self._key_of.items():
            layout = tuple(self._strides.get(tensor) for tensor in self._graph.ops[i].inputs)
            if key not in seen and layout == layouts[key].most_common(1)[0][0]:
                seen.add(key)
                yield self._op(i)

    def moves(self, kept: frozenset[str]) -> list[DeviceOp]:
        """Return the dtype conversions and gradient additions that the model needs besides its ops.

        Each size and pair of types is in the list once. Those whose keys are in ``kept`` (already in the table) are
        left out.
        """
        kind = load_cluster("H100").device_kinds[0]  # they are the same on every device that computes in the precision
        found: dict[Move, None] = {}
        for place, added in zip(self._classes.representatives, self._classes.added, strict=True):
            op = self._graph.ops[place]
            forward, backward, _ = moves_beside(self._graph, op, self._size, kind, self._numbers, self._widths, added)
            found |= dict.fromkeys((*forward, *backward))
        half = "float16" if self._numbers.compute == "float16" else "bfloat16"
        names = {2: half, 4: "float32", 8: "float64"}
        made = [
            make_move(move.elements, names[move.read], names[move.written], adds=move.adds)
            for move in found
            if move.written in names and move.read in names and move.elements
        ]
        return [op for op in {op.key: op for op in made}.values() if op.key not in kept]

    def surrounding(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs: autocast, or an empty context."""
        if not self._numbers.autocast:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self._numbers.autocast))

    def segments(self) -> list[tuple[str, Callable[[], Segment]]]:
        """Return layers that together contain every distinct op: pairs of a name and a function to make the layer."""
        layers = covering_layers(self._graph, [self._key_of[i] for i in range(len(self._graph.ops))])
        return [
            (self._graph.layers[stage.index].name, lambda stage=stage: self._segment(stage))  # type: ignore[misc]
            for stage in layers
        ]

    def _op(self, index: int) -> DeviceOp:
        graph, op = self._graph, self._graph.ops[index]
        inputs = list(dict.fromkeys(op.inputs))
        given = [i for i in inputs if graph.tensors[i].role in ("input", "activation")]
        module = part(self._captured, given, op.outputs, batch_size=self._size, ops=(index,), device=self._device)
        storages = {graph.tensors[i].storage for i in inputs}
        in_place = op.is_in_place
        return DeviceOp(
            key=self._key_of[index],
            module=module,
            feeds=tuple(self._feed(i, self._type_in(op, i)) for i in given),
            state={graph.tensors[i].name: self._type_in(op, i) for i in inputs if i not in given},
            differentiable=tuple(graph.mode == "training" and graph.tensors[i].requires_grad for i in op.outputs),
            is_view=not in_place and all(graph.tensors[i].storage in storages for i in op.outputs),
            is_in_place=in_place,
        )

    def _segment(self, stage: StageSlice) -> Segment:
        graph = self._graph
        received = [tensor for channel in stage.incoming for tensor in channel.tensors]
        sent = (tensor for channel in stage.outgoing for tensor in channel.tensors)
        given, fetches = (*stage.inputs, *received), tuple(dict.fromkeys((*sent, *stage.outputs)))
        module = part(self._captured, given, fetches, batch_size=self._size, ops=stage.ops, device=self._device)
        held = (*stage.parameters, *stage.buffers)
        state = {graph.tensors[i].name: self._type(i) for i in held}
        training = graph.mode == "training" and stage.has_backward
        return Segment(
            module=materialised(module, state, self._device),
            feeds=tuple(self._feed(i, self._type(i)).make(self._device) for i in given),
            keys={graph.ops[i].name: self._key_of[i] for i in stage.ops},
            differentiable=tuple(training and graph.tensors[i].requires_grad for i in fetches),
            training=training,
        )

    def _feed(self, tensor: int, dtype: str) -> InputSpec:
        held = self._graph.tensors[tensor]
        return InputSpec(
            shape=tuple(extent.at(self._size) for extent in held.shape),
            strides=self._strides.get(tensor),
            dtype=dtype,
            requires_grad=held.requires_grad,
            bound=self._bounds.get(tensor, 2),
        )

    def _type_in(self, op: Op, tensor: int) -> str:
        """The type in which an op reads a tensor, after autocast."""
        if self._numbers.autocast and tensor in cast_inputs(self._graph, op, self._numbers.autocast):
            return op_type(self._graph, op, self._numbers)
        dtype = self._type(tensor)
        is_cast = not self._numbers.autocast and family_of(op) in OF_ONE_TYPE and dtype in FLOAT_DTYPES
        return self._numbers.values if is_cast else dtype

    def _type(self, tensor: int) -> str:
        """The type of a tensor in the precision."""
        dtype = self._graph.tensors[tensor].dtype
        if self._numbers.autocast or dtype not in FLOAT_DTYPES or tensor in self._classes.single:
            return dtype
        return self._numbers.values


def index_bounds(graph: Graph, batch_size: int) -> dict[int, int]:
    """Return exclusive upper bounds for values of integer tensors, by tensor id, so that all indices are valid."""
    found: dict[int, int] = {}

    def limit(tensor: int, bound: int) -> None:
        found[tensor] = min(found.get(tensor, bound), bound)

    for op in reversed(graph.ops):
        whole = [i for i in op.inputs if graph.tensors[i].dtype not in FLOAT_DTYPES]
        name, first = operator_name(op).rstrip("_"), op.inputs[0] if op.inputs else None
        for i in whole:
            # Values made from integers by views and arithmetic may be indices later.
            for made in op.outputs:
                if made in found and graph.tensors[made].dtype not in FLOAT_DTYPES:
                    limit(i, found[made])
            if first is None or i == first:
                continue
            shape = [extent.at(batch_size) for extent in graph.tensors[first].shape]
            if name in _LOOKUPS and shape:
                limit(i, shape[0])
            elif name in _LOSSES and shape:
                limit(i, shape[1] if len(shape) > 1 else shape[0])
            elif name in _PLACES and shape:
                limit(i, min(shape))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """The result of measuring a device.

    ``table``: the whole table. ``left_out``: ops that could not be timed, as reasons by key. ``num_kept``: the number
    of rows that the table had already. ``warnings``: such as of other programs on the GPU.
    """

    table: Measurements
    left_out: dict[str, str] = field(default_factory=dict)
    num_kept: int = 0
    warnings: tuple[str, ...] = ()


def measure_device_here(
    reference: str | None,
    microbatch_sizes: Sequence[int],
    *,
    precisions: Sequence[str] = (),
    sizes: Sizes = (),
    device: str = "cuda:0",
    repeats: int = 10,
    known: Measurements | None = None,
    save: Callable[[Measurements], object] = lambda _: None,
    events: EventSink | None = None,
) -> DeviceRun:
    """Measure a CUDA device: the ops of a model, optimizers, and collectives among the GPUs of this host.

    ``reference``: the model, None for no model. ``known``: the table to which the rows are added; its rows of this
    device and torch version are not measured again. ``save`` receives the whole table every few seconds.
    ``precisions``: by default that of plans for this device. Raises MeasurementError for a table of another device, for
    a precision that cannot be timed, and for errors of the device; and the errors of loading or capturing the model.
    """
    place, empty = empty_table(device)
    _refuse_other(known, empty)
    words = tuple(precisions) or (default_precision(place),)
    for word in words:
        _check_precision(word)
    uuid = str(torch.cuda.get_device_properties(place).uuid)
    before = find_gpu_state(Host(), uuid)
    links = _links(events)
    clock = CudaClock(place, repeats)
    run = measure_on(
        clock,
        replace(empty, transfers=links, overhead_s=host_overhead()),
        reference,
        microbatch_sizes,
        precisions=words,
        sizes=sizes,
        repeats=repeats,
        known=known,
        save=save,
        events=events,
    )
    after = find_gpu_state(Host(), uuid)
    told = [f"{state.clocks} {when}" for state, when in ((before, "before"), (after, "after")) if state is not None]
    table = replace(run.table, conditions="; ".join((run.table.conditions, *told)))
    save(table)
    return replace(run, table=table, warnings=before.warnings() if before is not None else ())


def measure_on(
    clock: DeviceClock,
    empty: Measurements,
    reference: str | None,
    microbatch_sizes: Sequence[int],
    *,
    precisions: Sequence[str],
    sizes: Sizes = (),
    repeats: int = 10,
    known: Measurements | None = None,
    save: Callable[[Measurements], object] = lambda _: None,
    events: EventSink | None = None,
) -> DeviceRun:
    """Measure as `measure_device_here`, with the clock of any device.

    ``empty``: a table without ops for that device, with its name, links and overhead.
    """
    writer = _Writer(empty, known, save)
    writer.put(host_call_s=measure_call(clock))
    left_out: dict[str, str] = {}
    for size in microbatch_sizes if reference is not None else ():
        captured = capture_unallocated(str(reference), sizes, size)
        for word in precisions:
            model = ModelOps(captured, numbers_of(word), size, clock.device)
            missing = [op for op in model.ops() if op.key not in writer.kept]
            writer.num_kept += len(model.keys) - len(missing)
            chosen = (*missing, *model.moves(writer.kept))
            if not chosen:
                continue
            issued = _issue(model, clock, repeats, left_out, events) if missing else {}
            left_out |= measure_device_ops(chosen, clock, writer.add, issued=issued, events=events)
    states = dict.fromkeys(numbers_of(word).states for word in precisions)
    gradients = dict.fromkeys(numbers_of(word).gradients for word in precisions)
    wanted = writer.without_steps(tuple(states)), writer.without_copies(tuple(gradients))
    if any(wanted):
        rows = measure_device_optimizers(clock, states=wanted[0], gradients=wanted[1], events=events)
        writer.put(optimizers=rows)
    return DeviceRun(table=writer.save(), left_out=left_out, num_kept=writer.num_kept)


def default_precision(device: torch.device) -> Precision:
    """Return the default precision of plans for a CUDA device: mixed from compute capability 8.0 on, else float32."""
    return "mixed" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


class _Writer:
    """The table as it grows: known rows stay, and it is saved every few seconds."""

    def __init__(
        self,
        empty: Measurements,
        known: Measurements | None,
        save: Callable[[Measurements], object],
        every_s: float = 2.0,
    ) -> None:
        self._table = empty if known is None else merge_measurements(known, empty)
        self._rows = {row.key: row for row in self._table.ops}
        self._save, self._every_s, self._saved = save, every_s, time.monotonic()
        same = known is not None and known.software == empty.software
        # Ops that a host issues have a time for that, unless their layer failed.
        issued = any(row.forward_issue_s for row in self._rows.values())
        done = (key for key, row in self._rows.items() if row.forward_issue_s or not issued or read_move_key(key))
        self.kept = frozenset(done) if same else frozenset()
        steps = self._table.optimizers if same else ()
        self._steps = {row.dtype for row in steps if row.issue_s}
        self._copies = {row.dtype for row in steps if row.kind == BUCKET_COPY}
        self.num_kept = 0

    def without_steps(self, states: tuple[str, ...]) -> tuple[str, ...]:
        """Types of optimizer states that are not measured yet."""
        return tuple(dtype for dtype in states if dtype not in self._steps)

    def without_copies(self, gradients: tuple[str, ...]) -> tuple[str, ...]:
        """Types of gradients whose copies into buckets are not measured yet."""
        return tuple(dtype for dtype in gradients if dtype not in self._copies)

    def add(self, row: OpMeasurement) -> None:
        self._rows[row.key] = row
        if time.monotonic() - self._saved > self._every_s:
            self.save()

    def put(self, **rows: Any) -> None:
        self._table = merge_measurements(self._table, replace(self._table, ops=(), **rows))
        self.save()

    def save(self) -> Measurements:
        self._table = replace(self._table, ops=tuple(self._rows.values()))
        self._save(self._table)
        self._saved = time.monotonic()
        return self._table


def _issue(
    model: ModelOps,
    clock: DeviceClock,
    repeats: int,
    left_out: dict[str, str],
    events: EventSink | None,
) -> dict[str, tuple[float, float]]:
    """Seconds of the host by key; layers that fail are left out, and their costs stay predicted."""
    found: dict[str, tuple[float, float]] = {}
    for name, make in model.segments():
        try:
            taken = measure_issue([make], clock, repeats=repeats, surrounding=model.surrounding, events=events)
        except Exception as error:
            refuse_fatal(error, f"Layer {name}", clock)
            left_out[f"issuing of layer {name}"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            clock.release()
            continue
        found = {**taken, **found}
    return found


def empty_table(device: str) -> tuple[torch.device, Measurements]:
    """Return the torch device, and an empty table for it. Raises MeasurementError if torch does not see the device."""
    if device not in {f"cuda:{index}" for index in range(torch.cuda.device_count())}:
        raise MeasurementError(
            f"Device {device!r} was given to time ops on; torch sees {torch.cuda.device_count()} CUDA devices here. "
            "Give cpu, or cuda:N with N from 0 on."
        )
    place = torch.device(device)
    name = torch.cuda.get_device_name(place)
    return place, Measurements(
        device=name_gpu(name),
        software=f"torch {torch.__version__}, Python {platform.python_version()}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        conditions=f"{name}, CUDA {torch.version.cuda}; each op by itself, by CUDA graphs",
    )


def _refuse_other(known: Measurements | None, empty: Measurements) -> None:
    """Refuse a table of another device before anything is timed."""
    if known is not None:
        merge_measurements(known, empty)


def _check_precision(word: str) -> None:
    if numbers_of(word).products or word in SIMULATED_ONLY:
        raise MeasurementError(
            f"Ops cannot be timed in precision {word!r}; its costs are predicted from another precision. For tf32 "
            "measure float32, for float8 and mixed-float16 measure mixed."
        )


def _links(events: EventSink | None) -> tuple[Any, ...]:
    """Collectives among the GPUs of this host over NCCL; empty with one GPU."""
    count = torch.cuda.device_count()
    if count < 2:
        return ()
    rows = measure_links(num_ranks=count, events=events)
    return to_measurements(rows, str(rows.device[0])).transfers


def choose_device(device: str | None) -> str:
    """Return the device to time ops on: ``device`` (``cuda`` means cuda:0), by default the first GPU, else the CPU."""
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if device == "cuda" else device


def device_table_here(
    *,
    device: str = "cuda:0",
    repeats: int = 10,
    known: Records | None = None,
    save: Callable[[Records], object] = lambda _: None,
    events: EventSink | None = None,
) -> tuple[Records, dict[str, str], tuple[str, ...]]:
    """Measure single operators, optimizers and the host on a CUDA device, independent of any model.

    Returns the new rows, the reasons why others were left out (by key), and warnings. ``known``: existing rows; those
    of this device and torch version are not measured again. ``save`` receives the new rows every few seconds. Raises
    MeasurementError for a device that torch does not see.
    """
    place, empty = empty_table(device)
    state = find_gpu_state(Host(), str(torch.cuda.get_device_properties(place).uuid))
    if state is not None:
        empty = replace(empty, conditions=f"{empty.conditions}; {state.clocks} before")
    rows, left_out = device_table_on(CudaClock(place, repeats), empty, known=known, save=save, events=events)
    return rows, left_out, state.warnings() if state is not None else ()


def device_table_on(
    clock: DeviceClock,
    empty: Measurements,
    *,
    sizes: TableSizes | None = None,
    known: Records | None = None,
    save: Callable[[Records], object] = lambda _: None,
    every_s: float = 2.0,
    events: EventSink | None = None,
) -> tuple[Records, dict[str, str]]:
    """Measure as `device_table_here`, with the clock of any device; ``empty`` has the device's name and conditions."""
    columns = ("op", "phase", "shapes", "dtype", "kernel", "seconds", "spread", "num_samples")
    taken: list[Row] = []
    saved = [time.monotonic()]
    identity = ("op", "phase", "shapes", "dtype", "kernel")
    same = known.where(device=empty.device, software=empty.software) if known is not None else make_records(seconds=())
    have = set(zip(*(getattr(same, name).tolist() for name in identity), strict=True))

    def made() -> Records:
        return make_records(
            **columns_of(taken, columns),
            device=empty.device,
            software=empty.software,
            date=empty.date,
            source=empty.conditions,
        )

    def write(row: Row) -> None:
        taken.append(row)
        if time.monotonic() - saved[0] >= every_s:
            save(made())
            saved[0] = time.monotonic()

    left_out = measure_device_table(
        clock, write, sizes=sizes, kept=lambda row: tuple(row[name] for name in identity) in have, events=events
    )
    calls = replace(empty, host_call_s=measure_call(clock))
    if not any(op.startswith("optimizer.") for op, *_ in have):
        steps = measure_device_optimizers(
            clock, states=("float32", "bfloat16"), gradients=("float32", "bfloat16"), events=events
        )
        calls = replace(calls, optimizers=steps)
    rows = concat_records([made(), from_measurements(calls)])
    save(rows)
    return rows, left_out
