"""Named schedules against closed forms, torch's own action lists, and the rules that all of them keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import SCHEDULES, build_program, compute_orders, max_in_flight, picture_schedule
from meshwright.program.schedules.asynchronous import _RULES
from meshwright.program.schedules.seats import ORDER_WRITERS
from meshwright.spec import Opcode, PlanError
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES, NAMED_SCHEDULES
from tests.marks import examples
from tests.program.check import check_program
from tests.program.layouts import LAYOUTS, plan_of

_RELEASING = (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)
_LETTERS = {Opcode.FORWARD: "F", Opcode.BACKWARD: "B", Opcode.BACKWARD_INPUT: "I", Opcode.BACKWARD_WEIGHT: "W"}


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(sorted(LAYOUTS)))
    positions = draw(st.integers(1, 6))
    if schedule == "dualpipe":
        positions += positions % 2
    least = 2 * positions if schedule.startswith("dualpipe") else 1
    count = draw(st.integers(least, least + 12))
    if schedule == "dualpipe":
        count += count % 2
    replicas = 1 if schedule == "dualpipe" else draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 4))
    if schedule == "interleaved":
        count -= count % max(1, count // positions)
    return schedule, positions, count, chunks, replicas


@settings(max_examples=examples(150), deadline=None)
@given(layouts())
def test_every_schedule_runs_each_microbatch_once_and_keeps_every_rule(layout):
    schedule, positions, count, chunks, replicas = layout
    plan, graph = plan_of(schedule, positions, count * replicas, num_chunks=chunks, num_replicas=replicas)
    program = build_program(plan, graph)
    check_program(program)
    timeline = picture_schedule(plan)
    ran = list(zip(timeline.opcode.tolist(), timeline.stage.tolist(), timeline.microbatch.tolist(), strict=True))
    assert len(set(ran)) == len(ran)
    pairs = {(stage, microbatch) for stage in range(len(plan.stages)) for microbatch in range(plan.num_microbatches)}
    for kinds in (
        (Opcode.FORWARD,),
        (Opcode.BACKWARD, Opcode.BACKWARD_INPUT),
        (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT),
    ):
        assert sorted((stage, m) for opcode, stage, m in ran if opcode in kinds) == sorted(pairs)


def _slots(schedule: str, positions: int, count: int, **layout) -> int:
    return int(picture_schedule(plan_of(schedule, positions, count, **layout)[0]).end_ps.max())


@pytest.mark.parametrize(("positions", "count"), [(2, 8), (4, 8), (4, 17), (8, 32)])
def test_closed_forms(positions, count):
    """A forward, the input's and the weights' gradients take a slot each; sources in planners_simulators, section 3."""
    forward = inputs = weights = 1
    whole = inputs + weights
    busy = count * (forward + whole)
    for schedule in ("gpipe", "1f1b"):
        assert _slots(schedule, positions, count) == busy + (positions - 1) * (forward + whole)
    assert _slots("zb-h1", positions, count) == busy + (positions - 1) * (forward + whole - 2 * weights)
    rounds = count - count % positions
    for chunks in (2, 3):
        found = _slots("interleaved", positions, rounds, num_chunks=chunks)
        # v times as many stages, each of which takes a slot: the bubble of one pipeline, over v times the work.
        assert found == chunks * rounds * (forward + whole) + (positions - 1) * (forward + whole)


@pytest.mark.parametrize("positions", [2, 4, 8])
def test_zero_bubble_schedules_leave_no_rank_idle_once_it_began(positions):
    for schedule in ("zb-h2", "zb-v"):
        timeline = picture_schedule(plan_of(schedule, positions, 4 * positions)[0])
        for track in range(positions):
            mine = timeline.track == track
            spans = timeline.end_ps[mine] - timeline.start_ps[mine]
            assert timeline.end_ps[mine].max() - timeline.start_ps[mine].min() == spans.sum(), (schedule, track)


@pytest.mark.parametrize("positions", [2, 4, 6, 8])
def test_dualpipe_has_the_bubble_that_its_authors_state(positions):
    """(PP/2 - 1)(F&B + B - 3W), with F&B = F + B; the folded one has as many stages on half of the devices."""
    forward = weights = 1
    backward = 2
    bubble = (positions // 2 - 1) * (forward + backward + backward - 3 * weights)
    count = 4 * positions
    assert _slots("dualpipe", positions, count) == count * (forward + backward) + bubble
    assert _slots("dualpipe-v", positions // 2, count) == 2 * count * (forward + backward) + bubble


def _written(plan) -> list[list[str]]:
    """Each rank's order in torch's words: ``0F3``."""
    return [
        [f"{stage}{_LETTERS[Opcode(opcode)]}{m}" for opcode, stage, m in order.columns.table().tolist()]
        for order in compute_orders(plan)
    ]


def test_orders_are_those_of_torch():
    from tests.program.torch_schedules import torch_actions

    for schedule in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-v", "dualpipe-v"):
        for positions, count, chunks in ((2, 4, 2), (2, 8, 3), (4, 8, 2), (4, 16, 2), (3, 9, 4)):
            if schedule == "dualpipe-v" and count < 2 * positions:
                continue
            plan, _ = plan_of(schedule, positions, count, num_chunks=chunks)
            ours, theirs = _written(plan), torch_actions(schedule, positions, count, chunks)
            if schedule == "1f1b":
                # torch 2.13 prints the last rank's forwards one too high (F1 to F4 of four microbatches).
                ours, theirs = ours[:-1], theirs[:-1]
            assert ours == theirs, (schedule, positions, count)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 24), (6, 12)])
def test_a_rank_keeps_what_the_table_of_schedules_says(p, m):
    """docs/concepts/schedules.md, in stages of a rank; that of dualpipe is its authors' PP + 1."""
    expected = {
        "gpipe": [m] * p,
        "1f1b": [p - i for i in range(p)],
        "zb-h1": [p] * p,
        "zb-h2": [2 * p - 1] * p,
        "interleaved": [2 * p + p - 1 - 2 * i for i in range(p)],
        "looped-bfs": [2 * m] * p,
        "zb-v": [2 * p] * p,
        "dualpipe": [p + 1] * p,
        "dualpipe-v": [2 * p + 1] * p,
    }
    assert expected.keys() == SCHEDULES.keys()
    for schedule, counts in expected.items():
        orders = [order.columns.opcode for order in compute_orders(plan_of(schedule, p, m)[0])]
        steps = [(kinds == Opcode.FORWARD).astype(int) - np.isin(kinds, _RELEASING) for kinds in orders]
        assert [int(np.cumsum(each).max()) for each in steps] == counts, schedule
    busy = 3 * m
    assert _slots("looped-bfs", p, m) == 2 * busy + (p - 1) * 3


