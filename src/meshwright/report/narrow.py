"""Fit a table into a narrow terminal: columns shrink to their longest word.

The first of these layouts that fits is used:

1. natural widths, if they fit
2. less space between columns, and the widest column narrower by one until all fit; no column below its longest word
3. the same, but words of cells that are not numbers may be folded (names can be of any length)
4. the columns that fit, and the others in a second table below, which repeats the columns that name the rows
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Blanks between two columns: a divider and rich's padding of 1 on both sides of it, or of its widest side only.
_WIDE, _CLOSE = 3, 2


class NarrowTable:
    """A table of texts under headings, whose columns are laid out when the terminal's width is known.

    Args:
        headings: One per column.
        cells: Rows with one text per column.
        numeric: Whether each column holds numbers, which are aligned right.
        num_labels: The first columns, which name the rows.
        total: A last row, separated from the others.
        title: The line above the table.
        close: Less space between columns even if the terminal is wide enough.
    """

    def __init__(
        self,
        headings: Sequence[str],
        cells: Sequence[Sequence[str]],
        *,
        numeric: Sequence[bool],
        num_labels: int = 1,
        total: Sequence[str] = (),
        title: str = "",
        close: bool = False,
    ) -> None:
        self.headings, self.cells, self.numeric = list(headings), [list(row) for row in cells], list(numeric)
        self.num_labels, self.total, self.title = num_labels, list(total), title
        self.close = close

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = list(range(len(self.headings)))
        room = options.max_width
        if not self.close and _outer(self._natural(every), _WIDE) <= room:
            yield self._table(every, None, self.title)
            return
        for place, chosen in enumerate(self._chunks(every, room)):
            widths = self._narrow(chosen, room)
            yield self._table(chosen, widths, "" if place else self.title)

    def _chunks(self, every: list[int], room: int) -> list[list[int]]:
        """All columns if their headings fit side by side, else several tables, each with the labels."""
        least = self._least(every, cells=False)
        labels, rest = every[: self.num_labels], every[self.num_labels :]
        chunks = [labels]
        for column in rest:
            wanted = [*chunks[-1], column]
            if len(chunks[-1]) > len(labels) and _outer([least[i] for i in wanted], _CLOSE) > room:
                chunks.append([*labels, column])
            else:
                chunks[-1] = wanted
        return chunks

    def _narrow(self, chosen: list[int], room: int) -> list[int]:
        widths = self._natural(chosen)
        # A heading takes a second line before any cell does; then the widest column shrinks.
        first = [i for i in range(len(widths)) if self._can_give(chosen[i])]
        then = [i for i in range(len(widths)) if i not in first]
        for cells in (True, False):
            least = self._least(chosen, cells=cells)
            for among in (first, then):
                _lower(widths, least, among, _outer(widths, _CLOSE) - room)
        return widths

    def _can_give(self, column: int) -> bool:
        """Whether the heading is wider than every cell, so that only the heading takes a second line."""
        return cell_len(self.headings[column]) > max((cell_len(text) for text in self._texts(column)), default=0)

    def _texts(self, column: int) -> list[str]:
        return [row[column] for row in (*self.cells, *([self.total] if self.total else []))]

    def _natural(self, chosen: list[int]) -> list[int]:
        return [max(cell_len(text) for text in (self.headings[i], *self._texts(i))) for i in chosen]

    def _least(self, chosen: list[int], *, cells: bool) -> list[int]:
        """The longest word of each column, numbers with units; without ``cells``, of headings and numbers only."""
        return [
            max(
                cell_len(word)
                for text in (self.headings[i], *(self._texts(i) if cells and not self.numeric[i] else ()))
                for word in (*text.split(), *(self._texts(i) if self.numeric[i] else ()), "")
            )
            for i in chosen
        ]

    def _table(self, chosen: list[int], widths: Sequence[int] | None, title: str) -> Table:
        form: dict[str, Any] = {} if widths is None else {"collapse_padding": True}
        table = Table(
            box=SIMPLE_HEAD, title=Text(title) if title else None, title_justify="left", pad_edge=False, **form
        )
        for place, i in enumerate(chosen):
            justify: Any = "right" if self.numeric[i] else "left"
            width = None if widths is None else widths[place]
            table.add_column(Text(self.headings[i]), justify=justify, overflow="fold", width=width)
        # Names may hold square brackets, which rich would read as markup.
        for row in self.cells:
            table.add_row(*(Text(row[i]) for i in chosen))
        if self.total:
            table.add_section()
            table.add_row(*(Text(self.total[i], style="bold") for i in chosen))
        return table


def _lower(widths: list[int], least: Sequence[int], among: Sequence[int], over: int) -> None:
    """Take ``over`` from some columns, always one from the widest (the first of equals), never below a least width."""

    def taken(level: int) -> int:
        return sum(max(0, widths[i] - max(level, least[i])) for i in among)

    if over <= 0:
        return
    levels = range(max((widths[i] for i in among), default=0) + 1)
    # The lowest level to which all can be lowered for less than ``over``; the first columns give one more each.
    level = bisect_right(levels, -over, key=lambda level: -taken(level))
    rest = over - taken(level)
    for i in among:
        widths[i] = min(widths[i], max(level, least[i]))
        if rest and widths[i] == level > least[i]:
            widths[i] -= 1
            rest -= 1


def _outer(widths: Sequence[int], between: int) -> int:
    """Columns of the terminal that a table takes, with ``between`` blanks between its columns and one at each edge."""
    return sum(widths) + between * (len(widths) - 1) + 2
