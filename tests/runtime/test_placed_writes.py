"""A placement that parts what writes to the same memory is refused before it runs."""

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.planner.placing.op_tasks import find_tasks
from meshwright.runtime.opening import check_placed_writes
from meshwright.spec import PlacedStage, Placement, PlanError, Workload


class InPlace(nn.Module):
    """Convolution, batch norm, an activation in place, and an addition in place to what it made."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = torch.relu_(self.norm(self.convolution(x)))
        z = y * 2
        y += z
        return y.mean((2, 3))


@pytest.fixture(scope="module")
def captured():
    return capture_model(InPlace(), torch.randn(4, 3, 6, 6), mode="inference", verify=False)


def placement_of(graph, groups):
    return Placement(
        model="",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(kind="inference", global_batch=4),
        stages=tuple(PlacedStage(rank=rank % 2, ops=ops) for rank, ops in enumerate(groups)),
    )


def test_what_the_planner_keeps_together_runs(captured):
    tasks = find_tasks(captured.graph)
    assert any(len(ops) > 1 for ops in tasks.ops)
    check_placed_writes(captured, placement_of(captured.graph, tasks.ops))


def test_what_it_would_not_part_is_refused(captured):
    """Every op of its own stage: the activation would write to what batch norm's rank has."""
    with pytest.raises(PlanError, match=r"both use memory that 'add__0' writes in place"):
        check_placed_writes(captured, placement_of(captured.graph, [(op,) for op in range(len(captured.graph.ops))]))
