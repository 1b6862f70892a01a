"""The cost of the executor itself: seconds of the host per instruction, for a stage with almost no computation.

The stage adds two numbers. A step is many forwards and backwards of this stage on one rank, so the figure includes the
executor's loop and torch's call into autograd, but no transfer (their host time is measured with the transfers).
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from meshwright.program import build_program
from meshwright.runtime.executor import Executor
from meshwright.runtime.rank_program import arrange_rank
from meshwright.runtime.recorder import Recorder
from meshwright.runtime.session import FlushingSteps
from meshwright.runtime.stage_module import StageRunner
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.runtime.transport import Transport
from meshwright.spec import Extent, Graph, Layer, Op, Plan, StagePlan, Tensor, Workload, slice_graph


def measure_overhead(num_microbatches: int = 64, repeats: int = 15) -> float:
    """Return the median seconds per instruction over ``repeats`` steps.

    A step has ``2 * num_microbatches + 1`` instructions.
    """
    steps = FlushingSteps(_tiny_executor(num_microbatches))
    inputs = [[torch.ones(1, 1)] for _ in range(num_microbatches)]
    seconds = []
    for step in range(repeats + 1):
        start = time.perf_counter()
        steps.run_step(step, {0: inputs})
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) / (2 * num_microbatches + 1)


def _tiny_executor(num_microbatches: int) -> Executor:
    graph = _tiny_graph()
    plan = Plan(
        model="",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=num_microbatches),
        stages=(StagePlan(start=0, stop=1, ranks=(0,)),),
        num_microbatches=num_microbatches,
    )
    stage = slice_graph(graph, plan.bounds)[0]
    program = build_program(plan, graph)
    device = torch.device("cpu")
    return Executor(
        rank_programs={"body": arrange_rank(program, program.body, 0)},
        num_microbatches=num_microbatches,
        loss_scale=1.0,
        stages=(stage,),
        runners=(StageRunner(_Add(), graph, stage, device),),
        transport=Transport(program, device, TeamPosition(process=0, width=1)),
        exchange=None,
        layouts={},
        optimizer_step=lambda _: None,
        recorder=Recorder(device),
        device=device,
    )


class _Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + self.weight,)


def _tiny_graph() -> Graph:
    size = (Extent(0, 1), Extent(1))
    return Graph(
        name="tiny",
        tensors=(
            Tensor(name="x", shape=size, dtype="float32", role="input", storage=0),
            Tensor(name="weight", shape=(), dtype="float32", role="parameter", storage=1, requires_grad=True),
            Tensor(name="y", shape=size, dtype="float32", role="activation", storage=2, requires_grad=True),
        ),
        ops=(Op(name="add", kind="aten.add.Tensor", inputs=(0, 1), outputs=(2,)),),
        layers=(Layer(name="add", start=0, stop=1),),
        inputs=(0,),
        outputs=(2,),
        has_loss=True,
    )
