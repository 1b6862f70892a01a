"""Stages on unequal devices: against brute force over all orders of devices, cuts and groups, and closed forms."""

import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.methods.unequal import (
    KEEPS_ALL,
    KEEPS_ONE,
    KEEPS_SOME,
    MappingProblem,
    find_classes,
    find_groups,
    optimal_shares,
    solve_mapping,
)
from meshwright.spec import PlanError, load_cluster
from tests.marks import examples


def interval_sums(weights):
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    return np.maximum(sums[None, :] - sums[:-1, None], 0.0)


def problem_of(costs, speeds, sizes, num_microbatches, groups, **changes):
    """Classes of these sizes and speeds, without memory, transfers or exchange; groups as counts by class."""
    num_layers, num_classes = len(costs), len(sizes)
    sets = list(dict.fromkeys(tuple(count > 0 for count in group) for group in groups))
    seconds = np.stack([interval_sums(costs) / speed for speed in speeds])
    nothing = np.zeros((num_layers, num_layers + 1))
    problem = MappingProblem(
        num_microbatches=num_microbatches,
        num_fills=1,
        keeps=KEEPS_ALL,
        overlap=False,
        bucket_bytes=1.0,
        seconds=seconds,
        backward_s=seconds * (2 / 3),
        optimizer_s=seconds * 0,
        zero=0,
        static_bytes=nothing,
        shared_bytes=nothing,
        flight_bytes=nothing,
        leaving_bytes=nothing,
        input_bytes=nothing,
        beside_bytes=nothing,
        most_bytes=np.zeros((2, num_layers, num_layers + 1, 4)),
        exchange_bytes=nothing,
        kind_of=np.arange(num_classes),
        memory_limit=np.full(num_classes, np.inf),
        sizes=np.array(sizes, np.int64),
        counts=np.array(groups, np.int64),
        set_of=np.array([sets.index(tuple(count > 0 for count in group)) for group in groups], np.int64),
        latency_s=np.zeros(len(groups)),
        bucket_s=np.zeros(len(groups)),
        link_of=np.zeros((len(sets), len(sets)), np.int64),
        transfer_s=np.zeros((1, num_layers)),
    )
    return problem._replace(**changes)


def dealt(seconds, num_microbatches):
    """One microbatch for each device, every further one to the device that is done with it first."""
    shares = [1] * len(seconds)
    heap = sorted((2 * item, place) for place, item in enumerate(seconds))
    for _ in range(num_microbatches - len(seconds)):
        _, place = heapq.heappop(heap)
        shares[place] += 1
        heapq.heappush(heap, ((shares[place] + 1) * seconds[place], place))
    return shares


def moments(p, i, j, exchanged, count, held):
    """The largest moment of a step: as many in flight as may be, then one backward for one forward."""
    forward, first, later, step = p.most_bytes[int(exchanged), i, j]
    each = p.flight_bytes[i, j] + p.leaving_bytes[i, j]
    gradients = now = started = done = 0
    levels = []
    while done < count:
        if started < count and started - done < held:
            levels.append(now + gradients + forward)
            now, started = now + each, started + 1
            continue
        levels.append(now + gradients + (later if done else first))
        now, done, gradients = now - each, done + 1, (0 if exchanged else p.exchange_bytes[i, j])
    return max(*levels, step + gradients)


