"""Exact slicing: a chain of layers into replicated stages, the best of all by a closed form (Alpa, OSDI 2022, 5.2).

For every setting, microbatch size, schedule and layout of ranks one problem is assembled (`assemble`) and solved
exactly (`slicing`, `dynamic_program`); its answer is a candidate (`candidates`). Settings whose lower bound is above
what is known already are passed over. The most promising candidates are simulated; where one needs too much memory,
the next best of its problem follows.
"""

from meshwright.planner.methods.slicing.candidates import CandidateSearch, PlanCandidate
from meshwright.planner.methods.slicing.dynamic_program import SlicingProblem
from meshwright.planner.methods.slicing.method import slicing
from meshwright.planner.methods.slicing.slicing import Slicing, solve_slicing

__all__ = ["CandidateSearch", "PlanCandidate", "Slicing", "SlicingProblem", "slicing", "solve_slicing"]
