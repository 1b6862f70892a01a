"""Simulate plans whose exchange follows a policy: their controller decides on simulated events (`run_policy`).

An empty program is extended by the controller. Costs are those of the same plan with plain sums, whose replicas, and a
rank for the parameters, do the same computations; each kind of instruction is estimated once, when the controller first
issues it. Hosts issue a computation when it begins, since they hear of it only then. Processor time of transfers is
left out.

A controller issues the same number of updates in every step. Step k ends when the updates of k + 1 steps have ended;
a span belongs to the step in which it ends. The time of a step is the mean from a quarter to three quarters of the
steps: the first ones fill connections and queues, in the last ones some replicas have ended.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.program import ProgramBuilder
from meshwright.program.controllers import make_controller
from meshwright.program.issuing import check_for_ranks
from meshwright.simulator.controlled import ControlledRun, ScaleIssue, simulate_controlled
from meshwright.simulator.engine import Contention
from meshwright.simulator.program_costs import ProgramCosts, SectionCosts, bare_costs
from meshwright.simulator.program_estimate import estimate_program
from meshwright.spec import (
    AllReduce,
    Backward,
    Forward,
    Graph,
    Opcode,
    OptimizerStep,
    Plan,
    ProgramError,
    Receive,
    Send,
    Timeline,
    format_count,
)
from meshwright.spec.control import Controller, Issue
from meshwright.spec.exchange import read_policy
from meshwright.spec.instructions import STREAM_NAMES, instruction_row
from meshwright.spec.memory import OPTIMIZER, RECEIVED
from meshwright.spec.units import PICOSECONDS_PER_SECOND

# Steps that show the steady time of a step; the most groups of one size that are estimated.
POLICY_STEPS, MOST_GROUPS = 24, 20_000
# Steps of a user's own policy that are simulated before a run.
CHECKED_STEPS = 200


def parameter_bytes(graph: Graph) -> int:
    """Return the bytes of all trained parameters of a graph in float32, each storage once."""
    trained = {
        tensor.storage: tensor.num_elements(0)
        for tensor in graph.tensors
        if tensor.role == "parameter" and tensor.requires_grad
    }
    return 4 * sum(trained.values())


def run_policy(
    plan: Plan,
    graph: Graph,
    cost: CostModel,
    num_steps: int = POLICY_STEPS,
    *,
    catalogue: Catalogue | None = None,
    scale_issue: ScaleIssue | None = None,
    contention: Contention = "queued",
) -> tuple[ControlledRun, Timeline]:
    """Simulate ``num_steps`` steps of a plan with an exchange policy; return the run, and its timeline in steps.

    ``catalogue``: that of earlier runs of the plan with the same costs; ``scale_issue``: as for `simulate_controlled`.
    Raises the errors of `make_controller` and `simulate_controlled`, and ProgramError if the controller does not issue
    the same number of updates in every step.
    """
    controller = _controller_of(plan, num_steps, parameter_bytes(graph))
    program = ProgramBuilder(plan.num_devices).build(schedule="controlled", plan_hash="")
    catalogue = catalogue or Catalogue(plan, graph, cost)
    while True:
        try:
            run = simulate_controlled(
                program,
                catalogue.costs,
                controller,
                catalogue.estimate,
                scale_issue=scale_issue,
                contention=contention,
            )
        except _UnknownCostError:
            catalogue.renew()
        else:
            return run, number_steps(run.timeline, num_steps)


def _controller_of(plan: Plan, num_steps: int, num_bytes: int) -> Controller[Any]:
    """Return the controller of a plan. Raises ProgramError if it uses other ranks than the plan has."""
    workers = len(plan.stages[0].ranks)
    controller = make_controller(plan.exchange, workers, num_steps, num_bytes)
    num_ranks = getattr(controller, "num_ranks", workers)
    if num_ranks != plan.num_devices:
        raise ProgramError(
            f"The exchange policy {plan.exchange.policy} uses {num_ranks} ranks for {num_steps} steps of {workers} "
            f"replicas; the plan has {plan.num_devices}. Let `num_ranks` depend on `num_workers` only, and plan again."
        )
    return controller


def number_steps(timeline: Timeline, num_steps: int, *, strict: bool = True) -> Timeline:
    """Return the timeline of ``num_steps`` steps under a controller with the step of each span, by its end.

    Raises ProgramError unless the number of updates is a multiple of the number of steps; if not ``strict``, the rest
    belongs to the last step.
    """
    updates = np.sort(timeline.end_ps[timeline.opcode == Opcode.OPTIMIZER_STEP])
    each, rest = divmod(len(updates), num_steps)
    if (rest and strict) or not each:
        raise ProgramError(
            f"The exchange policy issued {format_count(len(updates), 'update')} in "
            f"{format_count(num_steps, 'step')}; expected the same number of updates in every step, at least one. Let "
            "the controller issue them until all steps are done."
        )
    step = np.searchsorted(updates[each - 1 :: each][:num_steps], timeline.end_ps).clip(max=num_steps - 1)
    return replace(timeline, step=step.astype(np.int32))


def check_policy(plan: Plan, num_steps: int, num_bytes: int = 0) -> int:
    """Return the number of updates in a step of a plan's exchange policy; simulate a user's own policy first.

    ``num_bytes``: bytes of all parameters. At most `CHECKED_STEPS` steps are simulated: each computation takes a
    second, messages take no time. Raises as `run_policy`, so a controller that never finishes, breaks a rule or issues
    nothing is found before ranks start; and ProgramError if a replica computes steps out of order or too many.
    """
    policy = read_policy(plan.exchange.policy)
    if policy is not None:
        return policy.updates_per_step(len(plan.stages[0].ranks))
    num_steps = min(num_steps, CHECKED_STEPS)
    controller, count = _controller_of(plan, num_steps, num_bytes), plan.num_microbatches
    newest = [0] * plan.num_devices

    def estimate(issue: Issue, _handle: int) -> tuple[int, int]:
        check_for_ranks(issue)
        if isinstance(issue.instruction, Forward):
            step = issue.instruction.microbatch // count
            if not newest[issue.rank] <= step < num_steps:
                raise ProgramError(
                    f"{issue.instruction}, of step {step}, was issued to rank {issue.rank} after step "
                    f"{newest[issue.rank]}, in a run of {num_steps} steps. Batches are read once: expected each "
                    "replica to compute its steps in order, and none beyond the last. Number microbatches step * "
                    "workers + worker."
                )
            newest[issue.rank] = step
        return int(issue.stream == "compute"), -1

    program = ProgramBuilder(plan.num_devices).build(schedule="controlled", plan_hash="")
    costs = bare_costs(program, [0, PICOSECONDS_PER_SECOND])
    run = simulate_controlled(program, costs, controller, estimate)
    timeline = number_steps(run.timeline, num_steps)
    return int((timeline.opcode == Opcode.OPTIMIZER_STEP).sum()) // num_steps


def steady_window(timeline: Timeline) -> tuple[range, int]:
    """Return the steps that show the time of a step (see the module), and how long they take in ps."""
    ends = np.round(np.cumsum(timeline.step_seconds()) * 1e12).astype(np.int64)
    steps = range(len(ends) // 4, max(len(ends) * 3 // 4, len(ends) // 4 + 1))
    return steps, int(ends[steps.stop - 1] - (ends[steps.start - 1] if steps.start else 0))


class _UnknownCostError(Exception):
    """A controller issued an instruction that is not in the catalogue yet."""


_ONCE: dict[str, Any] = {"stage": 0, "microbatch": 0, "version": 0}
# An instruction by what determines its cost: opcode, ranks and bytes.
_Key = tuple[int, tuple[int, ...], int]


class Catalogue:
    """The costs of the instructions that a controller issues; unknown ones are noted, and estimated by `renew`."""

    def __init__(self, plan: Plan, graph: Graph, cost: CostModel) -> None:
        num_ranks = plan.num_devices
        stage = replace(plan.stages[0], ranks=tuple(range(num_ranks)))
        size = plan.microbatch_size
        # The plan with sums, in which each rank computes, too; so a rank for the parameters holds them.
        self._plan = replace(
            plan.without_policy(),
            stages=(stage,),
            num_microbatches=num_ranks,
            workload=replace(plan.workload, global_batch=size * num_ranks),
        )
        self._graph, self._cost, self._num_ranks = graph, cost, num_ranks
        self._servers, self._policy = plan.exchange.servers, plan.exchange.policy
        # A rank for the parameters keeps the gradients of an update until all of them have arrived.
        self._kept_bytes = round(plan.used_share * len(plan.stages[0].ranks)) * parameter_bytes(graph)
        self._transfers: dict[_Key, Issue] = {}
        self._found: dict[_Key, tuple[int, int]] = {}
        self.renew()

    def estimate(self, issue: Issue, _handle: int) -> tuple[int, int]:
        """Return class and route of an issue. Raises `_UnknownCostError` for one that is not known yet."""
        check_for_ranks(issue)
        key = _key(issue)
        if key not in self._found:
            self._note(key, issue)
            raise _UnknownCostError
        return self._found[key]

    def renew(self) -> None:
        """Estimate all instructions noted so far."""
        issues = [*self._transfers.values()]
        for rank in range(self._num_ranks):
            computed = (Forward(**_ONCE), Backward(**_ONCE), OptimizerStep(stage=0))
            issues += [Issue(rank=rank, stream="compute", instruction=instruction) for instruction in computed]
        # Rows of a program are sorted by rank and stream.
        issues.sort(key=lambda issue: (issue.rank, STREAM_NAMES.index(issue.stream)))
        builder = ProgramBuilder(self._num_ranks)
        for issue in issues:
            builder.append(issue.rank, issue.stream, issue.instruction, group=issue.group)
        program = builder.build(schedule="controlled", plan_hash="")
        costs = estimate_program(program, self._plan, self._graph, self._cost)
        if costs.issue is not None:
            # Hosts are not ahead: they issue a computation when they hear of it.
            costs = replace(costs, duration_ps=np.maximum(costs.duration_ps, costs.issue.earliest_ps), issue=None)
        found = zip(costs.body.cost_class.tolist(), costs.body.route.tolist(), strict=True)
        self._found = dict(zip(map(_key, issues), found, strict=True))
        none = np.zeros(0, np.int32)
        resident = costs.resident_bytes.copy()
        if self._servers:
            # Only the rank for the parameters updates them.
            workers = [rank for rank in range(self._num_ranks) if rank not in self._servers]
            resident[workers, OPTIMIZER] = 0
            resident[list(self._servers), RECEIVED] += self._kept_bytes
        self.costs: ProgramCosts = replace(
            costs,
            host_ps=np.zeros_like(costs.host_ps),
            resident_bytes=resident,
            body=SectionCosts(cost_class=none, route=none, mark_offset_ps=none.astype(np.int64)),
        )

    def _note(self, key: _Key, issue: Issue) -> None:
        """Note an instruction, and with it those of other ranks that are alike."""
        opcode, ranks, num_bytes = key
        groups: set[tuple[int, ...]] = {ranks}
        if isinstance(issue.instruction, Send | Receive):
            for server in self._servers:
                others = (rank for rank in range(self._num_ranks) if rank != server)
                groups |= {(other, server) if server == ranks[1] else (server, other) for other in others}
        elif (count := comb(self._num_ranks, len(ranks))) <= MOST_GROUPS:
            groups |= set(combinations(range(self._num_ranks), len(ranks)))
        else:
            raise ProgramError(
                f"The exchange policy {self._policy} sums gradients of {len(ranks)} of {self._num_ranks} replicas, "
                f"which may be {count:,} groups; at most {MOST_GROUPS:,} are simulated. Choose smaller groups, or "
                "fewer replicas."
            )
        for group in sorted(groups):
            rank = group[1] if isinstance(issue.instruction, Receive) else group[0]
            self._transfers[opcode, group, num_bytes] = replace(issue, rank=rank, group=group)


def _key(issue: Issue) -> _Key:
    opcode, *_, num_bytes = instruction_row(issue.instruction)
    if isinstance(issue.instruction, AllReduce):
        return opcode, tuple(sorted(issue.group)), num_bytes
    return opcode, issue.group or (issue.rank,), num_bytes
