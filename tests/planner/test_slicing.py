"""The slicing solver against brute force, the notebook's instances, and closed forms."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner import SlicingProblem, solve_slicing
from tests.marks import examples


def interval_sums(weights):
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    return np.maximum(sums[None, :] - sums[:-1, None], 0.0)


def kept(num_microbatches, num_ranks, *, everything):
    """Microbatches in flight of r replicas behind a ranks: all that they have (GPipe), or 1F1B's."""
    table = np.zeros((num_ranks, num_ranks + 1), np.int64)
    for a, r in itertools.product(range(num_ranks), range(1, num_ranks + 1)):
        rounds = math.ceil(num_microbatches / r)
        table[a, r] = rounds if everything else min(rounds, math.ceil((num_ranks - a) / r))
    return table


def chain(costs, num_ranks, num_microbatches, **changes):
    """A problem of one device kind, without memory, transfers or exchange."""
    num_layers = len(costs)
    seconds = interval_sums(costs)[None]
    nothing = np.zeros((num_layers, num_layers + 1))
    places = (num_ranks, num_ranks + 1)
    problem = SlicingProblem(
        num_microbatches=num_microbatches,
        num_fills=1,
        in_flight=kept(num_microbatches, num_ranks, everything=True),
        overlap=False,
        bucket_bytes=1.0,
        seconds=seconds,
        backward_s=seconds * (2 / 3),
        optimizer_s=seconds * 0,
        zero=0,
        shard_size=0,
        passes_wait=False,
        pass_bytes=nothing,
        shared_bytes=nothing,
        alone_bytes=nothing,
        static_bytes=nothing,
        flight_bytes=nothing,
        leaving_bytes=nothing,
        input_bytes=nothing,
        beside_bytes=nothing,
        most_bytes=np.zeros((2, num_layers, num_layers + 1, 4)),
        exchange_bytes=nothing,
        transfer_s=np.zeros((1, num_layers)),
        kind_of=np.zeros(places, np.int64),
        link_of=np.zeros(places, np.int64),
        memory_limit=np.full(places, np.inf),
        latency_s=np.zeros(places),
        bucket_s=np.zeros(places),
        shared_s=np.zeros(places),
    )
    return problem._replace(**changes)


def compositions(total, parts):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def memory_by_moments(p, i, j, a, r, n):
    """Every moment of a step in its order, up to as many microbatches in flight as there are, then one by one."""
    forward, first, later, step = p.most_bytes[int(r > 1), i, j]
    each, held = p.flight_bytes[i, j] + p.leaving_bytes[i, j], int(p.in_flight[a, r])
    gradients = now = started = done = 0
    levels = []
    while done < n:
        if started < n and started - done < held:
            levels.append(now + gradients + forward)
            now, started = now + each, started + 1
            continue
        levels.append(now + gradients + (later if done else first))
        # Where replicas exchange them, gradients lie in buckets, which are there all the time.
        now, done, gradients = now - each, done + 1, (0 if r > 1 else p.exchange_bytes[i, j])
    levels.append(step + gradients)
    always = p.static_bytes[i, j] + n * p.input_bytes[i, j] + p.beside_bytes[i, j]
    return always + max(levels) + (p.exchange_bytes[i, j] if r > 1 else 0)


def cost_of(p, lengths, takes):
    """The objective of the module's docstring, stage by stage; None if a stage does not fit."""
    i = a = 0
    total, busiest = 0.0, 0.0
    for length, r in zip(lengths, takes, strict=True):
        j, n, k = i + length, math.ceil(p.num_microbatches / r), p.kind_of[a, r]
        if r > p.num_microbatches:
            return None
        if memory_by_moments(p, i, j, a, r, n) > p.memory_limit[a, r]:
            return None
        t, x, exchange = p.seconds[k, i, j], p.transfer_s[p.link_of[a, r], i], 0.0
        if r > 1 and p.exchange_bytes[i, j]:
            whole, rest = divmod(p.exchange_bytes[i, j], p.bucket_bytes)
            last = p.bucket_s[a, r]
            exchange = whole * last
            if rest:
                share = rest / p.bucket_bytes
                last = p.latency_s[a, r] * (1 - share) + p.bucket_s[a, r] * share
                exchange += last
            if p.overlap:
                exchange = max(exchange - p.backward_s[k, i, j], last)
        total += (t + x) * p.num_fills
        passing = p.pass_bytes[i, j] / p.bucket_bytes * p.shared_s[a, r] if r > 1 else 0.0
        period = max(t + passing if p.passes_wait else max(t, passing), x)
        busiest = max(busiest, (n - p.num_fills) * period + exchange + p.optimizer_s[k, i, j])
        i, a = j, a + r
    return total + busiest


