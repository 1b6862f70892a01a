"""Plots of sweeps: points stand where their numbers say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from meshwright.report import draw_curves
from meshwright.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH


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


@pytest.mark.parametrize(
    "rows", [[], [{"a": 1, "y_s": 0.0}], [{"a": 1, "y_s": 5.0}], [{"a": 0, "y_s": 1.0}, {"a": 1e6, "y_s": -3.0}]]
)
def test_any_rows_can_be_drawn(rows):
    ET.fromstring(draw_curves(rows, ["a"], "y_s"))
