"""Program × costs → Timeline and peak memory, on a virtual clock.

`simulate_plan` lowers a plan to what one device of each team does (`teams`), builds its program and estimates its costs
(`program_estimate`: stages by `stage_costs` and `stage_bytes`, what replicas share by `state_shards`), then runs it:
`unroll` lays the sections behind each other, the repetitions of programs that never flush as one, `engine` finds when
each instruction ends, `memory` follows the bytes, `simulation` sums up. Links that several want are granted one by one
(`engine`) or shared fairly (`fair`, `sharing`); `joins` go on when some of their waits have happened; `deadlock` tells
why a program stops. `simulate_controlled` (`controlled`, `growing`, `control`) asks a controller what to add while a
program runs. `folding` finds replicas that are alike, of which one is simulated; `many` simulates many plans
on all cores. `allocation` follows one rank's memory op by op, `op_spans` tells what happens inside each computation,
`overflow` where there is more than fits, `host_memory` what hosts and drives keep.
`exchange_order` finds in which order parts of gradients leave, `scenarios` what becomes of a plan on other machines.
`explain_step` tells what bounds a step (`critical_path`) and what would help (`levers`).
"""

from meshwright.simulator.allocation import RankAllocation, allocate_rank, predict_reserved
from meshwright.simulator.controlled import ControlledRun, EstimateIssue, simulate_controlled
from meshwright.simulator.critical_path import Bound
from meshwright.simulator.engine import Contention
from meshwright.simulator.exchange_order import OwnOrder, schedule_exchange
from meshwright.simulator.explanation import StepExplanation, explain_program, explain_step
from meshwright.simulator.host_memory import NodeMemory, explain_nodes
from meshwright.simulator.levers import SHORTER, Lever
from meshwright.simulator.many import simulate_plans
from meshwright.simulator.overflow import Overflow, explain_overflows, find_overflows
from meshwright.simulator.plan import DETAILS, Detail, simulate_plan
from meshwright.simulator.program_costs import ProgramCosts, SectionCosts, bare_costs
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.simulate import simulate_program
from meshwright.simulator.simulation import PeakMemory, RankSeconds, Simulation
from meshwright.simulator.stage_times import stage_times
from meshwright.simulator.steady import describe_steady_step, steady_rows
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
    "describe_steady_step",
    "estimate_program",
    "explain_nodes",
    "explain_overflows",
    "explain_program",
    "explain_step",
    "find_overflows",
    "form_teams",
    "predict_reserved",
    "schedule_exchange",
    "simulate_controlled",
    "simulate_plan",
    "simulate_plans",
    "simulate_program",
    "stage_times",
    "steady_rows",
]
