"""What a table prints, read back from plain text."""

import io
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.table import Table

from meshwright.program import build_program
from meshwright.report import (
    cluster_table,
    compare_timelines,
    comparison_table,
    draw_grid,
    fit_table,
    graph_table,
    make_table,
    measurement_table,
    plan_table,
    plans_table,
    program_table,
    timeline_table,
)
from meshwright.report.cells import collapse_rows, format_cell, format_heading, format_ranges
from meshwright.report.narrow import NarrowTable, _lower
from meshwright.simulator import simulate_plan
from meshwright.spec import Measurements, OpMeasurement, load_cluster
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.report.plan_rows import plan_row
from tests.report.timelines import F, as_measured, make_timeline
from tests.strategies import clusters, graphs, measurements, plans, programs, timelines


def printed(renderable, width=200):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def words(text):
    """Lines of a table, cut at two or more blanks."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("key", "value", "heading", "cell"),
    [
        ("step_time_s", 0.00124, "step time", "1.24 ms"),
        ("saved_bytes", 1536, "saved", "1.5 KiB"),
        ("backward_flops", 2_100_000, "backward", "2.1 MFLOP"),
        ("nic_bytes_per_s", 2**30, "nic bandwidth", "1 GiB/s"),
        ("bandwidth_bytes_per_s", 2**30, "bandwidth", "1 GiB/s"),
        ("bfloat16_flops_per_s", 989e12, "bfloat16", "989 TFLOP/s"),
        ("samples_per_s", 1234.56, "samples per s", "1235"),
        ("bubble_share", 0.1234, "bubble share", "12.3 %"),
        ("relative_error", 0.05, "relative error", "+5.0 %"),
        ("num_parameters", 124439808, "parameters", "124,439,808"),
        ("ranks", [0, 1, 2, 5], "ranks", "0–2, 5"),
        ("replicas", (1, 2, 3), "replicas", "1, 2, 3"),
        ("num_measured", 40, "times measured", "40"),
        ("fits", True, "fits", "yes"),
        ("peak_memory_bytes", None, "peak memory", "–"),
    ],
)
def test_the_key_says_how_a_value_is_printed(key, value, heading, cell):
    assert format_heading(key) == heading
    assert format_cell(key, value) == cell


@given(st.lists(st.integers(0, 12)))
def test_ranges_name_every_number_in_order(numbers):
    found = []
    for run in filter(None, format_ranges(numbers).split(", ")):
        first, _, last = run.partition("–")
        found += range(int(first), int(last or first) + 1)
    assert found == numbers


@given(st.lists(st.integers(0, 1), max_size=12))
def test_collapsing_keeps_every_row_once(values):
    cells = [[f"layer{i}", str(value)] for i, value in enumerate(values)]
    position = 0
    before = None
    for label, value in collapse_rows(cells, 0):
        names, _, count = label.partition(" ×")
        first, _, last = names.partition(" … ")
        stop = position + int(count or 1)
        assert (first, last or first) == (f"layer{position}", f"layer{stop - 1}")
        assert {str(item) for item in values[position:stop]} == {value}
        assert value != before
        position, before = stop, value
    assert position == len(values)


def test_equal_layers_are_one_line():
    lines = words(printed(graph_table(chain_graph(82, width=64), 1)))
    labels = [line[0] for line in lines]
    assert "layers.0 … layers.80 ×81" in labels
    # The last layer differs: nothing crosses its end.
    assert labels[-2:] == ["layers.81", "total"]
    assert lines[-1][1:3] == ["82", f"{82 * 64 * 64:,}"]


def test_names_with_square_brackets_are_not_markup():
    assert "[bold]x[/bold]" in printed(make_table([{"layer": "[bold]x[/bold]", "num_ops": 1}]))


def test_columns_without_values_and_hidden_ones_are_left_out():
    rows = [{"rank": 0, "peak_memory_bytes": None, "busy_s": 1.0, "idle_s": 2.0}]
    assert words(printed(make_table(rows, hide=("idle_s",))))[0] == ["rank", "busy"]


def test_opcodes_that_do_not_occur_have_no_column():
    graph = chain_graph(4)
    text = printed(program_table(build_program(make_plan(graph, [(0, 4)], [4], 4), graph)))
    assert "send activation" not in text
    assert ["body", "0 … 3 ×4", "1", "1", "1", "1", "0 B", "256 B"] in words(text)


def test_a_comparison_says_what_differs():
    predicted = make_timeline([(0, "compute", F, 0, m, -1, m * 10**9, (m + 1) * 10**9) for m in range(2)])
    same = printed(comparison_table(compare_timelines(predicted, as_measured(predicted, 2.0))))
    assert "Order of issued instructions: the same on every stream." in same
    assert ["forward", "0", "2", "1 ms", "2 ms", "-50.0 %"] in words(same)
    assert "Most memory" not in same
    on_gpu = replace(as_measured(predicted), peak_memory_bytes=(2**30,), reserved_memory_bytes=(3 * 2**30,))
    comparison = compare_timelines(predicted, on_gpu)
    assert comparison.ranks[0].measured_reserved_bytes == 3 * 2**30
    text = printed(comparison_table(comparison))
    assert "Most memory measured on a rank: 1 GiB, for which the allocator reserved up to 3 GiB." in text
    swapped = as_measured(make_timeline([(0, "compute", F, 0, 1 - m, -1, m, m + 1) for m in range(2)]))
    text = printed(comparison_table(compare_timelines(predicted, swapped)))
    assert "rank 0 compute, step 0, instruction 0: predicted F0.0, measured F0.1" in text


def test_a_narrow_terminal_loses_no_digit():
    graph = chain_graph(6)
    plan = make_plan(graph, even_bounds(6, 3), [2, 1, 1], 4)
    timeline = simulate_plan(plan, graph, load_cluster("4xA100")).timeline
    for renderable in (timeline_table(timeline), plan_table(plan, graph), graph_table(graph, 2)):
        assert "…" not in printed(renderable, 60).replace(" … ", "")
    assert max(len(line) for line in printed(draw_grid(timeline), 60).splitlines()) <= 60


def broken_headings(renderable, width):
    """Words above a rule that are no words of a heading, and lines that are too long."""
    parts = renderable.renderables if isinstance(renderable, Group) else [renderable]
    bad = []
    for part in parts:
        if isinstance(part, NarrowTable):
            known = {word for heading in part.headings for word in heading.split()}
        elif isinstance(part, Table):
            known = {word for column in part.columns for word in str(column.header).split()}
        else:
            continue
        lines = printed(part, width).splitlines()
        bad += [line for line in lines if len(line) > width]
        for place in (i for i, line in enumerate(lines) if "──" in line):
            above = list(takewhile(str.strip, reversed(lines[:place])))
            bad += [word for line in above for word in line.split() if word not in known]
            assert above
    return bad


def test_no_heading_is_broken_in_80_columns():
    graph, cluster = chain_graph(40, width=4096), load_cluster("2x8xA100")
    plan = make_plan(graph, even_bounds(40, 4), [4, 4, 4, 4], 64)
    simulation = simulate_plan(plan, graph, cluster)
    timeline = simulation.timeline
    memory = [
        {"rank": rank, "stages": [0], "peak_bytes": 2**40 - 2**30, "limit_bytes": 2**40, "headroom_bytes": 2**30 * 1023}
        | {"reserved_bytes": 2**40}
        | {"fits": True, "parts_bytes": {"parameters": 2**39 + rank, "gradients": 2**39, "optimizer states": 2**39}}
        for rank in range(16)
    ]
    ranked = [plan_row(place, schedule=("1f1b", "interleaved")[place % 2], tensor=place) for place in range(1, 12)]
    views = {
        "cluster": cluster_table(cluster),
        "graph": graph_table(graph, 64),
        "plan": plan_table(plan, graph),
        "program": program_table(build_program(plan, graph)),
        "timeline": timeline_table(timeline),
        "comparison": comparison_table(compare_timelines(timeline, as_measured(timeline, 1.5))),
        "plans": plans_table(ranked),
        "fit": fit_table(memory),
    }
    assert {name: bad for name, view in views.items() if (bad := broken_headings(view, 80))} == {}


def test_what_has_no_room_stands_in_a_second_table_that_names_the_rows_again():
    rows = [{"rank": rank, **{f"heading{i:02}": i for i in range(12)}} for rank in range(2)]
    lines = words(printed(make_table(rows, collapse="rank"), 60))
    headings = [line for line in lines if line[0] == "rank"]
    assert [word for line in headings for word in line[1:]] == [f"heading{i:02}" for i in range(12)]
    assert len(headings) == 3
    assert [line[0] for line in lines if line[0].startswith("0")] == ["0 … 1 ×2"] * 3


@pytest.mark.parametrize(("spreads", "told"), [((6.0, 0.2, 6.1), True), ((0.2, 0.25, 6.0), False), ((), False)])
def test_a_disturbed_measurement_says_so_with_the_remedy(spreads, told):
    ops = tuple(
        OpMeasurement(key=str(i), forward_s=1e-3, backward_s=2e-3, num_samples=10, spread=spread)
        for i, spread in enumerate(spreads)
    )
    table = Measurements(device="cpu", software="s", date="d", ops=ops)
    text = " ".join(printed(measurement_table(table), 80).split())
    assert ("differ by 600.0 % from run to run" in text) == told
    assert ("Close other programs and measure again." in text) == told


def test_the_schedule_is_not_said_for_every_stage():
    graph = chain_graph(4)
    assert "schedule" not in printed(plan_table(make_plan(graph, even_bounds(4, 2), [1, 1], 4), graph))


@settings(max_examples=15)
@given(clusters(), graphs(max_ops=4), measurements, plans(), programs(), timelines())
def test_anything_that_is_legal_can_be_printed(cluster, graph, table, plan, program, timeline):
    views = (
        cluster_table(cluster),
        graph_table(graph, graph.batch_size or 1),
        measurement_table(table),
        plan_table(plan),
        program_table(program),
        timeline_table(timeline),
    )
    for view in views:
        assert printed(view).strip()


SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5)


@given(sizes=SIZES, over=st.integers(-5, 120), data=st.data())
def test_the_widest_column_gives_way_first(sizes, over, data):
    """All at once as one by one: from the widest, of equals from the first, none below its least."""
    least = [min(pair) for pair in sizes]
    widths = [max(pair) for pair in sizes]
    among = [i for i in range(len(sizes)) if data.draw(st.booleans())]
    one_by_one = list(widths)
    for _ in range(max(over, 0)):
        if spare := [i for i in among if one_by_one[i] > least[i]]:
            one_by_one[max(spare, key=lambda i: one_by_one[i])] -= 1
    _lower(widths, least, among, over)
    assert widths == one_by_one


def test_a_name_of_a_million_letters_is_laid_out_at_once():
    table = NarrowTable(["name", "n"], [["x" * 1_000_000, "1"]], numeric=[False, True])
    assert table._narrow([0, 1], 80) == [75, 1]
