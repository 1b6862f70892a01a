"""Simulate a program with its costs on a virtual clock: predict its Timeline, step time and peak memory.

`simulate_plan` (`plan_simulation`) reduces a plan to the work of one device of each team (`teams`), builds the plan's
program and estimates its costs (`program_estimate`: stages by `stage_costs` and `stage_bytes`, sharded states by
`state_shards`, links by `routes`). Then it runs the program: `unroll` concatenates the sections, `engine` computes when
each instruction ends, `simulate` follows the bytes in use, and `simulation` sums up times and memory, including hosts
and drives.

Contended links are granted one request at a time (`engine`) or shared fairly (`fair`, `sharing`). `joins` handles
instructions that need only some of their waits, `deadlock` explains why a program can never finish, `overflow` which
ranks run out of memory. `simulate_controlled` (`controlled`, `growing`, `control`) lets a controller add instructions
while a program runs; `policy_simulation` simulates plans whose exchange follows a policy, and `replay_measured` replays
logs of real runs. `pipeline_alike` finds identical replicas, of which only one is simulated; `many` simulates many
plans on all cores. `rank_allocation` follows one rank's memory op by op. `exchange_order` finds the order in which
gradient parts are sent, `scenarios` simulates a plan on changed machines. `explain_step` (`critical_path`) finds the
critical path of a step and the changes that would shorten the step.
"""

from meshwright.simulator.controlled import ControlledRun, EstimateIssue, simulate_controlled
from meshwright.simulator.critical_path import SHORTER, Bound, Lever, StepExplanation, explain_program, explain_step
from meshwright.simulator.engine import Contention
from meshwright.simulator.exchange_order import OwnOrder, schedule_exchange, stage_times
from meshwright.simulator.many import simulate_plans
from meshwright.simulator.overflow import Overflow, explain_overflows, find_overflows
from meshwright.simulator.plan_simulation import DETAILS, Detail, simulate_plan
from meshwright.simulator.policy_simulation import check_policy, number_steps, steady_window
from meshwright.simulator.program_costs import ProgramCosts, SectionCosts, bare_costs
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.rank_allocation import RankAllocation, allocate_rank, predict_reserved
from meshwright.simulator.replayed import replay_measured
from meshwright.simulator.simulate import simulate_program
from meshwright.simulator.simulation import (
    NodeMemory,
    PeakMemory,
    RankSeconds,
    Simulation,
    describe_steady_step,
    explain_nodes,
    steady_rows,
)
from meshwright.simulator.teams import Teams, form_teams

__all__ = [
    "DETAILS",
    "SHORTER",
    "Bound",
    "Contention",
    "ControlledRun",
    "Detail",
    "EstimateIssue",
    "Lever",
    "NodeMemory",
    "Overflow",
    "OwnOrder",
    "PeakMemory",
    "ProgramCosts",
    "RankAllocation",
    "RankSeconds",
    "SectionCosts",
    "Simulation",
    "StepExplanation",
    "Teams",
    "allocate_rank",
    "bare_costs",
    "check_policy",
    "describe_steady_step",
    "estimate_program",
    "explain_nodes",
    "explain_overflows",
    "explain_program",
    "explain_step",
    "find_overflows",
    "form_teams",
    "number_steps",
    "predict_reserved",
    "replay_measured",
    "schedule_exchange",
    "simulate_controlled",
    "simulate_plan",
    "simulate_plans",
    "simulate_program",
    "stage_times",
    "steady_rows",
    "steady_window",
]
