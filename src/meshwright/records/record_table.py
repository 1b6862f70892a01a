"""The measurement table of many devices: each row has the seconds of one op, at one size, on one device.

    op, phase, shapes, dtype     what was timed          device, software, kernel     on what, by which code
    seconds, spread, num_samples the measurement         source, date, flags          its origin, and special cases

``shapes`` has one of two forms: named integers (``m=4096;n=128;k=1536``), or the inputs of a captured op
(``4x128x768:float32,768x768:float32;attribute=value|11``, the part of `meshwright.spec.op_key` in brackets). It is
empty if ``op`` alone identifies the work. ``bytes`` of a collective is the size of the full tensor: the output of an
all-gather, the input of a reduce-scatter, the input of all ranks together for an all-to-all (each rank holds
bytes / ranks).

``spread`` is (p90 - p10) / median. A ``spread`` or ``num_samples`` of 0 means unknown. Flags are words joined by
commas: ``noop`` (the size is so small that nothing is done) and ``plateau`` (the source raised the time so that
bandwidth never falls with size). A row of zero seconds, or with a size of zero, must be flagged ``noop``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshwright.spec import MAX_SECONDS, MIN_SECONDS, MeasurementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    # The annotations below are not read at run time.
    Texts: TypeAlias = NDArray[np.object_]
    Floats: TypeAlias = NDArray[np.float64]
    Integers: TypeAlias = NDArray[np.int64]
    Mask: TypeAlias = NDArray[np.bool_]

# A row on its way into the table: some of its columns.
Row = dict[str, Any]

PHASES = ("", "forward", "backward", "accumulate", "step", "host", "forward_host", "backward_host", "step_host")
FLAGS = ("noop", "plateau")
# What makes two rows measurements of the same thing.
IDENTITY = ("op", "phase", "shapes", "dtype", "device", "software", "kernel")
TEXTS = (*IDENTITY, "source", "date", "flags")
COLUMNS = (*TEXTS, "seconds", "spread", "num_samples")

# A captured op names every input; the longest in the zoo's graphs has 5,600 characters.
MAX_TEXT = 100_000
# Sizes of which zero means that there was nothing to do; of others (parameters, window, stride) it is a fact.
_OF_KERNELS = ("elements", "tensors", "m", "n", "k", "batch", "heads", "kv_heads", "head_dim", "queries", "keys")
_COUNTED = frozenset((*_OF_KERNELS, "bytes", "ranks", "groups", "nodes", "devices_per_node"))
_NAMED = re.compile(r"[a-z][a-z0-9_]*=\d{1,18}(?:;[a-z][a-z0-9_]*=\d{1,18})*")
_DEFAULTS: dict[str, Any] = {"spread": 0.0, "num_samples": 0, **dict.fromkeys(TEXTS, "")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """A measurement table of n rows, as columns of shape (n,). The module's docstring describes the columns.

    Raises MeasurementError, with the numbers of the rows, for impossible figures, sizes, phases or flags; `keep_sound`
    leaves such rows out instead. Columns cannot be changed afterwards.
    """

    op: Texts
    phase: Texts
    shapes: Texts
    dtype: Texts
    device: Texts
    software: Texts
    kernel: Texts
    seconds: Floats
    spread: Floats
    num_samples: Integers
    source: Texts
    date: Texts
    flags: Texts

    def __post_init__(self) -> None:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        for problem, rows in find_faults(columns).items():
            if rows.any():
                places = np.flatnonzero(rows)
                shown = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
                raise MeasurementError(
                    f"{len(places)} of {len(rows)} rows have {problem} (rows {shown}). Correct them, or leave them out."
                )
        for column in columns.values():
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.seconds)

    def select(self, rows: Mask | Integers) -> Records:
        """Return the rows where a mask of shape (n,) is true, or the rows with the given indices, in that order."""
        return Records(**{name: getattr(self, name)[rows] for name in COLUMNS})

    def where(self, **values: str) -> Records:
        """Return the rows whose text columns equal the given values: ``where(op="matmul", device="H100")``."""
        mask = np.ones(len(self), bool)
        for name, value in values.items():
            mask &= getattr(self, name) == value
        return self.select(mask)

    def size(self, name: str) -> Integers:
        """Return the integer ``name`` of every row's ``shapes``, shape (n,).

        Raises MeasurementError if a row does not have it.
        """
        found = {text: (parse_sizes(text) or {}).get(name) for text in set(self.shapes)}
        missing = sorted(text for text, size in found.items() if size is None)
        if missing:
            raise MeasurementError(
                f"Rows with the shapes {missing[0]!r} have no size {name!r}. Select the rows that have it first."
            )
        return np.array([found[text] for text in self.shapes], np.int64)

    def has_flag(self, flag: str) -> Mask:
        """Return for each row whether it has the flag (``noop`` or ``plateau``), shape (n,)."""
        return _rows_where(self.flags, lambda text: flag in text.split(","))

    def row_hashes(self) -> NDArray[np.uint64]:
        """Return a hash of each row's identity columns and seconds, shape (n,); equal on every machine."""
        columns = [getattr(self, name) for name in IDENTITY]
        rows = zip(*columns, self.seconds.tolist(), strict=True)
        digests = (hashlib.blake2b("\x1f".join((*row[:-1], repr(row[-1]))).encode(), digest_size=8) for row in rows)
        return np.array([int.from_bytes(digest.digest(), "little") for digest in digests], np.uint64)

    def contradictions(self) -> Integers:
        """Return the indices, ascending, of rows that agree with an earlier row in `IDENTITY` but not in seconds."""
        seen: dict[tuple[str, ...], float] = {}
        pairs = zip(self._texts(IDENTITY), self.seconds.tolist(), strict=True)
        return np.array(
            [i for i, (row, seconds) in enumerate(pairs) if seen.setdefault(row, seconds) != seconds], np.int64
        )

    def dedupe(self, identity: Sequence[str] = IDENTITY) -> Records:
        """Return the last of the rows that agree in the ``identity`` columns, for each combination of their values."""
        last = {row: place for place, row in enumerate(self._texts(identity))}
        return self.select(np.array(sorted(last.values()), np.int64))

    def _texts(self, names: Sequence[str]) -> Iterable[tuple[str, ...]]:
        return zip(*(getattr(self, name) for name in names), strict=True)


