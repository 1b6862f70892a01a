"""Search the space of plans: numbers of stages, replicas and microbatches, the schedule, and the ranks of each stage.

`whole_space` lists all choices that plans can combine. `search_plans` runs the search methods (`methods`), simulates
the plans that they propose (`evaluate`) and returns `Plans`: the ranking, texts that explain it, and how far it may be
from the optimum (`step_bounds`). `adopt_schedule` and `compare_schedules` change the schedule of a plan,
`compare_exchanges` compares ways to reduce gradients, `find_order` searches for the fastest order of a plan's
instructions. `replan` adapts a plan after the machines changed. `place` assigns single ops to devices. `find_shares`
computes what each choice of the best plan gains.
"""

from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.choices import Choices, Setting
from meshwright.planner.diagnosis import NothingFitsError
from meshwright.planner.evaluate import (
    Breakdown,
    RankedPlan,
    evaluate_plan,
    explain_step_interval,
    predict_step_interval,
    rank_simulation,
)
from meshwright.planner.exchange_search import (
    EXCHANGE_NAMES,
    ExchangeComparison,
    ExchangedPlan,
    FoundPlan,
    compare_exchanges,
    cut_into_layers,
    find_order,
    follow_own_order,
)
from meshwright.planner.methods import METHODS
from meshwright.planner.methods.slicing import Slicing, SlicingProblem, solve_slicing
from meshwright.planner.placing.op_tasks import Constraints
from meshwright.planner.placing.place_ops import place, seconds_on_one_device
from meshwright.planner.plan_pages import plans_document, simulation_document
from meshwright.planner.plan_shares import Share, Shares, find_shares
from meshwright.planner.plans import Coverage, Plans, explain_difference
from meshwright.planner.prices import within_budget
from meshwright.planner.problem import Problem
from meshwright.planner.replanning import replan, replan_seconds
from meshwright.planner.search import DEFAULT_METHOD, search_plans
from meshwright.planner.search_method import Limits, Method, Proposal, SearchState
from meshwright.planner.space import list_shardings
from meshwright.planner.whole_space import compare_schedules, schedule_rows, whole_space

__all__ = [
    "DEFAULT_METHOD",
    "EXCHANGE_NAMES",
    "METHODS",
    "Breakdown",
    "Choices",
    "Constraints",
    "Coverage",
    "ExchangeComparison",
    "ExchangedPlan",
    "FoundPlan",
    "Limits",
    "Method",
    "NothingFitsError",
    "Plans",
    "Problem",
    "Proposal",
    "RankedPlan",
    "SearchState",
    "Setting",
    "Share",
    "Shares",
    "Slicing",
    "SlicingProblem",
    "adopt_schedule",
    "compare_exchanges",
    "compare_schedules",
    "cut_into_layers",
    "evaluate_plan",
    "explain_difference",
    "explain_step_interval",
    "find_order",
    "find_shares",
    "follow_own_order",
    "list_shardings",
    "place",
    "plans_document",
    "predict_step_interval",
    "rank_simulation",
    "replan",
    "replan_seconds",
    "schedule_rows",
    "search_plans",
    "seconds_on_one_device",
    "simulation_document",
    "solve_slicing",
    "whole_space",
    "within_budget",
]