def brute_force(p, replicas=None, num_stages=None):
    best = math.inf
    for parts in [num_stages] if num_stages else range(1, min(p.num_layers, p.num_ranks) + 1):
        for lengths in compositions(p.num_layers, parts):
            for takes in compositions(p.num_ranks, parts):
                if replicas and not set(takes) <= set(replicas):
                    continue
                cost = cost_of(p, lengths, takes)
                best = min(best, math.inf if cost is None else cost)
    return best


@st.composite
def problems(draw):
    num_layers, num_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    coarse = draw(st.booleans())  # equal layers make many ties

    def numbers(*shape):
        return rng.integers(0, 4, shape).astype(float) if coarse else rng.uniform(0, 4, shape)

    num_kinds, num_links = 2, 2
    backward = np.stack([interval_sums(numbers(num_layers)) for _ in range(num_kinds)])
    forward = np.stack([interval_sums(numbers(num_layers)) for _ in range(num_kinds)])
    transfer = numbers(num_links, num_layers)
    transfer[:, 0] = 0
    places = (num_ranks, num_ranks + 1)
    tight = draw(st.booleans())
    num_microbatches = draw(st.integers(1, 7))
    return SlicingProblem(
        num_microbatches=num_microbatches,
        num_fills=draw(st.integers(0, 1)),
        in_flight=kept(num_microbatches, num_ranks, everything=draw(st.booleans())),
        overlap=draw(st.booleans()),
        bucket_bytes=float(rng.uniform(0.5, 5)),
        seconds=forward + backward,
        backward_s=backward,
        optimizer_s=np.stack([interval_sums(numbers(num_layers)) for _ in range(num_kinds)]),
        zero=0,
        shard_size=0,
        passes_wait=draw(st.booleans()),
        pass_bytes=interval_sums(numbers(num_layers)) * draw(st.sampled_from([0.0, 1.0])),
        shared_bytes=np.zeros((num_layers, num_layers + 1)),
        alone_bytes=np.zeros((num_layers, num_layers + 1)),
        static_bytes=interval_sums(numbers(num_layers)),
        flight_bytes=interval_sums(numbers(num_layers)),
        leaving_bytes=numbers(num_layers, num_layers + 1),
        beside_bytes=numbers(num_layers, num_layers + 1) * 0.1,
        input_bytes=interval_sums(numbers(num_layers)) * 0.1,
        most_bytes=numbers(2, num_layers, num_layers + 1, 4),
        exchange_bytes=interval_sums(numbers(num_layers)),
        transfer_s=transfer,
        kind_of=rng.integers(0, num_kinds, places),
        link_of=rng.integers(0, num_links, places),
        memory_limit=rng.uniform(4, 40, places) if tight else np.full(places, np.inf),
        latency_s=rng.uniform(0, 0.5, places),
        bucket_s=rng.uniform(0.5, 2, places),
        shared_s=rng.uniform(0.5, 2, places),
    )


@settings(max_examples=examples(300), deadline=None)
@given(problems(), st.sampled_from([None, (1,), (1, 2), (2, 3)]), st.integers(0, 4))
def test_equals_brute_force(problem, replicas, num_stages):
    expected = brute_force(problem, replicas, num_stages)
    found = solve_slicing(problem, replicas=replicas, num_stages=num_stages or None)
    if found is None:
        assert expected == math.inf
        return
    assert found.seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert sum(found.replicas) == problem.num_ranks
    lengths = [stop - start for start, stop in found.bounds]
    assert cost_of(problem, lengths, found.replicas) == pytest.approx(found.seconds, rel=1e-9, abs=1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(problems(), st.sampled_from([1, 2]), st.integers(0, 2**32 - 1))
def test_equals_brute_force_for_any_counts_in_flight_of_equal_stages(problem, replicas, seed):
    counts = np.random.default_rng(seed).integers(1, 6, problem.in_flight.shape)
    problem = problem._replace(in_flight=counts)
    expected = brute_force(problem, (replicas,))
    found = solve_slicing(problem, replicas=(replicas,))
    assert (math.inf if found is None else found.seconds) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=examples(50), deadline=None)
