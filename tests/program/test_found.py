"""Found orders: never slower than a named one, the optimum where it is known, and the limits are kept."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import (
    SCHEDULES,
    Order,
    StageTimes,
    build_program,
    compute_orders,
    find_orders,
    with_schedule,
    write_orders,
)
from meshwright.program.order_bounds import Columns, play
from meshwright.program.order_search import GreedyRule, make_problem, write_greedily
from meshwright.spec import Opcode, PlanError, with_branches
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.program.layouts import plan_of
from tests.program.order_oracle import all_orders, length_of, most_held


def rows_of(columns):
    """Each rank's rows as the oracle reads them."""
    return [
        [(*row, bool(joint)) for row, joint in zip(each.table().tolist(), each.joint.tolist(), strict=True)]
        for each in columns
    ]


def edges_of(plan):
    return [(stage, target) for stage in range(len(plan.stages)) for target in plan.feeds(stage)]


@st.composite
def branched(draw, stages, count, replicas):
    """(plan, graph) of so many stages, each of which reads any of those before it; the last one often all that is."""
    read = [draw(st.sets(st.integers(0, stage - 1), min_size=1, max_size=2)) for stage in range(1, stages)]
    if draw(st.booleans()):
        read[-1] |= set(range(stages - 1)) - set().union(*read)
    reads = {stage: min(own) for stage, own in enumerate(read, 1)}
    skips = tuple((source, stage) for stage, own in enumerate(read, 1) for source in sorted(own)[1:])
    graph = chain_graph(stages, reads=reads, skips=skips)
    numbers = draw(st.lists(st.integers(1, replicas), min_size=stages, max_size=stages))
    return with_branches(make_plan(graph, even_bounds(stages, stages), numbers, count), graph), graph


@st.composite
def problems(draw):
    """(plan, graph, times) of a layout, stages that differ, and limits from too little to plenty."""
    schedule = draw(st.sampled_from(["branches", "branches", "1f1b", "zb-v", "interleaved", "dualpipe"]))
    positions = draw(st.sampled_from([2, 4])) if schedule == "dualpipe" else draw(st.integers(1, 4))
    count = 2 * draw(st.integers(1, 6))
    replicas = 1 if schedule == "dualpipe" else draw(st.sampled_from([1, 1, 2]))
    if schedule == "branches":
        plan, graph = draw(branched(positions + 1, count * replicas, replicas))
    else:
        plan, graph = plan_of(schedule, positions, count * replicas, num_replicas=replicas)
    stages, edges = len(plan.stages), len(edges_of(plan))

    def numbers(low, high, size):
        return draw(st.lists(st.integers(low, high), min_size=size, max_size=size))

    kept = numbers(1, 3, stages)
    own = [sum(kept[stage] for stage in plan.stages_of(rank)) for rank in range(plan.num_ranks)]
    times = StageTimes(
        forward_ps=numbers(1, 20, stages),
        inputs_ps=numbers(0, 20, stages),
        weights_ps=numbers(0, 20, stages),
        sending_ps=numbers(0, 9, edges),
        returning_ps=numbers(0, 9, edges),
        kept_bytes=kept,
        limit_bytes=[each * draw(st.integers(1, 2 * positions)) for each in own],
    )
    return plan, graph, times


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems(), whole=st.booleans())
@pytest.mark.long
def test_nothing_named_that_fits_is_shorter(problem, whole):
    plan, _, times = problem
    seconds = [
        [kinds] * plan.num_ranks for kinds in zip(times.forward_ps, times.inputs_ps, times.weights_ps, strict=True)
    ]
    ranks = [stage.ranks for stage in plan.stages]
    layout = (ranks, seconds, times.sending_ps, times.returning_ps, edges_of(plan))
    lengths = {}
    for name in SCHEDULES:
        try:
            rows = rows_of([order.columns for order in compute_orders(with_schedule(plan, name))])
        except PlanError:
            continue
        fits = all(most_held(own, times.kept_bytes) <= most for own, most in zip(rows, times.limit_bytes, strict=True))
        in_parts = any(row[0] == Opcode.BACKWARD_INPUT for own in rows for row in own)
        if fits and not (whole and in_parts):
            lengths[name] = length_of(rows, *layout)
    try:
        found = find_orders(plan, times, whole=whole)
    except PlanError:
        found = None
    if found is None:
        assert not lengths
        return
    assert found.named_ps == lengths
    rows = rows_of(found.columns)
    assert found.length_ps == length_of(rows, *layout)
    assert found.bound_ps <= found.length_ps <= min(lengths.values(), default=found.length_ps)
    for own, most in zip(rows, times.limit_bytes, strict=True):
        assert most_held(own, times.kept_bytes) <= most
        assert not whole or all(row[0] in (Opcode.FORWARD, Opcode.BACKWARD) for row in own)


