"""Uniform grid: all combinations of axes, positions, replicas, microbatches, schedules, ZeRO and recompute.

This is how transformers are laid out at scale (Narayanan et al., SC 2021; Isaev et al., Calculon, SC 2023): every
position of the pipeline has the same number of replicas, and layers are cut evenly. All combinations are bounded from
below in compiled loops on the figures of one block of each kind (`short`, `figures`, `cover`, `sheet`). Only those are
simulated whose bound is below the best simulated step (`grid_method`), and that may fit by a sharper memory bound
(`sheet`, from the backwards of single layers, `figures`).
"""

from meshwright.planner.methods.grid.grid_method import grid
from meshwright.planner.methods.grid.sheet import Configuration, ConfigurationGrid, bound_grid

__all__ = ["Configuration", "ConfigurationGrid", "bound_grid", "grid"]
