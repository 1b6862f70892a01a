"""Schedules that never flush: versions of weights, copies of them, and programs that repeat."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.program import (
    build_program,
    compute_orders,
    max_in_flight,
    repeat_body,
    with_schedule,
    write_orders,
)
from meshwright.spec import Backward, Drop, Forward, Merge, OptimizerStep, PlanError, Stash, slice_graph
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.program.check import check_program
from tests.program.endless_plans import endless_plan, endless_plans, schedules


def compute_streams(program, num_steps):
    """What each rank computes, typed, with the body ``num_steps`` times."""
    section = repeat_body(program, num_steps).section
    for index, stream in enumerate(program.streams):
        if stream.name == "compute":
            yield stream.rank, [section.instruction(i) for i in section.stream_range(index)]


class Rank:
    """A rank that holds versions instead of weights: it has what it computed last, and what it kept."""

    def __init__(self, instructions):
        self.instructions = instructions
        self.current, self.kept, self.used = 0, set(), {}
        self.most_kept = 0
        self.has_backward = any(isinstance(item, Backward) for item in instructions)

    def run(self):
        for place, item in enumerate(self.instructions):
            match item:
                case Forward(microbatch=m, version=v):
                    assert v == self.current or v in self.kept
                    self.used[m] = v
                case Backward(microbatch=m, version=v):
                    assert self.used.pop(m) == v, "the backward uses the weights of the forward"
                    assert v == self.current or v in self.kept
                case Stash(version=v):
                    assert v == self.current
                    assert self.is_needed(v, place), "nothing is kept that nobody needs"
                    self.kept.add(v)
                    self.most_kept = max(self.most_kept, len(self.kept))
                case Drop(version=v):
                    assert not self.is_needed(v, place), "nothing is dropped that somebody needs"
                    self.kept.remove(v)
                    before = self.instructions[place - 1]
                    assert isinstance(before, Backward)
                    assert before.version == v, "what nobody needs any more goes at once"
                case OptimizerStep(version=v) | Merge(version=v):
                    assert v == self.current
                    self.current += 1
        assert not self.kept
        assert not self.used or not self.has_backward

    def is_needed(self, version, place):
        rest = self.instructions[place + 1 :]
        return any(isinstance(item, Forward | Backward) and item.version == version for item in rest)


@given(case=endless_plans(), num_steps=st.integers(1, 3))
def test_stashes_hold_exactly_the_versions_that_are_needed(case, num_steps):
    plan, graph = case
    for _, instructions in compute_streams(build_program(plan, graph), num_steps):
        Rank(instructions).run()


@given(case=endless_plans(), num_steps=st.integers(1, 3))
def test_every_microbatch_runs_once_each_way_at_every_stage(case, num_steps):
    plan, graph = case
    program = build_program(plan, graph)
    check_program(program)
    done = Counter(
        (type(item), item.stage, item.microbatch)
        for rank, instructions in compute_streams(program, num_steps)
        for item in instructions
        if isinstance(item, Forward | Backward) and plan.stages[item.stage].rank_of(item.microbatch) == rank
    )
    computed = Counter(
        (type(item), item.stage)
        for _, instructions in compute_streams(program, num_steps)
        for item in instructions
        if isinstance(item, Forward | Backward)
    )
    counts = {count for (_, stage), count in computed.items()}
    assert len(counts) == 1
    total = counts.pop()
    assert total % plan.num_microbatches == 0
    trained = {stage.index for stage in slice_graph(graph, plan.bounds) if stage.has_backward}
    ways = [(Forward, s) for s in range(len(plan.stages))] + [(Backward, s) for s in trained]
    expected = {(kind, s, m) for kind, s in ways for m in range(total)}
    assert done == Counter(expected)


@given(schedule=schedules, num_stages=st.integers(1, 5), rounds=st.integers(1, 3))
def test_versions_without_replicas_are_those_of_the_papers(schedule, num_stages, rounds):
    count = num_stages * rounds
    plan, graph = endless_plan(schedule, [1] * num_stages, count)
    for rank, instructions in compute_streams(build_program(plan, graph), 2):
        behind = num_stages - 1 - rank
        for item in instructions:
            if isinstance(item, Forward | Backward):
                expected = {
                    "pipedream": max(0, item.microbatch - behind),
                    "pipedream-vertical": max(0, item.microbatch - num_stages + 1),
                    "pipedream-2bw": max(0, item.microbatch // count - 1),
                    "hetpipe": max(0, item.microbatch - num_stages + 1),
                }
                assert item.version == expected[schedule]


@pytest.mark.parametrize(
    ("schedule", "most_kept"),
    [
        ("pipedream", [3, 2, 1, 0]),
        ("pipedream-vertical", [3, 3, 3, 3]),
        ("pipedream-2bw", [1, 1, 1, 1]),
        ("hetpipe", [3, 3, 3, 3]),
    ],
)
def test_copies_that_are_held_at_once(schedule, most_kept):
    """PipeDream: p - s versions at stage s, with the newest; 2BW: two."""
    plan, graph = endless_plan(schedule, [1, 1, 1, 1], 8)
    for rank, instructions in compute_streams(build_program(plan, graph), 3):
        one = Rank(instructions)
        one.run()
        assert one.most_kept == most_kept[rank]
    assert [max_in_flight(plan, stage) for stage in range(4)] == [4, 3, 2, 1]


def test_the_order_runs_from_the_first_microbatch_to_the_last():
    plan, _ = endless_plan("pipedream", [1, 1], 2)
    names = ["".join(type(item).__name__[0] + str(item.microbatch) for item in o.items) for o in compute_orders(plan)]
    assert names == ["F0F1B0F2B1F3B2F4B3F5B4B5", "F0B0F1B1F2B2F3B3F4B4F5B5"]


@given(
    num_stages=st.integers(1, 3),
    replicas=st.integers(2, 3),
    wave=st.integers(1, 5),
    staleness=st.integers(0, 3),
    num_steps=st.integers(1, 4),
)
def test_waves_are_merged_as_late_as_the_staleness_allows(num_stages, replicas, wave, staleness, num_steps):
    """HetPipe: minibatch j lacks at most (D + 1) n + k - 2 of those before it of another worker, at all stages."""
    plan, graph = endless_plan("hetpipe", [replicas] * num_stages, wave * replicas, staleness=staleness)
    program = build_program(plan, graph)
    check_program(program)
    section = repeat_body(program, num_steps).section
    lacking = Counter()
    for index, stream in enumerate(program.streams):
        if stream.name == "compute":
            lacking.update(lacking_at(plan, program, section, index))
    counts = {minibatch: {lack for (other, lack) in lacking if other == minibatch} for minibatch, _ in lacking}
    assert all(len(lacks) == 1 for lacks in counts.values()), "all stages use the weights with which it entered"
    worst = max(max(lacks) for lacks in counts.values())
    assert worst == (staleness + 1) * wave + num_stages - 2


def lacking_at(plan, program, section, index):
    """Per local minibatch how many before it, of another replica, its weights know nothing of."""
    replicas = len(plan.stages[0].ranks)
    wave = plan.num_microbatches // replicas
    exchange = next(
        s
        for s, other in enumerate(program.streams)
        if other.rank == program.streams[index].rank and other.name == "exchange"
    )
    sums = list(section.stream_range(exchange))
    versions, updated, merged = {0: 0}, 0, 0
    for i in section.stream_range(index):
        match section.instruction(i):
            case OptimizerStep(version=v):
                updated += 1
                versions[v + 1] = merged
                if updated % wave == 0:
                    waiting = [k for k in sums if i in section.waits_of(k)]
                    assert waiting == [sums[updated // wave - 1]], "a wave is summed when its last update is made"
            case Merge(version=v):
                assert sums[merged] in section.waits_of(i), "a merge waits for the sum"
                merged += 1
                versions[v + 1] = merged
            case Forward(microbatch=m, version=v):
                yield m // replicas, max(0, m // replicas - wave * versions[v])


def test_waves_need_equal_replicas():
    plan, graph = endless_plan("hetpipe", [2, 1], 4)
    with pytest.raises(PlanError, match="stages with 2, 1 replicas; expected the same number of each"):
        build_program(plan, graph)


def test_staleness_without_waves_is_refused():
    with pytest.raises(
        PlanError, match="A staleness of 2 waves was given for the schedule pipedream, which has no waves"
    ):
        endless_plan("pipedream", [2, 2], 4, staleness=2)
    with pytest.raises(PlanError, match="A staleness of -1 waves was given; expected 0 to 64"):
        endless_plan("hetpipe", [2, 2], 4, staleness=-1)


def test_another_schedule_knows_no_waves():
    plan, _ = endless_plan("hetpipe", [2, 2], 4, staleness=2)
    assert with_schedule(plan, "1f1b").exchange.staleness == 0
    assert with_schedule(plan, "hetpipe") == plan


def test_inference_is_refused():
    plan, _ = endless_plan("pipedream", [1, 1], 4)
    forward_only = replace(plan, workload=replace(plan.workload, kind="inference"))
    with pytest.raises(PlanError, match="for inference, where weights never change"):
        compute_orders(forward_only)


def test_replicas_need_equal_shares():
    plan, graph = endless_plan("pipedream", [2, 1], 3)
    with pytest.raises(PlanError, match="3 microbatches for the 2 replicas of stage 0; expected a multiple"):
        build_program(plan, graph)


def test_two_versions_do_not_suffice_for_few_microbatches():
    plan, graph = endless_plan("pipedream-2bw", [1, 1, 1], 2)
    with pytest.raises(PlanError, match="2 microbatches between two updates, while 3 are in flight at stage 0"):
        build_program(plan, graph)


def test_stages_that_share_a_parameter_are_refused():
    graph = chain_graph(3, tied=True)
    plan = replace(make_plan(graph, even_bounds(3, 3), [1, 1, 1], 6), schedule="pipedream")
    with pytest.raises(PlanError, match=r"stages \[0, 2\] share the parameter"):
        build_program(plan, graph)


def test_files_of_orders_know_no_versions():
    plan, _ = endless_plan("pipedream", [1, 1], 4)
    with pytest.raises(PlanError, match="weights change between its actions, but a file of orders has no updates"):
        write_orders(plan, compute_orders(plan))


def test_versions_exist_when_they_are_used_whatever_the_replicas():
    """The middle stage is further behind than the first one."""
    plan, graph = endless_plan("pipedream-vertical", [1, 3, 1], 6)
    for _, instructions in compute_streams(build_program(plan, graph), 2):
        Rank(instructions).run()


def test_frozen_stages_stay_at_version_0():
    plan, graph = endless_plan("pipedream", [1, 1, 1], 4, frozen=1)
    (_, first), *_ = compute_streams(build_program(plan, graph), 3)
    assert {type(item) for item in first} == {Forward}
    assert {item.version for item in first} == {0}
