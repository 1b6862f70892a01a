"""Uniform grid: all combinations of parallel axes, pipeline sizes, microbatches, schedules, ZeRO and recompute.

Transformers are laid out like this at scale (Narayanan et al., SC 2021; Isaev et al., Calculon, SC 2023): every
position of the pipeline has the same number of replicas, and layers are cut evenly. Compiled loops compute a lower
bound of step time and memory for every combination, from the costs of one block of each kind (`short`, `figures`,
`cover`, `sheet`). `grid_method` simulates only combinations whose bound is below the best simulated step and that may
fit by a tighter memory bound (`sheet`, from the backwards of single layers, `figures`).
"""

from meshwright.planner.methods.grid.grid_method import grid
from meshwright.planner.methods.grid.sheet import Configuration, ConfigurationGrid, bound_grid

__all__ = ["Configuration", "ConfigurationGrid", "bound_grid", "grid"]
