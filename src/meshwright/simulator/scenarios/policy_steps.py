"""Steps with random times under an exchange policy (`PolicySteps`), which decides by them.

A computation has the same factor as in the same plan without a policy (`long_run.with_jitter`), for the same seed,
replica and step: so policies are compared with each other, and with plain sums, with the same random draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.simulator.controlled import ScaleIssue
from meshwright.simulator.engine import Contention
from meshwright.simulator.policy_simulation import POLICY_STEPS, Catalogue, run_policy, steady_window
from meshwright.simulator.scenarios.long_run import NUM_SEEDS, NUM_STEPS, JitteredSteps, StepTimes, draw_factors
from meshwright.spec import Graph, Placement, Plan, Timeline
from meshwright.spec.control import Issue
from meshwright.spec.instructions import instruction_row
from meshwright.spec.scenario import Jitter, Scenario


class PolicySteps:
    """Simulates many steps of a plan with an exchange policy and random times, one seed after the other.

    Raises the errors of `run_policy`.
    """

    def __init__(
        self, plan: Plan, graph: Graph, cost: CostModel, scenario: Scenario, *, contention: Contention = "queued"
    ) -> None:
        self._plan, self._graph, self._cost, self._scenario = plan, graph, cost, scenario
        self._contention, self._catalogue = contention, Catalogue(plan, graph, cost)

    def time_steps(self, num_steps: int = NUM_STEPS, num_seeds: int = NUM_SEEDS) -> StepTimes:
        """Return the seconds of ``num_steps`` steps for each of ``num_seeds`` seeds, from the scenario's own seed on.

        The first and the last quarter of the simulated steps are left out.
        """
        begin, rows = self._scenario.seed or 0, []
        for seed in range(begin, begin + num_seeds):
            timeline = self._run(2 * num_steps, seed)
            steps, _ = steady_window(timeline)
            rows.append(timeline.step_seconds()[steps.start : steps.stop])
        return StepTimes(seconds=np.array(rows))

    def timeline(self, num_steps: int) -> Timeline:
        """Return the timeline of the first ``num_steps`` steps, with the random times of the scenario's own seed."""
        return self._run(max(num_steps, POLICY_STEPS), self._scenario.seed or 0).until(num_steps)

    def _run(self, num_steps: int, seed: int) -> Timeline:
        scale = _jitter(self._plan, self._cost, self._scenario, seed)
        _, timeline = run_policy(
            self._plan,
            self._graph,
            self._cost,
            num_steps,
            catalogue=self._catalogue,
            scale_issue=scale,
            contention=self._contention,
        )
        return timeline


def steps_under_jitter(
    plan: Plan | Placement,
    graph: Graph,
    cost: CostModel,
    scenario: Scenario,
    *,
    contention: Contention = "queued",
) -> JitteredSteps | PolicySteps:
    """Return what simulates many steps of a plan or a placement with the random times of a scenario."""
    if isinstance(plan, Plan) and plan.exchange.policy:
        return PolicySteps(plan, graph, cost, scenario, contention=contention)
    return JitteredSteps(plan, graph, cost, scenario, contention=contention)


def _jitter(plan: Plan, cost: CostModel, scenario: Scenario, seed: int) -> ScaleIssue:
    """Return the function from an issue to the factor on its duration."""
    effects = list[tuple[Jitter, tuple[int, int], frozenset[int]]]()
    for place, effect in enumerate(scenario.effects):
        if isinstance(effect, Jitter):
            with scenario.naming(place, "devices"):
                chosen = effect.devices.select(cost.cluster, (scenario.seed or 0, place))
            effects.append((effect, (seed, place), frozenset(map(int, chosen))))
    num_workers = len(plan.stages[0].ranks)
    known: dict[tuple[Any, ...], float] = {}

    def scale(issue: Issue) -> float:
        opcode, _, microbatch, version, _, num_bytes = instruction_row(issue.instruction)
        step, own = divmod(microbatch, num_workers) if microbatch >= 0 else (max(version, 0), -1)
        key = (issue.rank, step, issue.stream == "compute", opcode, own, num_bytes)
        if key not in known:
            known[key] = _factor(effects, key)
        return known[key]

    return scale


def _factor(effects: list[tuple[Jitter, tuple[int, int], frozenset[int]]], key: tuple[Any, ...]) -> float:
    rank, step, computes, opcode, microbatch, num_bytes = key
    factor = 1.0
    for effect, seed, chosen in effects:
        if rank not in chosen or effect.of not in ("all", "computations" if computes else "transfers"):
            continue
        columns = [rank, step]
        if effect.per == "instruction":
            columns += [opcode, 0, microbatch, num_bytes]
        factor *= float(draw_factors(effect, seed, [np.array([column]) for column in columns])[0])
    return factor
