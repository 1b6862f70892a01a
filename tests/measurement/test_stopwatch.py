"""Who is charged for what: ops that move a clock by known amounts, forward, backward and while gradients accumulate."""

import numpy as np
import pytest
import torch
from torch import fx, nn

from meshwright.measurement import Segment
from meshwright.measurement import clocks as clock
from meshwright.measurement import clocks as stopwatch
from meshwright.measurement import op_timing as ops
from tests.measurement.sources import perceptron

SECOND = 10**9


class Clock:
    """Stands still unless an op moves it."""

    def __init__(self):
        self.now = 0

    def perf_counter_ns(self):
        return self.now

    def perf_counter(self):
        return self.now / SECOND


@pytest.fixture
def hand(monkeypatch):
    """A clock that replaces the real one; what timing itself costs is then nothing."""
    hand = Clock()
    monkeypatch.setattr(stopwatch, "time", hand)
    monkeypatch.setattr(clock, "time", hand)
    monkeypatch.setattr(ops, "time", hand)
    clock.clock_overhead.cache_clear()
    yield hand
    clock.clock_overhead.cache_clear()


def ticking(hand):
    """An op that takes ``forward`` and ``backward`` seconds; each input gets a gradient."""

    class Tick(torch.autograd.Function):
        @staticmethod
        def forward(context, forward, backward, *tensors):
            hand.now += forward * SECOND
            context.backward, context.count = backward, len(tensors)
            return sum(tensors).clone()

        @staticmethod
        def backward(context, gradient):
            hand.now += context.backward * SECOND
            return (None, None, *(gradient.clone() for _ in range(context.count)))

    def tick(*args):
        return Tick.apply(*args)

    return tick


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def segment(hand):
    """y = tick(x, w: 1 s, 2 s), z = tick(y: 3 s, 4 s), out = tick(y, z: 5 s, 6 s); y is read twice."""
    tick, graph = ticking(hand), fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    y = graph.call_function(tick, (1, 2, x, weight), name="first")
    z = graph.call_function(tick, (3, 4, y), name="second")
    graph.output((graph.call_function(tick, (5, 6, y, z), name="third"),))
    owner = Weighted()
    return Segment(
        module=fx.GraphModule(owner, graph),
        feeds=(torch.ones(3),),
        keys={name: name for name in ("first", "second", "third")},
        differentiable=(True,),
        training=True,
    )


def test_every_op_is_charged_with_its_own_seconds(hand):
    runner = stopwatch.SegmentRunner(segment(hand))
    assert runner.names == ("first", "second", "third")
    assert runner.timed_forward().tolist() == [1, 3, 5]
    total, accumulate = runner.timed_backward()
    assert total.tolist() == [2, 4, 6]
    assert accumulate.tolist() == [0, 0, 0]


def test_the_whole_pass_takes_what_its_ops_take(hand):
    runner = stopwatch.SegmentRunner(segment(hand))
    assert (runner.forward(), runner.backward()) == (9, 12)


def test_accumulation_is_charged_to_the_op_that_uses_the_parameter(hand):
    piece = segment(hand)

    def add(parameter):
        if float(parameter.grad.max()) > 1:  # the first gradient is 2/3, the sum of two is more
            hand.now += 7 * SECOND

    piece.module.weight.register_post_accumulate_grad_hook(add)
    runner = stopwatch.SegmentRunner(piece)
    repetition = ops._one_repetition([runner])
    assert repetition.whole == (9, 12)
    assert repetition.by_op.tolist() == [[1, 3, 5], [2, 4, 6], [7, 0, 0]]


def test_timing_a_pass_leaves_the_gradients_of_a_real_one():
    whole, timed = (stopwatch.SegmentRunner(ops.build_segments(perceptron(4), 4, max_bytes=2**30)[0]) for _ in range(2))
    whole.forward()
    whole.backward()
    timed.timed_forward()
    timed.timed_backward()
    pairs = zip(whole._segment.module.parameters(), timed._segment.module.parameters(), strict=True)
    differences = [float((one.grad - other.grad).abs().max()) for one, other in pairs]
    assert len(differences) == 4
    assert max(differences) == 0.0


def test_inference_has_no_backward(hand):
    piece = segment(hand)
    still = Segment(module=piece.module, feeds=piece.feeds, keys=piece.keys, differentiable=(False,), training=False)
    repetition = ops._one_repetition([stopwatch.SegmentRunner(still)])
    assert repetition.whole == (9, 0)
    assert repetition.by_op[1:].sum() == 0


def test_typical_times_add_up_and_ops_of_one_key_share_a_mean():
    # Repetitions 0 and 3 have the smallest and the largest total; the middle half is 1 and 2.
    forward = np.array([[0, 0], [1, 3], [2, 6], [50, 50]], float)
    by_op = np.stack([forward, 2 * forward, 0 * forward], axis=1)
    run = ops._summarise(["same", "same"], by_op[:, :2].sum(axis=2), by_op)
    (row,) = run.ops
    assert (row.forward_s, row.backward_s, row.accumulate_s, row.num_samples) == (3.0, 6.0, 0.0, 8)
    assert (run.forward_s, run.backward_s) == (6.0, 12.0)
    assert run.residual == 0.0


def test_what_the_sums_miss_is_the_residual():
    by_op = np.ones((4, 3, 2))
    run = ops._summarise(["a", "b"], np.full((4, 2), 2.5), by_op)
    assert run.residual == pytest.approx(0.2)


def test_every_distinct_op_of_a_model_is_measured():
    source = perceptron(4)
    run = ops.measure_ops(source, 4, repeats=3)
    kinds = {row.key.partition("(")[0] for row in run.ops}
    assert kinds == {op.kind for op in source.graph.ops}
    assert len(run.ops) == len({row.key for row in run.ops})
    assert all(row.forward_s > 0 for row in run.ops)
    assert all(row.backward_s > 0 for row in run.ops)
    assert all(row.num_samples == 3 for row in run.ops)


def test_a_budget_that_is_spent_leaves_three_repetitions():
    assert {row.num_samples for row in ops.measure_ops(perceptron(4), 4, repeats=50, budget_s=0.0).ops} == {3}


def test_the_company_is_waited_for_before_each_repetition_and_decides_their_number():
    class Company:
        def __init__(self):
            self.waits, self.offers = 0, []

        def wait(self):
            self.waits += 1

        def agree(self, count):
            self.offers.append(count)
            return 4

    company = Company()
    rows = ops.measure_ops(perceptron(4), 4, repeats=6, company=company).ops
    assert {row.num_samples for row in rows} == {4}
    assert (company.waits, company.offers) == (4, [6])
