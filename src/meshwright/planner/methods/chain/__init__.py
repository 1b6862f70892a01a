"""A chain of layers cut into stages, one device each: the problem of pipeDejavu's notebook, and its exact solution."""

from meshwright.planner.methods.chain.exact import solve_chain
from meshwright.planner.methods.chain.problem import ChainProblem, Cutting

__all__ = ["ChainProblem", "Cutting", "solve_chain"]
