"""Lines that are made of columns, beside the same lines made by Python's own formatting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.perfetto import Number, TextChoice, render_lines

numbers = st.one_of(st.integers(-(2**62), 2**62), st.sampled_from([0, 9999, 10_000, 100_000_000, 10**6, 10**6 - 1]))
TEXTS = ("", "a", "eight by", "→ and more than eight bytes")


def in_millionths(value: int) -> str:
    return f"{'-' * (value < 0)}{abs(value) // 10**6}.{abs(value) % 10**6:06}"


@given(st.lists(st.tuples(numbers, numbers, st.sampled_from(range(len(TEXTS))), st.booleans()), max_size=20))
def test_lines_are_those_of_python(rows):
    whole, parts, which = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    shown = np.array([row[3] for row in rows], np.bool_)
    found = render_lines(
        [
            "<",
            Number(values=whole),
            "|",
            TextChoice(texts=TEXTS, which=which),
            Number(values=parts, millionths=True),
            Number(values=whole, millionths=True, shown=shown),
            TextChoice(texts=("", ""), which=which % 2),
            ">\n",
        ],
        len(rows),
    )
    expected = (
        f"<{a}|{TEXTS[text]}{in_millionths(b)}{in_millionths(a) if is_shown else ''}>\n"
        for a, b, text, is_shown in rows
    )
    assert found.decode() == "".join(expected)


def test_small_types_are_written_too():
    columns = [np.array([-128, 127], np.int8), np.array([-1, 2**31 - 1], np.int32)]
    assert render_lines([Number(values=columns[0]), " ", Number(values=columns[1]), "\n"], 2) == (
        b"-128 -1\n127 2147483647\n"
    )
