"""PipeDream's planner: a dynamic program over the possible cuts of a profiled graph, level by level.

    profile  ->  states  ->  recurrence, on each of the levels  ->  plan

`profile_states` makes a profile from PipeDream's own files or from a captured graph, and finds the states: the sets of
layers at whose ends the graph can be cut. `recurrence` is the dynamic program for each level of machines (devices of a
node, nodes). `pipedream_method` selects states if there are too many, makes plans and proposes them to a search. The
objective is that of PipeDream's optimizer, as coded, so that results are comparable.

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
