"""Score the step times that `plan` and `simulate` print against plain PyTorch on a GPU.

A step is measured in two ways: in a row of steps without synchronisation ("in a row"), and with a wait for the device
after each step ("waited for").

    device seconds          sum of the costs of all ops and of the optimizer step, against the kernels of a profiled
                            step
    bound by the device     the simulated step, against steps in a row; rows whose device is busy for 90 % or more
    bound by the host       the simulated step of all other rows, against the nearest value between the two measured
                            times, because hosts and waits change such times by up to a fifth
    forward, backward       parts of the simulated first step, against those of steps that are waited for
    compiled                the simulated step with compiled layers, against steps in a row of a model that torch
                            compiled as a whole, without its loss

Rows: ``data/steps_cuda.csv``, ``data/steps_cuda_compiled.csv``. No constant of the cost model comes from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from meshwright.cost.costs import Floats, Predictions
from meshwright.planner import predict_step_interval
from meshwright.simulator import simulate_plan
from meshwright.spec import Opcode, Timeline, to_seconds
from meshwright.validation.datasets import StepRow, load_table
from meshwright.validation.gpu_runs import COMPILED_TABLE, TABLE, read_run
from meshwright.validation.scores import Score, score_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import Basis

DATASET, ARM = "gpu_steps", "plan"
# A step whose kernels take this share of its time is bound by the device.
_BOUND_BY_DEVICE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOnGpu:
    """The prediction of `plan` for one step, in seconds: step time with its 80 % interval, and its parts.

    ``device_s``: the sum of all ops and the optimizer step on the device.
    """

    seconds: float
    low_s: float
    high_s: float
    device_s: float
    forward_s: float
    backward_s: float


def score_gpu_steps() -> tuple[Score, ...]:
    """Score every part of the module's table, on the steps on an H100."""
    rows = load_table(TABLE)
    found = [predict_on_gpu(row) for row in rows]
    step_s = np.array([item.seconds for item in found])
    measured = ("device_s", "seconds_in_a_row", "seconds_waited")
    device_s, in_a_row_s, waited_s = (_column(rows, name) for name in measured)
    steps = Predictions(
        seconds=step_s,
        low_s=np.array([item.low_s for item in found]),
        high_s=np.array([item.high_s for item in found]),
        basis=cast("tuple[Basis, ...]", ("transferred",) * len(rows)),
    )
    by_device = device_s >= _BOUND_BY_DEVICE * in_a_row_s
    ends = np.minimum(in_a_row_s, waited_s), np.maximum(in_a_row_s, waited_s)
    nearest = np.clip(step_s, *ends)

    def score(part: str, measured: Floats, predicted: Predictions | Floats, target: float | None = None) -> Score:
        return score_rows(DATASET, part, ARM, measured, predicted, target=target)

    return (
        score("device seconds", device_s, np.array([item.device_s for item in found]), 8.0),
        score("steps bound by the device", in_a_row_s[by_device], steps.select(by_device), 8.0),
        score("steps bound by the host", nearest[~by_device], steps.select(~by_device), 25.0),
        score("forward", _column(rows, "forward_s"), np.array([item.forward_s for item in found])),
        score("backward", _column(rows, "backward_s"), np.array([item.backward_s for item in found])),
        _score_compiled(),
    )


def _score_compiled() -> Score:
    rows = load_table(COMPILED_TABLE)
    found = [predict_on_gpu(row, compiled=True) for row in rows]
    steps = Predictions(
        seconds=np.array([item.seconds for item in found]),
        low_s=np.array([item.low_s for item in found]),
        high_s=np.array([item.high_s for item in found]),
        basis=cast("tuple[Basis, ...]", ("transferred",) * len(rows)),
    )
    return score_rows(DATASET, "compiled", ARM, _column(rows, "seconds_in_a_row"), steps)


def predict_on_gpu(row: StepRow, *, compiled: bool = False) -> StepOnGpu:
    """Return the prediction of `plan` for a row of ``steps_cuda.csv``; ``compiled``: with compiled layers."""
    run = read_run(row, compiled=compiled)
    work, kind = run.plan.workload, run.cluster.device_kind(0)
    graph = replace(run.graph, compiled=True) if compiled else run.graph
    ops = run.cost.estimate_ops(graph, work.global_batch, kind)
    parameters = [i for i, tensor in enumerate(run.graph.tensors) if tensor.role == "parameter"]
    update_s = run.cost.optimizer_seconds(run.graph, parameters, work.optimizer, kind)
    interval = predict_step_interval(run.plan, run.graph, run.cluster, run.cost)
    step = simulate_plan(run.plan, run.graph, run.cluster, cost=run.cost)
    # Host and device start together, as in a step that is waited for.
    ends_s = [to_seconds(_end_ps(step.timeline, opcode)) for opcode in (Opcode.FORWARD, Opcode.BACKWARD)]
    forward_s, backward_s = ends_s[0], ends_s[1] - ends_s[0]
    return StepOnGpu(
        seconds=step.step_time_s,
        low_s=interval.low_s,
        high_s=interval.high_s,
        device_s=float(ops.forward_s.sum() + ops.backward_s.sum()) + update_s,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def _end_ps(timeline: Timeline, opcode: Opcode) -> int:
    return int(timeline.end_ps[timeline.opcode == opcode].max())


def _column(rows: Sequence[StepRow], name: str) -> Floats:
    return np.array([float(row[name]) for row in rows])
