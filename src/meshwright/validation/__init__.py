"""Score predictions on public measurements, with folds fixed before the first fit, and compare them with baselines.

`meshwright.validation.sets` lists the data sets, `validate` scores them. The module of each data set describes its rows
and which rows are left out of fits and scores.
"""

from meshwright.validation.datasets import load_records, load_steps, load_table, read_table
from meshwright.validation.scores import Score, score_rows

__all__ = ["Score", "load_records", "load_steps", "load_table", "read_table", "score_rows"]
