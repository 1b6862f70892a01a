"""More memory than there is: which rank, when, and who holds it."""

from dataclasses import replace

import pytest

from meshwright.simulator import explain_overflows, find_overflows, simulate_plan
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import FixedCost, small_cluster


def small_memory(cluster, memory_bytes):
    kinds = tuple(replace(kind, memory_bytes=memory_bytes) for kind in cluster.device_kinds)
    return replace(cluster, device_kinds=kinds)


def simulated(num_stages=2, num_microbatches=4, schedule="gpipe"):
    graph = chain_graph(num_stages)
    plan = make_plan(graph, even_bounds(num_stages, num_stages), [1] * num_stages, num_microbatches, schedule=schedule)
    cost = FixedCost()
    return simulate_plan(plan, graph, cost.cluster, cost=cost)


def test_everything_fits():
    found = find_overflows(simulated(), small_cluster())
    assert found == ()
    assert explain_overflows(found) == ()


def test_the_moment_is_the_first_above_the_limit():
    """Against a walk through the samples of memory."""
    result = simulated()
    peaks = [use.total_bytes for use in result.memory]
    timeline = result.timeline
    limit = min(int(timeline.memory_bytes[timeline.memory_rank == rank].max()) for rank in (0, 1)) - 1
    found = find_overflows(result, small_memory(small_cluster(), limit))
    assert [item.rank for item in found] == [0, 1]
    for item in found:
        samples = zip(timeline.memory_rank, timeline.memory_time_ps, timeline.memory_bytes, strict=True)
        first = next(int(time) for rank, time, held in samples if rank == item.rank and held > limit)
        assert item.time_s == pytest.approx(first * 1e-12)
        begun = [timeline.name(i) for i in range(timeline.num_spans) if timeline.start_ps[i] == first]
        assert item.span in begun
        assert item.peak_bytes == peaks[item.rank]
        assert item.limit_bytes == limit


def test_one_rank_alone():
    """GPipe keeps as much on every rank; the first one has inputs besides, the last one their loss."""
    result = simulated()
    peaks = [use.total_bytes for use in result.memory]
    assert peaks[0] != peaks[1]
    (found,) = find_overflows(result, small_memory(small_cluster(), max(peaks) - 1))
    assert found.rank == peaks.index(max(peaks))


def test_what_is_always_there_is_too_much():
    result = simulated()
    found = find_overflows(result, small_memory(small_cluster(), 1))
    assert {item.span for item in found} <= {"F0.0", "F1.0", "its resident memory"}
    assert {item.time_s for item in found} == {0.0}


def test_many_are_told_by_their_number():
    lines = explain_overflows(find_overflows(simulated(num_stages=6), small_memory(small_cluster(), 1)))
    assert len(lines) == 3 + 2
    assert lines[0].startswith("Rank 0 needs up to ")
    assert "but its small has 1 B: too much from 0 s on, in " in lines[0]
    assert lines[3] == "So do 3 more ranks."
    assert "would not run there" in lines[4]
