"""Follow a long run with saves, failures and lost devices (`follow_run`); draw random failures and step times.

The run is followed from event to event: a save that is due, a failure, a change of the machines. Between failures all
whole intervals are advanced at once, so the computing time for a run of months depends only on the number of its
failures. At a failure, and when devices are lost, the work since the last complete save is lost. Then follow detection,
repair and restart; a failure during these starts them again. A run that waits for lost devices restarts when they are
back and everything that failed in the meantime is repaired. The return of devices is planned: unsaved work is saved
first, and there is no detection time. The last interval of a run is not saved.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.simulator.engine import Contention
from meshwright.simulator.message_matching import rank_of_streams
from meshwright.simulator.network import Network, collectives, durations, routes, with_durations
from meshwright.simulator.plan_simulation import SETTLED_STEPS, program_of
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.simulate import MAX_UNROLLED, SimulatedRun, instruction_columns, record_run, run_unrolled
from meshwright.simulator.teams import form_teams
from meshwright.simulator.unroll import Unrolled, unroll
from meshwright.spec import Cluster, Graph, Placement, Plan, Program, ProgramError, ScenarioError, Timeline, to_seconds
from meshwright.spec.instructions import COMPUTATIONS, STASHING, UPDATES
from meshwright.spec.scenario import Failures, Jitter, Scenario
from meshwright.spec.units import MOST_PICOSECONDS, PICOSECONDS_PER_SECOND
from meshwright.spec.used_devices import used_of


class Failure(NamedTuple):
    """The time of a failure in seconds of the run, and the seconds until it is repaired."""

    at_s: float
    repair_s: float


# The failures of n equal parts, each at random with a mean of m seconds, are at random with a mean of m / n in total.
# Under Weibull's law with another shape each part has its own clock, which restarts at every failure of the part.
def failures_of(scenario: Scenario, num_devices: int, num_nodes: int, seed: int) -> Iterator[Failure]:
    """Yield the failures of a run on the given numbers of devices and nodes, in order of time.

    The sequence is infinite if some effect gives a mean time to failure.
    """
    streams = []
    for place, effect in enumerate(scenario.effects):
        if isinstance(effect, Failures):
            count = num_devices if effect.of == "device" else num_nodes
            moments = _moments(effect, count, np.random.default_rng((seed, place)))
            streams.append(_with_repair(moments, float(effect.repair)))
    return heapq.merge(*streams)


def mean_time_to_failure(scenario: Scenario, num_devices: int, num_nodes: int) -> float | None:
    """Return the mean seconds between two failures anywhere among these devices and nodes; None if not given."""
    rates = [
        (num_devices if effect.of == "device" else num_nodes) / effect.mttf
        for effect in scenario.effects_of(Failures)
        if effect.mttf is not None
    ]
    return 1 / sum(rates) if rates else None


def effective_repair(scenario: Scenario, num_devices: int, num_nodes: int) -> float:
    """Return the single repair time, in seconds, with the same mean run time as the repair times of all failures.

    It holds for memoryless failures that start a repair again: if a share w of all failures has repair time r, the
    result is -M ln Σ w e^(-r/M), with M seconds between failures.
    """
    effects = [effect for effect in scenario.effects_of(Failures) if effect.mttf is not None]
    if not effects:
        return 0.0
    mttf_s = mean_time_to_failure(scenario, num_devices, num_nodes) or math.inf
    counts = [num_devices if effect.of == "device" else num_nodes for effect in effects]
    shares = [mttf_s * count / float(effect.mttf or 1) for count, effect in zip(counts, effects, strict=True)]
    shortest = min(float(effect.repair) for effect in effects)
    hoped = sum(
        share * math.exp((shortest - effect.repair) / mttf_s) for share, effect in zip(shares, effects, strict=True)
    )
    return shortest - mttf_s * math.log(hoped)


def are_at_random(scenario: Scenario) -> bool:
    """Return whether all failures are memoryless (exponentially distributed), so that the closed forms hold."""
    return all(effect.mttf is not None and effect.shape == 1 for effect in scenario.effects_of(Failures))


def _with_repair(moments: Iterator[float], repair_s: float) -> Iterator[Failure]:
    return (Failure(at_s, repair_s) for at_s in moments)


def _moments(effect: Failures, count: int, random: np.random.Generator) -> Iterator[float]:
    if effect.mttf is None:
        yield from sorted(map(float, effect.times))
        return
    if effect.shape == 1:
        at_s = 0.0
        while True:
            at_s += float(random.exponential(effect.mttf / count))
            yield at_s
    scale = effect.mttf / math.gamma(1 + 1 / effect.shape)
    clocks = (scale * random.weibull(effect.shape, count)).tolist()
    heapq.heapify(clocks)
    while True:
        yield clocks[0]
        heapq.heapreplace(clocks, clocks[0] + scale * float(random.weibull(effect.shape)))


Floats = NDArray[np.float64]
_COMPUTED = np.array([*COMPUTATIONS, *UPDATES, *STASHING])


def has_jitter(scenario: Scenario) -> bool:
    """Return whether the scenario has effects that make the time of a step random."""
    return any(
        effect.spread or (effect.straggler_probability and effect.straggler_factor != 1)
        for effect in scenario.effects_of(Jitter)
    )


# Factors are drawn by what an instruction is, not by order of evaluation:
#
#     factor of an instruction = exp(spread · z) · (straggler factor, with its probability)
#
# z is standard normal. Both are hashes of (seed, effect, rank, step) and, for a draw per instruction, (opcode, stage,
# microbatch, bytes): so they do not depend on the order of evaluation, on the number of steps or on the schedule, and
# two schedules are compared under the same luck. A send has the factor of its sender, a gradient sum that of its lowest
# rank, because all members take the same time. Receives take no time themselves. The hash is SplitMix64's finaliser
# (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014); normal numbers are Box and
# Muller's.
def with_jitter(
    program: Program, unrolled: Unrolled, scenario: Scenario, cluster: Cluster, seed: int, width: int = 1
) -> Unrolled:
    """Return the unrolled program with the random durations that the scenario's jitter gives for a seed.

    Rank r is device r of the cluster, or a team of ``width`` devices (`spec.teams`), which is as slow as its slowest
    device. Raises ScenarioError for a time that the simulation cannot represent.
    """
    network = unrolled.network
    members = (jitter_factors(program, unrolled, scenario, cluster, seed, (width, place)) for place in range(width))
    factor = reduce(np.maximum, members)
    _share_in_collectives(network, factor)
    usual_ps = durations(network)
    drawn_ps = np.rint(usual_ps * factor)
    if drawn_ps.max(initial=0) > MOST_PICOSECONDS:
        raise ScenarioError(
            f"jitter: an instruction takes {drawn_ps.max() / PICOSECONDS_PER_SECOND:.3g} s, more than a simulation can "
            f"hold ({to_seconds(MOST_PICOSECONDS):.0f} s). Give a smaller spread or straggler_factor."
        )
    duration_ps = drawn_ps.astype(np.int64)
    # A link is held for at least 1 ps.
    np.maximum(duration_ps, (usual_ps > 0) & (routes(network) >= 0), out=duration_ps)
    scale = (duration_ps / np.maximum(usual_ps, 1))[network.mark_instruction]
    shift_ps = np.rint(network.mark_shift_ps * scale).astype(np.int64)
    return replace(unrolled, network=with_durations(network, duration_ps, shift_ps))


def jitter_factors(
    program: Program,
    unrolled: Unrolled,
    scenario: Scenario,
    cluster: Cluster,
    seed: int,
    member: tuple[int, int] = (1, 0),
) -> Floats:
    """Return the factor on each instruction's duration, shape (n,); 1 without jitter.

    The caller then gives all members of a collective the same duration. ``member``: the number of devices of a team,
    and the index of the device in its team.
    """
    columns = instruction_columns(program, unrolled)
    rank = rank_of_streams(program)[columns["track"]] * member[0] + member[1]
    computed = np.isin(columns["opcode"], _COMPUTED)
    factor = np.ones(len(rank))
    for place, effect in enumerate(scenario.effects):
        if not isinstance(effect, Jitter):
            continue
        with scenario.naming(place, "devices"):
            chosen = np.isin(rank, effect.devices.select(cluster, (scenario.seed or 0, place)))
        if effect.of != "all":
            chosen &= computed == (effect.of == "computations")
        which = np.flatnonzero(chosen)
        keys = [rank[which], columns["step"][which]]
        if effect.per == "instruction":
            keys += [columns[name][which] for name in ("opcode", "stage", "microbatch", "num_bytes")]
        factor[which] *= draw_factors(effect, (seed, place), keys)
    return factor


def draw_factors(effect: Jitter, seed: tuple[int, ...], keys: list[NDArray[np.integer]]) -> Floats:
    """Return a random factor on a duration for each row of the keys, shape (n,); equal rows have equal factors.

    ``keys`` are columns of shape (n,).
    """
    state = np.full(len(keys[0]), 0x9E3779B97F4A7C15, np.uint64)
    for key in (*(np.full(len(keys[0]), part) for part in seed), *keys):
        state = _mix(state ^ _mix(key.astype(np.int64).view(np.uint64)))
    first, second, third = (_uniform(_mix(state + np.uint64(salt))) for salt in (1, 2, 3))
    factor = np.exp(effect.spread * np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second))
    straggles: Floats = np.where(third < effect.straggler_probability, effect.straggler_factor, 1.0)
    drawn: Floats = factor * straggles
    return drawn


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64: one step of its sequence, and its finaliser."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def _uniform(state: NDArray[np.uint64]) -> Floats:
    """Map to floats strictly between 0 and 1."""
    uniform: Floats = ((state >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return uniform


def _share_in_collectives(network: Network, factor: Floats) -> None:
    """Give all members of a collective the factor of the lowest rank, in place."""
    number = collectives(network)
    members = np.flatnonzero(number >= 0)
    # Instructions are numbered stream by stream, so the first is that of the lowest rank.
    _, first, inverse = np.unique(number[members], return_index=True, return_inverse=True)
    factor[members] = factor[members[first]][inverse]


NUM_STEPS, NUM_SEEDS = 100, 5
# Fewer steps give no 95th percentile.
LEAST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Seconds of every step after the pipeline has filled, shape (seeds, steps)."""

    seconds: NDArray[np.float64]

    def rows(self) -> dict[str, float | int]:
        """Return the figures to report, by name: counts, mean and percentiles over all steps.

        ``seed_spread_s`` is the standard deviation of the seeds' means.
        """
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


