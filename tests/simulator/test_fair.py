"""Fair sharing of links: rates by definition, small cases by hand. Whole programs: test_engine.py."""

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_program
from meshwright.simulator.engine import run_network
from meshwright.simulator.sharing import UNITS, enter_links, fill, leave_links, make_flows
from meshwright.simulator.unroll import unroll
from meshwright.spec import Opcode
from tests.marks import examples
from tests.simulator import oracle_fair
from tests.simulator.builders import ends_by_name, forward, program_of, random_program, reduction, transfer

seeds = st.integers(0, 2**31)


def simulate(rows, num_ranks, durations, routes, groups=()):
    program, costs = program_of([[], rows, []], num_ranks, durations, routes, groups)
    return simulate_program(program, costs, contention="fair")


@pytest.mark.parametrize("num_transfers", [1, 2, 3, 22])
def test_equal_transfers_share_a_link_equally(num_transfers):
    rows = []
    for rank in range(num_transfers):
        rows += transfer(rank, rank + 1, rank, waits=[], cost=1, route=0)
    timeline = simulate(rows, num_transfers + 1, [0, 10], [[0]])
    sends = timeline.opcode == Opcode.SEND_ACTIVATION
    assert set(timeline.end_ps[sends].tolist()) == {10 * num_transfers}
    assert set(timeline.start_ps[sends].tolist()) == {0}


def test_who_comes_later_shares_and_who_leaves_gives_back():
    """Alone until 4 (16 left), half each until 24 (b is done, 6 left), alone again until 30; a third waits for b."""
    late = forward(1, cost=1)
    a = transfer(0, 2, 0, waits=[], cost=3, route=0)
    b = transfer(1, 2, 1, waits=[late], cost=2, route=0)
    after = forward(2, cost=1, waits=[b[0]])
    ends = ends_by_name(simulate([late, *a, *b, after], 3, [0, 4, 10, 20], [[0]]))
    assert ends["1: send 1→2.1"] == 24
    assert ends["0: send 0→2.0"] == 30
    assert ends["2: F2.0"] == 28


def test_what_a_slow_transfer_leaves_goes_to_the_others():
    """Three on link 1 get 1/3 each, so the one that has link 0 with one of these gets 2/3."""
    rows = [*transfer(0, 1, 0, waits=[], cost=2, route=0), *transfer(1, 2, 1, waits=[], cost=1, route=1)]
    rows += [*transfer(2, 3, 2, waits=[], cost=1, route=2), *transfer(3, 0, 3, waits=[], cost=1, route=2)]
    ends = ends_by_name(simulate(rows, 4, [0, 10, 20], [[0], [0, 1], [1]]))
    assert [ends[name] for name in ("0: send 0→1.0", "1: send 1→2.1", "2: send 2→3.2", "3: send 3→0.3")] == [30] * 4


def test_a_mark_is_raised_when_its_work_is_done():
    """Two share a link; 5 of 10 ps of work are done at 10, and at 12 where a third one joins at 6."""
    for third, moment in ((False, 10), (True, 12)):
        first, second = (transfer(rank, 3, rank, waits=[], cost=1, route=0) for rank in (0, 1))
        watcher = forward(3, cost=0, waits=[(first[0], 5)])
        late = forward(2, cost=2)
        more = [*transfer(2, 3, 2, waits=[late], cost=1, route=0)] if third else []
        ends = ends_by_name(simulate([*first, *second, watcher, late, *more], 4, [0, 10, 6], [[0]]))
        assert ends["3: F3.0"] == moment


def test_a_collective_is_one_transfer():
    """It begins with its last member, and shares as one: from 5 on half, until the send is done at 15."""
    late = forward(1, cost=1)
    rows = [late, reduction(0, waits=[], cost=2, route=0), reduction(1, waits=[late], cost=2, route=0)]
    timeline = simulate([*rows, *transfer(0, 1, 0, waits=[], cost=2, route=0)], 2, [0, 5, 10], [[0]], [(0, 1)])
    ends = ends_by_name(timeline)
    assert ends["0: send 0→1.0"] == 15
    assert ends["0: all-reduce 0 #0"] == ends["1: all-reduce 1 #0"] == 20
    assert set(timeline.start_ps[timeline.opcode == Opcode.ALL_REDUCE].tolist()) == {5}


