"""Read Alpa's profiling database (``prof_database.pkl``) and result tables (``.tsv``); safe reader of pickles.

For each mesh of (hosts, devices per host), the database holds series of points. The points of a collective are
(elements of the full tensor, seconds), timed while all groups of the mesh run it at once. The points of square matrix
products are (floating-point operations, seconds). Source: Zheng et al., OSDI 2022, artifact
(``alpa/mesh_profiling.py``). Two flags mark rows that are not measurements:

    noop      the size is so small that the op does nothing: no elements, fewer than ranks (all-gather, reduce-scatter)
              or fewer than ranks² (all-to-all). The time is that of the empty loop
    plateau   Alpa raised the time so that bandwidth never falls with size: size / seconds is that of the neighbour

Points of infinite seconds (a series that failed) are left out and counted. `load_pickle` reads a pickle as plain data.
"""

from __future__ import annotations

import ast
import math
import pickletools
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import Any

import numpy as np

from meshwright.records.importing.imported import Imported
from meshwright.records.record_table import Row, columns_of, keep_sound, named_shapes
from meshwright.spec import DTYPE_BYTES, DocumentError

# The database of 8,000 collectives takes 104,000; each costs about a microsecond and a hundred bytes.
MAX_OPCODES = 5_000_000
# Longer integers cannot be sizes or counts; decoding them would take time and memory.
_MAX_INTEGER_BYTES = 16

_REMEDY = "Only pickled tables of numbers are read; convert the file to CSV or parquet if you trust its origin."
_SCALARS = {"f8": "<d", "i8": "<q"}
# A text stands for the bytes of one number; a longer one, kept once and encoded often, would fill the memory.
_MAX_ENCODED = max(map(struct.calcsize, _SCALARS.values()))


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The name of a global ("module.name") to which a pickle refers. It is never imported."""

    text: str


@dataclass(slots=True, eq=False)
class Pairs:
    """A mapping of a pickle, as a list of (key, value) in order."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object of an allowed class: the name of the class, and its attributes as the pickle stores them."""

    name: str
    state: Pairs | None = None


@dataclass(slots=True, eq=False)
class _Dtype:
    code: str


_MARK = object()


# A stranger's pickle is read without Python's unpickler: the opcodes that build data are interpreted here; no code of
# it is imported or run. A name of a module is only a `GlobalName`, and may become
#
#     numpy.core.multiarray.scalar(dtype, bytes)   a float64 or int64      numpy.dtype('f8' or 'i8', ...)   its dtype
#     collections.defaultdict(list)                an empty mapping        _codecs.encode(text, 'latin1')   bytes
#     a class that is named                        an `PickledObject`
#
# Mappings stay lists of pairs (`Pairs`): to hash a key that shares its parts a hundred times over would never end.
# Source of the opcodes: pickletools of CPython, protocols 2 to 5.
def load_pickle(content: bytes, classes: Collection[str]) -> Any:
    """Return the plain data of a pickle, without importing or running anything of it.

    Objects of ``classes`` ("module.Name") become `PickledObject`, mappings `Pairs`. Raises DocumentError for a pickle
    that is damaged, or that contains anything else than plain data and such objects.
    """
    machine = _Machine(frozenset(classes))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count >= MAX_OPCODES:
                raise DocumentError(f"The pickle has more than {MAX_OPCODES} opcodes. {_REMEDY}")
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, struct.error, OverflowError):
        pass
    raise DocumentError(f"The pickle is truncated or damaged. {_REMEDY}")