# Many consecutive steps are timed, for several seeds. Step k lasts from the end of step k - 1 to its own end. The steps
# in which a pipeline fills, and the last step of an asynchronous schedule, which drains, are not counted. Jitter makes
# otherwise identical replicas differ, so all ranks are simulated.
class JitteredSteps:
    """Simulates many steps of a plan with random times, one seed after the other.

    Raises the errors of `simulate_plan`.
    """

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
        """Return the seconds of ``num_steps`` steps for each of ``num_seeds`` seeds, from the scenario's own seed on.

        Fewer steps are simulated if the program is large. Raises ProgramError if fewer than 5 steps can be simulated or
        times overflow, and ScenarioError if the random time of one instruction overflows.
        """
        first, last = (SETTLED_STEPS, 1) if self._program.advance else (1, 0)
        most = MAX_UNROLLED // max(self._program.body.num_instructions, 1) - first - last
        count = min(num_steps, most)
        if count < LEAST_STEPS or num_seeds < 1:
            raise ProgramError(
                f"{num_steps} steps of {self._program.body.num_instructions} instructions for {num_seeds} seeds were "
                f"requested; expected one seed or more, and {LEAST_STEPS} to {max(most, LEAST_STEPS)} steps of at "
                f"most {MAX_UNROLLED} instructions in all. Simulate fewer microbatches or ranks under jitter."
            )
        unrolled = unroll(self._program, self._costs, first + count + last)
        begin = self._scenario.seed or 0
        rows = [self._ends(unrolled, begin + place)[first - 1 : first + count] for place in range(num_seeds)]
        return StepTimes(seconds=np.array([[to_seconds(step) for step in np.diff(row).tolist()] for row in rows]))

    def timeline(self, num_steps: int) -> Timeline:
        """Return the timeline of the first ``num_steps`` steps, with the random times of the scenario's own seed."""
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


