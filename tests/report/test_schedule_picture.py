"""A schedule as SVG: well-formed, one rectangle per computation, at its place."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from meshwright.program import picture_schedule
from meshwright.report import draw_schedule
from meshwright.report.schedule_pictures import COLOURS
from meshwright.spec import DocumentError, Opcode, instruction_name
from tests.program.layouts import LAYOUTS, plan_of

SVG = "{http://www.w3.org/2000/svg}"


def drawn(timeline, title="a schedule", note="a note"):
    return ElementTree.fromstring(draw_schedule(timeline, title=title, note=note, scale="the end"))


@pytest.mark.parametrize("schedule", sorted(LAYOUTS))
def test_every_computation_has_its_rectangle_where_it_runs(schedule):
    timeline = picture_schedule(plan_of(schedule, 4, 8)[0])
    root = drawn(timeline)
    found = {
        each.find(f"{SVG}title").text: (each.get("fill"), *(float(each.get(key)) for key in ("x", "y", "width")))
        for each in root.iter(f"{SVG}rect")
    }
    assert len(found) == timeline.num_spans == len(list(root.iter(f"{SVG}rect")))
    left = min(x for _, x, _, _ in found.values())
    right = max(x + width for _, x, _, width in found.values())
    slot = (right - left) / int(timeline.end_ps.max())
    rows = sorted({y for _, _, y, _ in found.values()})
    assert np.ptp(np.diff(rows)) == 0
    for i in range(timeline.num_spans):
        opcode = Opcode(int(timeline.opcode[i]))
        name = instruction_name(opcode, int(timeline.stage[i]), int(timeline.microbatch[i]), -1)
        colour, x, y, width = found[name]
        assert colour == COLOURS[opcode]
        assert rows.index(y) == timeline.tracks[timeline.track[i]].rank
        assert x == pytest.approx(left + timeline.start_ps[i] * slot, abs=0.11)
        assert width == pytest.approx((timeline.end_ps[i] - timeline.start_ps[i]) * slot, abs=0.11)
    numbers = [each.text for each in root.iter(f"{SVG}text") if each.get("pointer-events") == "none"]
    assert sorted(map(int, numbers)) == sorted(timeline.microbatch.tolist())
    inside = float(root.get("width"))
    assert right <= inside
    palest = {each.get("fill-opacity") for each in root.iter(f"{SVG}rect")}
    assert ("paler" in "".join(root.itertext())) == (len(palest) > 1) == (LAYOUTS[schedule] != "single")


def test_numbers_that_do_not_fit_are_left_out():
    timeline = picture_schedule(plan_of("zb-h2", 2, 400)[0])
    root = drawn(timeline)
    assert len(list(root.iter(f"{SVG}rect"))) == timeline.num_spans == 2 * 3 * 400
    assert not [each for each in root.iter(f"{SVG}text") if each.get("pointer-events") == "none"]


def test_a_name_may_hold_anything():
    timeline = picture_schedule(plan_of("1f1b", 2, 2)[0])
    root = drawn(timeline, title="<script>&\x07\x1b[31m'\"", note="n" * 5000)
    assert root.find(f"{SVG}title").text == "<script>&??[31m'\""
    assert [each.text[-1] for each in root.iter(f"{SVG}text")][-1] == "…"


def test_what_nobody_could_look_at_is_not_drawn():
    timeline = picture_schedule(plan_of("1f1b", 1, 2)[0])
    many = {
        name: np.tile(getattr(timeline, name), 20_000)
        for name in ("track", "opcode", "stage", "microbatch", "peer", "step", "num_bytes", "start_ps", "end_ps")
    }
    with pytest.raises(DocumentError, match="80,000 computations; up to 50,000 are drawn"):
        drawn(replace(timeline, **many))