@given(problems(), st.floats(0.5, 1.5))
def test_cutoff_only_hides_what_is_not_below_it(problem, share):
    best = solve_slicing(problem)
    if best is None:
        assert solve_slicing(problem, cutoff_s=1e9) is None
        return
    cutoff_s = best.seconds * share
    found = solve_slicing(problem, cutoff_s=cutoff_s)
    if found is None:
        assert best.seconds >= cutoff_s * (1 - 1e-9)
    else:
        assert found.seconds < cutoff_s
        assert found.seconds == pytest.approx(best.seconds, rel=1e-9)


def test_nothing_is_below_a_cutoff_of_zero():
    instantaneous = chain(np.zeros(2), 2, 3)
    assert solve_slicing(instantaneous).seconds == 0.0
    assert solve_slicing(instantaneous, cutoff_s=0.0) is None
    assert solve_slicing(instantaneous, cutoff_s=1e-9).seconds == 0.0


def notebook_optimum(costs, cuts, num_stages, num_microbatches):
    """Least (B - 1) max + sum of cut costs, by the plain program over (layer, cuts made, maximum allowed)."""
    num_layers = len(costs)
    prefix = [0, *itertools.accumulate(costs)]
    best = math.inf
    for most in sorted({prefix[j] - prefix[i] for i in range(num_layers) for j in range(i + 1, num_layers + 1)}):
        least = {0: 0.0}
        for stage in range(num_stages):
            following = {}
            for i, so_far in least.items():
                for j in range(i + 1, num_layers + 1):
                    if prefix[j] - prefix[i] > most:
                        break
                    if j == num_layers and stage < num_stages - 1:
                        break
                    cut = cuts[j - 1][stage] if stage < num_stages - 1 else 0.0
                    following[j] = min(following.get(j, math.inf), so_far + cut)
            least = following
        if num_layers in least:
            best = min(best, least[num_layers] + (num_microbatches - 1) * most)
    return best


@pytest.mark.parametrize(("num_layers", "num_stages"), [(12, 4), (24, 8), (36, 12), (128, 50)])
@pytest.mark.matrix
def test_notebook_instances(num_layers, num_stages):
    """Sizes of pipeDejavu's notebook (B = 3, cut costs that depend on the cut and on its place)."""
    rng = np.random.default_rng(num_layers)
    costs = rng.integers(1, 50, num_layers).astype(float)
    cuts = rng.integers(1, 20, (num_layers - 1, num_stages)).astype(float)
    transfer = np.zeros((num_stages, num_layers))
    transfer[1:, 1:] = cuts.T[: num_stages - 1]
    places = np.repeat(np.arange(num_stages)[:, None], num_stages + 1, axis=1)
    problem = chain(costs, num_stages, 3, transfer_s=transfer, link_of=places)
    found = solve_slicing(problem, replicas=(1,))
    assert len(found.bounds) == num_stages
    if num_layers <= 36:
        assert found.seconds - costs.sum() == notebook_optimum(costs, cuts.tolist(), num_stages, 3)
    again = solve_slicing(problem, num_stages=num_stages)
    assert again == found


def test_equal_layers_are_cut_equally():
    found = solve_slicing(chain(np.ones(12), 4, 8), replicas=(1,))
    assert found.bounds == ((0, 3), (3, 6), (6, 9), (9, 12))
    assert found.seconds == (8 + 4 - 1) * 3.0


def test_a_heavy_layer_gets_the_replicas():
    found = solve_slicing(chain(np.array([1.0, 3.0]), 4, 12))
    # 1 + 3 + max(11 * 1, 3 * 3) beats data parallelism's 3 * 4 = 12 only where it can: here it cannot.
    assert found.seconds == brute_force(chain(np.array([1.0, 3.0]), 4, 12)) == 12.0
    without = solve_slicing(chain(np.array([1.0, 3.0]), 4, 12), num_stages=2)
    assert without.replicas == (1, 3)


def test_data_parallelism_costs_rounds_times_the_model():
    found = solve_slicing(chain(np.ones(5), 4, 10), num_stages=1)
    assert found.seconds == math.ceil(10 / 4) * 5.0


def test_1f1b_fits_where_gpipe_does_not():
    held = interval_sums(np.ones(4))
    limit = np.full((4, 5), 4.0)
    gpipe = chain(np.ones(4), 4, 8, flight_bytes=held, memory_limit=limit)
    assert solve_slicing(gpipe, replicas=(1,)) is None
    assert solve_slicing(gpipe._replace(in_flight=kept(8, 4, everything=False)), replicas=(1,)) is not None


def test_more_replicas_than_microbatches_are_never_used():
    assert solve_slicing(chain(np.ones(1), 4, 3)) is None
    assert solve_slicing(chain(np.ones(2), 4, 3)).replicas in {(1, 3), (2, 2), (3, 1)}
