"""How wrong are the predictions: public measurements, folds fixed before the first fit, ours beside the baselines."""

from meshwright.validation.datasets import load_records, load_steps, load_table, read_table
from meshwright.validation.page import SCORE_HEADINGS, score_cells, scores_page
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.validate import (
    DATASETS,
    DataSet,
    find_datasets,
    score_datasets,
    score_step_table,
    tabulate_scores,
)

__all__ = [
    "DATASETS",
    "SCORE_HEADINGS",
    "DataSet",
    "Score",
    "find_datasets",
    "load_records",
    "load_steps",
    "load_table",
    "read_table",
    "score_cells",
    "score_datasets",
    "score_rows",
    "score_step_table",
    "scores_page",
    "tabulate_scores",
]
