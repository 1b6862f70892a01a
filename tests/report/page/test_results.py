import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report import compare_timelines
from meshwright.report.page import comparison_part, memory_part, pareto_front, plans_part
from meshwright.report.page.page_results import MAX_RANKS
from tests.report.page.examples import PARTS, make_cluster
from tests.report.timelines import as_measured, make_timeline, one_f_one_b

few = st.sampled_from([1.0, 2.0, 3.0])
points = st.lists(st.tuples(few, few, few), min_size=1, max_size=12)


def rows_of(values):
    return [{"step_time_s": a, "peak_memory_bytes": b, "samples_per_s": c} for a, b, c in values]


@given(points)
def test_the_front_is_what_nothing_dominates(values):
    front = pareto_front(rows_of(values))

    def dominates(a, b):
        better = (a[0] < b[0], a[1] < b[1], a[2] > b[2])
        worse = (a[0] > b[0], a[1] > b[1], a[2] < b[2])
        return any(better) and not any(worse)

    assert front == [i for i, b in enumerate(values) if not any(dominates(a, b) for a in values)]
    assert front


def test_equal_plans_are_both_on_the_front():
    assert plans_part(rows_of([(1.0, 1.0, 1.0)] * 2))["front"] == [0, 1]


def test_memory_takes_peak_from_the_parts_and_limit_from_the_device():
    rows = memory_part(3, parts=[PARTS] * 2, peak_memory_bytes=[1, 2, 7], cluster=make_cluster(1, 3))["rows"]
    assert [row["peak_bytes"] for row in rows] == [2000, 2000, 7]
    assert [row["limit_bytes"] for row in rows] == [4000] * 3
    assert rows[2]["parts"] == {}


def test_other_limits_and_unknown_ones():
    memory = memory_part(2, peak_memory_bytes=[6, 6], limits_bytes=[5, 6], cluster=make_cluster())
    assert [row["limit_bytes"] for row in memory["rows"]] == [5, 6]
    assert memory["num_over"] == 1
    assert memory_part(1, peak_memory_bytes=[3])["rows"][0]["limit_bytes"] is None
    empty = memory_part(2**40)
    assert (empty["num_ranks"], empty["num_over"], empty["rows"]) == (2**40, 0, [])


def test_of_very_many_ranks_the_fullest_are_kept():
    peaks = list(range(MAX_RANKS + 100))
    memory = memory_part(len(peaks), peak_memory_bytes=peaks, limits_bytes=[MAX_RANKS] * len(peaks))
    assert [row["rank"] for row in memory["rows"]] == peaks[100:]
    # peaks MAX_RANKS + 1 and up
    assert memory["num_over"] == 99


def test_intervals_hold_the_middle_of_the_durations():
    predicted = one_f_one_b(2, 8, 1000, 2000)
    lengths = range(1000, 1080, 10)
    spans = [(0, "compute", 0, 0, m, -1, 5000 * m, 5000 * m + length) for m, length in enumerate(lengths)]
    measured = make_timeline(spans, origin="measured", num_ranks=2)
    part = comparison_part(compare_timelines(predicted, measured), predicted, measured)
    forward = next(row for row in part["instructions"] if (row["opcode"], row["stage"]) == ("forward", 0))
    # positions 0.7 and 6.3 among eight equidistant lengths
    assert forward["measured_interval_s"] == pytest.approx([1007e-12, 1063e-12])
    assert forward["predicted_interval_s"] == pytest.approx([1000e-12, 1000e-12])
    backward = next(row for row in part["instructions"] if row["opcode"] == "backward")
    assert backward["measured_interval_s"] is None


def test_a_comparison_keeps_what_the_comparison_said():
    predicted = one_f_one_b(2, 4, 1000, 2000)
    measured = as_measured(predicted, 1.25)
    part = comparison_part(compare_timelines(predicted, measured), predicted, measured)
    assert part["step"]["relative_error"] == pytest.approx(-0.2)
    assert part["step"]["measured_interval_s"] == pytest.approx([float(np.median(measured.step_seconds()))] * 2)
    assert part["same_order"] is True
