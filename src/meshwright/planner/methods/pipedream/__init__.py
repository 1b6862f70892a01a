"""PipeDream's planner: a profile, the states of its graph, and a dynamic program over them, level by level.

    profile  ->  states  ->  recurrence, on each of the levels  ->  plan

`profile_states` reads PipeDream's own files or estimates a captured graph, and finds where it can be cut. `recurrence`
is the dynamic program, on each level. `pipedream_method` selects cuts if there are too many, makes the plan and
proposes it to a search, whose simulator estimates it. The objective is that of PipeDream's optimizer, as coded, so that
results are comparable.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), section 3.1.
"""

from meshwright.planner.methods.pipedream.pipedream_method import (
    PipedreamPlan,
    PipedreamStage,
    count_states,
    pipedream,
    plan_profile,
)
from meshwright.planner.methods.pipedream.profile_states import Profile, load_profile, make_profile, parse_profile
from meshwright.planner.methods.pipedream.recurrence import Level, PipeDreamOptions

__all__ = [
    "Level",
    "PipeDreamOptions",
    "PipedreamPlan",
    "PipedreamStage",
    "Profile",
    "count_states",
    "load_profile",
    "make_profile",
    "parse_profile",
    "pipedream",
    "plan_profile",
]
