"""Step times under jitter: many consecutive steps, for several seeds.

Step k lasts from the end of step k - 1 to its own end. The steps in which a pipeline fills, and the last step of an
asynchronous schedule, which drains, are not counted. Jitter makes otherwise identical replicas differ, so all ranks
are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention
from meshwright.simulator.plan import SETTLED_STEPS, program_of
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.scenarios.noise import with_jitter
from meshwright.simulator.simulate import MAX_UNROLLED, SimulatedRun, record_run, run_unrolled
from meshwright.simulator.teams import form_teams
from meshwright.simulator.unroll import Unrolled, unroll
from meshwright.spec import Graph, Placement, Plan, Program, ProgramError, Timeline, to_seconds
from meshwright.spec.scenario import Scenario
from meshwright.spec.used_devices import used_of

NUM_STEPS, NUM_SEEDS = 100, 5
# Fewer steps give no 95th percentile.
LEAST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Seconds of every counted step, shape (seeds, steps)."""

    seconds: NDArray[np.float64]

    def rows(self) -> dict[str, float | int]:
        """Return the figures to report; ``seed_spread_s`` is the standard deviation of the means of the seeds."""
        means = self.seconds.mean(axis=1)
        p50, p95, p99 = np.percentile(self.seconds, (50, 95, 99)).tolist()
        return {
            "num_seeds": len(means),
            "num_steps": self.seconds.shape[1],
            "mean_s": float(means.mean()),
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
            "slowest_s": float(self.seconds.max()),
            "seed_spread_s": float(means.std(ddof=1)) if len(means) > 1 else 0.0,
        }


class JitteredSteps:
    """A plan whose steps are simulated with random times, one seed after the other. Raises as `simulate_plan`."""

    def __init__(
        self,
        plan: Plan | Placement,
        graph: Graph,
        cost: CostModel,
        scenario: Scenario,
        *,
        contention: Contention = "queued",
    ) -> None:
        self._cluster, self._scenario, self._contention = cost.cluster, scenario, contention
        self._width = 1
        if isinstance(plan, Plan):
            self._width = plan.sharding.width
            self._cluster = used_of(plan, cost.cluster)
            plan, graph, _, cost = form_teams(plan, graph, cost.cluster, cost)
        self._program: Program = program_of(plan, graph, cost.cluster)
        self._costs: ProgramCosts = estimate_program(self._program, plan, graph, cost)

    def time_steps(self, num_steps: int = NUM_STEPS, num_seeds: int = NUM_SEEDS) -> StepTimes:
        """Return the seconds of ``num_steps`` steps for each seed, starting with the scenario's own.

        Raises ProgramError if too few steps of the program can be simulated or its times overflow, and ScenarioError
        if the jittered time of one instruction does.
        """
        first, last = (SETTLED_STEPS, 1) if self._program.advance else (1, 0)
        most = MAX_UNROLLED // max(self._program.body.num_instructions, 1) - first - last
        count = min(num_steps, most)
        if count < LEAST_STEPS or num_seeds < 1:
            raise ProgramError(
                f"{num_steps} steps of {self._program.body.num_instructions} instructions for {num_seeds} seeds were "
                f"asked for; expected one seed or more, and {LEAST_STEPS} to {max(most, LEAST_STEPS)} steps of at "
                f"most {MAX_UNROLLED} instructions in all. Simulate fewer microbatches or ranks under jitter."
            )
        unrolled = unroll(self._program, self._costs, first + count + last)
        begin = self._scenario.seed or 0
        rows = [self._ends(unrolled, begin + place)[first - 1 : first + count] for place in range(num_seeds)]
        return StepTimes(seconds=np.array([[to_seconds(step) for step in np.diff(row).tolist()] for row in rows]))

    def timeline(self, num_steps: int) -> Timeline:
        """Return the timeline of the first steps, with the times of the scenario's own seed."""
        unrolled = unroll(self._program, self._costs, num_steps)
        return record_run(self._program, self._costs, self._run(unrolled, self._scenario.seed or 0))[0]

    def _ends(self, unrolled: Unrolled, seed: int) -> NDArray[np.int64]:
        """Return when each step ends in ps, shape (steps,)."""
        run, step = self._run(unrolled, seed), unrolled.step
        ends = np.zeros(int(step.max(initial=0)) + 1, np.int64)
        np.maximum.at(ends, step, run.end_ps)
        # A step of an asynchronous program may end after a later one; the differences still add up to the total.
        return np.maximum.accumulate(ends)

    def _run(self, unrolled: Unrolled, seed: int) -> SimulatedRun:
        noisy = with_jitter(self._program, unrolled, self._scenario, self._cluster, seed, self._width)
        network, start_ps, end_ps = run_unrolled(self._program, noisy, self._costs.host_ps, self._contention)
        return SimulatedRun(unrolled=replace(noisy, network=network), network=network, start_ps=start_ps, end_ps=end_ps)
