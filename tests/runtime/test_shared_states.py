"""Replicas that share out states: statistics and frozen weights, what each holds, what is refused.

That they train as one process does is in `test_teams`.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.runtime import open_session
from meshwright.runtime.optimizer_steps import check_elementwise
from meshwright.spec import PlanError, StagePlan
from tests.rank_results import read_results
from tests.runtime.shared_states_worker import Blocks, capture, plan_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return read_results("tests.runtime.shared_states_worker", 2, tmp_path_factory.mktemp("shared"))


@pytest.mark.distributed
@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_statistics_and_frozen_weights_are_those_of_replicas_that_share_nothing(results, zero):
    wanted, found = results["0"]["state"], results[zero]["state"]
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(value), rtol=1e-9, atol=1e-12)


@pytest.mark.distributed
def test_each_holds_its_part(results):
    (parameters, moments), *held = (results[zero]["held"] for zero in "0123")
    # Parts are padded: each tensor's, or each bucket's.
    assert [count for count, _ in held] == [parameters, pytest.approx(parameters / 2, rel=0.02), held[2][0]]
    assert held[2][0] == held[1][0]
    assert all(own == pytest.approx(moments / 2, rel=0.05) for _, own in held)


@pytest.mark.distributed
def test_what_gets_no_gradient_is_not_decayed(results):
    for zero in "0123":
        assert results[zero]["state"]["unheard.weight"] == results["0"]["before"]


@pytest.mark.distributed
def test_replicas_take_the_buffers_of_the_first_one(results):
    for zero in "0123":
        (first, other), (told, taken) = results[zero]["buffers"]
        assert first == told == taken != other


@pytest.mark.distributed
@pytest.mark.parametrize("zero", range(4))
def test_what_goes_on_in_the_next_step_is_recorded_in_its_own(results, zero):
    before, *recorded = results[str(zero)]["spans"]
    assert before == 0
    assert len(recorded) == 2
    assert len(set(recorded)) == 1
    # Two passes of two microbatches, an update, and sums by buckets; with zero 1 as many gathers of them.
    buckets = results["0"]["spans"][1] - 5
    assert buckets > 1
    assert recorded[0] == {0: 5 + buckets, 1: 5 + 2 * buckets}.get(zero, recorded[0])


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["2 0", "1 0", "1 1", "1 3"])
def test_the_last_batch_may_have_fewer_microbatches(results, case):
    found = results[f"less {case}"]
    assert found["far"] < 1e-12
    assert found["losses"] == pytest.approx(found["wanted"], rel=1e-12)


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Gated(nn.Module):
    """A scalar weight."""

    def __init__(self):
        super().__init__()
        self.blocks, self.gate = Blocks(), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gate * self.blocks(x)


def open_shared(model, **options):
    captured = capture(model)
    exchange = {"zero": options.pop("zero", 3)}
    plan = replace(plan_of(captured.graph, **exchange), **options)
    return open_session(captured, plan, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Gated, {}, "torch's FSDP2 cannot shard this model.*scalar"),
        (
            Blocks,
            {"stages": (StagePlan(start=0, stop=6, ranks=(0, 1), shares=(3, 1)),)},
            "compute 1 and 3 microbatches",
        ),
        (Blocks, {"recompute": ((1, 11), (11, 21))}, "recomputes ops 1:11 together, but gathers"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(fake_ranks, make, options, words):
    with pytest.raises(PlanError, match=words):
        open_shared(make(), **options)


class ByNorm(torch.optim.SGD):
    """An update that depends on the norm of a whole tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


class Demanding(torch.optim.SGD):
    """One that cannot be made of its settings."""

    def __init__(self, parameters, teacher):
        super().__init__(parameters, lr=teacher)


def test_optimizers_that_look_at_whole_tensors_are_refused():
    weights = [nn.Parameter(torch.ones(2, 2))]
    for optimizer in (torch.optim.AdamW(weights, amsgrad=True), torch.optim.SGD(weights, lr=0.1, momentum=0.9), None):
        check_elementwise(optimizer)
    for optimizer in (ByNorm(weights, lr=0.1), torch.optim.Adafactor(weights)):
        with pytest.raises(PlanError, match="updates slices of a tensor differently than the tensor"):
            check_elementwise(optimizer)
    with pytest.raises(PlanError, match=r"Demanding failed on such slices: .*'teacher'"):
        check_elementwise(Demanding(weights, 0.1))
