"""Correct a measurement table by a few real steps on this host, and check on other steps whether predictions improve.

The model trains under the best plan for the given number of ranks. The first half of the recorded steps fits one factor
each for forward, backward and optimizer step (`cost.calibration`). The step times predicted before and after are then
compared with the second half.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.cost.calibration import StepCorrection, apply_calibration, fit_calibration
from meshwright.planner import Choices, Limits, Problem, search_plans
from meshwright.simulator import Simulation, simulate_plan
from meshwright.spec import (
    Cluster,
    EventSink,
    Graph,
    MeasurementError,
    Measurements,
    Plan,
    Timeline,
    Workload,
    load_cluster,
    read_document,
    write_document,
)
from meshwright.training.job import Job
from meshwright.training.launch import run_plan
from meshwright.training.step_measuring import Sizes, captured_model

# Steps before the recorded ones: allocator and oneDNN's cache warm up in them.
_WARM_UP_STEPS = 2
_MICROBATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A corrected table, and the errors of predictions before and after, on steps that were not used in the fit.

    ``num_fitted`` and ``num_judged``: numbers of steps. ``measured_s``: the median step time of the judged steps, in
    seconds; ``before_s`` and ``after_s``: the predicted step times. ``scatter``: the relative standard error of the
    median, estimated as (p90 - p10) / median / sqrt(number of steps).
    """

    table: Measurements
    corrections: tuple[StepCorrection, ...]
    num_fitted: int
    num_judged: int
    measured_s: float
    before_s: float
    after_s: float
    scatter: float

    @property
    def error_before(self) -> float:
        """Relative error of the step time predicted with the old table, (predicted - measured) / measured."""
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        """Relative error of the step time predicted with the corrected table, (predicted - measured) / measured."""
        return self.after_s / self.measured_s - 1.0

    def row(self) -> dict[str, Any]:
        """Return the results for ``--json``, without the table."""
        return {
            "corrections": [asdict(item) | {"factor": item.factor} for item in self.corrections],
            "steps_fitted": self.num_fitted,
            "steps_judged": self.num_judged,
            "step_measured_s": self.measured_s,
            "step_before_s": self.before_s,
            "step_after_s": self.after_s,
            "error_before": self.error_before,
            "error_after": self.error_after,
            "scatter": self.scatter,
            "why_kept": self.why_kept or None,
        }

    @property
    def why_kept(self) -> str:
        """The reason to keep the old table; "" if predictions of the judged steps improved by more than the scatter."""
        gained = abs(self.error_before) - abs(self.error_after)
        if gained <= 0:
            why = f"errors went from {self.error_before:+.1%} to {self.error_after:+.1%}: the table did not improve"
        elif gained <= self.scatter:
            why = f"the table improved by {gained:.1%}, but the {self.num_judged} steps scatter by {self.scatter:.1%}"
        else:
            return ""
        return (
            f"Judged by steps that were not used in the fit: {why}. The table is kept as it was. To try again: "
            "calibrate while nothing else runs here, with more steps (--repeats), or measure the model's ops again."
        )


def calibrate_here(
    reference: str,
    table: Measurements,
    microbatch_size: int,
    *,
    sizes: Sizes = (),
    num_ranks: int = 2,
    num_steps: int = 10,
    events: EventSink | None = None,
) -> Calibration:
    """Train the model on ``num_ranks`` CPU processes of this host, and correct the table by its steps.

    ``reference`` names the model, ``sizes`` its size options. ``num_steps`` steps are recorded, after two steps to warm
    up. Raises MeasurementError for a table of another device or fewer than two steps, and errors of planning and
    running.
    """
    cluster = load_cluster(f"{num_ranks}xcpu")
    device = cluster.device_kind(0).name
    if table.device != device or num_steps < 2:
        raise MeasurementError(
            f"A table of device {table.device!r} was given, to be corrected by {num_steps} steps; expected a table of "
            f"{device!r}, which can be run here, and at least 2 steps: one to fit and one to judge."
        )
    graph = captured_model(reference, sizes, None)[1].graph
    if graph.batch_size not in (None, microbatch_size):
        graph = captured_model(reference, sizes, microbatch_size)[1].graph
    workload = Workload(global_batch=microbatch_size * _MICROBATCHES * num_ranks, precision="float32")
    problem = Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=workload,
        cost=CostModel(cluster=cluster, measurements=table),
        choices=Choices(microbatch_sizes=(microbatch_size,)),
        model=reference,
        model_sizes=sizes,
    )
    plan = search_plans(problem, limits=Limits(max_plans=1)).best.plan
    measured = _run(plan, num_steps, events)
    return correct_table(table, plan, graph, cluster, measured, reference)


def correct_table(
    table: Measurements, plan: Plan, graph: Graph, cluster: Cluster, measured: Timeline, reference: str
) -> Calibration:
    """Correct a table by the first half of the measured steps, and judge it on the second half.

    Raises MeasurementError for fewer than two measured steps.
    """
    seconds = measured.step_seconds()
    half = len(seconds) // 2
    if not half:
        raise MeasurementError(f"{len(seconds)} steps were recorded; expected at least 2: one to fit and one to judge.")
    before = _simulate(plan, graph, cluster, table)
    bare = _simulate(plan, graph, cluster, replace(table, overhead_s=0.0))
    low, middle, high = np.percentile(seconds[half:], (10, 50, 90))
    corrections = fit_calibration(before.timeline, bare.timeline, measured.until(half))
    corrected = apply_calibration(table, corrections, f"{half} steps of {reference}")
    return Calibration(
        table=corrected,
        corrections=corrections,
        num_fitted=half,
        num_judged=len(seconds) - half,
        measured_s=float(middle),
        before_s=before.step_time_s,
        after_s=_simulate(plan, graph, cluster, corrected).step_time_s,
        scatter=float((high - low) / middle / np.sqrt(len(seconds) - half)),
    )


def _simulate(plan: Plan, graph: Graph, cluster: Cluster, table: Measurements) -> Simulation:
    cost = CostModel(cluster=cluster, measurements=table, precision=plan.workload.precision)
    return simulate_plan(plan, graph, cluster, cost=cost)


def _run(plan: Plan, num_steps: int, events: EventSink | None) -> Timeline:
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as folder:
        path = write_document(plan, Path(folder) / "plan.json")
        job = Job(plan=str(path), num_steps=num_steps + _WARM_UP_STEPS, num_recorded_steps=num_steps)
        return read_document(Timeline, run_plan(job, Path(folder) / "run", events).timeline)
