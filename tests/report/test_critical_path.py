"""How a critical path is folded and shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshwright.report import explanation_rows, explanation_table
from meshwright.report.critical_path_text import MAX_LINES, fold_path, path_rows
from meshwright.spec import Opcode
from tests.report.test_tables import broken_headings
from tests.report.timelines import B, F, R, S, make_timeline

LEVER = {"kind": "work", "name": "forwards", "path_s": 1e-12, "step_if_shorter_s": 9e-13, "step_if_free_s": 5e-13}


def path_of(*spans):
    """A path from (rank, stream, opcode, stage, microbatch, peer, length), one behind the other."""
    rows, now = [], 0
    for *facts, length in spans:
        rows.append((*facts, now, now + length))
        now += length
    return make_timeline(rows)


def fill(num_stages):
    """Forwards of microbatch 0 through all stages; receives take no time."""
    spans = []
    for stage in range(num_stages):
        if stage:
            spans.append((stage, "receive", R, stage, 0, stage - 1, 0))
        spans.append((stage, "compute", F, stage, 0, -1, 3))
        if stage + 1 < num_stages:
            spans.append((stage, "send", S, stage, 0, stage + 1, 1))
    return spans


def printed(renderable, width=80):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_wave_through_the_stages_and_a_steady_pair_are_lines():
    pairs = [(3, "compute", opcode, 3, m, -1, 2) for m in range(5) for opcode in (F, B)]
    sums = [(3, "exchange", Opcode.ALL_REDUCE, 3, -1, bucket, 7) for bucket in range(3)]
    path = path_of(*fill(4)[:-1], *pairs, *sums, (3, "compute", Opcode.OPTIMIZER_STEP, 3, -1, -1, 4))
    rows = fold_path(path, ["wait"] * path.num_spans)
    assert [(row["ranks"], row["instructions"], row["times"]) for row in rows] == [
        ([0, 1, 2], "F0.0 send 0→1.0 … F2.0 send 2→3.0", 3),
        ([3], "F3.0 B3.0 … F3.4 B3.4", 5),
        ([3], "all-reduce 3 #0 … all-reduce 3 #2", 3),
        ([3], "optimizer 3", 1),
    ]
    assert [round(row["on_path_s"] * 1e12) for row in rows] == [12, 20, 21, 4]


def test_two_are_no_run_and_what_waited_for_a_link_stands_apart():
    path = path_of(*[(0, "send", S, 0, m, 1, 5) for m in range(5)])
    rows = fold_path(path, ["begin", "stream", "link", "link", "link"])
    assert [(row["times"], row["waited_for"]) for row in rows] == [(1, None), (1, None), (3, "link")]


@given(
    st.lists(
        st.tuples(st.sampled_from([F, B]), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    )
)
def test_folding_loses_no_time_and_no_instruction(spans):
    path = path_of(*[(stage, "compute", opcode, stage, m, -1, length) for opcode, stage, m, length in spans])
    rows = fold_path(path, ["stream"] * len(spans))
    assert sum(round(row["on_path_s"] * 1e12) for row in rows) == sum(length for *_, length in spans)
    shown = sum(row["times"] * len(row["instructions"].split(" … ")[0].split()) for row in rows)
    assert shown == sum(length > 0 for *_, length in spans)


def test_rows_keep_every_instruction_and_say_what_share_is_whose():
    path = path_of(*fill(2))
    bounds = ["begin", "wait", "wait", "link"]
    assert [row["name"] for row in path_rows(path, bounds)] == ["F0.0", "send 0→1.0", "receive 0→1.0", "F1.0"]
    rows = explanation_rows(path, ["begin", "wait", "link", "wait"], [{**LEVER, "path_s": 3.5e-12}])
    assert rows["step_time_s"] == pytest.approx(7e-12)
    assert rows["queued_s"] == pytest.approx(1e-12)
    assert rows["levers"][0]["path_share"] == pytest.approx(0.5)


def test_a_long_path_and_many_levers_are_cut_and_say_so():
    # Microbatches in no order at all, so that nothing folds.
    spans = [(0, "compute", (F, B)[m % 2], 0, (m * m) % 97, -1, 1 + m) for m in range(60)]
    path = path_of(*spans)
    unseen = {**LEVER, "name": "backwards", "step_if_shorter_s": None, "step_if_free_s": None}
    assert len(fold_path(path, ["stream"] * 60)) > MAX_LINES
    text = printed(explanation_table(path, ["stream"] * 60, [LEVER, unseen], 0.1))
    assert "more: --json)" in text
    assert "10 % less time" in text
    assert "forwards" in text
    assert "backwards" not in text
    assert "1 more with less on the path: --json." in text


def test_headings_fit_a_narrow_terminal_and_nothing_is_fine_too():
    path = path_of(*fill(40))
    assert broken_headings(explanation_table(path, ["wait"] * path.num_spans, [LEVER, LEVER], 0.1), 80) == []
    empty = make_timeline([])
    assert explanation_rows(empty, [], []) == {"step_time_s": 0.0, "queued_s": 0.0, "path": [], "levers": []}
    assert "0 instructions" in printed(explanation_table(empty, [], [], 0.1))
