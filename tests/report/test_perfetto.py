"""Traces are read back as plain JSON and compared with the timelines they came from."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report import check_ranks, perfetto, write_trace
from meshwright.report.perfetto import pair_transfers
from meshwright.simulator import simulate_plan
from meshwright.spec import DocumentError, Opcode, load_cluster
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.report.timelines import F, R, S, as_measured, make_timeline
from tests.strategies import timelines

REQUIRED = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "id", "name", "cat", "pid", "tid", "ts"},
    "f": {"ph", "id", "name", "cat", "pid", "tid", "ts", "bp"},
    "C": {"ph", "name", "pid", "ts", "args"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def read_trace(path, *given_timelines, ranks=None):
    assert write_trace(given_timelines, path, ranks=ranks) == path
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data.keys() == {"displayTimeUnit", "traceEvents"}
    events = defaultdict(list)
    for event in data["traceEvents"]:
        assert event.keys() == REQUIRED[event["ph"]]
        events[event["ph"]].append(event)
    return events


def names_of(events, kind, *keys):
    return {tuple(event[key] for key in keys): event["args"]["name"] for event in events["M"] if event["name"] == kind}


def spans_by_track(events):
    """(process, thread) names → [(name, ts, dur)] in the order of the file."""
    processes, threads = names_of(events, "process_name", "pid"), names_of(events, "thread_name", "pid", "tid")
    spans = defaultdict(list)
    for event in events["X"]:
        place = processes[event["pid"],], threads[event["pid"], event["tid"]]
        spans[place].append((event["name"], event["ts"], event["dur"]))
    return spans


@pytest.fixture(scope="module")
def simulated():
    graph = chain_graph(6, skips=((0, 4),))
    plan = make_plan(graph, even_bounds(6, 3), [2, 1, 1], 4)
    return simulate_plan(plan, graph, load_cluster("4xA100"), num_steps=2).timeline


def test_predicted_and_measured_have_equal_names_side_by_side(simulated, folder):
    spans = spans_by_track(read_trace(folder / "both.json", simulated, as_measured(simulated, 2.0)))
    assert {process for process, _ in spans} == {f"rank {r} {o}" for r in range(4) for o in ("predicted", "measured")}
    for (process, thread), ours in spans.items():
        if process.endswith("predicted"):
            theirs = spans[process.replace("predicted", "measured"), thread]
            assert [name for name, _, _ in ours] == [name for name, _, _ in theirs]
            assert [2 * duration for _, _, duration in ours] == pytest.approx([d for _, _, d in theirs], abs=2e-6)
    assert {thread for _, thread in spans} == {"compute", "send", "receive", "exchange"}


def test_processes_of_one_rank_follow_each_other(simulated, folder):
    events = read_trace(folder / "order.json", simulated, as_measured(simulated))
    processes = names_of(events, "process_name", "pid")
    index = {e["pid"]: e["args"]["sort_index"] for e in events["M"] if e["name"] == "process_sort_index"}
    ordered = [processes[pid,] for pid in sorted(index, key=index.get)]
    assert ordered[:3] == ["rank 0 predicted", "rank 0 measured", "rank 1 predicted"]


def test_every_send_has_an_arrow_to_its_receive(simulated, folder):
    events = read_trace(folder / "arrows.json", simulated)
    starts, ends = ({event["id"]: event for event in events[kind]} for kind in ("s", "f"))
    num_sends = int(np.isin(simulated.opcode, (2, 4)).sum())
    assert len(starts) == len(events["s"]) == num_sends > 0
    assert starts.keys() == ends.keys()
    containing = defaultdict(list)
    for event in events["X"]:
        containing[event["pid"], event["tid"]].append(event)

    def enclosing(arrow):
        for event in containing[arrow["pid"], arrow["tid"]]:
            if event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]:
                yield event["name"], event["args"]["step"]

    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        sends = {(name.removeprefix("send "), step) for name, step in enclosing(start) if name.startswith("send")}
        receives = {(n.removeprefix("receive "), step) for n, step in enclosing(ends[number]) if n.startswith("rec")}
        assert sends & receives


def test_arrows_stay_within_their_timeline(simulated, folder):
    events = read_trace(folder / "apart.json", simulated, as_measured(simulated))
    processes = names_of(events, "process_name", "pid")
    ends = {event["id"]: processes[event["pid"],] for event in events["f"]}
    assert len(ends) == len(events["s"]) == 2 * int(np.isin(simulated.opcode, (2, 4)).sum())
    for event in events["s"]:
        assert processes[event["pid"],].split()[2] == ends[event["id"]].split()[2]


def test_arrows_point_forward_also_to_receives_that_were_posted_early(folder):
    spans = [
        (0, "send", S, 0, 0, 1, 500_000_000, 800_000_000),
        (1, "receive", R, 1, 0, 0, 0, 900_000_000),
        (1, "receive", R, 1, 1, 0, 0, 900_000_000),
    ]
    events = read_trace(folder / "early.json", make_timeline(spans, origin="measured"))
    assert [event["ts"] for event in events["s"]] == [500.0]
    assert [event["ts"] for event in events["f"]] == [700.0]


def test_spans_under_way_at_once_get_threads_of_one_name(folder):
    spans = [
        (0, "send", S, 0, 0, 1, 0, 30_000_000),
        (0, "send", S, 0, 1, 1, 10_000_000, 20_000_000),
        (0, "send", S, 0, 2, 1, 20_000_000, 50_000_000),
        (0, "send", S, 0, 3, 1, 30_000_000, 40_000_000),
    ]
    events = read_trace(folder / "lanes.json", make_timeline(spans))
    tids = [event["tid"] for event in events["X"]]
    assert list(names_of(events, "thread_name", "tid").values()) == ["send", "send"]
    assert [tid - min(tids) for tid in tids] == [0, 1, 1, 0]


def test_memory_is_a_counter_of_the_rank(folder):
    memory = [(1, 2_000_000, 7), (0, 0, 5), (1, 1_000_000, 9)]
    spans = [(rank, "compute", F, rank, 0, -1, 0, 10) for rank in range(2)]
    events = read_trace(folder / "memory.json", make_timeline(spans, memory=memory))
    processes = names_of(events, "process_name", "pid")
    found = [(processes[event["pid"],], event["ts"], event["args"]["bytes"]) for event in events["C"]]
    assert found == [("rank 0", 0.0, 5), ("rank 1", 1.0, 9), ("rank 1", 2.0, 7)]


def test_a_single_timeline_needs_no_origin_and_equal_origins_are_numbered(folder):
    timeline = make_timeline([(0, "compute", F, 0, 3, -1, 1, 1_000_001, 2, 64)])
    events = read_trace(folder / "one.json", timeline)
    assert names_of(events, "process_name", "pid") == {(1,): "rank 0"}
    assert events["X"][0] | {"pid": 0, "tid": 0} == {
        "ph": "X",
        "name": "F0.3",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 1e-6,
        "dur": 1.0,
        "args": {"stage": 0, "microbatch": 3, "bytes": 64, "step": 2},
    }
    events = read_trace(folder / "two.json", timeline, timeline)
    assert list(names_of(events, "process_name", "pid").values()) == ["rank 0 predicted", "rank 0 predicted 2"]


@given(st.lists(timelines(), min_size=1, max_size=3))
def test_any_timelines_come_back_span_by_span(folder, many):
    events = read_trace(folder / "any.json", *many)
    expected, found = Counter(), Counter()
    for timeline in many:
        for i in range(timeline.num_spans):
            start, end = int(timeline.start_ps[i]), int(timeline.end_ps[i])
            stream = timeline.tracks[timeline.track[i]].name
            expected[timeline.name(i), stream, start, end - start] += 1
    threads = names_of(events, "thread_name", "pid", "tid")
    last: dict[tuple[int, int], float] = {}
    for event in events["X"]:
        place = event["pid"], event["tid"]
        found[event["name"], threads[place], round(event["ts"] * 1e6), round(event["dur"] * 1e6)] += 1
        assert event["ts"] >= last.get(place, 0.0) * (1 - 1e-12)
        last[place] = event["ts"] + event["dur"]
    assert found == expected
    assert sorted(event["id"] for event in events["s"]) == sorted(event["id"] for event in events["f"])
    assert len({event["id"] for event in events["s"]}) == len(events["s"])
    identifiers = [*names_of(events, "process_name", "pid"), *names_of(events, "thread_name", "tid")]
    assert len(set(identifiers)) == len(identifiers)


def test_no_timeline_is_refused_and_no_file_is_left(tmp_path):
    with pytest.raises(DocumentError, match="at least one"):
        write_trace([], tmp_path / "trace.json")
    broken = make_timeline([(0, "compute", F, 0, 0, -1, 0, 10)])
    object.__setattr__(broken, "stage", broken.stage[:0])
    with pytest.raises(IndexError):
        write_trace([broken], tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_fails_leaves_the_file_that_was_there(tmp_path, simulated):
    path = write_trace([simulated], tmp_path / "trace.json")
    before = path.read_bytes()
    broken = make_timeline([(0, "compute", F, 0, 0, -1, 0, 10)])
    object.__setattr__(broken, "stage", broken.stage[:0])
    with pytest.raises(IndexError):
        write_trace([simulated, broken], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_ranks_are_cut_out_with_what_goes_between_them(simulated, folder):
    whole, cut = read_trace(folder / "all.json", simulated), read_trace(folder / "cut.json", simulated, ranks=(1, 3))
    assert set(names_of(cut, "process_name", "pid").values()) == {"rank 1", "rank 3"}
    processes = names_of(whole, "process_name", "pid")
    drawn = {pid for (pid,), name in processes.items() if name in ("rank 1", "rank 3")}
    ranks = np.array([stream.rank for stream in simulated.tracks])[simulated.track]
    assert len(cut["X"]) == int(np.isin(ranks, (1, 3)).sum()) > 0
    assert len(cut["C"]) == int(np.isin(simulated.memory_rank, (1, 3)).sum()) > 0
    for kind in ("M", "X", "C"):
        kept = [event for event in whole[kind] if event["pid"] in drawn]
        assert [without_tid(event) for event in cut[kind]] == [without_tid(event) for event in kept]
    # An arrow needs both of its ends: rank 3 gets from ranks 1 and 2.
    ends = {event["id"]: event["pid"] for event in whole["f"]}
    between = {event["id"] for event in whole["s"] if {event["pid"], ends[event["id"]]} <= drawn}
    assert {event["id"] for event in cut["s"]} == {event["id"] for event in cut["f"]} == between
    assert 0 < len(between) < len(whole["s"])


def without_tid(event):
    """Threads are numbered through those that are drawn."""
    kept = {key: value for key, value in event.items() if key != "tid"}
    return kept | ({"args": {}} if event["name"] == "thread_sort_index" else {})


def test_ranks_that_are_not_there_are_refused(simulated, tmp_path):
    with pytest.raises(DocumentError, match="Rank 4 was asked for in a trace; the ranks are 0 to 3"):
        write_trace([simulated], tmp_path / "trace.json", ranks=(0, 4))
    with pytest.raises(DocumentError, match="No ranks were asked for"):
        check_ranks((), 4)
    check_ranks(None, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_packed_trace_holds_the_same(simulated, folder):
    plain, packed = (write_trace([simulated], folder / name).read_bytes() for name in ("p.json", "p.json.gz"))
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 5


@given(timeline=timelines(), chunk=st.integers(1, 4))
def test_chunks_leave_no_seam(folder, timeline, chunk):
    whole = write_trace([timeline], folder / "whole.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perfetto, "CHUNK", chunk)
        assert write_trace([timeline], folder / "chunks.json").read_bytes() == whole


def test_names_are_those_of_every_timeline(folder):
    spans = [(0, "compute", opcode, 12, 345, 6789, 0, 10) for opcode in Opcode]
    timeline = make_timeline(spans)
    names = [event["name"] for event in read_trace(folder / "names.json", timeline)["X"]]
    assert sorted(names) == sorted(timeline.name(i) for i in range(timeline.num_spans))


def pairs_told_one_by_one(timeline):
    keys = defaultdict(list)
    sends = {Opcode.SEND_ACTIVATION: "activation", Opcode.SEND_GRADIENT: "gradient"}
    receives = {Opcode.RECEIVE_ACTIVATION: "activation", Opcode.RECEIVE_GRADIENT: "gradient"}
    for i in np.argsort(timeline.start_ps, kind="stable").tolist():
        opcode, ends = Opcode(timeline.opcode[i]), (int(timeline.stage[i]), int(timeline.peer[i]))
        facts = int(timeline.microbatch[i]), int(timeline.step[i])
        if opcode in sends:
            keys[sends[opcode], ends, facts, "send"].append(i)
        elif opcode in receives:
            keys[receives[opcode], ends[::-1], facts, "receive"].append(i)
    expected = {}
    for (*key, side), indices in keys.items():
        if side == "send":
            for send, receive in zip(indices, keys.get((*key, "receive"), ()), strict=False):
                expected |= {send: receive, receive: send}
    return expected


def check_pairs(timeline):
    partner = pair_transfers(timeline)
    assert {i: int(other) for i, other in enumerate(partner) if other >= 0} == pairs_told_one_by_one(timeline)


@given(timelines())
def test_transfers_pair_up_as_told_one_by_one(timeline):
    check_pairs(timeline)


@given(st.data(), st.booleans())
def test_transfers_of_a_pipeline_pair_up(data, twice):
    """In any order, some of them missing; ``twice``: one of them occurs again."""
    every = [
        (kind, stage, microbatch, peer)
        for microbatch in range(6)
        for kind, stage, peer in (
            (Opcode.SEND_ACTIVATION, 0, 1),
            (Opcode.RECEIVE_ACTIVATION, 1, 0),
            (Opcode.SEND_GRADIENT, 1, 0),
            (Opcode.RECEIVE_GRADIENT, 0, 1),
        )
    ]
    chosen = data.draw(st.permutations(every))[: data.draw(st.integers(0, len(every)))]
    chosen += chosen[:1] * twice
    spans = [(0, "send", *facts, place, place + 1) for place, facts in enumerate(chosen)]
    check_pairs(make_timeline(spans))


def test_memory_holds_no_trace():
    """Twice as many spans take a few numbers each, while their text is some hundred bytes."""
    peaks, sizes = [], []
    for count in (30_000, 60_000):
        spans = make_timeline([(0, "compute", F, 0, 0, -1, 0, 10)])
        row = {name: np.repeat(getattr(spans, name), count) for name in ("track", "opcode", "stage", "microbatch")}
        row |= {name: np.repeat(getattr(spans, name), count) for name in ("peer", "step", "num_bytes")}
        start_ps = 10 * np.arange(count)
        timeline = replace(spans, **row, start_ps=start_ps, end_ps=start_ps + 10)
        tracemalloc.start()
        sizes.append(sum(map(len, perfetto.trace_pieces([timeline]))))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sizes[1] - sizes[0] > 30_000 * 130
    assert peaks[1] - peaks[0] < 30_000 * 80
