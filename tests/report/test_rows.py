"""Rows against sums worked out another way: cuts by `slice_graph`, time by counting picoseconds, programs by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.program import build_program
from meshwright.report import (
    cluster_rows,
    fit_transfers,
    graph_rows,
    graph_total,
    measurement_rows,
    plan_rows,
    program_rows,
    timeline_rows,
)
from meshwright.spec import (
    GraphError,
    Measurements,
    Opcode,
    PlanError,
    TransferMeasurement,
    load_cluster,
    slice_graph,
)
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.report.timelines import B, F, R, S, make_timeline
from tests.strategies import clusters, graphs, measurements, plans, programs, timelines


@given(graphs(), st.integers(1, 3))
def test_what_crosses_a_layer_is_what_a_cut_there_sends(graph, batch_size):
    if graph.batch_size is not None:
        batch_size = graph.batch_size
    rows = graph_rows(graph, batch_size)
    last = len(graph.layers)
    assert rows[-1]["crossing_bytes"] == 0
    for cut in range(1, last):
        first, _ = slice_graph(graph, [(0, cut), (cut, last)])
        sent = {tensor for channel in first.outgoing for tensor in channel.tensors}
        expected = sum(graph.tensors[tensor].num_bytes(batch_size) for tensor in sent)
        assert rows[cut - 1]["crossing_bytes"] == expected


@given(graphs())
def test_layers_add_up_to_the_graph(graph):
    batch_size = graph.batch_size or 2
    rows, total = graph_rows(graph, batch_size), graph_total(graph, batch_size)
    for key in ("num_ops", "forward_flops", "backward_flops", "saved_bytes"):
        assert sum(row[key] for row in rows) == total[key]
    assert total["forward_flops"] + total["backward_flops"] == graph.flops(batch_size)
    read = {tensor for op in graph.ops for tensor in op.inputs if graph.tensors[tensor].role == "parameter"}
    unread = sum(graph.tensors[i].num_elements(0) for i in graph.parameters if i not in read)
    assert sum(row["num_parameters"] for row in rows) == total["num_parameters"] - unread
    assert json.loads(json.dumps(rows)) == rows


def test_layers_of_a_graph_made_by_hand():
    rows = graph_rows(chain_graph(3, width=4, tied=True), 2)
    # 4x4 weights, 2x4 float32 activations; the loss shares the first weight.
    assert [row["num_parameters"] for row in rows] == [16, 16, 0]
    assert [row["forward_flops"] for row in rows] == [64, 64, 64]
    assert [row["backward_flops"] for row in rows] == [128, 128, 128]
    assert [row["saved_bytes"] for row in rows] == [32, 32, 32]
    assert [row["crossing_bytes"] for row in rows] == [32, 32, 0]
    assert [row["layer"] for row in rows] == ["layers.0", "layers.1", "layers.2"]


def test_what_later_stages_compute_again_does_not_cross():
    graph = chain_graph(3, width=4, skips=((0, 2),))
    assert [row["crossing_bytes"] for row in graph_rows(graph, 2)] == [32, 64, 0]
    constant = graph.tensors[0]
    tensors = (replace(constant, role="constant"), *graph.tensors[1:])
    ops = (replace(graph.ops[0], inputs=(0,), replicable=True), *graph.ops[1:])
    again = replace(graph, tensors=tensors, ops=ops, inputs=())
    assert [row["crossing_bytes"] for row in graph_rows(again, 2)] == [0, 32, 0]


def test_a_batch_size_that_the_graph_does_not_describe_is_refused():
    graph = chain_graph(2)
    object.__setattr__(graph, "batch_size", 4)
    for rows in (graph_rows, graph_total):
        with pytest.raises(GraphError, match="batches of 4 samples only"):
            rows(graph, 3)


def test_stages_of_a_plan_have_the_names_of_their_layers():
    graph = chain_graph(5)
    plan = make_plan(graph, [(0, 2), (2, 5)], [2, 1], 4, microbatch_size=3)
    rows = plan_rows(plan, graph)
    assert [(row["first_layer"], row["last_layer"], row["num_layers"]) for row in rows] == [
        ("layers.0", "layers.1", 2),
        ("layers.2", "layers.4", 3),
    ]
    assert [(row["ranks"], row["replicas"]) for row in rows] == [([0, 1], 2), ([2], 1)]
    assert {(row["num_microbatches"], row["microbatch_size"], row["schedule"]) for row in rows} == {(4, 3, "1f1b")}
    assert [row["last_layer"] for row in plan_rows(plan)] == ["1", "4"]
    with pytest.raises(PlanError, match="give the graph that the plan was made for"):
        plan_rows(plan, chain_graph(4))


def test_seconds_per_rank_are_those_worked_out_by_hand():
    second = 10**12
    spans = [
        (0, "compute", F, 0, 0, -1, 0, 2 * second, 0),
        (0, "send", S, 0, 0, 1, second, 4 * second, 0),
        (0, "receive", R, 0, 0, 1, 3 * second, 5 * second, 0),
        (0, "compute", B, 0, 0, -1, 6 * second, 8 * second, 1),
        (1, "compute", F, 1, 0, -1, 4 * second, 5 * second, 0),
    ]
    rows = timeline_rows(make_timeline(spans, peaks=(7, 8)))
    assert (rows["num_steps"], rows["median_step_s"], rows["slowest_step_s"]) == (2, 4.0, 5.0)
    assert rows["bubble_share"] == pytest.approx(1 - 5 / 16)
    first, second_rank = rows["ranks"]
    # Two steps in 8 s: rank 0 computes 4 s, moves bytes for 4 s (1 to 5), 3 s of which it does not compute.
    assert (first["busy_s"], first["communication_s"], first["exposed_s"], first["idle_s"]) == (2.0, 2.0, 1.5, 2.0)
    assert (first["busy_share"], first["communication_share"], first["idle_share"]) == (0.5, 0.5, 0.5)
    assert (second_rank["busy_s"], second_rank["communication_s"]) == (0.5, 0.0)
    assert [row["peak_memory_bytes"] for row in rows["ranks"]] == [7, 8]


small_spans = st.tuples(
    st.integers(0, 1), st.sampled_from(("compute", "send", "receive")), st.integers(0, 30), st.integers(0, 10)
)


@given(st.lists(small_spans, max_size=8))
def test_communication_is_what_counting_every_picosecond_gives(drawn):
    spans = [(rank, stream, S, 0, 0, 1, start, start + length) for rank, stream, start, length in drawn]
    rows = timeline_rows(make_timeline(spans, num_ranks=2))
    for rank, row in enumerate(rows["ranks"]):
        covered = {True: np.zeros(50, bool), False: np.zeros(50, bool)}
        for owner, stream, start, length in drawn:
            if owner == rank:
                covered[stream == "compute"][start : start + length] = True
        assert row["communication_s"] == pytest.approx(covered[False].sum() / 1e12)
        assert row["exposed_s"] == pytest.approx((covered[False] & ~covered[True]).sum() / 1e12)


def test_instructions_are_counted_per_rank():
    graph = chain_graph(4)
    rows = program_rows(build_program(make_plan(graph, even_bounds(4, 2), [2, 1], 4), graph))
    assert [(row["section"], row["rank"]) for row in rows] == [("body", 0), ("body", 1), ("body", 2)]
    assert [row["forward"] for row in rows] == [2, 2, 4]
    assert [row["backward"] for row in rows] == [2, 2, 4]
    assert [row["send_activation"] for row in rows] == [2, 2, 0]
    assert [row["receive_gradient"] for row in rows] == [2, 2, 0]
    assert [row["optimizer_step"] for row in rows] == [1, 1, 1]
    # Microbatches of 2 samples of 4 float32 values; two 4x4 weights per stage.
    assert [row["sent_bytes"] for row in rows] == [64, 64, 128]
    assert [row["reduced_bytes"] for row in rows] == [128, 128, 0]


@given(programs())
def test_no_instruction_is_lost(program):
    count = sum(section.num_instructions for _, section in program.sections())
    rows = program_rows(program)
    assert sum(row[opcode.name.lower()] for row in rows for opcode in Opcode) == count


def transfers(points, kind="send"):
    return [TransferMeasurement(kind=kind, num_ranks=2, num_bytes=size, seconds=t) for size, t in points]


@given(st.floats(0, 1e-3), st.floats(1e6, 1e11), st.lists(st.integers(1, 2**30), min_size=2, max_size=6, unique=True))
def test_a_straight_line_is_found_again(latency, bandwidth, sizes):
    found, rate = fit_transfers(transfers((size, latency + size / bandwidth) for size in sizes))
    seconds = [found + size / rate for size in sizes] if rate else [found] * len(sizes)
    assert seconds == pytest.approx([latency + size / bandwidth for size in sizes], rel=1e-3)


def test_transfers_that_are_no_line_get_no_impossible_link():
    # The line through both points would start at -1 s; the best one through 0 weighs both by relative error.
    latency, rate = fit_transfers(transfers([(1, 1.0), (2, 3.0)]))
    assert latency == 0.0
    slopes = np.linspace(0.5, 2, 30001)
    errors = (slopes / 1.0 - 1) ** 2 + (2 * slopes / 3.0 - 1) ** 2
    assert 1 / rate == pytest.approx(slopes[errors.argmin()], abs=1e-4)
    assert fit_transfers(transfers([(8, 2.0), (8, 2.0)])) == (pytest.approx(2.0), None)
    latency, rate = fit_transfers(transfers([(1, 2.0), (100, 1.0)]))
    assert rate is None
    assert 1.0 < latency < 2.0


def test_measurements_are_summed_up():
    table = Measurements(
        device="cpu",
        software="torch",
        date="2026-01-02",
        transfers=(
            *transfers([(1000, 3.0), (2000, 4.0)]),
            *transfers([(1000, 5.0)], "all_reduce"),
        ),
    )
    rows = measurement_rows(table)
    assert (rows["num_ops"], rows["op_spread_share"]) == (0, None)
    reduce, send = rows["transfers"]
    assert (reduce["kind"], reduce["bandwidth_bytes_per_s"]) == ("all_reduce", None)
    assert (send["latency_s"], send["bandwidth_bytes_per_s"]) == (pytest.approx(2.0), pytest.approx(1000.0))
    assert (send["smallest_bytes"], send["largest_bytes"], send["num_sizes"]) == (1000, 2000, 2)


def test_a_cluster_has_a_row_per_group_of_devices():
    rows = cluster_rows(load_cluster("2x8xH100"))
    assert [(row["node"], row["num_devices"], row["kind"]) for row in rows] == [
        ("node0", 8, "H100"),
        ("node1", 8, "H100"),
    ]


@given(clusters(), plans(), timelines(), measurements)
def test_rows_are_json(cluster, plan, timeline, table):
    for rows in (cluster_rows(cluster), plan_rows(plan), timeline_rows(timeline), measurement_rows(table)):
        assert json.loads(json.dumps(rows, allow_nan=False)) == rows
