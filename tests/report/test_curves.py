"""Plots of sweeps: points stand where their numbers say."""

import re
import xml.etree.ElementTree as ET

import pytest

from meshwright.report import draw_curves
from meshwright.report.curve_pictures import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH


def points(svg):
    return [
        [tuple(map(float, pair.split(","))) for pair in text.split()] for text in re.findall(r'points="([^"]+)"', svg)
    ]


def test_places_are_in_proportion():
    rows = [{"a": x, "step_time_s": 2.0 * x} for x in (1, 2, 4)]
    svg = draw_curves(rows, ["a"], "step_time_s", title="A < B")
    ET.fromstring(svg)
    ((first, second, third),) = points(svg)
    assert (first[0], third[0]) == (LEFT, WIDTH - RIGHT)
    assert (second[0] - first[0]) / (third[0] - first[0]) == pytest.approx(1 / 3, abs=1e-3)
    bottom = HEIGHT - BOTTOM
    assert (bottom - first[1]) * 4 == pytest.approx(bottom - third[1], abs=0.5)
    assert TOP < third[1] < first[1] < bottom


def test_other_parameters_make_curves_and_missing_figures_none():
    rows = [{"a": x, "b": b, "step_time_s": x * 1.0} for b in ("x", "y") for x in (1, 2)]
    svg = draw_curves([*rows, {"a": 3, "b": "x", "error": "none"}], ["a", "b"], "step_time_s")
    assert [len(curve) for curve in points(svg)] == [2, 2]
    assert ">b x</text>" in svg
    assert ">b y</text>" in svg


def test_quantities_are_numbers_with_their_unit_and_words_stand_apart():
    svg = draw_curves([{"a": f"{x} GB/s", "y_s": 1.0} for x in (1, 100)], ["a"], "y_s")
    assert ">a, GB/s</text>" in svg
    assert points(svg)[0][1][0] == WIDTH - RIGHT
    svg = draw_curves([{"a": word, "y_s": 1.0} for word in ("gpipe", "1f1b", "zb-h1")], ["a"], "y_s")
    ((first, second, third),) = points(svg)
    assert second[0] - first[0] == pytest.approx(third[0] - second[0])
    assert ">1f1b</text>" in svg


def test_figures_that_are_close_do_not_lie_on_each_other():
    rows = [{"a": x, "run_s": seconds} for x, seconds in ((1, 69_800.0), (2, 71_700.0))]
    svg = draw_curves(rows, ["a"], "run_s")
    ((first, second),) = points(svg)
    assert first[1] - second[1] > 0.8 * (HEIGHT - TOP - BOTTOM)
    assert ">19.6 h</text>" in svg
    assert "1e+" not in svg


def test_numbers_are_read_without_exponents():
    svg = draw_curves([{"a": x, "y_s": 1.0} for x in (10_000, 123_456, 150_000)], ["a"], "y_s")
    assert ">10,000</text>" in svg
    assert ">123,456</text>" in svg


@pytest.mark.parametrize("count", [8, 9, 20, 21, 40])
def test_each_curve_has_a_look_of_its_own_and_its_name_in_the_picture(count):
    rows = [{"a": x, "b": b, "y_s": x + b / 10} for b in range(count) for x in (1, 2)]
    svg = draw_curves(rows, ["a", "b"], "y_s")
    looks = re.findall(r'fill="none" (stroke="[^/]*")/>', svg)
    assert len(looks) == len(set(looks)) == min(count, 20)
    names = re.findall(r'<text x="[0-9.]+" y="([0-9.]+)" [^>]*>b [0-9]+</text>', svg)
    assert len(names) == min(count, 20)
    assert max(map(float, names)) < HEIGHT
    assert (f"and {count - 20} more, not drawn" in svg) == (count > 20)


def test_numbers_of_several_units_stand_where_their_values_are():
    svg = draw_curves([{"a": text, "y_s": 1.0} for text in ("10 min", "1 h", "70 min")], ["a"], "y_s")
    ((first, second, third),) = points(svg)
    assert (second[0] - first[0]) / (third[0] - first[0]) == pytest.approx(50 / 60, abs=1e-3)
    assert ">a, min</text>" in svg
    svg = draw_curves([{"a": text, "y_s": 1.0} for text in ("1 GB/s", "8 Gbit/s", "2000 MB/s")], ["a"], "y_s")
    assert [round(x) for x, _ in points(svg)[0]] == [LEFT, LEFT, WIDTH - RIGHT]


@pytest.mark.parametrize(
    "rows", [[], [{"a": 1, "y_s": 0.0}], [{"a": 1, "y_s": 5.0}], [{"a": 0, "y_s": 1.0}, {"a": 1e6, "y_s": -3.0}]]
)
def test_any_rows_can_be_drawn(rows):
    ET.fromstring(draw_curves(rows, ["a"], "y_s"))
