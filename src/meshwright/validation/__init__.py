"""How wrong are the predictions: public measurements, folds fixed before the first fit, ours beside the baselines."""

from meshwright.validation.scores import Score, score_rows

__all__ = ["Score", "score_rows"]
