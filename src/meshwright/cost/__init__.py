"""Costs: seconds and bytes of ops, transfers, optimizer steps and stages, from measurements or datasheets."""

from meshwright.cost.cost_model import CostModel
from meshwright.cost.costs import Basis, OpCosts, TotalSeconds, add_intervals
from meshwright.cost.load_model import load_cost_model, other_torch
from meshwright.cost.memory import StageMemory
from meshwright.cost.roofline import LAUNCH_S
from meshwright.cost.software import read_software

__all__ = [
    "LAUNCH_S",
    "Basis",
    "CostModel",
    "OpCosts",
    "StageMemory",
    "TotalSeconds",
    "add_intervals",
    "load_cost_model",
    "other_torch",
    "read_software",
]
