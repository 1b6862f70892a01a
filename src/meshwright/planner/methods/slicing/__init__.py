"""Exact slicing of a chain of layers into replicated stages.

A dynamic program minimises a closed form of the step time (Alpa, OSDI 2022, 5.2).

For every setting, microbatch size, schedule and layout of ranks, one problem is assembled (`assemble`) and solved
exactly (`dynamic_program`); its solution is a candidate (`slicing_candidates`). Settings whose lower bound exceeds the
best known step are skipped. The most promising candidates are simulated. If a candidate exceeds memory, the next best
solution of its problem is tried.
"""

from meshwright.planner.methods.slicing.dynamic_program import Slicing, SlicingProblem, solve_slicing
from meshwright.planner.methods.slicing.slicing_candidates import CandidateSearch, PlanCandidate
from meshwright.planner.methods.slicing.slicing_method import slicing

__all__ = ["CandidateSearch", "PlanCandidate", "Slicing", "SlicingProblem", "slicing", "solve_slicing"]
