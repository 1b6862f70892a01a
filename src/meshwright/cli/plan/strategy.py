"""What ``meshwright plan --method flexflow`` finds beside plans: a strategy of the SOAP space, as a placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.models import graphs_of
from meshwright.cli.placements import placement_tables, rank_rows
from meshwright.spec.codec import write_document
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.files import refuse_replacing, write_text
from meshwright.spec.made_with import note_making
from meshwright.spec.units import format_percent, format_seconds

if TYPE_CHECKING:
    from meshwright.cli.plan.command import CommandPlans
    from meshwright.cli.plan.request import PlanRequest
    from meshwright.planner.methods.flexflow import SoapResult
    from meshwright.simulator import Simulation
    from meshwright.spec import Graph, Placement

# Simulated proposals without a deadline.
NUM_PROPOSALS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The best strategy, what it is simulated at as a placement, and why it is none if it cannot be run."""

    result: SoapResult
    plan_s: float
    placed: tuple[Placement, Graph, Simulation] | None = None
    refusal: str = ""
    file: Path | None = None

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layers": self.result.configurations(),
            "estimated_step_s": self.result.step_s,
            "step_time_s": self.placed[2].step_time_s if self.placed else None,
            "plan_step_time_s": self.plan_s,
            "refusal": self.refusal or None,
            "num_simulated": self.result.num_simulated,
            "file": str(self.file) if self.file else None,
        }

    def tables(self) -> Iterator[Any]:
        """What people read."""
        from meshwright.report.narrow import NarrowTable
        from meshwright.simulator import explain_overflows, find_overflows

        headings = ("layers", "from", "to", "sample", "attribute", "parameter", "devices")
        yield "Strategy of single layers (FlexFlow's SOAP space), parts along each kind of dim:"
        yield NarrowTable(headings, list(self._rows()), numeric=(True, False, False, True, True, True, False))
        yield self.result.explain()
        if self.placed is None:
            yield Text(f"It is an estimate alone: {self.refusal}")
        else:
            placement, graph, simulation = self.placed
            machine = self.result.space.cluster
            yield from ("", "As a placement of its parts:")
            yield from placement_tables(placement, rank_rows(placement, graph, simulation, machine), simulation)
            yield from explain_overflows(find_overflows(simulation, machine))
            yield self._compare(simulation.step_time_s)
        if self.file is not None:
            yield Text(f"{'placement' if self.placed else 'strategy'} written to {self.file}")

    def _compare(self, step_s: float) -> str:
        kind = "longer" if step_s > self.plan_s else "shorter"
        return (
            f"A steady step of it takes {format_seconds(step_s)}, and {format_seconds(self.plan_s)} under the best "
            f"plan above: {format_percent(abs(step_s / self.plan_s - 1), 1)} {kind}."
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Neighbouring layers with the same parts on the same devices in one row."""
        for (degrees, devices), group in groupby(self.result.configurations(), key=_shown):
            names = [row["layer"] for row in group]
            last = names[-1] if len(names) > 1 else ""
            yield (str(len(names)), names[0], last, *degrees, devices)


def find_strategy(found: CommandPlans, request: PlanRequest, file: Path | None) -> Strategy | str:
    """Search the strategies of the plans' problem and write the best one; or why there are none.

    With a deadline, in half of it.
    """
    from meshwright.planner.methods.flexflow import search_soap, soap_space

    if request.rewrite:
        return "Strategies of single layers are of the model as it is: leave out --rewrite to search them."
    best = found.plans.best.plan
    workload, machine = best.workload, found.cost.cluster
    graph = found.graph_for(workload.global_batch)
    num_devices = max(request.ranks) if request.ranks else None
    try:
        space = soap_space(graph, machine, workload, found.cost, num_devices=num_devices, can_run=True)
        result = search_soap(
            space,
            num_proposals=None if request.deadline else NUM_PROPOSALS,
            seconds=request.deadline and request.deadline / 2,
            seed=request.seed,
        )
    except MeshwrightError as error:
        return f"Strategies of single layers (FlexFlow's SOAP space) were not searched: {error}"
    made_with = note_making(found.measurements, file or Path("placement.json"), found.predicted_for)
    strategy = Strategy(result=result, plan_s=found.plans.best.step_time_s, file=file)
    try:
        placed = _place(result, request, graph)
    except MeshwrightError as error:
        if file is not None:
            write_text(_as_json(result), file)
        return replace(strategy, refusal=str(error))
    placement, parts, simulation = placed
    placement = replace(placement, made_with=made_with)
    if file is not None:
        write_document(placement, file)
    return replace(strategy, placed=(placement, parts, simulation))


def strategy_file(out: Path | None) -> Path | None:
    """Where the strategy goes: the file that was asked for, or one in the folder."""
    file = out if out is None or out.suffix else out / "placement.json"
    if file is not None:
        refuse_replacing(file)
    return file


def _place(result: SoapResult, request: PlanRequest, graph: Graph) -> tuple[Placement, Graph, Simulation]:
    from meshwright.planner.methods.flexflow import place_strategy
    from meshwright.simulator import simulate_plan

    size = result.space.workload.global_batch
    if result.is_split:
        graph = graphs_of(request.model, request.sizes, mode=graph.mode, degrees=result.degrees)(size)
    placement = replace(
        place_strategy(result, graph), model=request.model, model_sizes=request.sizes, cluster=request.cluster
    )
    return placement, graph, simulate_plan(placement, graph, result.space.cluster, cost=result.space.cost)


def _as_json(result: SoapResult) -> str:
    import json

    return json.dumps(result.document(), indent=1) + "\n"


def _shown(row: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Degrees by kind, several dims of a kind as a product, and devices."""
    degrees: dict[str, list[str]] = {"sample": [], "attribute": [], "parameter": []}
    for kind, degree in row["degrees"]:
        degrees[kind].append(str(degree))
    return tuple("×".join(items) for items in degrees.values()), ", ".join(map(str, row["devices"]))