def stage_cost(p, group, before, i, j, behind):
    """First and busy seconds of a stage; None if a device of it has too little memory."""
    counts, num_ranks = p.counts[group], int(p.counts[group].sum())
    classes = [k for k, count in enumerate(counts) for _ in range(count)]
    if num_ranks > p.num_microbatches:
        return None
    times = [p.seconds[p.kind_of[k], i, j] for k in classes]
    shares = dealt(times, p.num_microbatches)
    for k, share in zip(classes, shares, strict=True):
        most = max(s for c, s in zip(classes, shares, strict=True) if c == k)
        held = {
            KEEPS_ONE: 1,
            KEEPS_ALL: most,
            KEEPS_SOME: min(most, 1 + math.ceil(behind * most / p.num_microbatches)),
        }[p.keeps]
        always = p.static_bytes[i, j] - p.shared_bytes[i, j] * (1 - 1 / num_ranks)
        always += most * p.input_bytes[i, j] + p.beside_bytes[i, j]
        always += p.exchange_bytes[i, j] if num_ranks > 1 else 0
        if always + moments(p, i, j, num_ranks > 1, most, held) > p.memory_limit[k] or share > most:
            return None
    x = p.transfer_s[p.link_of[before, p.set_of[group]], i] if i else 0.0
    exchange = 0.0
    if num_ranks > 1 and p.exchange_bytes[i, j]:
        whole, rest = divmod(p.exchange_bytes[i, j], p.bucket_bytes)
        last = p.bucket_s[group]
        exchange = whole * last
        if rest:
            share = rest / p.bucket_bytes
            last = p.latency_s[group] * (1 - share) + p.bucket_s[group] * share
            exchange += last
        if p.overlap:
            exchange = max(exchange - min(p.backward_s[p.kind_of[k], i, j] for k in classes), last)
    optimizer = max(p.optimizer_s[p.kind_of[k], i, j] for k in classes) / (num_ranks if p.zero else 1)
    busy = max(share * max(time, x) for share, time in zip(shares, times, strict=True))
    return p.num_fills * (min(times) + x), busy - p.num_fills * max(min(times), x) + exchange + optimizer


def sequences(p, left):
    """All orders of groups that use what is left of each class exactly."""
    if not any(left):
        yield ()
    for group, counts in enumerate(p.counts.tolist()):
        if all(count <= have for count, have in zip(counts, left, strict=True)):
            rest = tuple(have - count for count, have in zip(counts, left, strict=True))
            yield from ((group, *others) for others in sequences(p, rest))


def brute_force(p):
    best = math.inf
    for groups in sequences(p, tuple(p.sizes.tolist())):
        if len(groups) > p.num_layers:
            continue
        for cuts in itertools.combinations(range(1, p.num_layers), len(groups) - 1):
            edges = (0, *cuts, p.num_layers)
            total, busiest, before = 0.0, -math.inf, 0
            for place, (group, i, j) in enumerate(zip(groups, edges, edges[1:], strict=False)):
                behind = sum(int(p.counts[later].sum()) for later in groups[place + 1 :])
                cost = stage_cost(p, group, before, i, j, behind)
                if cost is None:
                    break
                total, busiest, before = total + cost[0], max(busiest, cost[1]), p.set_of[group]
            else:
                best = min(best, total + busiest)
    return best


@st.composite
def problems(draw):
    num_layers = draw(st.integers(1, 5))
    sizes = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    whole = st.integers(0, 9).map(float)

    def column(values=whole):
        return np.array([draw(values) for _ in range(num_layers)])

    singles = [tuple(c * (k == own) for k in range(len(sizes))) for own in range(len(sizes)) for c in (1, 2)]
    groups = [group for group in singles if max(group) <= sizes[group.index(max(group))]]
    groups = list(dict.fromkeys([*groups, sizes, *([(1,) * len(sizes)] if len(sizes) > 1 else [])]))
    num_sets = len({tuple(count > 0 for count in group) for group in groups})
    num_links = draw(st.integers(1, 3))
    transfers = np.array([[0.0, *(draw(st.integers(0, 20)) for _ in range(num_layers - 1))] for _ in range(num_links)])
    costs = 1.0 + column(st.integers(1, 9).map(float))
    speeds = [draw(st.sampled_from([1.0, 2.0, 4.0, 5.0])) for _ in sizes]
    return problem_of(
        costs,
        speeds,
        sizes,
        draw(st.integers(1, 7)),
        groups,
        num_fills=draw(st.integers(0, 1)),
        keeps=draw(st.sampled_from([KEEPS_ONE, KEEPS_SOME, KEEPS_ALL])),
        overlap=draw(st.booleans()),
        zero=draw(st.integers(0, 1)),
        bucket_bytes=4.0,
        optimizer_s=np.stack([interval_sums(column()) for _ in sizes]),
        static_bytes=2 * interval_sums(column()),
        shared_bytes=interval_sums(column(st.just(1.0))),
        flight_bytes=interval_sums(column()),
        leaving_bytes=interval_sums(column()),
        input_bytes=interval_sums(column()),
        beside_bytes=interval_sums(column()),
        most_bytes=np.stack([interval_sums(column()) for _ in range(8)])
        .reshape(2, 4, num_layers, -1)
        .transpose(0, 2, 3, 1),
        exchange_bytes=interval_sums(column()),
        memory_limit=np.array([draw(st.sampled_from([40.0, 120.0, 300.0, np.inf])) for _ in sizes]),
        latency_s=np.array([draw(st.integers(0, 2)) for _ in groups], np.float64),
        bucket_s=np.array([draw(st.integers(2, 9)) for _ in groups], np.float64),
        link_of=np.array([[draw(st.integers(0, num_links - 1)) for _ in range(num_sets)] for _ in range(num_sets)]),
        transfer_s=transfers,
    )


