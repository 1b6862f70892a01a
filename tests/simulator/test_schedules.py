"""Every named schedule, simulated: its memory comes back to where it began, and a backward in parts is as long."""

from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.program import build_program
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.simulator.stage_costs import weights_share
from meshwright.spec import Extent, Op, Opcode, Tensor
from tests.program.layouts import LAYOUTS, plan_of
from tests.simulator.plans import FixedCost, fast_cluster, small_cluster


@pytest.mark.parametrize("schedule", sorted(LAYOUTS))
def test_memory_comes_back_to_what_is_always_there(schedule):
    plan, graph = plan_of(schedule, 4, 16)
    cost = CostModel(cluster=fast_cluster("4xA100"))
    program = build_program(plan, graph)
    resident = estimate_program(program, plan, graph, cost).resident_bytes.sum(axis=1)
    timeline = simulate_plan(plan, graph, cost.cluster, cost=cost).timeline
    for rank in range(plan.num_ranks):
        used = timeline.memory_bytes[timeline.memory_rank == rank]
        assert used[-1] == resident[rank]
        assert used.min() == resident[rank]
        assert used.max() > resident[rank]


def test_backwards_in_two_parts_take_as_long_as_whole_ones():
    cluster = fast_cluster("4xA100")
    busy = {}
    for schedule in ("1f1b", "zb-h1"):
        plan, graph = plan_of(schedule, 4, 16)
        timeline = simulate_plan(plan, graph, cluster).timeline
        backward = np.isin(timeline.opcode, (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT))
        busy[schedule] = int((timeline.end_ps - timeline.start_ps)[backward].sum())
    assert busy["zb-h1"] == pytest.approx(busy["1f1b"], rel=1e-6)


@pytest.mark.parametrize(
    ("shapes", "flops", "share"),
    [
        ([(8, 16), (32, 16)], 1, 0.5),  # a product and its weight
        ([(8, 16), (32, 16), (32,)], 1, 0.5),  # a bias needs no product of its own
        ([(8, 16), (16,), (16,)], 0, 0.0),  # a norm makes all of its gradients at once
        ([(8, 16)], 1, 0.0),  # nothing to learn
    ],
)
def test_what_of_a_backward_may_wait(shapes, flops, share):
    roles = ("activation", *("parameter" for _ in shapes[1:]))
    tensors = [
        Tensor(name=f"t{i}", shape=tuple(map(Extent, shape)), dtype="float32", role=role, storage=i, requires_grad=True)
        for i, (shape, role) in enumerate(zip(shapes, roles, strict=True))
    ]
    op = Op(name="op", kind="aten.linear.default", inputs=tuple(range(len(shapes))), outputs=(), flops=Extent(flops))
    assert weights_share(SimpleNamespace(tensors=tensors), op) == share


@pytest.mark.parametrize("schedule", sorted(LAYOUTS))
def test_every_rank_is_seen_with_all_that_it_does_in_a_step(schedule):
    """Also where some ranks begin the next step while others end this one, as those of zb-h2 and zb-v do."""
    plan, graph = plan_of(schedule, 4, 16)
    cost = FixedCost(forward=3e-6, backward=6e-6)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost)
    work_s = 16 * 9e-6 * len(plan.stages_of(0)) / len(plan.stages[0].ranks)
    assert [rank.busy_s for rank in result.ranks] == pytest.approx([work_s] * 4, rel=1e-9)
    assert result.bubble_fraction == pytest.approx(1 - work_s / result.step_time_s, abs=1e-9)
    if schedule in ("zb-h2", "zb-v"):
        assert result.bubble_fraction == pytest.approx(0, abs=1e-6)
