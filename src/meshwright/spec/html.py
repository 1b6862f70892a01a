"""HTML for notebooks: a caption and a table of the first rows (`html_table`), without script or style sheet.

Notebooks call ``_repr_html_`` of an object, or ``_repr_pretty_`` for text. The time of both depends only on the number
of shown rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Protocol

MAX_ROWS = 12


class Printer(Protocol):
    """The object that IPython passes to ``_repr_pretty_``."""

    def text(self, text: str) -> None:
        """Append text to the output."""


def html_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]], num_rows: int) -> str:
    """Return an HTML table of the first `MAX_ROWS` of ``num_rows`` rows, with whole numbers right-aligned.

    Further rows are counted in a last line, but not computed.
    """
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in islice(rows, MAX_ROWS))
    left = num_rows - MAX_ROWS
    more = f'<tr><td colspan="{len(headings)}">… {left:,} more</td></tr>' if left > 0 else ""
    return (
        f'<table><caption style="text-align: left">{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}{more}</tbody></table>"
    )


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td style="text-align: right">{value:,}</td>'
    return f"<td>{escape(str(value))}</td>"
