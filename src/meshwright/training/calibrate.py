"""Correct a measurement table by a few real steps on this host, and check with other steps whether that helped.

The model trains under the best plan for the given ranks. The first half of the recorded steps fits one factor each for
forward, backward and optimizer step (`cost.calibration`); with the second half the step times predicted before and
after are compared.
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
    """The corrected table, and the errors of predictions before and after, on steps that were not used in the fit.

    ``scatter`` is the relative standard error of their median: (p90 - p10) / median / sqrt(number).
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
        """Error of the step time, (predicted - measured) / measured."""
        return self.before_s / self.measured_s - 1.0

    @property
    def error_after(self) -> float:
        """Error of the step time with the corrected table, (predicted - measured) / measured."""
        return self.after_s / self.measured_s - 1.0

    def row(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
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
        """The reason to keep the old table: the second half shows no gain beyond chance. Empty if it does."""
        gained = abs(self.error_before) - abs(self.error_after)
        if gained <= 0:
            why = f"errors went from {self.error_before:+.1%} to {self.error_after:+.1%}: the table did not improve"
        elif gained <= self.scatter:
            why = f"the table improved by {gained:.1%}, but the {self.num_judged} steps scatter by {self.scatter:.1%}"
        else:
            return ""
        return (
            f"Judged by steps that were not used in the fit: {why}. The table is kept as it was. To try again: "
            "calibrate when nothing else runs here, with more steps (--repeats), or measure the model's ops again."
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
    """Train ``num_steps`` recorded steps of the model on ``num_ranks`` processes of this host and correct the table.

    Raises MeasurementError for a table of another device or fewer than two steps, and errors of planning and running.
    """
    cluster = load_cluster(f"{num_ranks}xcpu")
    device = cluster.device_kind(0).name
    if table.device != device or num_steps < 2:
        raise MeasurementError(
            f"A table of device {table.device!r} was given to correct by {num_steps} steps; expected a table of "
            f"{device!r}, whose steps can run here, and at least 2 steps: one to fit and one to judge."
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
    """Fit on the first half of the measured steps, judge on the second. Raises MeasurementError for fewer than two."""
    seconds = measured.step_seconds()
    half = len(seconds) // 2
    if not half:
        raise MeasurementError(f"{len(seconds)} steps were recorded; expected at least one to fit and one to judge.")
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
