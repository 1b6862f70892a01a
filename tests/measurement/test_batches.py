"""Batches of small real models: what is called, how often, in which order; memory that is lacking; merged tables."""

import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.measurement import is_out_of_memory, measure_batches, merge_measurements
from meshwright.measurement import op_batches as module
from meshwright.spec import BatchMeasurement, MeasurementError, Measurements, OpMeasurement
from tests.events import SeenEvents


class Noted(nn.Module):
    """A small classifier that writes down how it was called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
        self.calls = []

    def forward(self, inputs, scale=1.0):
        modes = (self.training, self.layers[1].training, torch.is_inference_mode_enabled(), torch.get_num_threads())
        self.calls.append((len(inputs), *modes))
        return self.layers(inputs) * scale


def inputs(batch_size):
    return (torch.ones(batch_size, 8),)


def test_sizes_take_turns_in_inference_mode():
    model = Noted()
    model.layers[1].eval()
    threads = torch.get_num_threads()
    seen = SeenEvents()
    found = measure_batches(model, inputs, (4, 1, 2, 4), name="noted", repeats=3, events=seen)
    assert [(row.model, row.batch_size, row.num_samples) for row in found] == [
        ("noted", 1, 3),
        ("noted", 2, 3),
        ("noted", 4, 3),
    ]
    assert [call[0] for call in model.calls] == [1, 1, 2, 2, 4, 4] + [1, 2, 4] * 3
    assert {call[1:] for call in model.calls} == {(False, False, True, threads)}
    assert seen.seen[-1] == ("measure batches of noted", 3, 3)
    # As it was: the model in training, its dropout not.
    assert (model.training, model.layers[0].training, model.layers[1].training) == (True, True, False)


def test_percentiles_are_those_of_the_samples_without_the_warm_up(monkeypatch):
    warm_up = [50.0, 50.0] * 2
    samples = {1: [1.0 + 0.37 * (7 * k % 20) for k in range(20)], 2: [2.0 + k**2 for k in range(20)]}
    told = iter([*warm_up, *(samples[size][k] for k in range(20) for size in (1, 2))])
    monkeypatch.setattr(module, "_seconds", lambda *_: next(told))
    for row in measure_batches(Noted(), inputs, [1, 2], name="m", repeats=20):
        cuts = statistics.quantiles(samples[row.batch_size], n=100, method="inclusive")
        assert (row.seconds, row.p90_s, row.p99_s) == pytest.approx((cuts[49], cuts[89], cuts[98]))
        assert row.num_samples == 20


@pytest.mark.parametrize(("budget_s", "repeats", "num_samples"), [(0.0, 50, 3), (1e9, 25, 25)])
def test_the_budget_decides_how_often(budget_s, repeats, num_samples):
    rows = measure_batches(Noted(), inputs, [1, 3], name="m", repeats=repeats, budget_s=budget_s)
    assert [row.num_samples for row in rows] == [num_samples] * 2


def test_arguments_may_have_names():
    model = Noted()
    measure_batches(
        model, lambda size: {"inputs": torch.ones(size, 8), "scale": torch.tensor(2.0)}, [3], name="m", repeats=3
    )
    assert {call[0] for call in model.calls} == {3}


class Hungry(nn.Module):
    """Runs out of memory from a batch size on, as torch does."""

    def __init__(self, most, fail):
        super().__init__()
        self.most, self.fail = most, fail

    def forward(self, inputs):
        if len(inputs) > self.most:
            self.fail()
        return inputs


def of_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def of_a_library():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def of_a_processor():
    torch.empty(2**50)


@pytest.mark.parametrize("fail", [of_a_gpu, of_a_library, of_a_processor])
def test_sizes_that_do_not_fit_are_left_out_and_named(fail):
    seen = SeenEvents()
    found = measure_batches(Hungry(2, fail), inputs, [1, 2, 4, 8], name="m", repeats=3, events=seen)
    assert [row.batch_size for row in found] == [1, 2]
    assert [value for name, value, _ in seen.seen if name == "left_out_batch_size"] == [4, 8]
    with pytest.raises(MeasurementError, match=r"m and a batch of 4 do not fit in the memory of cpu"):
        measure_batches(Hungry(2, fail), inputs, [4, 8], name="m", repeats=3)


def test_inputs_that_do_not_fit_are_left_out_too():
    found = measure_batches(nn.Identity(), lambda size: (torch.empty(size**60),), [1, 2], name="m", repeats=3)
    assert [row.batch_size for row in found] == [1]


def test_other_errors_are_no_lack_of_memory():
    model = Hungry(2, lambda: torch.ones(2) @ torch.ones(3))
    with pytest.raises(MeasurementError, match=r"m raised RuntimeError for a batch of 4: .*any number of samples"):
        measure_batches(model, inputs, [1, 4], name="m", repeats=3)
    assert model.training
    assert not is_out_of_memory(ValueError("no"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    ("sizes", "repeats", "told"),
    [([], 3, "expected sizes of at least 1"), ([1, 0], 3, "expected sizes of at least 1"), ([1], 2, "at least 3")],
)
def test_what_cannot_be_timed(sizes, repeats, told):
    model = Noted()
    with pytest.raises(MeasurementError, match=told):
        measure_batches(model, inputs, sizes, name="m", repeats=repeats)
    assert not model.calls


@pytest.mark.gpu
def test_a_gpu_is_waited_for():
    class Slow(nn.Module):
        def forward(self, inputs):
            torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second at 2 GHz
            return inputs

    (row,) = measure_batches(Slow(), inputs, [2], name="m", device="cuda:0", repeats=3)
    assert row.seconds > 0.01  # the call itself returns within microseconds


def batch(model, batch_size, seconds):
    return BatchMeasurement(
        model=model, batch_size=batch_size, seconds=seconds, p90_s=2 * seconds, p99_s=3 * seconds, num_samples=20
    )


def table(*rows, conditions="", **facts):
    return Measurements(device="cpu", software="s", date="d", conditions=conditions, batches=rows, **facts)


def test_newer_batches_replace_older_ones_of_the_same_model_and_size():
    old = table(batch("a", 1, 1.0), batch("a", 2, 2.0), batch("b", 1, 3.0))
    new = table(batch("a", 2, 9.0), batch("b", 2, 4.0))
    merged = merge_measurements(old, new)
    assert {(row.model, row.batch_size): row.seconds for row in merged.batches} == {
        ("a", 1): 1.0,
        ("a", 2): 9.0,
        ("b", 1): 3.0,
        ("b", 2): 4.0,
    }
    assert merge_measurements(old, table()).batches == old.batches
    assert merge_measurements(table(), new).batches == new.batches


def test_conditions_say_of_ops_and_of_batches_how_each_was_timed():
    op = OpMeasurement(key="k", forward_s=1.0, backward_s=1.0, num_samples=1)
    ops = table(ops=(op,), conditions="EPYC; 2 processes")
    batches = table(batch("a", 1, 1.0), conditions="batches of a: one thread")
    both = merge_measurements(ops, batches)
    assert both.conditions == "EPYC; 2 processes; batches of a: one thread"
    assert (both.ops, both.batches) == (ops.ops, batches.batches)
    assert merge_measurements(both, batches).conditions == both.conditions
    assert merge_measurements(batches, ops).conditions == both.conditions
    anew = replace(ops, conditions="EPYC; 4 processes")
    assert merge_measurements(both, anew).conditions == "EPYC; 4 processes; batches of a: one thread"