@settings(max_examples=examples(60), deadline=None)
@given(
    problem=problems(),
    rule=st.builds(
        GreedyRule,
        *map(st.sampled_from, ((True, False), (True, False), (0.0, 0.5), (0.0, 1.0), (-1, 0), (True, False))),
    ),
)
def test_the_clock_of_the_list_scheduler_is_never_ahead(problem, rule):
    """Nothing starts before all that it needs is there: played as early as can be, no order ends later."""
    plan, _, times = problem
    made = make_problem(plan, times)
    counts = np.add.reduceat(made.seat_count, made.seat_offsets[:-1]) * (3 if rule.split else 2)
    columns = Columns(np.cumsum([0, *counts]), *np.zeros((4, counts.sum()), np.int64))
    length = write_greedily(made, made.limit, rule, columns)
    assert length < 0 or 0 <= play(made, columns, np.empty(counts.sum(), np.int64)) <= length


@settings(max_examples=examples(25), deadline=None)
@given(problem=problems())
def test_what_is_found_keeps_every_rule(tmp_path_factory, problem):
    plan, graph, times = problem
    try:
        found = find_orders(plan, times)
    except PlanError:
        return
    again = find_orders(plan, times)
    assert again.columns == found.columns
    orders = tuple(Order(rank=rank, columns=columns) for rank, columns in enumerate(found.columns))
    path = tmp_path_factory.mktemp("found") / "found.csv"
    path.write_text(write_orders(plan, orders).text, newline="")
    # Read back, each rank is held against the rules, and all ranks are played together.
    program = build_program(with_schedule(plan, str(path)), graph)
    check_program(program)


def shortest_of(count, most, seconds, sending, returning, edges=None):
    """The length of the shortest of all orders there are of stages on one rank each."""
    ranks = [(stage,) for stage in range(len(seconds))]
    layout = (ranks, [[own] * len(seconds) for own in seconds], sending, returning, edges)
    shortest = None
    for orders in itertools.product(*(list(all_orders(stage, count, most[stage])) for (stage,) in ranks)):
        try:
            length = length_of(orders, *layout)
        except RecursionError:  # the ranks wait in a circle
            continue
        shortest = length if shortest is None else min(shortest, length)
    return shortest


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.matrix
def test_the_best_of_all_orders_of_two_short_stages_is_found(seed):
    rng = np.random.default_rng(seed)
    count = 1 + seed % 3
    most = rng.integers(1, count + 1, 2).tolist()
    seconds = rng.integers(seed % 2, 12, (2, 3)).tolist()
    sending, returning = rng.integers(0, 6, (2, 1)).tolist()
    shortest = shortest_of(count, most, seconds, sending, returning)
    plan, _ = plan_of("1f1b", 2, count)
    forward, inputs, weights = zip(*seconds, strict=True)
    found = find_orders(
        plan,
        StageTimes(
            forward_ps=forward,
            inputs_ps=inputs,
            weights_ps=weights,
            sending_ps=sending,
            returning_ps=returning,
            kept_bytes=1,
            limit_bytes=most,
        ),
    )
    assert found.length_ps == shortest
    assert found.bound_ps <= shortest


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), stages=st.integers(3, 4), count=st.integers(1, 2))
@pytest.mark.long
def test_no_order_of_short_stages_on_branches_is_below_the_bound(data, stages, count):
    plan, _ = data.draw(branched(stages, count, 1))
    edges = edges_of(plan)

    def numbers(low, high, *size):
        return np.array(data.draw(st.lists(st.integers(low, high), min_size=prod(size), max_size=prod(size)))).reshape(
            size
        )

    seconds, away = numbers(0, 9, stages, 3).tolist(), numbers(0, 5, 2, len(edges)).tolist()
    most = numbers(1, count, stages).tolist()
    shortest = shortest_of(count, most, seconds, *away, edges)
    forward, inputs, weights = zip(*seconds, strict=True)
    times = StageTimes(
        forward_ps=forward,
        inputs_ps=inputs,
        weights_ps=weights,
        sending_ps=away[0],
        returning_ps=away[1],
        kept_bytes=1,
        limit_bytes=most,
    )
    found = find_orders(plan, times)
    assert found.bound_ps <= shortest <= found.length_ps
    assert all(length >= found.length_ps for length in found.named_ps.values())
    if count == 1:
        assert found.bound_ps == shortest == found.length_ps


