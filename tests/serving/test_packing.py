"""Squishy bin packing: what a table says is checked by the definition, and its number of devices by brute force."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.serving.policies.packing import BATCH, CYCLE, DEVICE_OF, LOAD, MODEL_OF, SHARE, pack, pack_all, spread
from meshwright.serving.policies.pool import NEVER
from tests.marks import examples


@given(st.integers(1, 9), st.integers(1, 9))
def test_where_nothing_fits_all_models_and_all_devices_have_their_turn(num_models, num_devices):
    """No batch of one ends before half of its SLO, so that no two models share a device."""
    latency, slo = np.tile([0, 100, 150], (num_models, 1)), np.full(num_models, 120)
    table = np.zeros((num_models + num_devices, 6))
    most, rates = np.full(num_models, 2), np.full(num_models, 1e-9)
    facts = latency.ravel().copy(), 3, most, slo
    if num_models > num_devices:
        assert pack_all(*facts, rates, np.zeros(num_models), num_devices, table) == 0
    rows = table[: spread(*facts, num_devices, table)]
    assert set(rows[:, MODEL_OF]) == set(range(num_models))
    assert set(rows[:, DEVICE_OF]) == set(range(num_devices))
    assert len({tuple(row) for row in rows[:, :2].tolist()}) == len(rows) == max(num_models, num_devices)
    assert set(rows[:, BATCH]) == {1}


@st.composite
def cases(draw, most_models=4, most_rate=2.5):
    """(latencies, largest batches, SLOs in ns, rates per ns, shares of memory) of some models.

    Two batches of one fit into each SLO, and each model into a device.
    """
    num_models = draw(st.integers(1, most_models))
    largest = [draw(st.integers(1, 16)) for _ in range(num_models)]
    latency = np.full((num_models, max(largest) + 1), NEVER)
    slo, rates = [], []
    for model in range(num_models):
        alpha, beta = draw(st.integers(1, 3000)), draw(st.integers(0, 9000))
        sizes = np.arange(largest[model] + 1)
        latency[model, : largest[model] + 1] = 1000 * (alpha * sizes + beta)
        slo.append(int(latency[model, 1] * draw(st.floats(2, 30))) + 1)
        # As a multiple of what one device serves in batches of one.
        rates.append(draw(st.just(0.0) | st.floats(1e-4, most_rate)) / float(latency[model, 1]))
    memory = draw(st.just([0.0] * num_models) | st.lists(st.floats(0, 1), min_size=num_models, max_size=num_models))
    return latency, np.array(largest), np.array(slo), np.array(rates), np.array(memory)


def packed(case, num_devices, function=pack):
    latency, largest, slo, rates, memory = case
    table = np.zeros((len(rates) + num_devices, 6))
    count = function(latency.ravel().copy(), latency.shape[1], largest, slo, rates, memory, num_devices, table)
    return count, table[: max(count, 0)]


def saturating(latency, slo):
    return max(batch for batch in range(1, len(latency)) if batch == 1 or 2 * latency[batch] <= slo)


def check(case, table, num_devices, multiple=1.0):
    """Is what a table says possible, and enough for the rates?"""
    latency, _, slo, rates, memory = case
    assert set(table[:, DEVICE_OF]) <= set(range(num_devices))
    for device in set(table[:, DEVICE_OF]):
        rows = table[table[:, DEVICE_OF] == device]
        cycle = rows[0, CYCLE]
        assert sum(memory[int(row[MODEL_OF])] for row in rows) <= 1 + 1e-6
        assert (rows[:, CYCLE] == cycle).all()
        used = sum(latency[int(row[MODEL_OF]), int(row[BATCH])] for row in rows)
        assert used <= cycle * (1 + 1e-9)
        assert np.allclose(rows[:, LOAD], used / cycle)
        for row in rows:
            model, batch = int(row[MODEL_OF]), int(row[BATCH])
            assert 1 <= batch <= saturating(latency[model], slo[model])
            length = latency[model, batch]
            is_whole = len(rows) == 1 and cycle == length
            assert 2 * length <= slo[model] if is_whole else cycle + length <= slo[model] * (1 + 1e-9)
            # A batch in each cycle keeps pace, but for the thousandth of a request of the published code.
            assert batch >= row[SHARE] * cycle - 1.1e-3
    for model, rate in enumerate(rates):
        share = table[table[:, MODEL_OF] == model, SHARE].sum()
        assert share == np.float64(rate * multiple) or math.isclose(share, rate * multiple, rel_tol=1e-6)


@given(cases(), st.integers(1, 12))
@settings(max_examples=examples(200))
def test_what_is_packed_is_possible(case, num_devices):
    count, table = packed(case, num_devices)
    latency, _, slo, rates, _ = case
    whole = residues = 0
    for model, rate in enumerate(rates):
        full = saturating(latency[model], slo[model])
        needed = rate * latency[model, full] / full
        assume(abs(needed - round(needed)) > 1e-6 or rate == 0)
        whole += int(needed)
        residues += needed > int(needed)
    if count >= 0:
        check(case, table, num_devices)
        assert len(set(table[:, DEVICE_OF])) >= whole + (residues > 0)
    else:
        # Each on a device of its own would always do.
        assert num_devices < whole + residues


def partitions(items):
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


@given(cases(most_models=3, most_rate=0.9))
@settings(max_examples=examples(200))
def test_what_could_be_together_by_no_partition_is_not_refused_wrongly(case):
    """Models of parts of devices only: no packing has fewer devices than the best partition, by its own cycles."""
    latency, largest, slo, rates, memory = case
    cycles = {}
    for model, rate in enumerate(rates):
        if rate > 0:
            full = saturating(latency[model], slo[model])
            assume(rate * latency[model, full] / full < 1)
            batch = max(b for b in range(1, full + 1) if b == 1 or (b - 1) / rate + latency[model, b] <= slo[model])
            cycles[model] = min(float(slo[model] - latency[model, batch]), batch / rate)

    def fits(group):
        cycle = min(cycles[model] for model in group)
        batches = [max(math.ceil(cycle * rates[model] - 1e-3), 1) for model in group]
        if any(batch > largest[model] for model, batch in zip(group, batches, strict=True)):
            return False
        lengths = [latency[model, batch] for model, batch in zip(group, batches, strict=True)]
        in_time = all(cycle + length <= slo[model] for model, length in zip(group, lengths, strict=True))
        is_held = sum(memory[model] for model in group) <= 1 + 1e-9
        return len(group) == 1 or (in_time and sum(lengths) <= cycle and is_held)

    best = min(len(groups) for groups in partitions(list(cycles)) if all(map(fits, groups)))
    needed = next(devices for devices in range(1, 9) if packed(case, devices)[0] >= 0)
    assert max(best, 1) <= needed <= max(len(cycles), 1)
    if len(cycles) <= 2:
        assert needed == max(best, 1)


@given(cases(), st.integers(4, 12))
def test_the_multiple_is_possible_and_the_one_where_halving_ends(case, num_devices):
    latency, largest, slo, rates, memory = case
    assume(rates.any())
    count, table = packed(case, num_devices, pack_all)
    assert count > 0
    model = int(table[0, MODEL_OF])
    multiple = table[table[:, MODEL_OF] == model, SHARE].sum() / rates[model]
    check(case, table, num_devices, multiple)

    def fits(factor):
        return packed((latency, largest, slo, rates * factor, memory), num_devices)[0] >= 0

    low, high = 0.0, 1.0
    while high < 1e6 and fits(high):
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    # A greedy packing may do for some more what it does not for less: nothing is said of higher multiples.
    assert multiple == pytest.approx(low, rel=1e-6)


def test_a_rate_beyond_all_numbers_needs_more_devices_than_there_are():
    case = (np.array([[0, 8 * 10**13]]), np.array([1]), np.array([2 * 10**14]), np.array([1e7]), np.zeros(1))
    assert packed(case, 3)[0] == -1
    assert packed(case, 3, pack_all)[0] == 0
