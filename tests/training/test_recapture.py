"""A model captured once more in the precision of its plan: types, layers, and what stays in float32."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.spec import Plan, PlanError, StagePlan, Workload
from meshwright.training.precision import bind_plan, capture_in_precision, recaptures


class Waves(nn.Module):
    """No repeated blocks, so its layers are cut where the fewest bytes cross; ``pos`` is state."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("pos", torch.arange(64).float())

    def forward(self, x):
        return self.leave(torch.tanh(self.enter(x + torch.sin(self.pos)[: x.shape[1], None])))


class Table(nn.Module):
    """Multiplies by a table that it computed; with ``asks`` in the type of what is multiplied."""

    def __init__(self, *, asks):
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(8, 8), nn.Linear(8, 1), asks
        self.register_buffer("table", torch.rand(8), persistent=False)

    def forward(self, x):
        x = self.first(x)
        return self.second(x * (self.table.to(x.dtype) if self.asks else self.table))


def again(model, precision, *sizes):
    """(the float32 graph, the graph in a precision, the plan)"""
    batch = (torch.randn(4, *sizes, 8),), (torch.randn(4, *sizes, 1),)
    capture = partial(capture_model, model, loss=nn.functional.mse_loss, verify=False)
    given = capture(batch[0], targets=batch[1])
    plan = Plan(
        model="m",
        graph_hash=given.graph.content_hash,
        cluster="1xcpu",
        workload=Workload(global_batch=4, precision=precision),
        stages=(StagePlan(start=0, stop=len(given.graph.layers), ranks=(0,)),),
        num_microbatches=1,
    )
    assert recaptures(plan, model, given.graph)
    made, _ = capture_in_precision(plan, model, batch, given, capture)
    return given.graph, made.graph, plan


def test_bytes_of_the_type_do_not_move_cuts():
    given, made, plan = again(Waves(), "mixed", 64)
    assert made.layers == given.layers
    x, y = torch.randn(4, 64, 8).bfloat16(), torch.randn(4, 64, 1).bfloat16()
    cast = capture_model(Waves().bfloat16(), (x,), targets=(y,), loss=nn.functional.mse_loss, verify=False).graph
    assert len(cast.layers) != len(given.layers), "else this model says nothing"
    assert bind_plan(plan, given, made).graph_hash == made.content_hash


def test_tables_stay_in_float32():
    model = Table(asks=True)
    table = model.table.clone()
    again(model, "mixed")
    assert model.first.weight.dtype is torch.bfloat16
    assert torch.equal(model.table, table)


def test_a_table_that_the_ops_cannot_take_is_cast():
    model = Table(asks=False)
    again(model, "mixed")
    assert model.table.dtype is torch.bfloat16


def test_state_is_cast_and_a_cast_model_is_left_alone():
    model = Waves()
    _, made, plan = again(model, "bfloat16", 64)
    assert model.pos.dtype is torch.bfloat16
    assert not recaptures(plan, model, made)


@pytest.mark.parametrize(("precision", "dtype"), [("amp", "bfloat16"), ("amp-float16", "float16")])
def test_a_model_that_asks_for_a_type_has_that_of_autocast(precision, dtype):
    given, made, _ = again(Table(asks=True), precision)
    for graph, expected in ((given, "float32"), (made, dtype)):
        found = [dict(op.attributes)["dtype"] for op in graph.ops if op.kind == "aten.to.dtype"]
        assert found == [expected]
    assert made.layers == given.layers


def test_other_ops_are_named_where_the_plan_names_ops():
    class Clamps(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.dtype is torch.float32 else x.clamp(-100, 100))

    given, made, plan = again(nn.Sequential(nn.Linear(8, 8), Clamps(8, 1)), "mixed")
    assert len(made.ops) == len(given.ops) + 1
    bind_plan(plan, given, made)
    with pytest.raises(PlanError, match=r"In mixed the ops of the model differ.* it computes aten\.clamp.*in place of"):
        bind_plan(replace(plan, recompute=((0, 1),)), given, made)
