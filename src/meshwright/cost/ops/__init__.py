"""Seconds of ops by their keys, learned from measured ops of the same device."""

from meshwright.cost.ops.regressor import PASSES, OpRegressor, Pass, fit_op_regressor
from meshwright.cost.ops.work import OpWork, read_work, relatives

__all__ = ["PASSES", "OpRegressor", "OpWork", "Pass", "fit_op_regressor", "read_work", "relatives"]
