"""Schedules side by side, and drawn in slots."""

import io

import pytest
from rich.console import Console

from meshwright.program import picture_schedule
from meshwright.report import draw_slots, name_schedule_briefly, schedules_table
from tests.program.own import pipeline

ROW = {
    "schedule": "some/folder/mine.py:waves",
    "step_s": 0.0123,
    "samples_per_s": 100.0,
    "bubble_share": 0.25,
    "in_flight": [4, 3, 2, 1],
    "activations_bytes": 3 * 2**20,
    "peak_bytes": 2**30,
    "limit_bytes": 2**31,
    "fits": True,
}


def drawn(renderable, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_names_without_folders():
    assert [name_schedule_briefly(name) for name in ("a/b/mine.py:waves", "a/b/orders.csv", "1f1b")] == [
        "mine.py:waves",
        "orders.csv",
        "1f1b",
    ]


def test_the_table_names_no_folders_and_tells_memory_only_where_it_differs():
    text = "\n".join(drawn(schedules_table([ROW, {**ROW, "schedule": "gpipe", "in_flight": [32] * 9, "fits": False}])))
    assert "mine.py:waves" in text
    assert "folder" not in text
    assert "12.3 ms" in text
    assert "25.0 %" in text
    assert "4, 3, 2, 1" in text
    assert "at most 32" in text
    assert "2 GiB" not in text
    assert "2 GiB" in "\n".join(drawn(schedules_table([ROW, {**ROW, "limit_bytes": 2**32}])))


@pytest.mark.parametrize(
    ("schedule", "brief"),
    [("1f1b", "1f1b"), ("a/b.py:f", "b.py:f"), ("/a b/c.py:f", "c.py:f"), ("b.py:f", "b.py:f")],
)
def test_brief_names(schedule, brief):
    assert name_schedule_briefly(schedule) == brief


def test_1f1b_of_two_stages_as_papers_draw_it():
    _, plan = pipeline(2, 3)
    lines = drawn(draw_slots(picture_schedule(plan), [2, 1], max_width=60))
    assert lines == [
        "rank 0 F0 F1 ......B0    F2 B1    ...B2",
        "rank 1 ...F0 B0    F1 B1    F2 B2    ......",
        "       0                           12 slots",
        "A forward takes 1 slot, a backward 2, transfers none. In flight, by stage: 2, 1.",
    ]


@pytest.mark.parametrize("width", [1, 5, 12, 24, 25, 200])
def test_a_picture_keeps_to_its_width(width):
    _, plan = pipeline(2, 3)
    rank_0, rank_1, scale, *_ = drawn(draw_slots(picture_schedule(plan), [2, 1], max_width=width), 300)
    for line in (rank_0, rank_1):
        assert len(line) <= len("rank 0 ") + width
    assert scale.endswith("12 slots")
