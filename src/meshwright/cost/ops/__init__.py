"""Seconds of ops that were not measured, from a regression over measured ops of the same device."""

from meshwright.cost.ops.regressor import PASSES, OpRegressor, Pass, fit_op_regressor

__all__ = ["PASSES", "OpRegressor", "Pass", "fit_op_regressor"]
