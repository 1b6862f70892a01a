"""What happens inside computations: parts that fill them exactly, in the order of the ops, with marks at their ends."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.report import write_trace
from meshwright.simulator import simulate_plan
from meshwright.spec import Opcode, ProgramError
from meshwright.spec.instructions import COMPUTATIONS
from tests.graphs import chain_graph
from tests.marks import examples
from tests.simulator.plans import FixedCost, small_cluster
from tests.simulator.replicas import cases, grid, make_plan

US = 1_000_000  # ps


def parts_of(result, span):
    """Names and µs of the parts of a span of the timeline."""
    ops = result.op_spans
    mine = np.flatnonzero(ops.span == span)
    lengths = (ops.end_ps - ops.start_ps)[mine] / US
    return [(ops.name(i), length) for i, length in zip(mine.tolist(), lengths.tolist(), strict=True)]


@settings(max_examples=examples(80))
@given(case=cases(), contention=st.sampled_from(["queued", "fair"]))
def test_parts_fill_their_spans(case, contention):
    """Folded or not, whole or halved backwards, lengthened by processor time or not."""
    plan, graph, cluster, options = case
    result = simulate_plan(plan, graph, cluster, contention=contention, detail="ops", **options)
    plain = simulate_plan(plan, graph, cluster, contention=contention, **options)
    assert (result.step_time_s, result.timeline) == (plain.step_time_s, plain.timeline)
    assert plain.op_spans is None
    timeline, ops = result.timeline, result.op_spans
    first = np.append(True, np.diff(ops.span) != 0)
    last = np.append(first[1:], True)
    assert (np.diff(ops.span) >= 0).all()
    assert np.array_equal(ops.start_ps[first], timeline.start_ps[ops.span[first]])
    assert np.array_equal(ops.end_ps[last], timeline.end_ps[ops.span[last]])
    assert np.array_equal(ops.start_ps[~first], ops.end_ps[~last])
    assert (ops.end_ps >= ops.start_ps).all()
    told = np.zeros(timeline.num_spans, bool)
    told[ops.span] = True
    takes_time = timeline.end_ps > timeline.start_ps
    assert np.array_equal(told & takes_time, np.isin(timeline.opcode, COMPUTATIONS) & takes_time)


def test_ops_come_in_order_and_back():
    """Three ops of 3 and 5 µs, from the second microbatch on 1 µs to add gradients; 0.5 µs of host each time."""
    graph = chain_graph(3)
    plan = make_plan(graph, [[0]], 2)
    result = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(accumulate=1e-6, overhead=0.5e-6), detail="ops")
    forward, _, backward, last = parts_in_order(result, (Opcode.FORWARD, Opcode.BACKWARD))
    names = ["linear0", "linear1", "linear2"]
    assert forward == [("host", 0.5), *((name, 3.0) for name in names)]
    assert backward == [("host", 0.5), *((name, 5.0) for name in names[::-1])]
    assert last == [("host", 0.5), *((name, 6.0) for name in names[::-1])]


def parts_in_order(result, opcodes, rank=0):
    timeline = result.timeline
    ranks = np.array([stream.rank for stream in timeline.tracks])[timeline.track]
    spans = np.flatnonzero(np.isin(timeline.opcode, opcodes) & (ranks == rank))
    spans = spans[np.argsort(timeline.start_ps[spans], kind="stable")]
    found = [parts_of(result, span) for span in spans.tolist()]
    return sorted(found[:-1], key=lambda parts: sum(length for _, length in parts)) + found[-1:]


def test_buckets_leave_at_the_ends_of_their_parts():
    """A bucket per layer, filled in 1 µs when the layer's gradients are there: the sums begin where a part ends."""
    graph = chain_graph(4)
    plan = make_plan(graph, grid(1, 2), 2, bucket_bytes=1)
    cost = FixedCost(fill=1e-6, all_reduce=1e-12)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost, detail="ops")
    timeline = result.timeline
    (backward,) = np.flatnonzero((timeline.opcode == Opcode.BACKWARD) & (timeline.track == timeline.track[0]))
    parts = parts_of(result, backward)
    layers = ["linear3", "linear2", "linear1", "linear0"]
    assert parts == [part for k, name in enumerate(layers) for part in ((name, 5.0), (f"fill bucket {k}", 1.0))]
    ops = result.op_spans
    fills = [ops.name(i).startswith("fill") and ops.span[i] == backward for i in range(ops.num_parts)]
    sums = np.unique(timeline.start_ps[timeline.opcode == Opcode.ALL_REDUCE])
    assert ops.end_ps[fills].tolist() == sums.tolist()


@settings(max_examples=examples(30))
@given(times=st.lists(st.floats(1e-9, 1e-5), min_size=4, max_size=4), fill=st.floats(0, 1e-6))
def test_marks_are_ends_of_parts_however_times_are_rounded(times, fill):
    graph = chain_graph(4)

    class Uneven(FixedCost):
        def estimate_ops(self, graph, batch_size, device_kind):
            costs = FixedCost.estimate_ops(self, graph, batch_size, device_kind)
            return replace(costs, backward_s=np.array(times))

    plan = make_plan(graph, grid(1, 2), 2, bucket_bytes=1)
    cost = Uneven(fill=fill, all_reduce=1e-12)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost, detail="ops")
    sums = result.timeline.opcode == Opcode.ALL_REDUCE
    # One that ends in the picosecond in which the next is ready makes that one wait for a picosecond.
    ends = np.append(result.op_spans.end_ps, result.timeline.end_ps[sums])
    assert set(result.timeline.start_ps[sums].tolist()) <= set(ends.tolist())


def test_traces_hold_ops_inside_of_their_spans(tmp_path):
    graph = chain_graph(4)
    plan = make_plan(graph, grid(2, 2), 4)
    result = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(), detail="ops")
    events = json.loads(write_trace([result.timeline], tmp_path / "t.json", ops=result.op_spans).read_text())
    spans = [event for event in events["traceEvents"] if event["ph"] == "X"]
    ops = [event for event in spans if event["cat"] == "op"]
    assert len(ops) == result.op_spans.num_parts == 4 * 2 * 2 * 2
    ps = lambda event: (round(event["ts"] * US), round(event["ts"] * US) + round(event["dur"] * US))
    threads = {}
    for event in spans:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["cat"], *ps(event)))
    for event in ops:
        start, end = ps(event)
        around = [item for item in threads[event["pid"], event["tid"]] if item[1] <= start and end <= item[2]]
        # Its computation comes first in the file, as Perfetto wants it where both begin together.
        assert [item[0] for item in around] == [around[0][0], "op"]
        assert around[0][0] in ("forward", "backward")


def test_an_unknown_detail_is_refused():
    graph = chain_graph(2)
    with pytest.raises(ProgramError, match="did you mean 'ops'"):
        simulate_plan(make_plan(graph, [[0]], 1), graph, small_cluster(), detail="op")
