"""Search the space of plans: how many stages, replicas and microbatches, in which schedule, on which ranks.

`search_plans` solves exact slicing problems (`candidates`, `slicing`), simulates the most promising plans (`evaluate`)
and returns `Plans`, which explain themselves. `adopt_schedule` and `compare_schedules` put a plan under other
schedules, `compare_exchanges` with other ways of summing gradients, `find_order` under the fastest order that a search
finds. `place` puts every op on a device instead.
"""

from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.candidates import Coverage
from meshwright.planner.diagnosis import NothingFitsError
from meshwright.planner.dynamic_program import SlicingProblem
from meshwright.planner.evaluate import Breakdown, RankedPlan, evaluate_plan, rank_simulation
from meshwright.planner.exchanges import (
    EXCHANGE_NAMES,
    ExchangeComparison,
    ExchangedPlan,
    compare_exchanges,
    cut_into_layers,
)
from meshwright.planner.found_orders import FoundPlan, find_order
from meshwright.planner.interval import explain_step_interval, predict_step_interval
from meshwright.planner.pages import plans_document, simulation_document
from meshwright.planner.place import place, seconds_on_one_device
from meshwright.planner.place_constraints import Constraints
from meshwright.planner.plans import Plans, explain_difference
from meshwright.planner.replanning import replan_seconds
from meshwright.planner.schedules import compare_schedules, schedule_rows
from meshwright.planner.search import search_plans
from meshwright.planner.slicing import Slicing, solve_slicing
from meshwright.planner.teams import Lowering, lower_search

__all__ = [
    "EXCHANGE_NAMES",
    "Breakdown",
    "Constraints",
    "Coverage",
    "ExchangeComparison",
    "ExchangedPlan",
    "FoundPlan",
    "Lowering",
    "NothingFitsError",
    "Plans",
    "RankedPlan",
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
    "lower_search",
    "place",
    "plans_document",
    "predict_step_interval",
    "rank_simulation",
    "replan_seconds",
    "schedule_rows",
    "search_plans",
    "seconds_on_one_device",
    "simulation_document",
    "solve_slicing",
]
