"""Format many lines of text from columns of numbers, without a Python object per line.

n lines are a table of bytes, shape (n, width): every part of a line is as wide as its longest text, unused bytes are
0, and all zeros are removed at the end. Numbers are looked up four digits at a time, and bytes are written into the
table four or eight at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
# Adjacent columns of bytes, some of them in one word.
Words: TypeAlias = Iterable[NDArray[np.uint32] | NDArray[np.uint64]]

_GROUP = 10_000
# Forms of a group of four digits in the table of `_lookup`: all of them, without zeros in front, the same but for the
# last 0, two digits behind a point, and nothing.
_FULL, _FIRST, _LAST, _POINT, _NOTHING = (form * _GROUP for form in range(5))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextChoice:
    """One of several texts, by line: ``texts[which[i]]``; ``which`` of shape (n,)."""

    texts: Sequence[str]
    which: NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Number:
    """A whole number, shape (n,); as ``millionths``, with six digits behind the point: 1234567 is 1.234567.

    ``shown``: the lines that have it, shape (n,); by default all.
    """

    values: NDArray[np.integer]
    millionths: bool = False
    shown: Mask | None = None


Part: TypeAlias = str | TextChoice | Number


def render_lines(parts: Sequence[Part], count: int) -> bytes:
    """``count`` lines, each made of all parts."""
    columns: list[bytes | NDArray[np.uint32] | NDArray[np.uint64]] = []
    for part in parts:
        match part:
            case str():
                columns.append(part.encode())
            case TextChoice():
                columns.extend(_choice_words(part))
            case Number():
                columns.extend(_number_words(part))
    widths = [len(column) if isinstance(column, bytes) else column.itemsize for column in columns]
    table = np.empty((count, sum(widths)), np.uint8)
    alike = (column if isinstance(column, bytes) else bytes(column.itemsize) for column in columns)
    table[:] = np.frombuffer(b"".join(alike), np.uint8)
    place = 0
    for column, width in zip(columns, widths, strict=True):
        if not isinstance(column, bytes) and count:
            np.ndarray(count, column.dtype, table.data, place, (table.shape[1],))[:] = column
        place += width
    return table.tobytes().translate(None, b"\0")


def _choice_words(part: TextChoice) -> Words:
    texts = [text.encode() for text in part.texts]
    if not any(texts):
        return []
    width = -(-max(map(len, texts)) // 8) * 8
    table = np.frombuffer(b"".join(text.ljust(width, b"\0") for text in texts), np.uint64).reshape(len(texts), -1)
    return [column.take(part.which) for column in table.T]


def _number_words(part: Number) -> Words:
    values = part.values.astype(np.int64)
    size = np.abs(values)
    whole = size // 10**6 if part.millionths else size
    groups = _whole_groups(whole)
    if part.millionths:
        rest = size - 10**6 * whole
        high = rest // _GROUP
        groups += [_POINT + high, _FULL + rest - _GROUP * high]
    negative = values < 0
    if part.shown is not None:
        groups, negative = [np.where(part.shown, group, _NOTHING) for group in groups], negative & part.shown
    words = [_lookup().take(group) for group in groups]
    if negative.any():
        words.insert(0, np.where(negative, np.frombuffer(b"-\0\0\0", np.uint32)[0], np.uint32(0)))
    return words


def _whole_groups(values: Ids) -> list[Ids]:
    """Positions of a number's groups of four digits in the table, the highest group first."""
    count = max(1, -(-len(str(int(values.max(initial=0)))) // 4))
    groups, rest = [], values
    for place in range(count):
        above = rest // _GROUP
        form = np.where(above > 0, _FULL, _FIRST if place else _LAST)
        groups.append(form + rest - _GROUP * above)
        rest = above
    return groups[::-1]


@cache
def _lookup() -> NDArray[np.uint32]:
    full = np.frombuffer("".join(f"{group:04}" for group in range(_GROUP)).encode(), np.uint8).reshape(_GROUP, 4)
    in_front = np.cumsum(full != ord("0"), axis=1) == 0
    first = np.where(in_front, 0, full)
    last = first.copy()
    last[0, -1] = ord("0")
    point = full.copy()
    point[:, :2] = 0, ord(".")
    nothing = np.zeros((1, 4), np.uint8)
    return np.concatenate([full, first, last, point, nothing]).astype(np.uint8).view(np.uint32).ravel()