def test_days_do_not_overflow():
    day = 86_400 * 10**12
    rows = [*transfer(0, 1, 0, waits=[], cost=1, route=0), *transfer(1, 0, 1, waits=[], cost=1, route=0)]
    rows += transfer(2, 0, 2, waits=[], cost=1, route=0)
    assert int(simulate(rows, 3, [0, 10 * day + 1], [[0]]).end_ps.max()) == 30 * day + 3


def random_routes(rng, num_links):
    return {
        t: tuple(rng.sample(range(num_links), rng.randint(1, min(3, num_links)))) for t in range(rng.randint(1, 12))
    }


def enter_all(routes, num_links):
    flows = make_flows(np.full(len(routes), 3), num_links)
    for transfer_, links in routes.items():
        route_links = np.array(links, np.int32)
        enter_links(*flows[:4], flows.counts, transfer_, route_links, 0, len(links))
    return flows


def rates_of(flows, routes):
    return {t: int(flows.transfers[t]["rate"]) for t in routes}


@settings(max_examples=examples(300))
@given(seed=seeds)
def test_rates_are_those_of_progressive_filling_and_max_min_fair(seed):
    rng = random.Random(seed)
    num_links = rng.randint(1, 6)
    routes = random_routes(rng, num_links)
    flows = enter_all(routes, num_links)
    assert sorted(flows.connected[: fill(*flows)].tolist()) == sorted(routes)
    rates = rates_of(flows, routes)
    assert rates == oracle_fair.fill_links(routes)
    exact = exact_rates(routes)
    # Whoever gives way by rounding does so by one part per transfer and round at most.
    assert all(abs(Fraction(rates[t], UNITS) - exact[t]) * UNITS <= len(routes) ** 2 for t in routes)
    for t, links in routes.items():
        users = [[other for other in routes if link in routes[other]] for link in links]
        assert all(sum(rates[other] for other in group) <= UNITS for group in users)
        assert any(
            sum(exact[other] for other in group) == 1 and max(exact[other] for other in group) == exact[t]
            for group in users
        )


def exact_rates(routes):
    """Raise all open rates together until a link is full; then those on it are settled. In fractions."""
    rates, level = {}, Fraction(0)
    while len(rates) < len(routes):
        rises = {}
        for link in {link for links in routes.values() for link in links}:
            users = [t for t in routes if link in routes[t]]
            open_users = [t for t in users if t not in rates]
            if open_users:
                taken = sum(rates.get(t, level) for t in users)
                rises[link] = (1 - taken) / len(open_users)
        rise = min(rises.values())
        level += rise
        full = {link for link in rises if rises[link] == rise}
        rates.update({t: level for t in routes if t not in rates and full.intersection(routes[t])})
    return rates


@settings(max_examples=examples(200))
@given(seed=seeds)
def test_only_what_is_connected_is_filled_anew(seed):
    rng = random.Random(seed)
    num_links = rng.randint(2, 12)
    routes = random_routes(rng, num_links)
    flows = enter_all(routes, num_links)
    fill(*flows)
    gone = rng.choice(sorted(routes))
    links = routes.pop(gone)
    before = rates_of(flows, routes)
    leave_links(*flows[:4], flows.counts, gone)
    touched = flows.connected[: fill(*flows)].tolist()
    connected, grown = set(links), True
    while grown:
        reached = {link for other in routes.values() if connected.intersection(other) for link in other} | connected
        grown, connected = reached != connected, reached
    assert sorted(touched) == [t for t in sorted(routes) if connected.intersection(routes[t])]
    after = rates_of(flows, routes)
    assert all(after[t] == before[t] for t in routes if t not in touched)
    assert after == oracle_fair.fill_links(routes)


@settings(max_examples=examples(200))
@given(seed=seeds, size=st.integers(5, 40))
def test_numbers_of_links_mean_nothing(seed, size):
    program, costs = random_program(seed, size)
    unrolled = unroll(program, costs, 2)
    network = unrolled.network
    order = np.random.default_rng(seed).permutation(unrolled.num_links).astype(np.int32)
    other = network._replace(route_links=order[network.route_links])
    one, two = (run_network(each, unrolled.num_links, "fair") for each in (network, other))
    assert all(np.array_equal(a, b) for a, b in zip(one[:3], two[:3], strict=True))