def test_every_row_has_its_function():
    """A name without a row would be found by nobody, and a row without orders fails when a plan has it."""
    assert ORDER_WRITERS.keys() == SCHEDULES.keys()
    assert set(_RULES) == set(ASYNCHRONOUS_SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 24)])
def test_facts_of_a_schedule_are_those_of_its_orders(schedule, p, m):
    facts = NAMED_SCHEDULES[schedule]
    orders = [order.columns for order in compute_orders(plan_of(schedule, p, m)[0])]
    assert any((columns.opcode == Opcode.BACKWARD_INPUT).any() for columns in orders) == facts.splits_backward
    flights = []
    for columns in orders:
        ends = np.isin(columns.opcode, (Opcode.BACKWARD, Opcode.BACKWARD_INPUT))
        flights.append(int(np.cumsum((columns.opcode == Opcode.FORWARD).astype(int) - ends).max()))
    chunks = 1 if facts.layout == "single" else 2
    known = {
        "all": [chunks * m] * p,
        "1f1b": [(chunks - 1) * p + (p - i - 1) * chunks + 1 for i in range(p)],
    }
    if facts.in_flight != "own":
        assert flights == known[facts.in_flight]
    else:
        assert flights not in known.values()


def test_activations_in_flight():
    p, m = 4, 16
    held = {
        name: [max_in_flight(plan, s) for s in range(len(plan.stages))]
        for name in SCHEDULES
        if (plan := plan_of(name, p, m)[0])
    }
    assert held["gpipe"] == [m] * p
    assert held["1f1b"] == [4, 3, 2, 1]
    assert max(held["zb-h1"]) == p
    assert max(held["zb-h2"]) == 2 * p - 1
    # Two stages on a rank, each half as large: at most 2p of them, the memory of 1F1B.
    for name in ("zb-v", "dualpipe-v"):
        assert max(a + b for a, b in zip(held[name], held[name][::-1], strict=True)) <= 2 * p + 1
    assert held["dualpipe"] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "ranks", "count", "message"),
    [
        ("interleaved", [(0,), (1,), (0,)], 4, "number of stages that 2 divides"),
        ("interleaved", [(0,), (1,), (1,), (0,)], 4, "stages i and i \\+ 2 on the same ranks"),
        ("interleaved", [(0,), (1,), (0,), (1,)], 5, "4 or 6 microbatches"),
        ("looped-bfs", [(0, 1), (2,)], 4, "same number of replicas"),
        ("zb-v", [(0,), (1,), (0,), (1,)], 4, "stage i with stage 3 - i"),
        ("dualpipe-v", [(0,), (1,), (1,), (0,)], 3, "at least 4 to fill both directions"),
        ("dualpipe", [(0,), (1,)], 4, "two replicas each"),
        ("dualpipe", [(0, 1), (1, 0)], 3, "even number"),
        ("1f1b", [(0,), (1,), (0,)], 4, "one stage on every rank"),
        ("zb-h1", [(0, 1), (2,)], 4, "same number of replicas"),
    ],
)
def test_layouts_that_a_schedule_does_not_take_are_refused(schedule, ranks, count, message):
    from dataclasses import replace

    from meshwright.spec import StagePlan
    from tests.graphs import chain_graph, even_bounds, make_plan

    graph = chain_graph(len(ranks))
    bounds = even_bounds(len(ranks), len(ranks))
    plan = make_plan(graph, bounds, [1] * len(ranks), count)
    stages = tuple(StagePlan(start=a, stop=b, ranks=own) for (a, b), own in zip(bounds, ranks, strict=True))
    with pytest.raises(PlanError, match=message):
        build_program(replace(plan, stages=stages, schedule=schedule), graph)


def test_columns_of_an_order_are_its_items():
    for order in compute_orders(plan_of("dualpipe", 4, 8)[0]):
        assert len(order.items) == len(order)
        assert np.array_equal([item.microbatch for item in order.items], order.columns.microbatch)
