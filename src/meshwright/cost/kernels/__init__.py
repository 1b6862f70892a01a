"""Predicted seconds of GPU kernels (matrix products and attention) on devices with many, few or no measurements."""

from meshwright.cost.kernels.demand import is_tiled
from meshwright.cost.kernels.kernel_costs import KernelQueries, estimate_kernels
from meshwright.cost.kernels.kernel_fit import adapt_kernels, fit_kernels
from meshwright.cost.kernels.kernel_model import Kernel, KernelModel
from meshwright.cost.kernels.store import read_model, shipped_model, write_model

__all__ = [
    "Kernel",
    "KernelModel",
    "KernelQueries",
    "adapt_kernels",
    "estimate_kernels",
    "fit_kernels",
    "is_tiled",
    "read_model",
    "shipped_model",
    "write_model",
]
