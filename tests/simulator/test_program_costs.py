"""Costs of a plan's program: seconds of stages, readiness of buckets, kinds of devices, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from meshwright.program import build_program, gradient_buckets
from meshwright.simulator import estimate_program, simulate_program
from meshwright.spec import Cluster, DeviceGroup, GradientExchange, Opcode, ProgramError, slice_graph
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import FixedCost, exact_costs, small_cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenCost(FixedCost):
    """Op i takes i + 1 µs forward, 2 (i + 1) backward, (i + 1) / 10 to accumulate; a "slow" device ten times that."""

    def estimate_ops(self, graph, batch_size, device_kind):
        times = 1e-6 * np.arange(1, len(graph.ops) + 1) * (10 if device_kind.name == "slow" else 1)
        return exact_costs(times, 2 * times, times / 10)


def mixed_cluster(fast: int, slow: int) -> Cluster:
    cluster = small_cluster()
    kind = cluster.device_kinds[0]
    devices = (DeviceGroup(kind="small", count=fast), DeviceGroup(kind="slow", count=slow))
    return replace(
        cluster,
        device_kinds=(kind, replace(kind, name="slow")),
        nodes=(replace(cluster.nodes[0], devices=devices),),
    )


def durations(program, costs) -> dict[tuple[int, str, int, int], list[int]]:
    """(rank, opcode, stage, microbatch) → µs, one instruction each."""
    section = program.body
    ranks = np.repeat([stream.rank for stream in program.streams], np.diff(section.stream_offsets))
    return {
        (int(ranks[i]), Opcode(int(section.opcode[i])).name, int(section.stage[i]), int(section.microbatch[i])): (
            int(costs.duration_ps[costs.body.cost_class[i]]) / 1e6
        )
        for i in range(section.num_instructions)
    }


def test_computations_cost_what_their_ops_cost_on_their_device():
    graph = chain_graph(5)
    plan = make_plan(graph, [(0, 2), (2, 5)], [2, 1], 4)
    cost = UnevenCost(cluster=mixed_cluster(1, 2))
    program = build_program(plan, graph)
    found = durations(program, estimate_program(program, plan, graph, cost))
    # Stage 0 holds ops of 1 and 2 µs, its second replica is slow; stage 1 those of 3, 4 and 5 µs on a slow device.
    assert found[0, "FORWARD", 0, 0] == found[0, "FORWARD", 0, 2] == 3
    assert found[1, "FORWARD", 0, 1] == 30
    assert found[0, "BACKWARD", 0, 0] == 6
    assert found[0, "BACKWARD", 0, 2] == pytest.approx(6.3)
    assert found[1, "BACKWARD", 0, 3] == pytest.approx(63)
    assert [found[2, "BACKWARD", 1, m] for m in range(4)] == pytest.approx([240, 252, 252, 252])


@pytest.mark.parametrize("tied", [False, True])
def test_buckets_are_ready_when_their_last_gradient_is(tied):
    """Backward goes from op 5 (12 µs) down to op 0 (2 µs); a bucket waits for the earliest op that uses it."""
    graph = chain_graph(6, tied=tied)
    exchange = GradientExchange(bucket_bytes=2 * 4 * 4 * 4)
    plan = make_plan(graph, [(0, 6)], [2], 2, exchange=exchange)
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, UnevenCost())
    buckets = gradient_buckets(graph, plan)
    expected = {}
    for bucket in buckets:
        earliest = min(i for i, op in enumerate(graph.ops) if set(op.inputs) & set(bucket.parameters))
        expected[bucket.index] = sum(2 * (i + 1) for i in range(earliest, 6))
    assert len(expected) == 3
    section = program.body
    assert len(section.mark_index) == 6
    for mark, bucket in enumerate(section.mark_index.tolist()):
        assert costs.body.mark_offset_ps[mark] == expected[bucket] * 10**6
    assert max(expected.values()) == 42


def test_a_bucket_is_not_ready_before_the_one_ahead_of_it():
    """A bucket over tied stages comes last in order, though its gradient in the last stage is first."""
    graph = chain_graph(4, tied=True)
    plan = make_plan(graph, even_bounds(4, 2), [2, 2], 2, exchange=GradientExchange(bucket_bytes=1))
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, UnevenCost())
    section = program.body
    last = section.stage[section.mark_instruction] == 1
    ready = dict(zip(section.mark_index[last].tolist(), costs.body.mark_offset_ps[last].tolist(), strict=True))
    across = next(bucket.index for bucket in gradient_buckets(graph, plan) if len(bucket.stages) == 2)
    assert across == max(ready)
    assert list(dict(sorted(ready.items())).values()) == sorted(ready.values())
    assert ready[across] == 14 * 10**6


def test_equal_instructions_share_a_class():
    graph = chain_graph(8)
    plan = make_plan(graph, even_bounds(8, 4), [1] * 4, 32)
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, FixedCost())
    # Per stage: forward, backward (first, middle, last), optimizer; per neighbouring pair: two sends and two receives.
    assert len(costs.duration_ps) == 4 * 5 + 3 * 4
    assert program.body.num_instructions > 300


def test_costs_of_another_program_are_refused():
    graph = chain_graph(4)
    small, large = (make_plan(graph, even_bounds(4, 2), [1, 1], count) for count in (2, 4))
    costs = estimate_program(build_program(small, graph), small, graph, FixedCost())
    with pytest.raises(ProgramError, match="do not match the program"):
        simulate_program(build_program(large, graph), costs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration_ps": lambda p: p.duration_ps * 0}, "less than 1 ps"),
        ({"duration_ps": lambda p: -p.duration_ps}, "negative"),
        ({"num_links": lambda p: 1}, "a link outside"),
        ({"resident_bytes": lambda p: p.resident_bytes[:1]}, "resident_bytes has shape"),
        ({"body": lambda p: replace(p.body, mark_offset_ps=p.body.mark_offset_ps + 10**9)}, "outside its span"),
        ({"body": lambda p: replace(p.body, cost_class=p.body.cost_class + 100)}, "unknown class"),
    ],
)
def test_impossible_costs_are_refused(change, message):
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 2), [2, 1], 2)
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, FixedCost(send=1e-6, all_reduce=1e-6))
    simulate_program(program, costs)
    broken = replace(costs, **{name: make(costs) for name, make in change.items()})
    with pytest.raises(ProgramError, match=message):
        simulate_program(program, broken)


def test_transfers_without_ranks_are_refused():
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 2), [1, 1], 2)
    program = build_program(plan, graph)
    nameless = replace(program, body=replace(program.body, group=np.full_like(program.body.group, -1)))
    with pytest.raises(ProgramError, match="has no group of ranks"):
        estimate_program(nameless, plan, graph, FixedCost())


def test_replicated_ops_are_paid_in_every_stage():
    """Stage 1 reads what op 0 yields; where that is replicable, stage 1 computes it again."""
    graph = chain_graph(4, skips=((0, 2),))
    graph = replace(graph, ops=(replace(graph.ops[0], replicable=True), *graph.ops[1:]))
    plan = make_plan(graph, even_bounds(4, 2), [1, 1], 1)
    assert [stage.ops for stage in slice_graph(graph, plan.bounds)] == [(0, 1), (0, 2, 3)]
    program = build_program(plan, graph)
    found = durations(program, estimate_program(program, plan, graph, UnevenCost()))
    assert [found[stage, "FORWARD", stage, 0] for stage in (0, 1)] == [1 + 2, 1 + 3 + 4]
