"""Errors of predictions on public measurements, with folds fixed before the first fit, compared with baselines.

`meshwright.validation.sets` names the data sets, `validate` scores them; the module of each set states what is left
out.
"""

from meshwright.validation.datasets import load_records, load_steps, load_table, read_table
from meshwright.validation.scores import Score, score_rows

__all__ = ["Score", "load_records", "load_steps", "load_table", "read_table", "score_rows"]
