"""Read measurement files of any known kind as rows (`import_file`): tables, profiler traces, PipeDream's profiles.

The content of a file decides its kind:

    parquet    a table of Meshwright, or a public one (aiconfigurator)   {...}    a trace, or a table of one device
    pickle     Alpa's profiling database (`importing.alpa`)              a -- b   a profile of PipeDream
    a,b,c      a public table (aiconfigurator, vTrain)                   tabs     Alpa's results

Files may be compressed (gzip). Their sizes are checked before anything is read.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshwright.records.importing.alpa import read_database, read_results
from meshwright.records.importing.imported import Imported
from meshwright.records.importing.public import DEVICES, NUMBERS, public_columns, read_public
from meshwright.records.one_device import from_measurements
from meshwright.records.record_table import Row, columns_of, keep_sound, named_shapes
from meshwright.records.text_files import parse_csv, read_unpacked
from meshwright.spec import DocumentError, Measurements, decode_document
from meshwright.spec.codec import document_kind
from meshwright.spec.parsing import parse_data

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Names of C++ types as the profiler writes them.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
_NO_SHAPES = "ops without shapes of tensors (record with record_shapes=True)"
_NO_KERNEL = "ops that start no kernel"
_NO_AGREEMENT = "ops of no named operator (collectives, custom ones)"
_NO_TIME = "ops whose start or duration is negative or no number"
_ODD_KERNELS = "ops with a kernel whose duration is negative or no number"
_NOT_TENSORS = "ops with impossible inputs (negative sizes, invalid strings)"
_EMPTY = "ops on tensors without elements"
# Libkineto prints figures as C++ does, so that a division by zero among them (blocks per multiprocessor) is not valid
# JSON. Strings are matched first and stay.
_BARE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:inf|infinity|nan)\b', re.IGNORECASE | re.DOTALL)
_ANY_BARE = re.compile(rb"[:,\[]\s*-?(?:inf|infinity|nan)\b", re.IGNORECASE)
# The profiler counts nanoseconds in 64 bits and writes microseconds.
_MAX_NANOSECONDS = 2**63


@dataclass(slots=True)
class _Event:
    """An op of the trace: its place in time, and the kernels that it and what it calls have started (seconds, name)."""

    name: str
    start: float
    end: float
    arguments: dict[str, Any]
    kernels: list[tuple[float, str]] = field(default_factory=list)


def without_bare_numbers(content: bytes) -> bytes:
    """Return the text of a trace with ``null`` in place of ``inf``, ``Infinity`` and ``NaN``; other texts unchanged."""
    if b'"traceEvents"' not in content or _ANY_BARE.search(content) is None:
        return content
    return _BARE.sub(lambda found: found[0] if found[0].startswith(b'"') else b"null", content)


def is_trace(data: Any) -> bool:
    """Return whether parsed JSON data is a trace of torch's profiler (has ``traceEvents``)."""
    return isinstance(data, dict) and isinstance(data.get("traceEvents"), list)


