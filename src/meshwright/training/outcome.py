"""Compare a run with its prediction: the step time, the causes of a difference, and slow ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost import load_cost_model
from meshwright.planner import predict_step_interval
from meshwright.report import SlowRank, explain_difference, explain_stragglers, find_stragglers
from meshwright.simulator import form_teams, simulate_plan
from meshwright.spec import Graph, Plan, Timeline, load_cluster
from meshwright.spec.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds of a step, predicted with their 80 % interval and measured; differences and slow ranks, in words.

    ``is_measured``: the prediction uses measured times, not only datasheets.
    """

    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    is_measured: bool
    difference: str
    stragglers: tuple[SlowRank, ...]
    first_step: int

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is in the interval."""
        return self.low_s <= self.measured_s <= self.high_s

    def row(self) -> dict[str, Any]:
        """The fields for JSON."""
        return {
            "predicted_step_s": self.predicted_s,
            "predicted_interval_s": [self.low_s, self.high_s],
            "predicted_by_measurements": self.is_measured,
            "inside": self.is_inside,
            "difference": self.difference,
            "stragglers": [
                {"rank": item.rank, "opcode": item.opcode.name.lower(), "ratio": item.ratio, "since_step": step}
                for item in self.stragglers
                for step in (self.first_step + item.since + 1,)
            ],
        }

    def explain(self) -> list[str]:
        """Sentences for people."""
        ends = f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        basis = "" if self.is_measured else ", by datasheets; --measurements TABLE goes by what `measure` found here"
        known = f"predicted: {format_seconds(self.predicted_s)} per step, 80 % interval {ends}{basis}"
        where = f"The measured step is {'in' if self.is_inside else 'outside of'} that interval."
        told = [known, where if self.is_inside else f"{where} {self.difference}".rstrip()]
        return told + explain_stragglers(list(self.stragglers), self.first_step)


def judge_run(plan: Plan, graph: Graph, measured: Timeline, first_step: int, measurements: Path | None) -> Outcome:
    """Compare a measured timeline, whose first step was number ``first_step`` of the run, with a prediction.

    Raises DocumentError or MeasurementError for a table that cannot be read or is of other devices, ClusterError for
    a cluster that is not known here.
    """
    cluster = load_cluster(plan.cluster)
    usual = load_cost_model(cluster, measurements, plan.workload.precision)
    plan, graph, cluster, cost = form_teams(plan, graph, cluster, usual)
    predicted = simulate_plan(plan, graph, cluster, cost=cost, num_steps=2).timeline
    interval = predict_step_interval(plan, graph, cluster, cost)
    return Outcome(
        predicted_s=float(np.median(predicted.step_seconds())),
        low_s=interval.low_s,
        high_s=interval.high_s,
        measured_s=float(np.median(measured.step_seconds())),
        is_measured=interval.measured,
        difference=explain_difference(predicted, measured),
        # Datasheets do not show how much longer one stage takes than another.
        stragglers=tuple(find_stragglers(measured, predicted if interval.measured else None)),
        first_step=first_step,
    )