@pytest.mark.long
@settings(max_examples=examples(150), deadline=None)
@given(problems())
def test_the_cheapest_of_all_orders_cuts_and_groups_is_found(problem):
    found, best = solve_mapping(problem), brute_force(problem)
    if found is None:
        assert best == math.inf
        return
    assert found.seconds == pytest.approx(best, rel=1e-9)
    total, busiest, before = 0.0, -math.inf, 0
    for place, (group, (i, j)) in enumerate(zip(found.groups, found.bounds, strict=True)):
        behind = sum(int(problem.counts[later].sum()) for later in found.groups[place + 1 :])
        first, busy = stage_cost(problem, group, before, i, j, behind)
        total, busiest, before = total + first, max(busiest, busy), problem.set_of[group]
    assert total + busiest == pytest.approx(best, rel=1e-9)
    assert (problem.counts[list(found.groups)].sum(axis=0) == problem.sizes).all()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 7))
def test_shares_are_the_best_of_all(seconds, more):
    num_microbatches = len(seconds) + more
    shares = optimal_shares([float(item) for item in seconds], num_microbatches)
    ways = (
        way
        for way in itertools.product(range(1, num_microbatches + 1), repeat=len(seconds))
        if sum(way) == num_microbatches
    )
    assert sum(shares) == num_microbatches
    assert min(shares) >= 1
    assert max(m * t for m, t in zip(shares, seconds, strict=True)) == min(
        max(m * t for m, t in zip(way, seconds, strict=True)) for way in ways
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 500))
def test_shares_are_those_of_one_microbatch_after_the_other(seconds, more):
    assert optimal_shares(seconds, len(seconds) + more) == tuple(dealt(seconds, len(seconds) + more))


def test_two_fast_devices_get_twice_the_layers():
    # Layers of 1 s at speed 1; devices of speeds 2 and 1; 8 layers cut in 5 + 3 or so, the fast device has more.
    found = solve_mapping(problem_of([1.0] * 9, [2.0, 1.0], (1, 1), 64, [(1, 0), (0, 1)]))
    lengths = {group: j - i for group, (i, j) in zip(found.groups, found.bounds, strict=True)}
    assert lengths == {0: 6, 1: 3}
    assert found.bottleneck_s == pytest.approx(63 * 3.0)


def test_bad_shares_are_refused():
    with pytest.raises(PlanError, match="2 microbatches cannot be divided among 3 devices"):
        optimal_shares([1.0, 2.0, 3.0], 2)
    with pytest.raises(PlanError, match="positive times"):
        optimal_shares([1.0, 0.0], 2)


def test_too_many_states_are_refused():
    with pytest.raises(PlanError, match="exact mapping, whose tables have at most"):
        solve_mapping(problem_of([1.0] * 40, [1.0] * 4, (40,) * 4, 64, [(1, 0, 0, 0)]))


def test_classes_are_devices_of_one_kind_in_one_node():
    cluster = load_cluster("2x4xA100")
    assert [item.ranks for item in find_classes(cluster)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [item.ranks for item in find_classes(cluster, merged=True)] == [tuple(range(8))]
    assert find_classes(cluster, merged=True)[0].per_node == 4
    groups = find_groups(cluster, find_classes(cluster), 8)
    assert set(groups) == {(k, 0) for k in range(1, 5)} | {(0, k) for k in range(1, 5)} | {(1, 1), (2, 2), (4, 4)}
    assert all(sum(group) <= 3 for group in find_groups(cluster, find_classes(cluster), 3))
