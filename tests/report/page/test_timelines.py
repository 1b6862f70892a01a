import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.page import timeline_part
from meshwright.report.page.page_results import name_template
from meshwright.spec import Opcode, instruction_name
from tests.report.page.decoding import decode_column, decode_spans, timeline_rows
from tests.report.page.examples import large_timeline, pipeline_spans
from tests.report.timelines import make_timeline, one_f_one_b

spans = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["compute", "send", "receive", "exchange"]),
        st.sampled_from(list(Opcode)),
        st.integers(0, 5),
        st.integers(-1, 40),
        st.integers(-1, 5),
        st.integers(0, 10**12),
        st.integers(0, 10**9),
        st.integers(0, 3),
        st.integers(0, 2**40),
    ).map(lambda row: (*row[:7], row[6] + row[7], *row[8:])),
    min_size=1,
    max_size=40,
)


@given(spans, st.booleans())
def test_every_span_is_in_the_part_unrounded(rows, deflate):
    timeline = make_timeline(rows, num_ranks=4)
    part = timeline_part(timeline, deflate=deflate)
    # Overlapping spans too; ordered by track and start.
    assert sorted(decode_spans(part)) == sorted(timeline_rows(timeline))
    assert (part["num_spans"], part["num_shown"]) == (len(rows), len(rows))


def test_times_are_counted_in_the_largest_unit_that_divides_them():
    part = timeline_part(make_timeline([(0, "compute", 0, 0, 0, -1, 6000, 15000)]))
    assert part["unit_ps"] == 3000
    assert timeline_part(make_timeline([(0, "compute", 0, 0, 0, -1, 0, 0)]))["unit_ps"] == 1


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_template_gives_the_name_of_every_instruction(opcode):
    fields = {"stage": "3", "microbatch": "14", "peer": "2"}
    named = re.sub(r"\{(\w+)\}", lambda match: fields[match[1]], name_template(opcode))
    assert named == instruction_name(opcode, 3, 14, 2)


def test_memory_is_ordered_by_rank_and_time():
    memory = [(1, 500, 30), (0, 700, 20), (0, 100, 10), (1, 0, 40)]
    part = timeline_part(make_timeline(pipeline_spans(), memory=memory, num_ranks=4))["memory"]
    unit = timeline_part(make_timeline(pipeline_spans(), memory=memory, num_ranks=4))["unit_ps"]
    assert (part["ranks"], part["samples_per_rank"]) == ([0, 1], [2, 2])
    assert [value * unit for value in decode_column(part["time"])] == [100, 700, 0, 500]
    assert [value * part["unit_bytes"] for value in decode_column(part["bytes"])] == [10, 20, 40, 30]


def test_a_long_timeline_keeps_whole_steps_from_the_first_on():
    timeline = one_f_one_b(2, 5, 10, 20)
    columns = ("track", "opcode", "stage", "microbatch", "peer", "num_bytes")
    repeated = {name: np.tile(getattr(timeline, name), 4) for name in columns}
    step = np.repeat(np.arange(4, dtype=np.int32), timeline.num_spans)
    length = int(timeline.end_ps.max())
    shifts = {name: np.tile(getattr(timeline, name), 4) + step * length for name in ("start_ps", "end_ps")}
    four = replace(timeline, **repeated, step=step, **shifts)
    part = timeline_part(four, max_spans=2 * timeline.num_spans + 3)
    assert {row[6] for row in decode_spans(part)} == {0, 1}
    assert part["num_shown"] == 2 * timeline.num_spans
    assert part["num_spans"] == 4 * timeline.num_spans
    # one step alone is too long: its beginning
    part = timeline_part(four, max_spans=7)
    expected = sorted(timeline_rows(four), key=lambda row: row[8])[:7]
    assert sorted(row[8] for row in decode_spans(part)) == [row[8] for row in expected]


def test_a_step_number_without_sense_costs_nothing():
    timeline = one_f_one_b(1, 3, 10, 20)
    odd = replace(timeline, step=np.full(timeline.num_spans, 2**31 - 2, np.int32), num_ranks=1000)
    assert timeline_part(odd, max_spans=2)["num_shown"] == 2


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_hundred_thousand_spans_of_64_ranks_are_packed_below_a_megabyte_and_a_half(noise):
    part = timeline_part(large_timeline(noise=noise))
    columns = [*part["columns"].values(), part["memory"]["time"], part["memory"]["bytes"]]
    assert part["num_shown"] > 99_000
    assert sum(len(column["data"]) for column in columns) < 1_500_000