def make_records(**columns: ArrayLike) -> Records:
    """Return a table from columns. A single value is used for all rows; columns that are left out are empty or 0.

    Raises MeasurementError as `Records` does, and for columns that do not exist or differ in length.
    """
    return Records(**_complete(columns))


def keep_sound(**columns: ArrayLike) -> tuple[Records, dict[str, int]]:
    """Return `make_records` without impossible rows (`find_faults`), and the number of rows left out by reason."""
    complete = _complete(columns)
    left_out = np.zeros(len(complete["seconds"]), bool)
    counts = {}
    for problem, rows in find_faults(complete).items():
        if new := int((rows & ~left_out).sum()):
            counts[problem] = new
        left_out |= rows
    return Records(**{name: column[~left_out] for name, column in complete.items()}), counts


def columns_of(rows: Iterable[Row], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the columns ``names`` of ``rows``, which all have them, as arguments for `make_records`."""
    known = list(rows)
    return {name: [row[name] for row in known] for name in names}


def concat_records(parts: Iterable[Records]) -> Records:
    """Return one table with all rows of all parts, in order."""
    known = [make_records(seconds=()), *parts]
    return Records(**{name: np.concatenate([getattr(part, name) for part in known]) for name in COLUMNS})


def merge_records(old: Records, new: Records) -> Records:
    """Return the rows of both tables, without old rows that agree with a new row in `IDENTITY`."""
    renewed = set(new._texts(IDENTITY))
    kept = np.array([row not in renewed for row in old._texts(IDENTITY)], bool)
    return concat_records([old.select(kept), new])


def named_shapes(**sizes: int) -> str:
    """Return named sizes as a text for the column ``shapes``: ``named_shapes(m=4, n=2)`` is ``m=4;n=2``."""
    return ";".join(f"{name}={int(size)}" for name, size in sizes.items())


def parse_sizes(shapes: str) -> dict[str, int] | None:
    """Return the sizes, by name, of a text that `named_shapes` wrote; {} for the inputs of a captured op.

    Returns None for a text of neither form, also if a name occurs twice.
    """
    if not shapes or "|" in shapes:
        return {}
    if _NAMED.fullmatch(shapes) is None:
        return None
    pairs = [part.split("=") for part in shapes.split(";")]
    sizes = {name: int(size) for name, size in pairs}
    return sizes if len(sizes) == len(pairs) else None


def find_faults(columns: Mapping[str, NDArray[Any]]) -> dict[str, Mask]:
    """Return, for each possible fault of a row, in words, a mask of the rows that have it, of shape (n,).

    ``columns`` has all columns of the table.
    """
    seconds, spread = columns["seconds"], columns["spread"]
    noop = _rows_where(columns["flags"], lambda text: "noop" in text.split(","))
    too_long = [_rows_where(columns[name], lambda text: len(text) > MAX_TEXT) for name in TEXTS]
    return {
        "seconds that are not a number": ~np.isfinite(seconds),
        "negative seconds": np.isfinite(seconds) & (seconds < 0),
        f"more seconds than a day has ({MAX_SECONDS:.0f})": np.isfinite(seconds) & (seconds > MAX_SECONDS),
        f"seconds above 0 and below {MIN_SECONDS:g}": (seconds > 0) & (seconds < MIN_SECONDS),
        "zero seconds without the flag 'noop'": (seconds == 0) & ~noop,
        "a spread that is negative or no number": ~(np.isfinite(spread) & (spread >= 0)),
        "a negative number of samples": columns["num_samples"] < 0,
        "no op": columns["op"] == "",
        "no device": columns["device"] == "",
        f"a phase other than {', '.join(map(repr, PHASES))}": _rows_where(columns["phase"], lambda x: x not in PHASES),
        f"flags other than {', '.join(FLAGS)}": _rows_where(columns["flags"], _odd_flags),
        "shapes that are neither named sizes (m=4;n=2) nor inputs of a captured op": _rows_where(
            columns["shapes"], lambda text: parse_sizes(text) is None
        ),
        "a size of zero without the flag 'noop'": _rows_where(columns["shapes"], _has_empty_size) & ~noop,
        "more ranks in their groups than the nodes have devices": _rows_where(columns["shapes"], _outgrows_mesh),
        f"a string of more than {MAX_TEXT} characters": np.any(too_long, axis=0),
    }


def _rows_where(column: Texts, test: Callable[[str], bool]) -> Mask:
    """The rows whose text passes the test, which sees every distinct text once."""
    passed = {text for text in set(column) if test(text)}
    return np.array([text in passed for text in column], bool) if passed else np.zeros(len(column), bool)


def _odd_flags(text: str) -> bool:
    words = text.split(",") if text else []
    return len(set(words)) < len(words) or not set(words) <= set(FLAGS)


def _has_empty_size(text: str) -> bool:
    return any(size == 0 and name in _COUNTED for name, size in (parse_sizes(text) or {}).items())


def _outgrows_mesh(text: str) -> bool:
    sizes = parse_sizes(text) or {}
    ranks = sizes.get("ranks", 0) * sizes.get("groups", 1)
    return "nodes" in sizes and "devices_per_node" in sizes and ranks > sizes["nodes"] * sizes["devices_per_node"]


def _complete(columns: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    """All columns as arrays of one length and of their own types."""
    if odd := set(columns) - set(COLUMNS):
        raise MeasurementError(
            f"{', '.join(sorted(odd))}: not a column of a measurement table; its columns are {', '.join(COLUMNS)}."
        )
    arrays = {name: _as_column(name, columns.get(name, _DEFAULTS.get(name, ()))) for name in COLUMNS}
    lengths = {name: len(array) for name, array in arrays.items() if array.ndim}
    if len(set(lengths.values())) != 1:
        raise MeasurementError(
            f"The columns have lengths {lengths}; expected the column seconds, and the same length for all columns."
        )
    count = next(iter(lengths.values()))
    return {
        name: np.full(count, array[()], array.dtype) if array.ndim == 0 else array for name, array in arrays.items()
    }


def _as_column(name: str, values: ArrayLike) -> NDArray[Any]:
    kind: Any = {"seconds": np.float64, "spread": np.float64, "num_samples": np.int64}.get(name, object)
    try:
        given = np.asarray(values)
        if kind is not object and given.size and given.dtype.kind not in "iuf":
            raise TypeError("strings, or other values that are not numbers")
        if kind is np.int64 and given.dtype.kind == "f" and not np.isfinite(given).all():
            raise ValueError("missing ones")
        array = np.array(values, kind)
        if kind is np.int64 and not np.array_equal(array, given):
            raise ValueError("fractions")
    except (TypeError, ValueError, OverflowError):
        raise MeasurementError(
            f"Column {name!r} holds values that are not {np.dtype(kind).name}; expected only such numbers."
        ) from None
    if array.ndim > 1:
        raise MeasurementError(f"Column {name!r} has {array.ndim} dimensions; expected one.")
    if kind is object and not all(type(value) is str for value in array.ravel()):
        raise MeasurementError(f"Column {name!r} has values that are not strings; expected only strings.")
    return array
