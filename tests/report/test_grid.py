"""The picture of a schedule against pictures drawn by hand."""

import pytest
from hypothesis import given

from meshwright.report import draw_grid
from meshwright.spec import DocumentError, Opcode
from tests.report.timelines import F, make_timeline, one_f_one_b
from tests.strategies import timelines


def lines(text):
    return text.plain.split("\n")


def draw_by_hand(num_stages, num_microbatches):
    """1F1B in closed form for forward 1 and backward 2 units, two columns per unit.

    Backward m of the last stage starts at P + 3m; a stage above it follows each backward by 2 units. In the steady
    state its forwards fill the unit before a backward.
    """
    period = 3
    total = (num_stages - 1) * 3 + num_microbatches * period
    rows = []
    for stage in range(num_stages):
        cells = ["."] * (2 * total)
        warm = min(num_microbatches, num_stages - stage)
        for m in range(num_microbatches):
            start = num_stages + period * m + 2 * (num_stages - 1 - stage)
            cells[2 * start : 2 * start + 4] = f"B{m}".ljust(4)
            # A forward after the warm-up runs as soon as the backward before it has ended.
            begin = stage + m if m < warm else num_stages + period * (m - warm) + 2 * (num_stages - 1 - stage) + 2
            cells[2 * begin : 2 * begin + 2] = f"F{m}"
        rows.append("".join(cells))
    return rows


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 4), (4, 4), (4, 8)])
def test_1f1b_is_drawn_as_in_the_papers(num_stages, num_microbatches):
    timeline = one_f_one_b(num_stages, num_microbatches, 1000, 2000)
    total = 3 * (num_microbatches + num_stages - 1)
    picture = lines(draw_grid(timeline, width=2 * total))
    assert timeline.end_ps.max() == 1000 * total
    assert [line.removeprefix(f"rank {rank} ") for rank, line in enumerate(picture[:-1])] == draw_by_hand(
        num_stages, num_microbatches
    )


def test_cells_are_coloured_by_kind():
    spans = [
        (0, "compute", F, 0, 0, -1, 0, 10),
        (0, "compute", Opcode.BACKWARD, 0, 0, -1, 10, 20),
        (0, "compute", Opcode.OPTIMIZER_STEP, 0, 0, -1, 30, 40),
    ]
    text = draw_grid(make_timeline(spans), width=16)
    assert lines(text)[0] == "rank 0 F0  B0  ....O   "
    colours = {text.plain[span.start]: str(span.style) for span in text.spans if span.start < 23}
    assert "blue" in colours["F"]
    assert "green" in colours["B"]
    assert "yellow" in colours["O"]


def test_transfers_are_not_drawn_and_the_last_step_is_shown():
    spans = [
        (0, "compute", F, 0, 1, -1, 0, 10_000, 0),
        (0, "send", Opcode.SEND_ACTIVATION, 0, 0, 1, 10_000, 15_000, 1),
        (0, "compute", F, 0, 2, -1, 20_000, 30_000, 1),
    ]
    timeline = make_timeline(spans)
    assert lines(draw_grid(timeline, width=4)) == ["rank 0 F2  ", "       10 ns"]
    assert lines(draw_grid(timeline, width=4, step=0))[0] == "rank 0 F1  "


def test_edges_go_to_the_nearest_column():
    spans = [(0, "compute", F, 0, 0, -1, 0, 16), (0, "compute", F, 0, 1, -1, 34, 100)]
    assert lines(draw_grid(make_timeline(spans), width=10))[0] == "rank 0 F0.F1     "


def test_a_number_that_does_not_fit_leaves_the_letter():
    spans = [(0, "compute", F, 0, 10 + m, -1, 10 * m, 10 * m + 10) for m in range(2)]
    assert lines(draw_grid(make_timeline(spans), width=4))[0] == "rank 0 F F "
    assert lines(draw_grid(make_timeline(spans), width=6))[0] == "rank 0 F10F11"


@pytest.mark.parametrize(("step", "width"), [(1, 10), (-1, 10), (0, 0)])
def test_what_cannot_be_drawn_is_refused(step, width):
    with pytest.raises(DocumentError, match="has steps 0 to 0"):
        draw_grid(make_timeline([(0, "compute", F, 0, 0, -1, 0, 1)]), step=step, width=width)


@given(timelines())
def test_every_rank_has_a_line_of_the_same_width(timeline):
    drawn = lines(draw_grid(timeline, width=30))
    assert len(drawn) == timeline.num_ranks + 1
    assert {len(line) for line in drawn[:-1]} == {37}