@pytest.mark.parametrize(("positions", "count"), [(2, 6), (4, 12), (8, 32), (8, 64)])
@pytest.mark.matrix
def test_closed_forms(positions, count):
    plan, _ = plan_of("1f1b", positions, count)
    forward, inputs, weights = 70, 90, 50
    times = {"forward_ps": forward, "inputs_ps": inputs, "weights_ps": weights, "kept_bytes": 1}
    stages = {name: [value] * positions for name, value in times.items()}
    work = count * (forward + inputs + weights)
    # No bubble but the way of the first microbatch to the last stage (Qi et al., section 2.3) ...
    free = find_orders(plan, StageTimes(**stages, limit_bytes=2 * positions))
    assert free.length_ps == free.bound_ps == work + (positions - 1) * forward
    # ... with whole backwards the bubble of 1F1B, in the memory of 1F1B ...
    limits = [positions - stage for stage in range(positions)]
    whole = find_orders(plan, StageTimes(**stages, limit_bytes=limits), whole=True)
    assert whole.length_ps == whole.bound_ps == work + (positions - 1) * (forward + inputs + weights)
    # ... which is not exceeded where there is more of it ...
    unlimited = find_orders(plan, StageTimes(**stages), whole=True)
    assert unlimited.length_ps == whole.length_ps
    assert sum(most_held(own, [1] * positions) for own in rows_of(unlimited.columns)) <= sum(limits)
    # ... and with one microbatch at a time on the first rank its round trips in a row.
    alone = find_orders(plan, StageTimes(**stages, limit_bytes=1))
    trip = positions * (forward + inputs) + weights
    assert alone.bound_ps == count * trip
    assert alone.length_ps <= count * (trip + weights)


def test_unequal_stages_and_ranks():
    graph = chain_graph(2)
    plan = make_plan(graph, even_bounds(2, 2), [2, 1], 8)
    # Rank 1 computes the first stage three times slower than rank 0: rank 2 is behind both.
    found = find_orders(
        plan,
        StageTimes(
            forward_ps=[[10, 30, 0], [0, 0, 4]], inputs_ps=[[10, 30, 0], [0, 0, 4]], weights_ps=[[10, 30, 0], [0, 0, 4]]
        ),
    )
    assert found.length_ps == found.bound_ps == 4 * 3 * 30
    assert [int((columns.opcode == Opcode.FORWARD).sum()) for columns in found.columns] == [4, 4, 8]
    # Of equal ones that hold as much it is a named one.
    assert found.length_ps == found.named_ps[found.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_ps": [1, 2, 3]}, r"forward_ps has shape \(3, 1\); expected \(2, 2\)"),
        ({"inputs_ps": [1, -2]}, r"inputs_ps has the number -2; expected 0 or more"),
        ({"sending_ps": [1, 2]}, r"sending_ps has shape \(2,\); expected \(1,\)"),
        ({"limit_bytes": [5, 9]}, r"No order of 4 microbatches was found within the memory of each rank \(5, 9 bytes"),
    ],
)
def test_times_that_cannot_be_meant(changes, message):
    plan, _ = plan_of("1f1b", 2, 4)
    times = {"forward_ps": [1, 2], "inputs_ps": [1, 2], "weights_ps": [1, 2], "kept_bytes": 6}
    with pytest.raises(PlanError, match=message):
        find_orders(plan, StageTimes(**(times | changes)))
