"""Convert measurements of one device (`meshwright.spec.Measurements`, JSON) to rows of the table and back, losslessly.

    op           aten.linear.default   forward, backward, accumulate,     shapes: the key's brackets
                                       forward_host, backward_host
    optimizer    optimizer.adamw       step, step_host                    shapes: elements, tensors
    transfer     send, all_reduce, ... "", host (processor's seconds)     shapes: bytes, ranks, ... of one node
    overhead     runtime.instruction   host
    call         host.call             host
    batch        model.gpt-tiny        "", the median                     shapes: batch_size
                                       "", the samples' percentiles       shapes: batch_size, percentile (90, 99)

Conditions are in the column ``source``. A pass of 0 s has no row, except a forward, which is then flagged ``noop``.
`device_row` makes rows of single operators, measured outside of any model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from meshwright.records.record_table import Records, Row, columns_of, make_records, named_shapes, parse_sizes
from meshwright.spec import (
    BatchMeasurement,
    MeasurementError,
    Measurements,
    OpMeasurement,
    OptimizerMeasurement,
    TransferMeasurement,
    suggest,
)
from meshwright.spec.measurements import TransferKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Shapes = Sequence[Sequence[int]]


PRODUCTS = ("aten.mm", "aten.mm.dgrad", "aten.mm.wgrad")
# Operators whose inputs of one dim are places in a table, or classes.
_INDEXED = ("aten.embedding", "aten.embedding_dense_backward", "aten.nll_loss_forward", "aten.nll_loss_backward")


# Single operators, each alone on tensors of many sizes:
#
#     products of matrices    matmul, sizes m, n, k; ``kernel`` says which of a layer's three it is (``aten.mm``,
#                             ``aten.mm.dgrad``, ``aten.mm.wgrad``): their factors lie differently in memory
#     other operators         ``aten.NAME``, the inputs that decide its traffic in the form of a captured op;
#                             ``kernel`` of many products at once: ``nn``, or ``nt`` where the second factors are
#                             transposed
#
# Where they coincide, these are the rows of a trace of torch's profiler (`importing.read_records`).
def device_row(op: str, dtype: str, shapes: Shapes, kernel: str = "") -> Row:
    """Return the columns op, phase, shapes, dtype and kernel of a single operator on inputs of these ``shapes``."""
    if op in PRODUCTS:
        (m, k), (_, n) = shapes
        return {"op": "matmul", "phase": "", "shapes": named_shapes(m=m, n=n, k=k), "dtype": dtype, "kernel": op}
    inputs = (f"{'x'.join(map(str, shape))}:{_dtype_of_key(op, dtype, shape)}" for shape in shapes)
    return {"op": op, "phase": "forward", "shapes": f"{','.join(inputs)}|", "dtype": dtype, "kernel": kernel}


def read_device_row(op: str, shapes: str, kernel: str) -> tuple[str, tuple[tuple[int, ...], ...]] | None:
    """Return (operator, shapes of its inputs) of a row that `device_row` made; None for any other row."""
    if op == "matmul" and kernel in PRODUCTS:
        sizes = parse_sizes(shapes) or {}
        if sizes.keys() != {"m", "n", "k"}:
            return None
        return kernel, ((sizes["m"], sizes["k"]), (sizes["k"], sizes["n"]))
    if not shapes.endswith("|") or ":" not in shapes:
        return None
    sides = (text.partition(":")[0] for text in shapes[:-1].partition(";")[0].split(","))
    return op, tuple(tuple(int(size) for size in text.split("x") if size) for text in sides)


def _dtype_of_key(op: str, dtype: str, shape: Sequence[int]) -> str:
    return "int64" if op in _INDEXED and len(shape) == 1 else dtype


_OVERHEAD = "runtime.instruction"
_CALL = "host.call"
_OPTIMIZER = "optimizer."
_MODEL = "model."
_TRANSFERS: tuple[TransferKind, ...] = get_args(TransferKind)


def from_measurements(table: Measurements) -> Records:
    """Return the measurements of one device as rows. Raises MeasurementError for impossible figures."""
    rows = list(_rows(table))
    names = ("op", "phase", "shapes", "dtype", "seconds", "spread", "num_samples")
    return make_records(
        **columns_of(rows, names),
        flags=["noop" if row["seconds"] == 0 or row.get("empty") else "" for row in rows],
        device=table.device,
        software=table.software,
        date=table.date,
        source=table.conditions,
    )


def to_measurements(records: Records, device: str) -> Measurements:
    """Return the rows of one device as `Measurements`.

    Rows of kernels with named sizes and of groups across nodes have no place there and are left out. Raises
    MeasurementError if no row is of this device.
    """
    # Rows of an older version of the software give way to later ones.
    rows = records.where(device=device).dedupe(("op", "phase", "shapes", "dtype"))
    if not len(rows):
        raise MeasurementError(
            f"The table has no rows of device {device!r}{suggest(device, set(records.device))}. Measure there, or plan "
            "without this table."
        )
    times = {(op, shapes, phase): place for place, (op, shapes, phase) in enumerate(_columns(rows, "op shapes phase"))}
    pairs = dict.fromkeys((op, shapes) for op, shapes, _ in times)
    last = len(rows) - 1

    def seconds(op: str, shapes: str, phase: str) -> float:
        place = times.get((op, shapes, phase))
        return 0.0 if place is None else float(rows.seconds[place])

    return Measurements(
        device=device,
        software=rows.software[last],
        date=rows.date[last],
        conditions=rows.source[last],
        ops=tuple(
            OpMeasurement(
                key=f"{op}({shapes})" if shapes else op,
                forward_s=seconds(op, shapes, "forward"),
                backward_s=seconds(op, shapes, "backward"),
                accumulate_s=seconds(op, shapes, "accumulate"),
                forward_issue_s=seconds(op, shapes, "forward_host"),
                backward_issue_s=seconds(op, shapes, "backward_host"),
                spread=float(rows.spread[times[op, shapes, "forward"]]),
                num_samples=int(rows.num_samples[times[op, shapes, "forward"]]),
            )
            for op, shapes in pairs
            if (op, shapes, "forward") in times
        ),
        optimizers=tuple(_optimizers(rows)),
        transfers=tuple(_transfers(rows, times)),
        overhead_s=seconds(_OVERHEAD, "", "host"),
        host_call_s=seconds(_CALL, "", "host"),
        batches=tuple(_batches(rows, times)),
    )


def _rows(table: Measurements) -> Iterator[Row]:
    usual: Row = {"phase": "", "shapes": "", "dtype": "", "spread": 0.0, "num_samples": 0}
    for op in table.ops:
        name, shapes = _split_key(op.key)
        about = {**usual, "op": name, "shapes": shapes, "dtype": _dtype(shapes), "num_samples": op.num_samples}
        yield {**about, "phase": "forward", "seconds": op.forward_s, "spread": op.spread}
        for phase, seconds in (
            ("backward", op.backward_s),
            ("accumulate", op.accumulate_s),
            ("forward_host", op.forward_issue_s),
            ("backward_host", op.backward_issue_s),
        ):
            if seconds:
                yield {**about, "phase": phase, "seconds": seconds}
    for step in table.optimizers:
        shapes = named_shapes(elements=step.num_elements, tensors=step.num_tensors)
        about = {**usual, "op": f"{_OPTIMIZER}{step.kind}", "shapes": shapes, "dtype": step.dtype}
        about["empty"] = not (step.num_elements and step.num_tensors)
        yield {**about, "phase": "step", "seconds": step.seconds}
        if step.issue_s:
            yield {**about, "phase": "step_host", "seconds": step.issue_s}
    for transfer in table.transfers:
        about = {**usual, "op": transfer.kind, "shapes": _group(transfer.num_bytes, transfer.num_ranks)}
        about["empty"] = not transfer.num_bytes
        yield {**about, "seconds": transfer.seconds, "spread": transfer.spread}
        if transfer.host_s:
            yield {**about, "phase": "host", "seconds": transfer.host_s}
    if table.overhead_s:
        yield {**usual, "op": _OVERHEAD, "phase": "host", "seconds": table.overhead_s}
    if table.host_call_s:
        yield {**usual, "op": _CALL, "phase": "host", "seconds": table.host_call_s}
    for batch in table.batches:
        about = {**usual, "op": f"{_MODEL}{batch.model}", "num_samples": batch.num_samples}
        yield {**about, "shapes": _batch(batch.batch_size), "seconds": batch.seconds}
        for percentile, seconds in ((90, batch.p90_s), (99, batch.p99_s)):
            yield {**about, "shapes": _batch(batch.batch_size, percentile), "seconds": seconds}


def _optimizers(rows: Records) -> Iterator[OptimizerMeasurement]:
    issued = rows.where(phase="step_host")
    issue_s = {(op, shapes, dtype): s for op, shapes, dtype, s in _columns(issued, "op shapes dtype seconds")}
    for op, shapes, dtype, seconds in _columns(rows.where(phase="step"), "op shapes dtype seconds"):
        sizes = parse_sizes(shapes) or {}
        if op.startswith(_OPTIMIZER) and sizes.keys() == {"elements", "tensors"}:
            yield OptimizerMeasurement(
                kind=op.removeprefix(_OPTIMIZER),
                dtype=dtype,
                num_elements=sizes["elements"],
                num_tensors=sizes["tensors"],
                seconds=seconds,
                issue_s=issue_s.get((op, shapes, dtype), 0.0),
            )


def _transfers(rows: Records, times: dict[tuple[str, str, str], int]) -> Iterator[TransferMeasurement]:
    for kind, shapes, phase, seconds, spread in _columns(rows, "op shapes phase seconds spread"):
        sizes = parse_sizes(shapes) or {}
        alone = all(sizes.get(name) == 1 for name in ("groups", "stride", "nodes"))
        if phase or kind not in _TRANSFERS or not alone or sizes["ranks"] < 2:
            continue
        host = times.get((kind, shapes, "host"))
        yield TransferMeasurement(
            kind=kind,
            num_ranks=sizes["ranks"],
            num_bytes=sizes["bytes"],
            seconds=seconds,
            spread=spread,
            host_s=0.0 if host is None else float(rows.seconds[host]),
        )


def _batches(rows: Records, times: dict[tuple[str, str, str], int]) -> Iterator[BatchMeasurement]:
    """Batches of which the median and both percentiles are there."""
    for op, shapes, phase, seconds, num_samples in _columns(rows, "op shapes phase seconds num_samples"):
        sizes = parse_sizes(shapes) or {}
        if phase or not op.startswith(_MODEL) or sizes.keys() != {"batch_size"}:
            continue
        p90, p99 = (times.get((op, _batch(sizes["batch_size"], percentile), "")) for percentile in (90, 99))
        if p90 is not None and p99 is not None:
            yield BatchMeasurement(
                model=op.removeprefix(_MODEL),
                batch_size=sizes["batch_size"],
                seconds=seconds,
                p90_s=float(rows.seconds[p90]),
                p99_s=float(rows.seconds[p99]),
                num_samples=num_samples,
            )


def _batch(batch_size: int, percentile: int | None = None) -> str:
    """The sizes of a batch's row: of its median, or of a percentile."""
    return named_shapes(batch_size=batch_size, **({} if percentile is None else {"percentile": percentile}))


def _group(num_bytes: int, num_ranks: int) -> str:
    """The sizes of a transfer among all devices of one node."""
    return named_shapes(bytes=num_bytes, ranks=num_ranks, groups=1, stride=1, nodes=1, devices_per_node=num_ranks)


def _split_key(key: str) -> tuple[str, str]:
    """(op, the text in its brackets) of a key; (key, "") if it has another form."""
    name, opened, rest = key.partition("(")
    return (name, rest[:-1]) if opened and "|" in rest and rest.endswith(")") else (key, "")


def _dtype(shapes: str) -> str:
    """The dtype of the first input."""
    return shapes.partition(":")[2].partition(",")[0].partition(";")[0].partition("|")[0]


def _columns(rows: Records, names: str) -> Iterable[tuple[Any, ...]]:
    return zip(*(getattr(rows, name).tolist() for name in names.split()), strict=True)