class _Machine:
    """Stack and memo of the pickle's program, holding plain data only."""

    def __init__(self, classes: frozenset[str]) -> None:
        self._classes = classes
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        value = self.pop()
        if self._stack:
            raise ValueError("more than one value")
        return value

    def pop(self, place: int = -1) -> Any:
        """Pop a value from the stack. Raises for a mark, which is not a value."""
        value = self._stack.pop(place)
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def step(self, name: str, argument: Any) -> None:
        if name in ("PROTO", "FRAME"):
            return
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _WITH_VALUE:
            self._stack.append(_checked(argument))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._stack.append(self.pop())
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self._stack.append(self._name(str(argument).replace(" ", ".", 1)))
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        else:
            raise DocumentError(f"The pickle has the opcode {name}, which plain data never needs. {_REMEDY}")

    def _name(self, text: str) -> GlobalName:
        if text not in self._classes and text not in _KNOWN_NAMES:
            raise DocumentError(f"The pickle refers to {text[:200]!r}, which is not plain data. {_REMEDY}")
        return GlobalName(text)

    def since_mark(self) -> list[Any]:
        """Take the values since the last mark, and the mark, off the stack."""
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def tuple_of(self, count: int | None) -> None:
        """The last ``count`` values, or those since the mark, as one tuple."""
        items = self.since_mark() if count is None else [self.pop() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def append(self, items: list[Any]) -> None:
        """Add to the list on top."""
        if type(self._stack[-1]) is not list:
            raise ValueError("no list")
        self._stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values in turn to the mapping on top."""
        if not isinstance(self._stack[-1], Pairs) or len(items) % 2:
            raise ValueError("no mapping")
        self._stack[-1].items.extend(zip(items[::2], items[1::2], strict=True))

    def stack_global(self) -> None:
        """A global named by two strings."""
        last, first = self.pop(), self.pop()
        if type(first) is not str or type(last) is not str:
            raise ValueError("no names")
        self._stack.append(self._name(f"{first}.{last}"))

    def new_object(self) -> None:
        """An object of a class that was named; arguments are never given to it."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, GlobalName) or name.text not in self._classes or arguments != ():
            raise DocumentError(f"The pickle makes an object that is not plain data. {_REMEDY}")
        self._stack.append(PickledObject(name.text))

    def reduce(self) -> None:
        """Evaluate one of the few allowed calls, whose results are plain data."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, GlobalName) or type(arguments) is not tuple:
            raise ValueError("no call")
        match name.text, arguments:
            case ("numpy.dtype", (str() as code, *_)) if code in _SCALARS:
                self._stack.append(_Dtype(code))
            case (
                "numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar",
                (_Dtype() as dtype, bytes() as raw),
            ):
                self._stack.append(struct.unpack(_SCALARS[dtype.code], raw)[0])
            case ("collections.defaultdict", ()) | ("collections.defaultdict", (GlobalName(),)):
                self._stack.append(Pairs())
            case ("_codecs.encode", (str() as text, "latin1")) if len(text) <= _MAX_ENCODED:
                self._stack.append(text.encode("latin1"))
            case _:
                raise DocumentError(f"The pickle calls {name.text!r}, whose result is not plain data. {_REMEDY}")

    def build(self) -> None:
        """The attributes of an object, or the byte order of a dtype, which must be the usual one."""
        state, target = self.pop(), self._stack[-1]
        if isinstance(target, PickledObject) and isinstance(state, Pairs):
            target.state = state
        elif not (isinstance(target, _Dtype) and type(state) is tuple and len(state) > 1 and state[1] == "<"):
            raise DocumentError(f"The pickle sets the state of an object that is not plain data. {_REMEDY}")


def _checked(value: Any) -> Any:
    if type(value) is int and value.bit_length() > 8 * _MAX_INTEGER_BYTES:
        raise DocumentError(
            f"The pickle has an integer of {value.bit_length()} bits, too long for a size or a count. {_REMEDY}"
        )
    return value


_KNOWN_NAMES = frozenset(
    (
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "collections.defaultdict",
        "_codecs.encode",
        "builtins.list",
        "__builtin__.list",
    )
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": Pairs,
}
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_WITH_VALUE = frozenset((*_INTEGERS, *_TEXTS, "BINFLOAT"))
_ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "TUPLE": lambda machine: machine.tuple_of(None),
    "TUPLE1": lambda machine: machine.tuple_of(1),
    "TUPLE2": lambda machine: machine.tuple_of(2),
    "TUPLE3": lambda machine: machine.tuple_of(3),
    "APPEND": lambda machine: machine.append([machine.pop()]),
    "APPENDS": lambda machine: machine.append(machine.since_mark()),
    "SETITEM": lambda machine: machine.set_items([machine.pop(-2), machine.pop()]),
    "SETITEMS": lambda machine: machine.set_items(machine.since_mark()),
    "STACK_GLOBAL": _Machine.stack_global,
    "NEWOBJ": _Machine.new_object,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}


_RESULT = "alpa.mesh_profiling.MeshProfilingResult"
_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
_DTYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
# The artifact's database has 8,828 points in 260 series on at most 32 devices.
_MAX_POINTS = 1_000_000
_MAX_SERIES = 5_000
_MAX_DEVICES = 4_096
# Of a raised point, seconds / size is its neighbour's but for rounding.
_SAME = 1e-9


def read_database(content: bytes, *, device: str, source: str) -> Imported:
    """Return the rows of Alpa's profiling database, measured on devices of the kind ``device``.

    ``source`` is the file's name, for rows and messages. Raises DocumentError for any other pickle.
    """
    meshes = _pairs(load_pickle(content, {_RESULT}), "a mapping of meshes")
    rows: list[Row] = []
    num_series = 0
    for key, result in meshes:
        if not isinstance(result, PickledObject) or result.state is None:
            raise DocumentError(
                f"{source}: expected a profiling result of Alpa for each mesh; this is a pickle of another kind."
            )
        num_nodes, per_node = _mesh(key, source)
        tables = {name: table for name, table in result.state.items if isinstance(name, str)}
        series: Iterator[Iterator[Row]] = chain(
            (_collective(op, *item, num_nodes, per_node) for op in _OPS for item in _table(tables, f"{op}_cost_dict")),
            (_products(*item) for item in _table(tables, "dot_cost_dict")),
        )
        for points in series:
            rows.extend(points)
            num_series += 1
            if num_series > _MAX_SERIES or len(rows) > _MAX_POINTS:
                raise DocumentError(
                    f"{source}: more than {_MAX_SERIES} series or {_MAX_POINTS} points. Check which file was meant."
                )
    # The products are the same on every mesh: they were timed once.
    distinct = {(row["op"], row["shapes"], row["dtype"], row["seconds"]): row for row in rows}
    if twice := len(distinct) - len({identity[:3] for identity in distinct}):
        raise DocumentError(
            f"{source}: {twice} points were measured twice, with different times. Leave one of the two series out."
        )
    columns = columns_of(distinct.values(), ("op", "shapes", "dtype", "seconds", "flags"))
    records, left_out = keep_sound(**columns, device=device, software="Alpa (OSDI'22)", source=source)
    return Imported(kind="Alpa's profiling database", records=records, left_out=left_out)


def read_results(text: str, *, device: str, source: str) -> Imported:
    """Return the training step times of one of Alpa's result tables, as rows: the median of each run's latencies.

    Runs that failed or have no latencies are left out and counted. Raises DocumentError for lines of another form.
    """
    rows: list[Row] = []
    left_out = {"failed, or no latency": 0}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) != 8:
            left_out["failed, or no latency"] += 1
            continue
        _, _, hosts, per_host, model, method, figures, when = cells
        try:
            known = ast.literal_eval(figures)
            latencies = np.array(known.get("latencies", []), np.float64)
            sizes = {"nodes": int(hosts), "devices_per_node": int(per_host)}
            parameters = round(1e9 * float(known.get("param_count", 0)))
            date = datetime.fromtimestamp(int(when), UTC).strftime("%Y-%m-%d")
        except (
            ValueError,
            SyntaxError,
            TypeError,
            AttributeError,
            MemoryError,
            RecursionError,
            ArithmeticError,
            OSError,
        ):
            raise DocumentError(
                f"{source}: {line[:100]!r} is not a row of Alpa's result tables. Check the file."
            ) from None
        if not len(latencies) or not (latencies > 0).all():
            left_out["failed, or no latency"] += 1
            continue
        middle = float(np.median(latencies))
        low, high = np.percentile(latencies, (10, 90))
        rows.append(
            {
                "op": f"training_step.{model}",
                "shapes": named_shapes(**sizes, parameters=parameters),
                "kernel": method,
                "seconds": middle,
                "spread": (high - low) / middle,
                "num_samples": len(latencies),
                "date": date,
            }
        )
    columns = columns_of(rows, ("op", "shapes", "kernel", "seconds", "spread", "num_samples", "date"))
    records, odd = keep_sound(**columns, device=device, software="Alpa (OSDI'22)", source=source)
    return Imported(kind="Alpa's results", records=records, left_out={**left_out, **odd})


def _collective(op: str, key: Any, points: Any, num_nodes: int, per_node: int) -> Iterator[Row]:
    match key:
        case (tuple() as groups, str() as code) if code in _DTYPES:
            num_groups, ranks, stride = _layout(groups)
        case _:
            raise DocumentError(
                f"The key of an {op} series of Alpa's database is not (groups of devices, dtype). Check the file."
            )
    dtype = _DTYPES[code]
    least = {"all_to_all": ranks**2, "all_reduce": 1}.get(op, ranks)
    where = {"ranks": ranks, "groups": num_groups, "stride": stride, "nodes": num_nodes, "devices_per_node": per_node}
    for size, seconds, raised in _points(points):
        flag = "noop" if size < least else "plateau" if raised else ""
        shapes = named_shapes(bytes=size * DTYPE_BYTES[dtype], **where)
        yield {"op": op, "shapes": shapes, "dtype": dtype, "seconds": seconds, "flags": flag}


def _products(key: Any, points: Any) -> Iterator[Row]:
    match key:
        case (_, str() as code) if code in _DTYPES:
            pass
        case _:
            raise DocumentError(
                "The key of a series of matrix products in Alpa's database is not (shape, dtype). Check the file."
            )
    for flops, seconds, raised in _points(points):
        side = round((flops / 2) ** (1 / 3))
        if 2 * side**3 != flops:
            raise DocumentError(
                f"A matrix product in Alpa's database has {flops} operations; expected 2 n³ for square matrices. Check "
                "the file."
            )
        flag = "noop" if flops == 0 else "plateau" if raised else ""
        shapes = named_shapes(m=side, n=side, k=side)
        yield {"op": "matmul", "shapes": shapes, "dtype": _DTYPES[code], "seconds": seconds, "flags": flag}


def _points(points: Any) -> Iterator[tuple[int, float, bool]]:
    """(size, seconds, whether it was raised to its neighbour's rate) of a series."""
    if type(points) is not list or len(points) > _MAX_POINTS // 100:
        raise DocumentError("A series of Alpa's database is not a list of points, or is too long. Check the file.")
    before = math.nan
    for point in points:
        match point:
            case (int() as size, float() as seconds) if size >= 0:
                per_size = seconds / size if size else math.nan
                yield size, seconds, abs(per_size - before) <= _SAME * before
                before = per_size
            case _:
                raise DocumentError("A point of Alpa's database is not (size, seconds). Check the file.")


def _layout(groups: tuple[Any, ...]) -> tuple[int, int, int]:
    """(number of groups, ranks of each, distance between the ranks of a group) of groups of device ids."""
    if not groups or not all(type(group) is tuple and len(group) == len(groups[0]) for group in groups):
        raise DocumentError(
            "The groups of devices of a series in Alpa's database are not tuples of equal length. Check the file."
        )
    if not 0 < (count := len(groups) * len(groups[0])) <= _MAX_DEVICES:
        raise DocumentError(
            f"A series in Alpa's database has {len(groups)} groups with {count} devices in all; expected 1 to "
            f"{_MAX_DEVICES} devices. The file may be damaged: profile again."
        )
    if not all(type(device) is int for group in groups for device in group):
        raise DocumentError(
            "The groups of a series in Alpa's database contain values that are not device ids. Check the file."
        )
    distances = {there - here for group in groups for here, there in pairwise(group)}
    if len(distances) > 1 or (distances and min(distances) < 1):
        raise DocumentError(
            "The device ids of a group in Alpa's database are not equally spaced, so it has no row. Check the file."
        )
    return len(groups), len(groups[0]), distances.pop() if distances else 0


def _mesh(key: Any, source: str) -> tuple[int, int]:
    match key:
        case (_, (int() as hosts, int() as devices)) if hosts > 0 and devices > 0:
            return hosts, devices
        case _:
            raise DocumentError(
                f"{source}: the key of a mesh is not (cluster, (hosts, devices per host)). Check the file."
            )


def _pairs(value: Any, expected: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise DocumentError(f"The pickle is of another kind; expected {expected}. Check which file was meant.")
    return value.items


def _table(tables: dict[str, Any], name: str) -> list[tuple[Any, Any]]:
    found = tables.get(name)
    return _pairs(found, f"a mapping {name}") if found else []