# A trace of torch's profiler (Kineto, Chrome trace events):
#
#     time of an op = its kernels' time where the trace has kernels of a GPU, else the op's own time on the processor
#
# Counted is the outermost ``aten`` op on each thread, with all that it calls; ops that are alike (name, shapes, dtypes,
# other arguments) become one row: median, spread and number. Products of two matrices become rows ``matmul``, all
# others rows ``aten.NAME`` with the inputs in the form of a captured op. The trace must have been taken with
# ``record_shapes=True``. Events: ``torch/csrc/autograd/profiler_kineto.cpp`` and libkineto's ``output_json.cpp``.
def read_trace(data: dict[str, Any], *, device: str | None, source: str) -> Imported:
    """Return a row for each distinct op (with its shapes) of a trace of torch's profiler.

    ``device``: the name of the device kind; None means the GPU's own name, or ``cpu``. Raises DocumentError for a trace
    without ops, or with GPUs of several kinds.
    """
    events = [event for event in data["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    kernels = _kernels_by_launch(events)
    left_out = dict.fromkeys((_NO_SHAPES, _NO_KERNEL, _NO_AGREEMENT, _NO_TIME, _ODD_KERNELS, _NOT_TENSORS, _EMPTY), 0)
    left_out[_NO_TIME] = sum(event.get("cat") == "cpu_op" and not _is_timed(event) for event in events)
    samples: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    for event in _outermost(events, kernels):
        if not event.name.startswith("aten::"):
            left_out[_NO_AGREEMENT] += 1
            continue
        described = _describe(event)
        if isinstance(described, str):
            left_out[described] += 1
        elif kernels and not event.kernels:
            left_out[_NO_KERNEL] += 1
        elif any(math.isnan(seconds) for seconds, _ in event.kernels):
            left_out[_ODD_KERNELS] += 1
        elif kernels:
            samples[described].append((math.fsum(s for s, _ in event.kernels), max(event.kernels)[1]))
        else:
            samples[described].append(((event.end - event.start) / 1e6, ""))
    if not samples:
        found = "; ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        raise DocumentError(
            f"{source}: the trace has no ops with shapes and times ({found or 'no op at all'}). Record it with "
            "torch.profiler.profile(record_shapes=True)."
        )
    records, odd = keep_sound(
        **columns_of(_rows(samples), ("op", "phase", "shapes", "dtype", "kernel", "seconds", "spread", "num_samples")),
        device=device or _device(data, bool(kernels), source),
        software="torch profiler",
        source=source,
        date=_date(data, events),
    )
    return Imported(kind="a trace of torch's profiler", records=records, left_out={**left_out, **odd})


def _rows(samples: dict[tuple[str, str, str], list[tuple[float, str]]]) -> Iterator[Row]:
    for (op, shapes, dtype), taken in samples.items():
        seconds = np.array([item[0] for item in taken])
        low, middle, high = np.percentile(seconds, (10, 50, 90))
        yield {
            "op": op,
            "phase": "" if op == "matmul" else "forward",
            "shapes": shapes,
            "dtype": dtype,
            "kernel": taken[0][1],
            "seconds": float(middle),
            "spread": float((high - low) / middle) if middle > 0 else 0.0,
            "num_samples": len(taken),
        }


def _kernels_by_launch(events: list[dict[str, Any]]) -> dict[int, list[tuple[float, str]]]:
    """(seconds, family) of the kernels of each op, by the id that both carry; seconds are NaN where they cannot be."""
    found: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and isinstance(event.get("args"), dict):
            launch = event["args"].get("External id")
            if isinstance(launch, int):
                seconds = event["dur"] / 1e6 if _is_time(event.get("dur")) else math.nan
                found[launch].append((seconds, _family(str(event.get("name")))))
    return found


def _outermost(events: list[dict[str, Any]], kernels: dict[int, list[tuple[float, str]]]) -> Iterator[_Event]:
    """The operators that no other operator calls, thread by thread, with the kernels of all that they call."""
    threads: dict[tuple[str, str], list[_Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "cpu_op" or not _is_timed(event):
            continue
        name, start, length = str(event.get("name")), float(event["ts"]), float(event["dur"])
        # The nodes of autograd contain the operators of the backward pass; they are not operators themselves.
        if "::" in name and not name.startswith("autograd::"):
            arguments = event["args"] if isinstance(event.get("args"), dict) else {}
            thread = (str(event.get("pid")), str(event.get("tid")))
            threads[thread].append(_Event(name=name, start=start, end=start + length, arguments=arguments))
    for operators in threads.values():
        operators.sort(key=lambda operator: (operator.start, -operator.end))
        outer: _Event | None = None
        for operator in operators:
            if outer is None or operator.start >= outer.end:
                if outer is not None:
                    yield outer
                outer = operator
            launch = operator.arguments.get("External id")
            outer.kernels += kernels.get(launch, []) if isinstance(launch, int) else []
        if outer is not None:
            yield outer


def _is_timed(event: dict[str, Any]) -> bool:
    return _is_time(event.get("ts")) and _is_time(event.get("dur"))


def _is_time(microseconds: Any) -> bool:
    return _is_number(microseconds) and 1000 * microseconds < _MAX_NANOSECONDS


def _is_number(value: Any) -> bool:
    """Whether a value is a number of at least 0; False for NaN."""
    return type(value) in (int, float) and value >= 0


def _describe(event: _Event) -> tuple[str, str, str] | str:
    """(op, shapes, dtype) of an operator, or why it has no row."""
    dims, kinds = event.arguments.get("Input Dims"), event.arguments.get("Input type")
    values = event.arguments.get("Concrete Inputs", [])
    if not isinstance(dims, list) or not isinstance(kinds, list) or len(dims) != len(kinds):
        return _NO_SHAPES
    given = [value or "" for value in values] if isinstance(values, list) else []
    if not all(isinstance(text, str) for text in (*kinds, *given)):
        return _NOT_TENSORS
    tensors, others = [], []
    for place, (shape, kind) in enumerate(zip(dims, kinds, strict=True)):
        if kind in _DTYPES:
            if not _is_shape(shape):
                return _NOT_TENSORS
            tensors.append((tuple(shape), _DTYPES[kind]))
        elif place < len(given) and given[place]:
            others.append(f"arg{place}={given[place]}")
    if not tensors:
        return _NO_SHAPES
    if any(0 in shape for shape, _ in tensors):
        return _EMPTY
    name = event.name.removeprefix("aten::")
    product = _PRODUCTS[name](*(shape for shape, _ in tensors)) if name in _PRODUCTS else None
    if product is not None:
        return "matmul", product, tensors[0][1]
    shapes = ",".join(f"{'x'.join(map(str, shape))}:{dtype}" for shape, dtype in tensors)
    return f"aten.{name}", ";".join((shapes, *others)) + "|", tensors[0][1]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _mm(*shapes: tuple[int, ...]) -> str | None:
    """(m, k) by (k, n), after the summand where there is one."""
    left, right = shapes[-2:] if len(shapes) > 1 else ((), ())
    if not (len(left) == len(right) == 2 and left[1] == right[0] and min(left + right) > 0):
        return None
    return named_shapes(m=left[0], n=right[1], k=left[1])


def _linear(*shapes: tuple[int, ...]) -> str | None:
    """(..., k) by the transpose of (n, k)."""
    left, right = shapes[:2] if len(shapes) > 1 else ((), ())
    if not (left and len(right) == 2 and left[-1] == right[1] and min(left + right) > 0):
        return None
    return named_shapes(m=math.prod(left[:-1]), n=right[0], k=right[1])


_PRODUCTS: dict[str, Callable[..., str | None]] = {"mm": _mm, "matmul": _mm, "addmm": _mm, "linear": _linear}


def _family(name: str) -> str:
    """A kernel's name without its template's arguments and parameters."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].strip()[:200]


def _date(data: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """The day on which the trace was begun; empty where it does not say."""
    base = data.get("baseTimeNanoseconds", 0)
    begun = min((event["ts"] for event in events if _is_time(event.get("ts"))), default=0.0)
    nanoseconds = int(base) + int(1e3 * begun) if _is_number(base) and 0 < base < _MAX_NANOSECONDS else 0
    return str(np.datetime64(nanoseconds, "ns").astype("datetime64[D]")) if 0 < nanoseconds < _MAX_NANOSECONDS else ""


def _device(data: dict[str, Any], has_kernels: bool, source: str) -> str:
    if not has_kernels:
        return "cpu"
    found = data.get("deviceProperties")
    given = [item.get("name") for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    names = sorted({name for name in given if isinstance(name, str) and name})
    if len(names) != 1 or not all(name in names for name in given):
        known = ", ".join(name[:100] for name in names[:8])
        raise DocumentError(
            f"{source}: the trace has kernels of {known or 'devices without a name'}; expected devices of one kind. "
            "Name the kind with --device."
        )
    name = names[0]
    return DEVICES.get(name, name)


_NODE = re.compile(r"(?P<name>\S+) -- (?P<what>.*?) -- (?P<figures>forward_compute_time=[^\t]*?)(?: -- stage_id=\d+)?")
_EDGE = re.compile(r"(\S+) -- (\S+)")
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


# Lines of PipeDream's layer profiles (``graph.txt``):
#
#     node3 -- Conv2d(3, 64) -- forward_compute_time=MS, backward_compute_time=MS, activation_size=B, parameter_size=B
#     <tab>node2 -- node3
#
# Times are milliseconds of one minibatch on one device. In the table, inputs, which measure the loading of data, are
# left out; an activation that is a list (``[a; b]``) counts as the sum. Format: `read_graph.py` and `graph/graph.py` of
# the PipeDream repository (Narayanan et al., SOSP 2019).
class ProfiledLayer(NamedTuple):
    """One layer of a PipeDream profile: milliseconds of its passes, bytes of its output and of its parameters.

    ``what`` describes the layer, such as ``Conv2d(3, 64)``.
    """

    name: str
    what: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        """Return whether the layer is an input, whose times are those of loading data."""
        return self.what.startswith("Input")


def read_layers(text: str, *, source: str) -> Iterator[ProfiledLayer]:
    """Yield the layers of a PipeDream profile, in its order. Raises DocumentError for lines of another kind."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("\t"):
            continue
        match = _NODE.fullmatch(line.strip())
        if match is None:
            raise _no_line(line, source)
        yield ProfiledLayer(match["name"], match["what"], *_figures(match["figures"], source))


def read_edges(text: str, *, source: str) -> Iterator[tuple[str, str]]:
    """Yield the edges of a PipeDream profile: pairs of layer names, of which the first passes its output to the second.

    Raises DocumentError for lines of another kind.
    """
    for line in text.splitlines():
        if line.startswith("\t"):
            match = _EDGE.fullmatch(line.strip())
            if match is None:
                raise _no_line(line, source)
            yield match[1], match[2]


def read_profile(text: str, *, device: str, source: str) -> Imported:
    """Return rows with the seconds of forward and backward of every layer of a PipeDream profile.

    Raises DocumentError for lines of another kind.
    """
    rows: list[Row] = []
    left_out = {"inputs (the loading of data)": 0, "passes that take no time": 0}
    for layer in read_layers(text, source=source):
        if layer.is_input:
            left_out["inputs (the loading of data)"] += 1
            continue
        shapes = named_shapes(activation_bytes=int(layer.activation_bytes), parameter_bytes=int(layer.parameter_bytes))
        for phase, milliseconds in (("forward", layer.forward_ms), ("backward", layer.backward_ms)):
            if milliseconds == 0:
                left_out["passes that take no time"] += 1
            else:
                rows.append({"op": layer.what, "phase": phase, "shapes": shapes, "seconds": milliseconds / 1e3})
    columns = columns_of(rows, ("op", "phase", "shapes", "seconds"))
    records, odd = keep_sound(**columns, dtype="float32", device=device, software="PipeDream", source=source)
    return Imported(kind="a PipeDream profile", records=records, left_out={**left_out, **odd})


def _no_line(line: str, source: str) -> DocumentError:
    return DocumentError(f"{source}: {line[:100]!r} is not a line of a PipeDream profile. Check the file.")


def _figures(text: str, source: str) -> list[float]:
    given = dict(part.partition("=")[::2] for part in text.split(", "))
    try:
        if tuple(given) != _FIGURES:
            raise ValueError("other names")
        figures = [math.fsum(float(item) for item in given[name].strip("[]").split(";")) for name in _FIGURES]
        if not all(0 <= figure < 1e18 for figure in figures):
            raise ValueError("impossible figures")
    except ValueError:
        raise DocumentError(
            f"{source}: {text[:100]!r} are not the four figures of a PipeDream layer. Check the file."
        ) from None
    return figures


_KNOWN = (
    "tables of Meshwright (.parquet, .json), traces of torch's profiler, Alpa's database and results, PipeDream's "
    "profiles, tables of aiconfigurator and vTrain"
)

# The share of rows that may be odd by themselves; the tables that are known have none.
_MAX_REFUSED = 0.01


def import_file(path: Path | str, *, device: str | None = None) -> Imported:
    """Return the rows of a measurement file of any known kind.

    ``device``: the name of the device kind, for files that do not contain it. Raises DocumentError for a file that is
    of another kind, too large, damaged, or without a device.
    """
    path = Path(path)
    content = read_unpacked(path)
    if content.startswith(b"PAR1"):
        return _parquet(path, content)
    if content.startswith(b"\x80"):
        return read_database(content, device=_named(device, path), source=path.name)
    if content.lstrip()[:1] in (b"{", b"["):
        return _json(parse_data(without_bare_numbers(content), path.with_suffix(".json")), path, device)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _unknown(path) from None
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if " -- " in first:
        return read_profile(text, device=_named(device, path), source=path.name)
    if "\t" in first:
        return read_results(text, device=_named(device, path), source=path.name)
    rows = parse_csv(content, path) if "," in first else []
    columns = {name: np.array([row[name] for row in rows], object) for name in (rows[0] if rows else ())}
    return _public(columns, path)


def _parquet(path: Path, content: bytes) -> Imported:
    from meshwright.records.parquet import is_records, parse_columns, parse_records, parse_schema  # noqa: PLC0415

    schema = parse_schema(content, path)
    if is_records(schema):
        return Imported(kind="a measurement table", records=parse_records(content, path))
    columns = parse_columns(content, path, public_columns(schema.names))
    if texts := [name for name, column in columns.items() if name in NUMBERS and column.dtype == object]:
        raise DocumentError(f"{path}: column {texts[0]!r} holds strings; expected numbers. Write the table again.")
    return _public(columns, path)


def _public(columns: dict[str, NDArray[Any]], path: Path) -> Imported:
    """Read a public table. It has no checksum: if many figures are impossible, the others are as likely damaged."""
    imported = read_public(columns, source=path.name)
    if imported is None:
        raise _unknown(path)
    num_refused = sum(imported.left_out.values())
    num_rows = len(imported.records) + num_refused
    if num_refused > _MAX_REFUSED * num_rows:
        what = ", ".join(f"{count} with {reason}" for reason, count in imported.left_out.items())
        raise DocumentError(
            f"{path}: {num_refused} of {num_rows} rows are impossible ({what}); the file is damaged or in other units. "
            "Fetch it again, or leave those rows out."
        )
    return imported


def _json(data: Any, path: Path, device: str | None) -> Imported:
    if document_kind(data) == "measurements":
        records = from_measurements(decode_document(Measurements, data, str(path)))
        return Imported(kind="a table of one device", records=records)
    if is_trace(data):
        return read_trace(data, device=device, source=path.name)
    raise _unknown(path)


def _named(device: str | None, path: Path) -> str:
    if device is None:
        raise DocumentError(f"{path}: the file does not say on which device it was measured. Name it with --device.")
    return device


def _unknown(path: Path) -> DocumentError:
    return DocumentError(f"{path}: not a known kind of measurement file. Known are {_KNOWN}.")
