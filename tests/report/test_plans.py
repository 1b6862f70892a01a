"""The table of ranked plans: what differs has a column, what is alike is said once, nothing vanishes at 80 columns."""

import io

import pytest
from rich.console import Console

from meshwright.report import plans_table
from tests.report.plan_rows import plan_row


def drawn(rows, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(plans_table(rows))
    return console.file.getvalue()


def test_a_row_says_layout_step_interval_rate_memory_and_bubble():
    lines = drawn([plan_row(1)]).splitlines()
    headings = ["#", "dp", "pp", "mbs", "step", "80", "%", "tokens/s", "MFU", "memory", "bubble"]
    assert headings in [line.split() for line in lines]
    assert ["1", "4", "2", "2", "500", "ms", "400–750", "65,536", "42", "%", "3", "GiB", "25", "%"] in [
        line.split() for line in lines
    ]
    assert lines[0] == "All plans: schedule 1f1b."


@pytest.mark.parametrize(
    ("change", "heading", "cells"),
    [
        ({"tensor": 8, "sequence_parallel": True}, "tp", ["1", "8+sp"]),
        ({"tensor": 2, "has_own_placements": True}, "tp", ["1", "2 own"]),
        ({"zero": 3}, "zero", ["0", "3"]),
        ({"shard_size": 8}, "shard", ["0", "8"]),
        ({"recompute": "full"}, "recompute", ["none", "full"]),
        ({"context": 4}, "cp", ["1", "4"]),
        ({"replicas": [1, 3, 3, 3, 2], "num_stages": 5}, "dp", ["4", "1, 3 ×3, 2"]),
        ({"schedule": "interleaved", "num_stages": 8}, "sched.", ["1f1b", "interleaved ×4"]),
        ({"schedule": "folder/mine.py:waves"}, "sched.", ["1f1b", "mine.py:waves"]),
        ({"num_devices": 4}, "devices", ["8", "4"]),
    ],
)
def test_what_differs_has_a_column_and_what_is_alike_is_said_above(change, heading, cells):
    text = drawn([plan_row(1), plan_row(2, **change)], width=200)
    header = next(line for line in text.splitlines() if line.split()[:1] == ["#"])
    assert heading in header
    for cell in cells:
        assert cell in text
    same = drawn([plan_row(1, **change), plan_row(2, **change, microbatch_size=4)], width=200)
    if heading not in ("dp", "devices"):
        above = same.splitlines()[0]
        assert f"{heading.replace('sched.', 'schedule')} {cells[1]}" in above


def test_what_has_no_room_stands_in_a_second_table_with_the_places():
    wide = {"schedule": "interleaved", "recompute": "selective", "offload": "optimizer states on the host"}
    rows = [plan_row(1, **wide), plan_row(2, currency="USD", price_per_million_tokens=0.5)]
    rows[0] |= {"currency": "USD", "price_per_million_tokens": 0.25}
    text = drawn(rows)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("selective", "tokens/s", "memory", "bubble", "USD/M", "0.25"):
        assert word in text


def test_models_without_tokens_count_samples_and_units_follow_the_step():
    text = drawn([plan_row(1, tokens_per_s=None, step_interval_s=[0.9, 1.2], mfu_share=None)], width=120)
    assert "samples/s" in text
    assert "MFU" not in text
    assert "900 ms–1.2 s" in text