# A run with more failures than this is taken never to end.
MAX_FAILURES = 100_000
_NEVER = Failure(math.inf, 0.0)


Change = Literal["", "lost", "back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStretch:
    """A stretch of a run: from ``begin_s`` (seconds of the run) on, a step takes ``step_s``, infinite if it is stopped.

    ``change``: what happens at the start. ``lost``: devices are lost, with everything in their memory. ``back``:
    devices return; a run that continued without them saves first. ``""``: only speeds change.
    """

    begin_s: float
    step_s: float
    change: Change = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How a run is saved, in seconds: the interval between saves (of work; infinite: never saved), the time of a save.

    ``detection_s``: until a failure is noticed. ``restart_s``: to restart after a failure.
    """

    interval_s: float = math.inf
    save_s: float = 0.0
    detection_s: float = 0.0
    restart_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RunTimes:
    """The seconds of a run by purpose, which add up to ``wall_s``.

    ``computing_s``: work that counts. ``lost_s``: work and interrupted saves lost at failures. ``saving_s``: complete
    saves. ``restarting_s``: detection, repair and restart. ``waiting_s``: waits for lost devices and their repair.
    """

    computing_s: float = 0.0
    lost_s: float = 0.0
    saving_s: float = 0.0
    restarting_s: float = 0.0
    waiting_s: float = 0.0
    num_failures: int = 0
    num_saves: int = 0

    @property
    def wall_s(self) -> float:
        """The total time of the run in seconds."""
        return self.computing_s + self.lost_s + self.saving_s + self.restarting_s + self.waiting_s


def follow_run(
    num_steps: float, stretches: Sequence[StepStretch], failures: Iterator[Failure], saving: Saving
) -> RunTimes:
    """Follow a run of ``num_steps`` steps to its end and return its times.

    ``stretches`` are in order of time; the first begins at 0. Raises ScenarioError if the run never ends.
    """
    run = _Run(num_steps=num_steps, stretches=stretches, failures=failures, saving=saving)
    while run.left > 1e-12 * num_steps:
        run.go_on()
    return run.times


class _Run:
    """The state of a run: the time, the steps saved and unsaved, and the seconds of the unsaved ones."""

    def __init__(
        self, *, num_steps: float, stretches: Sequence[StepStretch], failures: Iterator[Failure], saving: Saving
    ) -> None:
        self.times = RunTimes()
        self._num_steps, self._stretches, self._failures, self._saving = num_steps, stretches, failures, saving
        self._now, self._place, self._saved, self._fresh, self._fresh_s = 0.0, 0, 0.0, 0.0, 0.0
        # When everything that failed while the run was stopped is repaired.
        self._repaired_s = 0.0
        self._failure = next(failures, _NEVER)

    @property
    def left(self) -> float:
        """The number of steps still to compute."""
        return self._num_steps - self._saved - self._fresh

    def go_on(self) -> None:
        """Advance to the next event."""
        following = self._stretches[self._place + 1 : self._place + 2]
        change_s = following[0].begin_s if following else math.inf
        if self._failure.at_s <= self._now:
            self._interrupt()
        elif change_s <= self._now:
            self._change(following[0])
            self._place += 1
        else:
            self._work(min(change_s, self._failure.at_s) - self._now)

    def _work(self, room_s: float) -> None:
        step_s = self._stretches[self._place].step_s
        if math.isinf(step_s):
            if math.isinf(room_s):
                raise ScenarioError(
                    "The run waits for devices that do not come back, so it has no end. Give `until` to the lost "
                    "devices, or let the run continue without them (then = 'replan')."
                )
            self._wait(room_s)
            return
        left_s, interval_s, save_s = self.left * step_s, self._saving.interval_s, self._saving.save_s
        if not self._fresh and interval_s < left_s:
            # An infinite time has no whole number of intervals.
            most = math.inf if math.isinf(room_s) else room_s // (interval_s + save_s)
            whole = min(most, math.ceil(left_s / interval_s) - 1)
            if whole > 0:
                self._now += whole * (interval_s + save_s)
                self._saved += whole * interval_s / step_s
                self._count(computing_s=whole * interval_s, saving_s=whole * save_s, num_saves=int(whole))
                return
        due_s = interval_s - self._fresh_s
        passed_s = min(due_s, left_s, room_s)
        self._now += passed_s
        self._fresh += passed_s / step_s if passed_s < left_s else self.left
        self._fresh_s += passed_s
        self._count(computing_s=passed_s)
        if passed_s == due_s < left_s:
            self._save()

    def _save(self) -> None:
        end_s = self._now + self._saving.save_s
        if end_s > self._failure.at_s:
            # The failure interrupts the save.
            self._count(lost_s=self._failure.at_s - self._now)
            self._now = self._failure.at_s
            return
        self._count(saving_s=self._saving.save_s, num_saves=1)
        self._now = end_s
        self._saved, self._fresh, self._fresh_s = self._saved + self._fresh, 0.0, 0.0

    def _change(self, stretch: StepStretch) -> None:
        stood = [math.isinf(before.step_s) for before in self._stretches[: self._place + 1]]
        if stretch.change == "lost":
            self._drop()
        elif stretch.change == "back" and self._fresh:
            self._save()
            if self._failure.at_s <= self._now:
                return
        if not stretch.change or math.isinf(stretch.step_s):
            return
        if stood[-1]:
            self._wait_for_repairs()
        if not all(stood):
            is_sudden = stretch.change == "lost" and not stood[-1]
            self._restart(self._saving.detection_s if is_sudden else 0.0)

    def _interrupt(self) -> None:
        failure = self._failure
        self._drop()
        self._next_failure()
        if math.isinf(self._stretches[self._place].step_s):
            self._repaired_s = max(self._repaired_s, failure.at_s + failure.repair_s)
        else:
            self._restart(self._saving.detection_s + failure.repair_s)

    def _wait(self, seconds: float) -> None:
        self.times.waiting_s += seconds
        self._now += seconds

    def _wait_for_repairs(self) -> None:
        while self._failure.at_s < self._repaired_s:
            self._repaired_s = max(self._repaired_s, self._failure.at_s + self._failure.repair_s)
            self._next_failure()
        self._wait(max(0.0, self._repaired_s - self._now))

    def _drop(self) -> None:
        self._count(computing_s=-self._fresh_s, lost_s=self._fresh_s)
        self._fresh, self._fresh_s = 0.0, 0.0

    def _restart(self, before_s: float) -> None:
        """Restart ``before_s`` seconds from now; failures meanwhile are detected and repaired first."""
        begin_s, end_s = self._now, self._now + before_s + self._saving.restart_s
        while self._failure.at_s < end_s:
            delay_s = self._saving.detection_s + self._failure.repair_s + self._saving.restart_s
            end_s = self._failure.at_s + delay_s
            self._next_failure()
        self._count(restarting_s=end_s - begin_s)
        self._now = end_s

    def _next_failure(self) -> None:
        self.times.num_failures += 1
        self._failure = next(self._failures, _NEVER)
        if self.times.num_failures > MAX_FAILURES:
            raise ScenarioError(
                f"The run fails {MAX_FAILURES} times before its end: the time between failures is too short to compute "
                "and save. Save more often, or give a longer mttf or fewer devices."
            )

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            setattr(self.times, name, getattr(self.times, name) + amount)
